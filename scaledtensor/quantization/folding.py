"""Factors of `Config.fold`: exact powers of two that move large channels of inputs into the weight.

A product x W^T equals (x / c)(W c)^T for a factor c_k of each element k along the summed dimension.
The factors are powers of two, so that the division and the multiplication are exact.

If a config casts inputs (`Dynamic`, `Static`), they balance the two operands as in SmoothQuant
(Xiao et al., arXiv 2211.10438): c_k = amax(x_k)^(1/2) / amax(W_k)^(1/2).

If it casts the weight alone (`WeightOnly`), they give more room to the columns of large inputs, as
in AWQ (Lin et al., arXiv 2306.00978): c_k = rms(x_k)^a. Of several exponents a, the one with the
least squared error of the product on the calibration data is taken. It can be 0, which folds
nothing.
"""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import QuantizationError
from scaledtensor.formats import TwoLevelScale, dequantize_blocks
from scaledtensor.ops.products.quantize import granularity, mixed, quantized
from scaledtensor.quantization.configs import Config
from scaledtensor.quantization.observing import Seen
from scaledtensor.quantization.products import turned_back

__all__ = ["ALPHAS", "SMOOTHING", "folded"]

#: The exponent of the amax of inputs in SmoothQuant's factors; the weight has 1 - SMOOTHING.
SMOOTHING = 0.5
#: The exponents that are tried for weights alone.
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: The most output channels in which the error is measured.
_ROWS = 512
#: The factors are from 2^-8 to 2^8, so that float16 inputs stay normal numbers.
_MOST = 8


def folded(matrix: Tensor, seen: Seen) -> Tensor:
    """The factors of the elements along the summed dimension, (K,), float32.

    Args:
        matrix: the matrix of the weight, (..., N, K), float32.
        seen: the inputs of the weight.

    Raises:
        QuantizationError: the weight is of a convolution whose inputs are cast.
    """
    if seen.config.input is None:
        return _for_weight(matrix, seen)
    if seen.order == "kernel":
        raise QuantizationError(
            f"{seen.name}: fold divides the inputs of matrix products, and a convolution casts its "
            "input as it is: leave convolutions out by roles=('linear', 'head')"
        )
    if seen.channels is None:
        raise QuantizationError(f"no rows of inputs of {seen.name} were seen")
    of_weight = matrix.abs().reshape(-1, matrix.shape[-1]).amax(0)
    ratio = seen.channels.double() ** SMOOTHING / of_weight.double() ** (1 - SMOOTHING)
    return _powers_of_two(torch.where(of_weight > 0, ratio, 0.0))


def _for_weight(matrix: Tensor, seen: Seen) -> Tensor:
    if seen.moments is None:
        raise QuantizationError(f"no rows of inputs of {seen.name} were seen")
    sizes = seen.moments.diagonal(dim1=-2, dim2=-1).sum(0).sqrt()
    groups = seen.moments.shape[0]
    rows = matrix.view(groups, -1, matrix.shape[-1])
    every = max(1, rows.shape[1] // _ROWS)
    # A block may span some rows, so rows that are next to each other are measured.
    some = rows if every == 1 else rows[:, : rows.shape[1] // every]
    best, least = None, None
    for alpha in ALPHAS:
        columns = _powers_of_two(sizes.double() ** alpha)
        error = _error(some, columns, seen.moments, seen.config)
        if least is None or error < least:
            best, least = columns, error
    return best  # type: ignore[return-value]


def _error(rows: Tensor, columns: Tensor, moments: Tensor, config: Config) -> Tensor:
    """The squared error of the product on the calibration data."""
    difference = _stored(rows * columns, config) / columns - rows
    return ((difference @ moments) * difference).double().sum()


def _stored(matrix: Tensor, config: Config) -> Tensor:
    """The values that a config stores a matrix as, by rounding to nearest."""
    held = mixed(matrix, -1) if config.rotate else matrix
    how = config.weight
    coded = quantized(held, torch.ones((), device=held.device, dtype=torch.float32), how, -1)
    scale: Any = coded.scale
    if coded.whole is not None:
        scale = TwoLevelScale(coded.scale, coded.whole)
    values = dequantize_blocks(coded.codes, scale, how.format, granularity(how, -1))
    return turned_back(values) if config.rotate else values


def _powers_of_two(x: Tensor) -> Tensor:
    """The powers of two nearest to `x` in the logarithm, with a geometric mean near 1, float32. A
    channel of zeros gets 1."""
    logs = x.double().log2()
    found = logs.isfinite()
    if not found.any():
        return torch.ones_like(x, dtype=torch.float32)
    exponents = (logs - logs[found].mean()).round().clamp(-_MOST, _MOST)
    exponents = torch.where(found, exponents, 0.0)
    return torch.ldexp(torch.ones_like(exponents), exponents.int()).float()
