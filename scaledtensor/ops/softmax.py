"""Softmax, log-softmax and their derivatives.

Softmax over N logits of RMS m: from 1/N each (small m) to one winner, RMS 1/sqrt(N) (large m).
Unit scaling interpolates in the log domain: r = 1 / LI(1 / (1 + 4/m^2), N, sqrt N) (Blake et al.
2023, appendix G), that is N^(a/2 - 1) with a = m^2 / (m^2 + 4).
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import at_value, count, elements, operand, quadrature, value
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.tensor import ScaledTensor

aten = torch.ops.aten


def sharpness(rms: Tensor) -> Tensor:
    """a in (0, 1): 0 where all logits count alike, 1 where one wins."""
    m2 = rms.clamp_max(2.0**60).square()
    return m2 / (m2 + 4)


@rule(aten._softmax.default, aten._safe_softmax.default)
def softmax(
    x: ScaledTensor, dim: int, half_to_float: Any = False, dtype: torch.dtype | None = None
) -> Raw:
    """r = N^(a/2 - 1), a = m^2 / (m^2 + 4)."""
    n = count(x.shape, dim)
    rms = torch.exp((sharpness(x.rms) / 2 - 1) * math.log(max(n, 1)))
    return at_value(lambda v: torch.softmax(v, dim), x, rms, nonnegative=True, dtype=dtype)


@rule(aten._softmax_backward_data.default)
def softmax_backward(g: Any, y: ScaledTensor, dim: int, input_dtype: torch.dtype) -> Raw:
    """y (g - sum y g): r = r_g r_y."""
    left = operand(g, y)
    v = value(y)
    q = aten._softmax_backward_data.default(left.q.to(v.dtype), v, dim, v.dtype)
    return Raw(q, left.scale, left.rms * y.rms)


@rule(aten._log_softmax.default)
def log_softmax(x: ScaledTensor, dim: int, half_to_float: bool = False) -> Raw:
    """r = sqrt(ln(N)^2 + m^2). In float32: a loss is a small difference of these."""
    n = count(x.shape, dim)
    rms = quadrature(torch.full_like(x.rms, math.log(max(n, 2))), x.rms)
    q = aten._log_softmax.default(value(x).float(), dim, False)
    return Raw(q, None, rms, format=FP32)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(g: Any, y: ScaledTensor, dim: int, input_dtype: torch.dtype) -> Raw:
    """g - softmax * sum(g): r = r_g sqrt((N - 1) / N). With the one-hot gradient of a mean
    cross-entropy over B tokens, r_g = 1 / (B sqrt N), this is (sqrt(N - 1) / N) / B."""
    n = count(y.shape, dim)
    left = operand(g, y)
    q = aten._log_softmax_backward_data.default(left.q.float(), value(y), dim, torch.float32)
    narrow = y.recipe.activation if y.recipe is not None else None
    return Raw(q, left.scale, left.rms * max((n - 1) / n, 1 / n) ** 0.5, format=narrow)


@rule(aten.logsumexp.default)
def logsumexp(x: ScaledTensor, dim: Any, keepdim: bool = False) -> Raw:
    """A statistic, in float32: ln(n) + r^2 / 2 for a Gaussian, at most r sqrt(2 ln n)."""
    n = math.log(max(count(x.shape, dim), 2))
    rms = quadrature(
        torch.minimum(n + x.rms.clamp_max(2.0**60).square() / 2, n + x.rms * (2 * n) ** 0.5), x.rms / n
    )
    return Raw(torch.logsumexp(value(x).float(), dim, keepdim), None, rms, format=FP32)
