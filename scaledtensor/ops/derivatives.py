"""Functions whose derivative autograd spells in parts that no rule can see through.

The gradient of logsumexp is a softmax, which autograd writes as exp(x - lse); that of erf a bell,
which it writes as exp(-(x^2)). The rule of exp takes its argument for a Gaussian of zero mean, and
cannot know that here it is never positive. So these have operators of their own, whose derivatives
are operators with a rule. Caught where Python calls them; the rest of torch is as it was.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import at_value, bounded_square, count, quadrature, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.rules.softmax import logsumexp_rms
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


# --- logsumexp -------------------------------------------------------------------------------


def _save_for_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.keepdim = inputs
    ctx.save_for_backward(x)


def _times_softmax(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    if not ctx.keepdim:
        for d in sorted(d % x.dim() for d in ctx.dim):
            grad = grad.unsqueeze(d)
    return grad * _softmax(x, ctx.dim), None, None


def _softmax(x: Tensor, dims: list[int]) -> Tensor:
    """Over several dimensions at once."""
    if len(dims) == 1:
        return x.softmax(dims[0])
    last = [d % x.dim() for d in dims]
    order = [d for d in range(x.dim()) if d not in last] + last
    back = sorted(range(x.dim()), key=order.__getitem__)
    moved = x.permute(order)
    flat = moved.flatten(-len(last)).softmax(-1)
    return flat.reshape(moved.shape).permute(back)


_logsumexp = verbs.operator(
    "logsumexp(Tensor x, int[] dim, bool keepdim) -> Tensor", _times_softmax, _save_for_softmax
)


@rule(aten.logsumexp.default, _logsumexp)
def logsumexp_rule(x: ScaledTensor, dim: Any, keepdim: bool = False) -> Raw:
    """ln sum exp: the free energy of N Gaussian levels, and the spread of a mean, m / sqrt(N). A
    statistic, in float32."""
    n = max(count(x.shape, dim), 1)
    rms = quadrature(logsumexp_rms(x.rms, n), x.rms / n**0.5)
    return Raw(torch.logsumexp(value(x).float(), dim, keepdim), None, rms, format=FP32)


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any) -> Tensor:
    if kwargs or input.dim() == 0:
        return torch.logsumexp(input, dim, keepdim, **kwargs)
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.dim()))
    result: Tensor = _logsumexp(input, dims, keepdim)
    return result


# --- erf -------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _slope_of_erf(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    slope: Tensor = grad * (2 / math.pi**0.5) * _bell(x)
    return slope


def _slope_of_bell(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    slope: Tensor = grad * -2 * (x * _bell(x))
    return slope


_erf = verbs.operator("erf(Tensor x) -> Tensor", _slope_of_erf, _save)

#: exp(-x^2)
_bell = verbs.operator("bell(Tensor x) -> Tensor", _slope_of_bell, _save)


@rule(aten.erf.default, _erf)
def erf_rule(x: ScaledTensor) -> Raw:
    """r = sqrt(2/pi asin(2 rx^2 / (1 + 2 rx^2))), exact for a Gaussian (Williams 1998)."""
    r2 = 2 * bounded_square(x.rms)
    return at_value(torch.erf, x, (2 / math.pi * torch.asin(r2 / (1 + r2))).sqrt())


@rule(_bell)
def bell_rule(x: ScaledTensor) -> Raw:
    """exp(-x^2): r = (1 + 4 rx^2)^-1/4, exact for a Gaussian."""
    rms = (1 + 4 * bounded_square(x.rms)).rsqrt().sqrt()
    return at_value(lambda v: torch.exp(-v.square()), x, rms, nonnegative=True)


def erf(input: Tensor, **kwargs: Any) -> Tensor:
    if kwargs:
        return torch.erf(input, **kwargs)
    result: Tensor = _erf(input)
    return result


# --- x * x -----------------------------------------------------------------------------------


def mul(input: Any, other: Any, **kwargs: Any) -> Tensor:
    """x * x as a square: autograd would add x g to x g, which a sum takes for independent."""
    if input is other and not kwargs:
        return torch.square(input)
    return torch.mul(input, other, **kwargs)


#: function that a user may call -> the same with a derivative that has rules.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp), logsumexp),
    **dict.fromkeys((torch.erf, Tensor.erf, torch.special.erf), erf),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__), mul),
}
