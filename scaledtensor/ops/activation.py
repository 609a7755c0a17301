"""Activations and their derivatives.

The second moments of gelu and silu under x ~ N(0, r^2) run from r^2/4 (where they are linear with
slope 1/2) to r^2/2 (where they are relu). r^2/4 (1 + r^2 / (r^2 + c)) meets both ends and stays
within 7% of the integral between; c is fitted. It needs no transcendental, so eager and compiled
code agree to the bit. (Unit scaling interpolates in the log domain: Blake et al. 2023, appendix.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import at_value, bounded_square, elements, operand, value
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.tensor import ScaledTensor

aten = torch.ops.aten


def _between_half_and_root_half(rms: Tensor, c: float) -> Tensor:
    r2 = bounded_square(rms)
    return (0.25 + 0.25 * (r2 / (r2 + c))).sqrt()


def _backward(g: Any, saved: ScaledTensor, slope: Tensor, kernel: Callable[..., Tensor]) -> Raw:
    """A gradient is linear in `g`: computed on its elements, it cannot leave the range."""
    left, v = operand(g, saved), value(saved)
    return Raw(kernel(left.q.to(v.dtype), v), left.scale, left.rms * slope)


# --- homogeneous -----------------------------------------------------------------------------


@rule(aten.relu.default)
def relu(x: ScaledTensor) -> Raw:
    """Homogeneous: the scale passes through; half of the energy survives, r / sqrt(2)."""
    return Raw(elements(x).relu(), x.scale, x.rms * 0.5**0.5, settled=True, nonnegative=True)


@rule(aten.threshold_backward.default)
def threshold_backward(g: Any, x: ScaledTensor, threshold: float) -> Raw:
    """Half of the gradients survive: r / sqrt(2)."""
    left = operand(g, x)
    q = torch.where(value(x) > threshold, left.q, 0.0)
    return Raw(q, left.scale, left.rms * 0.5**0.5, settled=True)


@rule(aten.leaky_relu.default)
def leaky_relu(x: ScaledTensor, negative_slope: float = 0.01) -> Raw:
    """Homogeneous: r sqrt((1 + a^2) / 2)."""
    q = aten.leaky_relu.default(elements(x), negative_slope)
    return Raw(q, x.scale, x.rms * ((1 + negative_slope**2) / 2) ** 0.5, settled=True)


@rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    g: Any, x: ScaledTensor, negative_slope: float, self_is_result: bool
) -> Raw:
    """r sqrt((1 + a^2) / 2)."""
    left = operand(g, x)
    q = torch.where(elements(x) > 0, left.q, left.q * negative_slope)
    return Raw(q, left.scale, left.rms * ((1 + negative_slope**2) / 2) ** 0.5, settled=True)


@rule(aten.hardtanh_backward.default)
def hardtanh_backward(g: Any, x: ScaledTensor, low: float, high: float) -> Raw:
    """Of a Gaussian, (erf(b / r sqrt 2) - erf(a / r sqrt 2)) / 2 lies between the bounds: r_g times
    its root."""
    left = operand(g, x)
    v = value(x)
    sigma = x.rms.clamp_min(2.0**-60) * 2**0.5
    share = 0.5 * (torch.erf(high / sigma) - torch.erf(low / sigma))
    q = torch.where((v > low) & (v < high), left.q, 0.0)
    return Raw(q, left.scale, left.rms * share.clamp_min(2.0**-20).sqrt())


# --- gated -----------------------------------------------------------------------------------


@rule(aten.gelu.default)
def gelu(x: ScaledTensor, *, approximate: str = "none") -> Raw:
    """r * sqrt(1/4 (1 + r^2 / (r^2 + 0.6)))."""
    rms = x.rms * _between_half_and_root_half(x.rms, 0.6)
    return at_value(lambda v: aten.gelu.default(v, approximate=approximate), x, rms)


@rule(aten.gelu_backward.default)
def gelu_backward(g: Any, x: ScaledTensor, *, approximate: str = "none") -> Raw:
    """r_g * sqrt(1/4 (1 + r^2 / (r^2 + 0.5)))."""
    kernel = partial(aten.gelu_backward.default, approximate=approximate)
    return _backward(g, x, _between_half_and_root_half(x.rms, 0.5), kernel)


@rule(aten.silu.default)
def silu(x: ScaledTensor) -> Raw:
    """r * sqrt(1/4 (1 + r^2 / (r^2 + 2)))."""
    return at_value(torch.nn.functional.silu, x, x.rms * _between_half_and_root_half(x.rms, 2.0))


@rule(aten.silu_backward.default)
def silu_backward(g: Any, x: ScaledTensor) -> Raw:
    """r_g * sqrt(1/4 (1 + r^2 / (r^2 + 1.2)))."""
    slope = _between_half_and_root_half(x.rms, 1.2)
    return _backward(g, x, slope, aten.silu_backward.default)


# --- saturating ------------------------------------------------------------------------------


@rule(aten.tanh.default)
def tanh(x: ScaledTensor) -> Raw:
    """r / sqrt(1 + 1.25 r^2), within 14% of the integral."""
    rms = x.rms.clamp_max(2.0**60) / (1 + 1.25 * bounded_square(x.rms)).sqrt()
    return at_value(torch.tanh, x, rms)


@rule(aten.tanh_backward.default)
def tanh_backward(g: Any, y: ScaledTensor) -> Raw:
    """r_g (1 + 3.6 r^2)^-1/4 for an input of RMS r, which the saved result y tells."""
    # Invert r_y = r / sqrt(1 + 1.25 r^2).
    y2 = y.rms.square()
    r2 = y2 / (1 - 1.25 * y2).clamp_min(2.0**-20)
    return _backward(g, y, (1 + 3.6 * r2).rsqrt().sqrt(), aten.tanh_backward.default)


@rule(aten.sigmoid.default)
def sigmoid(x: ScaledTensor) -> Raw:
    """sqrt(1/4 (1 + r^2 / (r^2 + 4)))."""
    rms = _between_half_and_root_half(x.rms, 4.0)
    return at_value(torch.sigmoid, x, rms, nonnegative=True)


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(g: Any, y: ScaledTensor) -> Raw:
    """r_g / 4 (1 + 0.9 r^2)^-1/4 for an input of RMS r, which the saved result y tells."""
    # Invert r_y^2 = 1/4 (1 + r^2 / (r^2 + 4)).
    share = (4 * y.rms.square() - 1).clamp(0.0, 1 - 2.0**-20)
    r2 = 4 * share / (1 - share)
    slope = 0.25 * (1 + 0.9 * r2).rsqrt().sqrt()
    return _backward(g, y, slope, aten.sigmoid_backward.default)
