"""Powers, roots, exponentials, logarithms, sine and cosine."""

import math
from typing import Any

import torch

from scaledtensor.ops.algebra import (
    at_value,
    constant,
    elements,
    gaussian_moment,
    quadrature,
    real,
    rms_seen,
    value,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.plausible import wild
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.arithmetic import mul
from scaledtensor.scales.singles import Amount, Single, rms_of, scale_of, tensor_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["exponential", "log_rms"]

# --- powers ----------------------------------------------------------------------------------


@rule(aten.square.default)
def square(x: ScaledTensor) -> Raw:
    """r = sqrt(3) rx^2, by the fourth moment of a Gaussian."""
    return _power(x, 2)


@rule(aten.pow.Tensor_Scalar)
def power(x: ScaledTensor, exponent: float) -> Raw:
    """r = rx^p sqrt(E |z|^(2 p)). Negative powers have no finite moment, so r = rx^p. A tensor that
    is known to have no negative elements is a statistic close to its RMS, so r = rx^p too, except
    for p = 2."""
    return _power(x, exponent)


@rule(aten.pow.Scalar)
def exponential_of(base: float, x: ScaledTensor) -> Raw:
    """Measured, like `exp`."""
    base = float(real(base))
    rate = abs(math.log(base)) if base > 0 else 1.0
    raw = exponential(x, lambda v: torch.pow(base, v), rate)
    return raw._replace(nonnegative=base > 0)


def _power(x: ScaledTensor, p: float) -> Raw:
    p = float(real(p))
    if p == 1:
        q = elements(x).clone()  # a copy, since a write to the result must not reach `x`
        return Raw(q, scale_of(x), rms_of(x), settled=True, nonnegative=x.nonnegative)
    positive = x.nonnegative or p % 2 == 0
    if p == 2:
        return mul(x, x)
    rms = rms_of(x).pow(p) * (1.0 if x.nonnegative else gaussian_moment(p))
    return at_value(lambda v: v.pow(p), x, rms, nonnegative=positive)


@rule(aten.sqrt.default)
def sqrt(x: ScaledTensor) -> Raw:
    """r = sqrt(rx). The root is taken of the value, so the sqrt(2) of an odd power of two is in the
    elements."""
    return at_value(torch.sqrt, x, rms_of(x).sqrt(), nonnegative=True)


@rule(aten.rsqrt.default)
def rsqrt(x: ScaledTensor) -> Raw:
    """r = 1 / sqrt(rx)."""
    return at_value(torch.rsqrt, x, rms_of(x).rsqrt(), nonnegative=True)


@rule(aten.reciprocal.default)
def reciprocal(x: ScaledTensor) -> Raw:
    """r = 1 / rx."""
    return Raw(elements(x).reciprocal(), scale_of(x).reciprocal(), rms_of(x).reciprocal())


# --- exponentials and logarithms --------------------------------------------------------------


def exponential(x: ScaledTensor, function: Any, rate: float) -> Raw:
    """Apply `function`, which is exp(rate x), with a measured RMS. If some element overflows, the
    RMS is exp((rate r)^2), the moment of a Gaussian."""
    q = function(value(x))
    gaussian = (rms_of(x) * rate).square().clamp_max(4.0).exp()
    return Raw(q, None, wild(rms_seen(q, gaussian)), nonnegative=True)


@rule(aten.exp.default)
def exp(x: ScaledTensor) -> Raw:
    """Measured: decays and log-probabilities are never positive, so the moment of a Gaussian is far
    from their RMS."""
    return exponential(x, torch.exp, 1.0)


@rule(aten.expm1.default)
def expm1(x: ScaledTensor) -> Raw:
    """r = expm1(rx^2) + rx: close to rx if rx is small, and as for exp if rx is large."""
    r = rms_of(x)
    return at_value(torch.expm1, x, r.square().clamp_max(4.0).expm1() + r.clamp_max(1.0))


@rule(aten.log1p.default)
def log1p(x: ScaledTensor) -> Raw:
    """r = log1p(rx): close to rx if rx is small, and to ln rx if rx is large."""
    return at_value(torch.log1p, x, rms_of(x).log1p(), nonnegative=x.nonnegative)


def log_rms(rms: Amount) -> Any:
    """RMS of ln|x| for a Gaussian x: the mean is ln r - (ln 2 + gamma) / 2, the variance pi^2 /
    8."""
    rms = rms if type(rms) is Single else tensor_of(rms)  # closed forms have no logarithm
    spread = constant(math.pi / 8**0.5, rms)
    return quadrature(rms.clamp_min(2.0**-126).log() - 0.635, spread)


@rule(aten.log.default, aten.log2.default, aten.log10.default, pass_op=True)
def log(op: Overload, x: ScaledTensor) -> Raw:
    """r = sqrt((ln rx - 0.635)^2 + pi^2 / 8), by the mean and the variance of ln|z|; log2 and log10
    divide it by ln 2 and ln 10."""
    natural = log_rms(rms_of(x))
    base = {aten.log2.default: math.log(2), aten.log10.default: math.log(10)}.get(op, 1.0)
    return at_value(op, x, natural / base)


@rule(aten.sin.default)
def sin(x: ScaledTensor) -> Raw:
    """r = sqrt((1 - exp(-2 rx^2)) / 2)."""
    return at_value(torch.sin, x, (-0.5 * (-2 * rms_of(x).square()).expm1()).sqrt())


@rule(aten.cos.default)
def cos(x: ScaledTensor) -> Raw:
    """r = sqrt((1 + exp(-2 rx^2)) / 2)."""
    return at_value(torch.cos, x, (0.5 + 0.5 * (-2 * rms_of(x).square()).exp()).sqrt())
