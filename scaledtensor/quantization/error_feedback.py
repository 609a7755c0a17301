"""Rounding with error feedback: GPTQ (Frantar et al., arXiv 2210.17323).

A product y = x W^T has the squared error tr(D H D^T) on the calibration data, where D is the error
of the weight and H = X^T X has the second moments of the inputs. The columns of W are rounded one
after another. The error of each is spread over the columns that are still to be rounded, so that
the squared error of the product stays least:

    U     the upper Cholesky factor of the inverse of H + damping
    e     (W[:, k] - rounded(W[:, k])) / U[k, k]
    W[:, j] -= e U[k, j]    for each j > k

The damping is 1 % of the mean of H's diagonal, as in the paper. If H was measured so inexactly that
this is not enough for a factor, it is 10 % or 100 %. A channel that was always zero in the data (a
dead one) takes no part: its column is rounded to nearest.

Scales of blocks along the summed dimension are chosen when the first column of the block is
reached, from the columns as they are then. A scale that all columns share is chosen at the start.
(Scales of all blocks from the start, with or without an order of columns by size, gave about the
same losses in a small GPT: the differences had no one sign.)
The arithmetic is in float64. Columns are updated 128 at a time, so the work is mostly matrix
products: N K^2 multiplications for a weight (N, K), and K^3 for the factor.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import QuantizationError
from scaledtensor.formats import E8M0FNU, decode, encode
from scaledtensor.formats.layouts import expand_scale
from scaledtensor.ops.products.quantize import Coded, granularity, quantized
from scaledtensor.recipes.casts import Cast

__all__ = ["DAMPING", "factor_of", "rounded_with_feedback"]

#: The fraction of the mean of the diagonal that is added to it.
DAMPING = 0.01
#: Columns that are updated together.
_COLUMNS = 128


def factor_of(moments: Tensor) -> Tensor:
    """U, the upper Cholesky factor of the inverse of the damped moments: (..., K, K), float64.

    Raises:
        QuantizationError: the moments are infinite, or are no moments.
    """
    if not moments.isfinite().all():
        raise QuantizationError(
            "the sum of the squared inputs of the calibration data is beyond float32: the inputs "
            "are too large"
        )
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        h = moments.double().clone()
        diagonal = h.diagonal(dim1=-2, dim2=-1)
        mean = diagonal.mean(-1, keepdim=True)
        dead = diagonal <= 0
        diagonal += torch.where(dead, torch.where(mean > 0, mean, 1.0), damping * mean)
        lower, failed = torch.linalg.cholesky_ex(h)
        if not failed.any():
            found = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not found.info.any():
                factor: Tensor = found.L
                return factor
    raise QuantizationError(
        "a matrix of second moments is symmetric and has no negative eigenvalue"
    )


def rounded_with_feedback(matrix: Tensor, moments: Tensor, cast: Cast) -> Coded:
    """The codes of a matrix, rounded with error feedback, and their scales.

    Args:
        matrix: (N, K), or a batch (E, N, K), float32. Products sum over K.
        moments: (E, K, K) for a batch; (1, K, K) for a matrix, or (G, K, K) if the rows of the
            matrix are in G groups with inputs of their own.
        cast: format, scale and block.

    Raises:
        QuantizationError: the inputs of the moments do not fit this matrix, or numbers are not
            finite.
    """
    k = matrix.shape[-1]
    if moments.shape[-1] != k or matrix.numel() // k % moments.shape[0]:
        raise QuantizationError(
            f"second moments {tuple(moments.shape)} do not fit a matrix {tuple(matrix.shape)}"
        )
    if not matrix.isfinite().all():
        raise QuantizationError(
            "the weight has a NaN or an infinity, which error feedback would spread over its row"
        )
    u = factor_of(moments)
    held = matrix.double().clone()
    by_moments = held.view(moments.shape[0], -1, k)  # the same memory
    # A second level is for the whole tensor, before any column is updated.
    one = torch.ones((), device=matrix.device, dtype=torch.float32)
    start = quantized(matrix, one, cast, -1)
    codes, scale = torch.empty_like(start.codes), start.scale
    along = cast.block[1]
    grouped = 0 < along < k
    of_part = replace(cast, block=(cast.block[0] or matrix.shape[-2], 0))
    if not grouped:
        along, factor = k, _numbers(start, cast, matrix.shape)
    else:
        scale = torch.empty_like(scale)
    # A block begins in columns that all earlier errors have reached.
    step = along * (_COLUMNS // along) if grouped and along <= _COLUMNS else _COLUMNS
    step = along if grouped and along > _COLUMNS and along % _COLUMNS else step
    for a in range(0, k, step):
        b = min(a + step, k)
        errors = torch.empty_like(by_moments[..., a:b])
        for j in range(a, b):
            if grouped and j % along == 0:
                part = held[..., j : j + along]
                found = quantized(part.float(), one, of_part, -1, start.whole)
                scale[..., j // along] = found.scale[..., 0]
                factor = _numbers(found, of_part, part.shape)
            s = factor[..., j % along]
            code = encode(held[..., j] / s, cast.format, overflow="saturate_finite")
            codes[..., j] = code
            value = decode(code, cast.format, torch.float64) * s
            error = (held[..., j] - value).view(by_moments.shape[:-1]) / u[:, j, j, None]
            by_moments[..., j + 1 : b] -= error[..., None] * u[:, j, None, j + 1 : b]
            errors[..., j - a] = error
        by_moments[..., b:] -= errors @ u[:, a:b, b:]
    return Coded(codes, scale, start.whole)


def _numbers(coded: Coded, cast: Cast, shape: torch.Size) -> Tensor:
    """The scale of each element, float64."""
    scale: Any = coded.scale
    if scale.dtype == torch.float8_e8m0fnu:
        scale = decode(scale, E8M0FNU)
    elif scale.dtype == torch.float8_e4m3fn:
        scale = scale.double()
    whole = 1.0 if coded.whole is None else coded.whole.double()
    return expand_scale(scale.double() * whole, granularity(cast, -1), shape)
