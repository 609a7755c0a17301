"""Quantisation after training: weights in few bits, activations cast, caches of keys and values.

A model that `quantize_` has converted is an ordinary model of plain tensors. Only its weights are
`QuantizedTensor`s, and a product with one returns a plain tensor.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaledtensor.quantization.configs import Config, Dynamic, Static, WeightOnly
    from scaledtensor.quantization.tensor import QuantizedTensor
    from scaledtensor.quantization.verb import quantize_

#: The module of each public name. They are loaded on use, since `import scaledtensor` loads
#: `quantization.tensor` for files, and no rules of operators.
_HOMES = {
    "Config": "configs",
    "Dynamic": "configs",
    "QuantizedTensor": "tensor",
    "Static": "configs",
    "WeightOnly": "configs",
    "quantize_": "verb",
}

__all__ = ["Config", "Dynamic", "QuantizedTensor", "Static", "WeightOnly", "quantize_"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
