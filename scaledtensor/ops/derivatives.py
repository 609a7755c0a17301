"""logsumexp, erf, x * x, the RMS norm and dropout, with derivatives that rules can follow.

Autograd writes the gradient of logsumexp, a softmax, as exp(x - lse), and the gradient of erf, a
bell, as exp(-(x^2)). The rule of exp assumes that its argument is a Gaussian of zero mean. It
cannot know that this argument is never positive. A CPU has no kernel for the RMS norm, so torch
composes it of five operators, whose rules take x and its RMS for independent. So these functions
run as operators of this library, and their derivatives are operators with a rule. Dropout runs as
the operator that torch takes on CUDA devices. `FUNCTIONS` lists the functions of torch that are
replaced for ScaledTensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import at_value, bounded_square, count, quadrature, value
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.rules.norm import DEFAULT_EPS
from scaledtensor.ops.rules.norm import rms_norm as fused_rms_norm
from scaledtensor.ops.rules.softmax import logsumexp_rms
from scaledtensor.scales.singles import rms_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


# --- logsumexp -------------------------------------------------------------------------------


def _times_softmax(grad: Tensor, x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    if not keepdim:
        for d in sorted(d % x.dim() for d in dim):
            grad = grad.unsqueeze(d)
    return grad * _softmax(x, dim)


def _softmax(x: Tensor, dims: list[int]) -> Tensor:
    """Return the softmax over several dimensions at once."""
    if len(dims) == 1:
        return x.softmax(dims[0])
    last = [d % x.dim() for d in dims]
    order = [d for d in range(x.dim()) if d not in last] + last
    back = sorted(range(x.dim()), key=order.__getitem__)
    moved = x.permute(order)
    flat = moved.flatten(-len(last)).softmax(-1)
    return flat.reshape(moved.shape).permute(back)


_logsumexp = define_operator(
    "logsumexp(Tensor x, int[] dim, bool keepdim) -> Tensor", _times_softmax
)


@rule(aten.logsumexp.default, _logsumexp)
def logsumexp_rule(x: ScaledTensor, dim: Any, keepdim: bool = False) -> Raw:
    """ln sum exp: the free energy of N Gaussian levels, and the spread of a mean, m / sqrt(N). A
    statistic, in float32."""
    n = max(count(x.shape, dim), 1)
    r = rms_of(x)
    rms = quadrature(logsumexp_rms(r, n), r / n**0.5)
    return Raw(torch.logsumexp(value(x).float(), dim, keepdim), None, rms, format=FP32)


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any) -> Tensor:
    if kwargs or input.dim() == 0:
        return torch.logsumexp(input, dim, keepdim, **kwargs)
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.dim()))
    result: Tensor = _logsumexp(input, dims, keepdim)
    return result


# --- erf -------------------------------------------------------------------------------------


#: exp(-x^2)
_bell: Any = define_operator("bell(Tensor x) -> Tensor", lambda grad, x: grad * -2 * (x * _bell(x)))

_erf = define_operator(
    "erf(Tensor x) -> Tensor", lambda grad, x: grad * (2 / math.pi**0.5) * _bell(x)
)


@rule(aten.erf.default, _erf)
def erf_rule(x: ScaledTensor) -> Raw:
    """r = sqrt(2/pi asin(2 rx^2 / (1 + 2 rx^2))), exact for a Gaussian (Williams 1998)."""
    r2 = 2 * bounded_square(rms_of(x))
    return at_value(torch.erf, x, (2 / math.pi * (r2 / (1 + r2)).asin()).sqrt())


@rule(_bell)
def bell_rule(x: ScaledTensor) -> Raw:
    """exp(-x^2): r = (1 + 4 rx^2)^-1/4, exact for a Gaussian."""
    rms = (1 + 4 * bounded_square(rms_of(x))).rsqrt().sqrt()
    return at_value(lambda v: torch.exp(-v.square()), x, rms, nonnegative=True)


def erf(input: Tensor, **kwargs: Any) -> Tensor:
    if kwargs:
        return torch.erf(input, **kwargs)
    result: Tensor = _erf(input)
    return result


# --- x * x -----------------------------------------------------------------------------------


def mul(input: Any, other: Any, **kwargs: Any) -> Tensor:
    """x * x as a square: a sum would take the two halves of its gradient for independent."""
    if input is other and not kwargs:
        return torch.square(input)
    return torch.mul(input, other, **kwargs)


# --- RMS norm --------------------------------------------------------------------------------


def _rms_norm_slope(
    grad: Tensor,
    input: Tensor,
    result1: Tensor,
    weight: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float | None,
    grad_input_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight; from operators that can be differentiated again if
    autograd records them."""
    if not torch.is_grad_enabled():
        found: tuple[Tensor | None, Tensor | None] = aten._fused_rms_norm_backward.default(
            grad, input, normalized_shape, result1, weight, grad_input_mask
        )
        return found
    dims = tuple(range(-len(normalized_shape), 0))
    eps = DEFAULT_EPS if eps is None else eps
    inverse = torch.rsqrt(input.square().mean(dims, keepdim=True) + eps)
    normal = input * inverse
    weighted = grad if weight is None else grad * weight
    dx = (weighted - normal * (weighted * normal).mean(dims, keepdim=True)) * inverse
    dw = None if weight is None else (grad * normal).sum_to_size(weight.shape)
    return dx, dw


_rms_norm = define_operator(
    "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps)"
    " -> (Tensor, Tensor)",
    _rms_norm_slope,
)
rule(_rms_norm)(fused_rms_norm)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Works like torch's function, which raises its own errors and keeps the cases of other dtypes
    and of `batch_invariant`."""
    shape = tuple(normalized_shape)
    fits = all(type(n) is int for n in shape) and input.shape[input.dim() - len(shape) :] == shape
    if weight is not None:
        fits = fits and weight.shape == shape and weight.dtype == input.dtype
    if not fits or not shape or invariant.is_on():
        return torch.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = _rms_norm(input, shape, weight, eps)[0]
    return result


# --- dropout ---------------------------------------------------------------------------------


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Works like torch's function, with the same mask. On a CPU torch composes it of four
    operators and keeps a mask in the dtype of the input. This one keeps booleans."""
    if inplace or not training or not 0 < p < 1:
        return torch.nn.functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


#: function of torch -> its replacement, whose derivative has rules.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp), logsumexp),
    **dict.fromkeys((torch.erf, Tensor.erf, torch.special.erf), erf),
    **dict.fromkeys((torch.nn.functional.rms_norm, torch.rms_norm), rms_norm),
    **dict.fromkeys((torch.nn.functional.dropout, torch.dropout), dropout),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__), mul),
}
