"""Activations and their derivatives.

For x ~ N(0, r^2), the second moments of gelu and silu run from r^2/4 (for small r they are linear
with slope 1/2) to r^2/2 (for large r they are relu). The formula r^2/4 (1 + r^2 / (r^2 + c)) meets
both ends. Between them it stays within 7% of the integral; c is fitted. It needs no transcendental
function, so eager and compiled code agree to the bit. (Unit scaling interpolates in the log domain:
Blake et al. 2023, appendix.)

The other formulas are fits too. Both ends are exact, and one constant makes the largest error
against the integral least over r = 2^-8 to 2^8. This error stays within 6%. Activations with a
threshold use the integral itself (`gaussian_rms`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import (
    at_value,
    bounded_square,
    constant,
    elements,
    first_scaled,
    gaussian_rms,
    integrand,
    operand,
    read_value,
    rms_seen,
    value,
    within,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import dequantized
from scaledtensor.ops.rules.arithmetic import product
from scaledtensor.ops.writes import write
from scaledtensor.scales.powers import product_of
from scaledtensor.scales.singles import (
    Amount,
    remembered,
    rms_of,
    scale_of,
    scaled_by,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["sigmoid_rms", "softplus_rms", "tanh_rms"]


@remembered
def _between(rms: Any, low: float, high: float, c: float) -> Any:
    """Return a number that grows from sqrt(low) at rms = 0 to sqrt(high) at infinity."""
    r2 = bounded_square(rms)
    return (low + (high - low) * (r2 / (r2 + c))).sqrt()


def _half_to_root_half(rms: Any, c: float) -> Any:
    """Return sqrt(1/4 (1 + r^2 / (r^2 + c))), which grows from 1/2 to sqrt(1/2)."""
    return _between(rms, 0.25, 0.5, c)


def _backward(g: Any, saved: ScaledTensor, slope: Amount, kernel: Callable[..., Tensor]) -> Raw:
    """Compute a gradient on the elements of `g`. It is linear in `g`, so it stays in the range."""
    left, v = operand(g, saved), read_value(saved)
    return Raw(kernel(left.q.to(v.dtype), v), left.scale, left.rms * slope, fresh=True)


# --- homogeneous -----------------------------------------------------------------------------


@rule(aten.relu.default)
def relu(x: ScaledTensor) -> Raw:
    """r / sqrt(2): half of the elements become zero. The scale stays."""
    q, rms = elements(x).relu(), rms_of(x) * 0.5**0.5
    return Raw(q, scale_of(x), rms, settled=True, nonnegative=True)


@rule(aten.threshold_backward.default)
def threshold_backward(g: Any, x: ScaledTensor, threshold: float) -> Raw:
    """r_g / sqrt(2): half of the gradients become zero. With a threshold t other than 0, r_g
    sqrt(P(r z > t))."""
    left = operand(g, x)
    # A threshold of zero is the same for the elements. `torch.where` takes ten times as long.
    q = aten.threshold_backward.default(
        left.q, elements(x) if threshold == 0 else value(x), threshold
    )
    if threshold == 0:
        return product(q, left.scale, left.rms * 0.5**0.5, (left.rms,))
    share = gaussian_rms("above", rms_of(x), threshold, nonnegative=x.nonnegative)
    return Raw(q, left.scale, left.rms * share)


@rule(aten.leaky_relu.default)
def leaky_relu(x: ScaledTensor, negative_slope: float = 0.01) -> Raw:
    """r sqrt((1 + a^2) / 2) for a slope a below zero. The scale stays."""
    q = aten.leaky_relu.default(elements(x), negative_slope)
    return Raw(q, scale_of(x), rms_of(x) * ((1 + negative_slope**2) / 2) ** 0.5, settled=True)


@rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    g: Any, x: ScaledTensor, negative_slope: float, self_is_result: bool
) -> Raw:
    """r_g sqrt((1 + a^2) / 2) for a slope a below zero."""
    left = operand(g, x)
    q = aten.leaky_relu_backward.default(left.q, elements(x), negative_slope, False)
    return Raw(q, left.scale, left.rms * ((1 + negative_slope**2) / 2) ** 0.5, settled=True)


@rule(aten.hardtanh_backward.default)
def hardtanh_backward(g: Any, x: ScaledTensor, low: float, high: float) -> Raw:
    """r_g sqrt(P(a < r z < b)) for bounds a and b; P is (erf(b / (r sqrt 2)) - erf(a / (r sqrt 2)))
    / 2."""
    left = operand(g, x)
    v = value(x)
    q = torch.where((v > low) & (v < high), left.q, 0.0)
    return Raw(q, left.scale, left.rms * _share_between(rms_of(x), low, high).sqrt())


@remembered
def _share_between(rms: Any, low: float, high: float) -> Any:
    """Return the probability that a Gaussian is between two bounds, and at least 2^-20."""
    sigma = rms.clamp_min(2.0**-60) * 2**0.5
    below, above = (single_of(torch.erf(tensor_of(bound / sigma))) for bound in (low, high))
    return (0.5 * (above - below)).clamp_min(2.0**-20)


# --- gated -----------------------------------------------------------------------------------


@rule(aten.gelu.default)
def gelu(x: ScaledTensor, *, approximate: str = "none") -> Raw:
    """r sqrt(1/4 (1 + r^2 / (r^2 + 0.6))): from r / 2 for small r to r / sqrt(2) for large r."""
    r = rms_of(x)
    rms = r * _half_to_root_half(r, 0.6)
    # The functions of torch are called here, because a call of an overload takes 2 us longer.
    return at_value(lambda v: torch.nn.functional.gelu(v, approximate=approximate), x, rms)


@rule(aten.gelu_backward.default)
def gelu_backward(g: Any, x: ScaledTensor, *, approximate: str = "none") -> Raw:
    """r_g sqrt(1/4 (1 + r^2 / (r^2 + 0.5)))."""
    kernel = partial(aten.gelu_backward.default, approximate=approximate)
    return _backward(g, x, _half_to_root_half(rms_of(x), 0.5), kernel)


@rule(aten.silu.default)
def silu(x: ScaledTensor) -> Raw:
    """r sqrt(1/4 (1 + r^2 / (r^2 + 2))): from r / 2 for small r to r / sqrt(2) for large r."""
    r = rms_of(x)
    return at_value(torch.nn.functional.silu, x, r * _half_to_root_half(r, 2.0))


@rule(aten.silu_backward.default)
def silu_backward(g: Any, x: ScaledTensor) -> Raw:
    """r_g sqrt(1/4 (1 + r^2 / (r^2 + 1.2)))."""
    slope = _half_to_root_half(rms_of(x), 1.2)
    return _backward(g, x, slope, aten.silu_backward.default)


# --- saturating ------------------------------------------------------------------------------


@rule(aten.tanh.default)
def tanh(x: ScaledTensor) -> Raw:
    """r / sqrt(1 + 1.25 r^2), within 14% of the integral."""
    return at_value(torch.tanh, x, tanh_rms(rms_of(x)))


@remembered
def tanh_rms(rms: Any) -> Any:
    return rms.clamp_max(2.0**60) / (1 + 1.25 * bounded_square(rms)).sqrt()


@rule(aten.tanh_backward.default)
def tanh_backward(g: Any, y: ScaledTensor) -> Raw:
    """r_g (1 + 3.6 r^2)^-1/4. The RMS r of the input follows from the RMS of the saved result."""
    return _backward(g, y, _tanh_slope(rms_of(y)), aten.tanh_backward.default)


@remembered
def _tanh_slope(rms: Any) -> Any:
    # Invert r_y = r / sqrt(1 + 1.25 r^2).
    y2 = rms.square()
    r2 = y2 / (1 - 1.25 * y2).clamp_min(2.0**-20)
    return (1 + 3.6 * r2).rsqrt().sqrt()


@rule(aten.sigmoid.default)
def sigmoid(x: ScaledTensor) -> Raw:
    """sqrt(1/4 (1 + r^2 / (r^2 + 4)))."""
    return at_value(torch.sigmoid, x, sigmoid_rms(rms_of(x)), nonnegative=True)


def sigmoid_rms(rms: Any) -> Any:
    return _half_to_root_half(rms, 4.0)


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(g: Any, y: ScaledTensor) -> Raw:
    """r_g / 4 (1 + 0.9 r^2)^-1/4. The RMS r of the input follows from the RMS of the saved
    result."""
    return _backward(g, y, _sigmoid_slope(rms_of(y)), aten.sigmoid_backward.default)


@remembered
def _sigmoid_slope(rms: Any) -> Any:
    # Invert r_y^2 = 1/4 (1 + r^2 / (r^2 + 4)).
    share = (4 * rms.square() - 1).clamp_min(0.0).clamp_max(1 - 2.0**-20)
    r2 = 4 * share / (1 - share)
    return 0.25 * (1 + 0.9 * r2).rsqrt().sqrt()


@rule(aten.hardsigmoid.default)
def hardsigmoid(x: ScaledTensor) -> Raw:
    """sqrt(1/4 (1 + r^2 / (r^2 + 9.5)))."""
    rms = _half_to_root_half(rms_of(x), 9.5)
    return at_value(aten.hardsigmoid.default, x, rms, nonnegative=True)


@rule(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(g: Any, x: ScaledTensor) -> Raw:
    """r_g / 6 (1 + 0.145 r^2)^-1/4."""
    slope = (1 + 0.145 * bounded_square(rms_of(x))).rsqrt().sqrt() / 6
    return _backward(g, x, slope, aten.hardsigmoid_backward.default)


# --- exponential below zero ------------------------------------------------------------------


@remembered
def _elu_rms(rms: Any, alpha: float, scale: float, input_scale: float) -> Any:
    u = rms * input_scale
    below = (alpha * input_scale) ** 2 / (1 + 1.41 * u + bounded_square(u))
    return rms * (0.5 + 0.5 * below).sqrt() * scale


@rule(aten.elu.default)
def elu(x: ScaledTensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Raw:
    """r s sqrt(1/2 + 1/2 (a b)^2 / (1 + 1.41 u + u^2)) with alpha a, scale s, input_scale b and
    u = b r. selu is an elu."""
    rms = _elu_rms(rms_of(x), alpha, scale, input_scale)
    return at_value(lambda v: aten.elu.default(v, alpha, scale, input_scale), x, rms)


@rule(aten.celu.default)
def celu(x: ScaledTensor, alpha: float = 1.0) -> Raw:
    """Same as `elu` with input_scale 1 / alpha."""
    rms = _elu_rms(rms_of(x), alpha, 1.0, 1 / alpha)
    return at_value(lambda v: torch.celu(v, alpha), x, rms)


@rule(aten.elu_backward.default)
def elu_backward(
    g: Any, alpha: float, scale: float, input_scale: float, is_result: bool, saved: ScaledTensor
) -> Raw:
    """r_g s sqrt(1/2 + 1/2 (a b)^2 / (1 + 2.3 u)), u = b r. The in-place form saves the result, and
    its RMS stands for r."""
    u = rms_of(saved) * input_scale
    slope = (0.5 + 0.5 * (alpha * input_scale) ** 2 / (1 + 2.3 * u)).sqrt() * scale

    def kernel(q: Tensor, v: Tensor) -> Tensor:
        grad: Tensor = aten.elu_backward.default(q, alpha, scale, input_scale, is_result, v)
        return grad

    return _backward(g, saved, slope, kernel)


# --- smooth relus ----------------------------------------------------------------------------


@rule(aten.softplus.default)
def softplus(x: ScaledTensor, beta: float = 1, threshold: float = 20) -> Raw:
    """Measured: models use softplus on biased arguments (the time steps of a state space model),
    and its results are small there."""
    q = aten.softplus.default(value(x), beta, threshold)
    return Raw(q, None, rms_seen(q, softplus_rms(rms_of(x), beta)), nonnegative=True)


def softplus_rms(rms: Any, beta: float = 1.0) -> Any:
    """RMS of softplus of a Gaussian: ln 2 / beta for small RMS, and as for relu for large RMS."""
    return ((math.log(2) / beta) ** 2 + bounded_square(rms) / 2).sqrt()


@rule(aten.softplus_backward.default)
def softplus_backward(g: Any, x: ScaledTensor, beta: float, threshold: float) -> Raw:
    """r_g times the measured RMS of a sigmoid."""
    slope = _sigmoid_seen(x, beta)
    kernel = partial(aten.softplus_backward.default, beta=beta, threshold=threshold)
    return _backward(g, x, slope, kernel)


def _sigmoid_seen(x: ScaledTensor, beta: float) -> Any:
    slope = torch.sigmoid(value(x) * beta)
    return rms_seen(slope, _half_to_root_half(rms_of(x) * abs(beta), 7.4))


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid(x: ScaledTensor) -> tuple[Raw, Tensor]:
    """-softplus(-x): measured. The buffer for the derivative is plain."""
    q, buffer = aten.log_sigmoid_forward.default(value(x))
    return Raw(q, None, rms_seen(q, softplus_rms(rms_of(x)))), buffer


@rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(g: Any, x: ScaledTensor, buffer: Tensor) -> Raw:
    """r_g times the measured RMS of sigmoid(-x)."""
    slope = _sigmoid_seen(x, -1.0)
    return _backward(g, x, slope, partial(aten.log_sigmoid_backward.default, buffer=buffer))


@rule(aten.mish.default)
def mish(x: ScaledTensor) -> Raw:
    """r sqrt(0.36 + 0.14 r^2 / (r^2 + 0.51)): at zero the slope is tanh(ln 2) = 0.6."""
    r = rms_of(x)
    return at_value(aten.mish.default, x, r * _between(r, 0.36, 0.5, 0.51))


@rule(aten.mish_backward.default)
def mish_backward(g: Any, x: ScaledTensor) -> Raw:
    """r_g sqrt(0.36 + 0.14 r^2 / (r^2 + 0.22))."""
    slope = _between(rms_of(x), 0.36, 0.5, 0.22)
    return _backward(g, x, slope, aten.mish_backward.default)


@rule(aten.hardswish.default)
def hardswish(x: ScaledTensor) -> Raw:
    """r sqrt(1/4 (1 + r^2 / (r^2 + 1.75)))."""
    r = rms_of(x)
    return at_value(aten.hardswish.default, x, r * _half_to_root_half(r, 1.75))


@rule(aten.hardswish_backward.default)
def hardswish_backward(g: Any, x: ScaledTensor) -> Raw:
    """r_g sqrt(1/4 (1 + r^2 / (r^2 + 0.92)))."""
    slope = _half_to_root_half(rms_of(x), 0.92)
    return _backward(g, x, slope, aten.hardswish_backward.default)


@rule(aten.glu.default)
def glu(x: ScaledTensor, dim: int = -1) -> Raw:
    """r sqrt(1/4 (1 + r^2 / (r^2 + 7.4))) for a sigmoid(b), where a and b are the halves of the
    input."""
    r = rms_of(x)
    rms = r * _half_to_root_half(r, 7.4)
    return at_value(lambda v: torch.nn.functional.glu(v, dim), x, rms)


@rule(aten.glu_backward.default)
def glu_backward(g: Any, x: ScaledTensor, dim: int) -> Raw:
    """The two halves of the gradient are g sigmoid(b) and g a sigmoid'(b). The rule is r_g times
    the root of the mean of two squares: 1/4 (1 + r^2 / (r^2 + 7.4)) and r^2 / 16 (1 + 0.9
    r^2)^-1/2."""
    r = rms_of(x)
    r2, gate = bounded_square(r), _half_to_root_half(r, 7.4).square()
    slope = ((gate + r2 / 16 * (1 + 0.9 * r2).rsqrt()) / 2).sqrt()
    return _backward(g, x, slope, partial(aten.glu_backward.default, dim=dim))


# --- leaky, with a learnt or a random slope --------------------------------------------------


@rule(aten._prelu_kernel.default)
def prelu(x: Any, weight: Any) -> Raw:
    """r sqrt((1 + rw^2) / 2) for slopes of RMS rw."""
    like = first_scaled(x, weight)
    a, w = operand(x, like), operand(weight, like)
    q = torch.where(a.q > 0, a.q.float(), a.q * scaled_by(w.q.float(), w.scale))
    return Raw(q, a.scale, a.rms * ((1 + w.rms.square()) / 2).sqrt())


@rule(aten._prelu_kernel_backward.default)
def prelu_backward(g: Any, x: Any, weight: Any) -> tuple[Raw, Raw]:
    """r_g sqrt((1 + rw^2) / 2) for the input, and r_g rx / sqrt(2) for the slopes, before autograd
    sums over the elements that share a slope."""
    like = first_scaled(g, x, weight)
    left, a, w = (operand(t, like) for t in (g, x, weight))
    positive = a.q > 0
    of_x = torch.where(positive, left.q.float(), left.q * scaled_by(w.q.float(), w.scale))
    of_w = torch.where(positive, 0.0, left.q.float() * a.q)
    half = (1 + w.rms.square()) / 2
    return (
        Raw(of_x, left.scale, left.rms * half.sqrt()),
        Raw(of_w, product_of(left.scale, a.scale), left.rms * a.rms * 0.5**0.5),
    )


def _rrelu_factor(lower: float, upper: float, training: bool) -> float:
    square = (lower**2 + lower * upper + upper**2) / 3 if training else ((lower + upper) / 2) ** 2
    return float(((1 + square) / 2) ** 0.5)


@rule(aten.rrelu_with_noise.default)
def rrelu(
    x: ScaledTensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Raw:
    """r sqrt((1 + E a^2) / 2). In training the slope a is uniform on [lower, upper); in evaluation
    it is the mean of both. The random slopes are written into `noise`."""
    out, drawn = rrelu_functional(x, noise, lower, upper, training, generator)
    if training:
        write(noise, drawn, [x])
    return out


@rule(aten.rrelu_with_noise_functional.default)
def rrelu_functional(
    x: ScaledTensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Raw, Raw]:
    """Same as `rrelu_with_noise`; the random slopes are a second result."""
    q = elements(x)
    drawn = torch.empty_like(q)
    factor = _rrelu_factor(lower, upper, training)
    out = aten.rrelu_with_noise.default(q, drawn, lower, upper, training, generator)
    slopes = drawn if training else torch.ones_like(q)
    rms = rms_of(x)
    return Raw(out, scale_of(x), rms * factor), Raw(slopes, None, constant(factor, rms))


@rule(aten.rrelu_with_noise_backward.default)
def rrelu_backward(
    g: Any,
    x: Any,
    noise: Any,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Raw:
    """r_g sqrt((1 + E a^2) / 2) for slopes a as in `rrelu_with_noise`."""
    left = operand(g, first_scaled(g, x, noise))
    q = aten.rrelu_with_noise_backward.default(
        left.q.float(),
        dequantized(x).float(),
        dequantized(noise).float(),
        lower,
        upper,
        training,
        self_is_result,
    )
    return Raw(q, left.scale, left.rms * _rrelu_factor(lower, upper, training))


# --- thresholds ------------------------------------------------------------------------------

integrand("threshold", aten.threshold.default)
integrand("hardshrink", aten.hardshrink.default)
integrand("softshrink", aten.softshrink.default)
integrand("above", lambda v, bound: (v > bound).double())
integrand("outside", lambda v, bound: (v.abs() > bound).double())


@rule(aten.threshold.default)
def threshold(x: ScaledTensor, threshold: float, value: float) -> Raw:
    """sqrt(E f(r z)^2) for the function f itself."""
    rms = gaussian_rms("threshold", rms_of(x), threshold, value, nonnegative=x.nonnegative)
    given = threshold, value
    function = aten.threshold.default
    return at_value(lambda v: function(v, *(within(n, v.dtype) for n in given)), x, rms)


@rule(aten.hardshrink.default, aten.softshrink.default, pass_op=True)
def shrink(op: Overload, x: ScaledTensor, lambd: float = 0.5) -> Raw:
    """sqrt(E f(r z)^2) for the function f itself."""
    rms = gaussian_rms(op._schema.name.split("::")[1], rms_of(x), lambd)
    return at_value(lambda v: op(v, within(lambd, v.dtype)), x, rms, nonnegative=x.nonnegative)


@rule(aten.hardshrink_backward.default, aten.softshrink_backward.default, pass_op=True)
def shrink_backward(op: Overload, g: Any, x: ScaledTensor, lambd: float) -> Raw:
    """r_g sqrt(P(|r z| > lambda))."""
    slope = gaussian_rms("outside", rms_of(x), lambd)
    return _backward(g, x, slope, lambda q, v: op(q, v, lambd))
