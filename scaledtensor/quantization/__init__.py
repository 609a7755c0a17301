"""Quantisation after training: weights in few bits, activations cast, caches of keys and values.

A model that `quantize_` has converted is an ordinary model of plain tensors. Only its weights are
`QuantizedTensor`s, and a product with one returns a plain tensor.
"""

from scaledtensor.quantization.configs import Config, Dynamic, Static, WeightOnly
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.quantization.verb import quantize_

__all__ = ["Config", "Dynamic", "QuantizedTensor", "Static", "WeightOnly", "quantize_"]
