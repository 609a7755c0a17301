"""scaledtensor: tensors that carry their own power-of-two scale. `import scaledtensor as sct`.

The classes that files hold come with the import, so that `torch.load` knows them. Everything else
is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scaledtensor._start import is_command as _is_command
from scaledtensor._version import __version__ as __version__

if TYPE_CHECKING:
    from scaledtensor import (
        checkpoint,
        distributed,
        errors,
        exchange,
        formats,
        functional,
        inspect,
        mup,
        nn,
        ops,
        optim,
        quantization,
        recipes,
    )
    from scaledtensor.formats import Format, PerAxis, PerBlock, PerTensor
    from scaledtensor.inspect import track_scales
    from scaledtensor.inspect.hardware import hardware
    from scaledtensor.inspect.report import report
    from scaledtensor.models.guard import calibrate
    from scaledtensor.models.rebalance import rebalance, rebalance_every, statistics
    from scaledtensor.models.scale_model import scale_model, unscale_model
    from scaledtensor.models.simulate import simulate_format, simulate_fp8
    from scaledtensor.ops import batch_invariant, on_missing, products_in
    from scaledtensor.quantization.cache import KVCache
    from scaledtensor.quantization.configs import Dynamic, Static, WeightOnly
    from scaledtensor.quantization.tensor import QuantizedTensor
    from scaledtensor.quantization.verb import quantize_
    from scaledtensor.tensors.coded import CodedTensor
    from scaledtensor.tensors.tensor import ScaledTensor
    from scaledtensor.tensors.verbs import drop
    from scaledtensor.tensors.wrap import scaled
    from scaledtensor.unit_scaling import unit_scale

#: The module of each name that is no module itself.
_HOMES = {
    "CodedTensor": "tensors.coded",
    "Dynamic": "quantization.configs",
    "Format": "formats",
    "KVCache": "quantization.cache",
    "PerAxis": "formats",
    "PerBlock": "formats",
    "PerTensor": "formats",
    "QuantizedTensor": "quantization.tensor",
    "ScaledTensor": "tensors.tensor",
    "Static": "quantization.configs",
    "WeightOnly": "quantization.configs",
    "batch_invariant": "ops",
    "calibrate": "models.guard",
    "drop": "tensors.verbs",
    "hardware": "inspect.hardware",
    "on_missing": "ops",
    "products_in": "ops",
    "quantize_": "quantization.verb",
    "rebalance": "models.rebalance",
    "rebalance_every": "models.rebalance",
    "report": "inspect.report",
    "scale_model": "models.scale_model",
    "scaled": "tensors.wrap",
    "simulate_format": "models.simulate",
    "simulate_fp8": "models.simulate",
    "statistics": "models.rebalance",
    "track_scales": "inspect",
    "unit_scale": "unit_scaling",
    "unscale_model": "models.scale_model",
}

__all__ = [
    "CodedTensor",
    "Dynamic",
    "Format",
    "KVCache",
    "PerAxis",
    "PerBlock",
    "PerTensor",
    "QuantizedTensor",
    "ScaledTensor",
    "Static",
    "WeightOnly",
    "__version__",
    "batch_invariant",
    "calibrate",
    "checkpoint",
    "distributed",
    "drop",
    "errors",
    "exchange",
    "formats",
    "functional",
    "hardware",
    "inspect",
    "mup",
    "nn",
    "on_missing",
    "ops",
    "optim",
    "products_in",
    "quantization",
    "quantize_",
    "rebalance",
    "rebalance_every",
    "recipes",
    "report",
    "scale_model",
    "scaled",
    "simulate_format",
    "simulate_fp8",
    "statistics",
    "track_scales",
    "unit_scale",
    "unscale_model",
]


def _found(name: str) -> Any:
    """A public name, or any module of this package, on first use."""
    if name.startswith("__"):  # what Python and its tools ask of any module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    home = f"{__name__}.{_HOMES.get(name, name)}"
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:  # something that the module needs
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name) from None
    found = globals()[name] = getattr(module, name) if name in _HOMES else module
    return found


if not TYPE_CHECKING:  # a type checker would take any name for one that there is
    __getattr__ = _found


def __dir__() -> list[str]:
    return sorted(__all__)


def _load() -> None:
    """The kinds of tensors, which torch is told to be safe to load."""
    import_module(f"{__name__}.tensors.expanded")
    import_module(f"{__name__}.tensors.sparse")
    import_module(f"{__name__}.quantization.tensor")
    import_module(f"{__name__}._moved").install()


if not _is_command():
    _load()
