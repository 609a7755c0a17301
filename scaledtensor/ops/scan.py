"""Scans: what a dimension has come to so far."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor import verbs
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import count, elements, operand, plain, quadrature, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.reduction import growth
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.softmax import logsumexp_rms
from scaledtensor.tensor import ScaledTensor


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


# --- logcumsumexp ----------------------------------------------------------------------------
# Autograd writes its derivative with the logarithm of the gradient, which no rule sees through, so
# it has operators of its own.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output)


def _slope(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    x, result = ctx.saved_tensors
    return _logcumsumexp_backward(grad, x, result, ctx.dim), None


def _no_slope(ctx: Any, *grads: Tensor) -> Any:
    raise UnsupportedError("logcumsumexp of a ScaledTensor has no second derivative")


_logcumsumexp = verbs.operator("logcumsumexp(Tensor x, int dim) -> Tensor", _slope, _save)
_logcumsumexp_backward = verbs.operator(
    "logcumsumexp_backward(Tensor grad, Tensor x, Tensor result, int dim) -> Tensor",
    _no_slope,
    lambda ctx, inputs, output: None,
)


@rule(aten.logcumsumexp.default, _logcumsumexp)
def logcumsumexp_rule(x: ScaledTensor, dim: int) -> Raw:
    """As logsumexp of i = 1..n terms in the mean: of N terms with (ln N)^2 the mean of (ln i)^2,
    and the spread of a mean of i, r sqrt(sum(1 / i) / n)."""
    n = max(count(x.shape, dim), 1)
    logs = math.sqrt(sum(math.log(i) ** 2 for i in range(1, n + 1)) / n)
    spread = math.sqrt(sum(1 / i for i in range(1, n + 1)) / n)
    rms = quadrature(logsumexp_rms(x.rms, round(math.exp(logs))), x.rms * spread)
    return Raw(torch.logcumsumexp(value(x).float(), dim), None, rms, format=FP32)


@rule(_logcumsumexp_backward)
def logcumsumexp_backward(g: Any, x: ScaledTensor, result: Any, dim: int) -> Raw:
    """To element i from each j >= i, its share of the softmax of j terms, whose squares sum to
    exp(m^2) / j at most 1: r_g sqrt(sum_j min(1, exp(m^2) / j) / n)."""
    left = operand(g, x)
    n = max(count(x.shape, dim), 1)
    terms = torch.arange(1, n + 1, device=x.rms.device)
    shares = (x.rms.square().clamp_max(64.0).exp() / terms).clamp_max(1.0)
    grad, v, total = left.q.float(), value(x).float(), plain(result).float()
    # sum_j g_j exp(x_i - total_j) in logarithms, so that no exponential leaves its range.
    positive, negative = (_upstream(part.clamp_min(0), total, v, dim) for part in (grad, -grad))
    return Raw(positive - negative, left.scale, left.rms * shares.mean().sqrt(), format=FP32)


def _upstream(grad: Tensor, total: Tensor, v: Tensor, dim: int) -> Tensor:
    logs = (grad.log() - total).flip(dim).logcumsumexp(dim).flip(dim)
    return (logs + v).exp()


def logcumsumexp(input: Tensor, dim: int, **kwargs: Any) -> Tensor:
    if kwargs:
        return torch.logcumsumexp(input, dim, **kwargs)
    result: Tensor = _logcumsumexp(input, dim)
    return result


#: function that a user may call -> the same with a derivative that has rules.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(
    (torch.logcumsumexp, Tensor.logcumsumexp), logcumsumexp
)
