"""Scales of inputs that files keep and products here do not use.

Files of NVFP4 with quantised inputs have a float32 for the tensor, amax / (448 F), which their
servers read. Products of `Dynamic("nvfp4")` measure it in each call. `measured_inputs` runs the
model to find the largest amax of some batches.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor.errors import QuantizationError
from scaledtensor.formats import E4M3FN, TwoLevelScale
from scaledtensor.models.passes import as_it_was, called
from scaledtensor.quantization.tensor import QuantizedTensor

__all__ = ["measured_inputs"]


def measured_inputs(
    model: nn.Module, names: Sequence[str], batches: Iterable[Any]
) -> dict[str, QuantizedTensor]:
    """Weights with the scale of their inputs, by name.

    Args:
        model: the model; it is run without gradients, in evaluation mode, and is then as before.
        names: the names of weights without the scale.
        batches: as `quantize_` takes calibration data.

    Raises:
        QuantizationError: there is no batch, no input reached a weight, or an input is zero, NaN or
            infinite.
    """
    found: dict[str, Tensor] = {}
    hooks = [_watch(model, name.rpartition(".")[0], found) for name in names]
    try:
        with as_it_was(model), torch.no_grad():
            for batch in batches:
                called(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _with_scale(model, name, found.get(name.rpartition(".")[0])) for name in names}


def _watch(model: nn.Module, module: str, found: dict[str, Tensor]) -> Any:
    def measure(owner: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].numel():
            amax = args[0].detach().abs().amax().float()
            found[module] = torch.maximum(found[module], amax) if module in found else amax

    hook: Callable[..., None] = measure
    return model.get_submodule(module).register_forward_pre_hook(hook)


def _with_scale(model: nn.Module, name: str, amax: Tensor | None) -> QuantizedTensor:
    if amax is None:
        raise QuantizationError(
            f"no batch of the calibration data reached {name}, whose file keeps a scale of inputs"
        )
    if not 0 < float(amax) < float("inf"):
        raise QuantizationError(f"inputs of {name} have amax {float(amax)} in the calibration data")
    x: Any = model.get_parameter(name)
    limit = x.config.input.format.max * E4M3FN.max
    scale = TwoLevelScale(x.scale, x.tensor_scale)
    return QuantizedTensor(
        x.codes, scale, x.config, x.shape, dtype=x.dtype, input_scale=amax.double() / limit
    )
