"""scaledtensor: tensors that carry their own power-of-two scale. `import scaledtensor as sct`.

The classes that files hold come with the import, so that `torch.load` knows them. Everything else
is loaded when it is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scaledtensor._start import is_command as _is_command
from scaledtensor._version import __version__ as __version__

if TYPE_CHECKING:
    from scaledtensor import (
        checkpoint,
        distributed,
        errors,
        formats,
        functional,
        inspect,
        mup,
        nn,
        ops,
        optim,
        recipes,
    )
    from scaledtensor.coded import CodedTensor
    from scaledtensor.formats import Format, PerAxis, PerBlock, PerTensor
    from scaledtensor.guard import calibrate
    from scaledtensor.inspect import track_scales
    from scaledtensor.machine import hardware
    from scaledtensor.model import scale_model, unscale_model
    from scaledtensor.ops import on_missing, products_in
    from scaledtensor.rebalance import rebalance, rebalance_every, statistics
    from scaledtensor.report import report
    from scaledtensor.simulate import simulate_format, simulate_fp8
    from scaledtensor.tensor import ScaledTensor
    from scaledtensor.unit_scale import unit_scale
    from scaledtensor.verbs import drop
    from scaledtensor.wrap import scaled

#: The module of each name that is no module itself.
_HOMES = {
    "CodedTensor": "coded",
    "Format": "formats",
    "PerAxis": "formats",
    "PerBlock": "formats",
    "PerTensor": "formats",
    "ScaledTensor": "tensor",
    "calibrate": "guard",
    "drop": "verbs",
    "hardware": "machine",
    "on_missing": "ops",
    "products_in": "ops",
    "rebalance": "rebalance",
    "rebalance_every": "rebalance",
    "report": "report",
    "scale_model": "model",
    "scaled": "wrap",
    "simulate_format": "simulate",
    "simulate_fp8": "simulate",
    "statistics": "rebalance",
    "track_scales": "inspect",
    "unit_scale": "unit_scale",
    "unscale_model": "model",
}

__all__ = [
    "CodedTensor",
    "Format",
    "PerAxis",
    "PerBlock",
    "PerTensor",
    "ScaledTensor",
    "__version__",
    "calibrate",
    "checkpoint",
    "distributed",
    "drop",
    "errors",
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


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets a module that it loaded as an attribute of its package: of
        # `scaledtensor.report` that attribute is the function.
        if isinstance(value, ModuleType) and name in _HOMES:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _load() -> None:
    """The kinds of tensors, which torch is told to be safe to load."""
    import_module(f"{__name__}.expanded")
    import_module(f"{__name__}.sparse")


if not _is_command():
    _load()
