"""Scans: what a dimension has come to so far."""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import count, elements, quadrature, value
from scaledtensor.ops.reduction import growth
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.softmax import logsumexp_rms
from scaledtensor.tensor import ScaledTensor

aten = torch.ops.aten


@rule(aten.cumsum.default)
def cumsum(x: ScaledTensor, dim: int, *, dtype: Any = None) -> Raw:
    """The mean square over i = 1..n of a sum of i terms: r sqrt((n + 1) / 2)."""
    n = count(x.shape, dim)
    factor = growth(n, x.nonnegative) / (3**0.5 if x.nonnegative else 2**0.5)
    q = elements(x).cumsum(dim, dtype=torch.float32)
    return Raw(q, x.scale, x.rms * max(factor, 1.0), format=FP32, nonnegative=x.nonnegative)


@rule(aten.cumprod.default)
def cumprod(x: ScaledTensor, dim: int, *, dtype: Any = None) -> Raw:
    """The mean square over i = 1..n of r^i, (1 - r^2n) / (1 - r^2) r^2 / n. On the value."""
    n = max(count(x.shape, dim), 1)
    powers = x.rms.double() ** torch.arange(1, n + 1, device=x.rms.device)
    rms = powers.clamp_max(2.0**126).square().mean().sqrt().float()
    q = value(x).cumprod(dim, dtype=torch.float32)
    return Raw(q, None, rms, format=FP32, nonnegative=x.nonnegative)


@rule(aten.cummax.default, aten.cummin.default, pass_op=True)
def cummax(op: Overload, x: ScaledTensor, dim: int) -> tuple[Raw, Tensor]:
    """The largest of i Gaussians, r sqrt(2 ln i), in the mean over i = 1..n: r sqrt(2 ln(n!) / n).
    The indices are plain."""
    q, index = op(elements(x), dim)
    n = max(count(x.shape, dim), 1)
    rms = x.rms * max(2 * math.lgamma(n + 1) / n, 1.0) ** 0.5
    return Raw(q, x.scale, rms), index


@rule(aten.logcumsumexp.default)
def logcumsumexp(x: ScaledTensor, dim: int) -> Raw:
    """As logsumexp of i = 1..n terms in the mean: of N terms with (ln N)^2 the mean of (ln i)^2,
    and the spread of a mean of i, r sqrt(sum(1 / i) / n)."""
    n = max(count(x.shape, dim), 1)
    logs = math.sqrt(sum(math.log(i) ** 2 for i in range(1, n + 1)) / n)
    spread = math.sqrt(sum(1 / i for i in range(1, n + 1)) / n)
    rms = quadrature(logsumexp_rms(x.rms, round(math.exp(logs))), x.rms * spread)
    return Raw(torch.logcumsumexp(value(x).float(), dim), None, rms, format=FP32)
