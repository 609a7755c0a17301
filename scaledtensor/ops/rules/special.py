"""Special functions, and elementary functions of two arguments.

The special functions of one argument (gamma, error, Bessel) have a Gaussian integral by quadrature
(`algebra.gaussian_rms`). Most of the functions of two arguments have a closed form. Incomplete
gamma functions, zeta functions and polynomials have none. Nobody trains through them, so they are
measured.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import (
    Operand,
    at_value,
    constant,
    first_scaled,
    gaussian_rms,
    integrand,
    measured,
    operand,
    plain,
    quadrature,
    value,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.arithmetic import div, mul
from scaledtensor.ops.rules.elementary import elementwise, spellings, with_slope
from scaledtensor.ops.rules.powers import log_rms
from scaledtensor.scales.powers import settle
from scaledtensor.scales.singles import rms_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


#: Function of torch -> the same function with a derivative that has one rule.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {}


# --- gamma functions -------------------------------------------------------------------------

elementwise("lgamma", aten.lgamma.default)
elementwise("digamma", aten.digamma.default, heavy=True)

_POLYGAMMA = integrand("polygamma", lambda v, n: torch.polygamma(int(n), v), heavy=True)


@rule(aten.polygamma.default)
def polygamma(n: int, x: ScaledTensor) -> Raw:
    """median |polygamma(n, r z)|. The poles at 0, -1, -2, ... leave no second moment."""
    rms = gaussian_rms(_POLYGAMMA, rms_of(x), n, nonnegative=x.nonnegative)
    return at_value(lambda v: torch.polygamma(n, v.float()), x, rms)


@rule(aten.mvlgamma.default)
def mvlgamma(x: ScaledTensor, p: int) -> Raw:
    """Measured: it is the logarithm of a product of gamma functions with different domains."""
    return measured(torch.mvlgamma(value(x).float(), p))


# --- functions of the normal distribution ----------------------------------------------------

with_slope(
    "log_ndtr",
    aten.special_log_ndtr.default,
    function=torch.special.log_ndtr,
    slope=lambda x: (2 / math.pi) ** 0.5 / torch.special.erfcx(x * -(0.5**0.5)),
    words="sqrt(2 / pi) / erfcx(-x / sqrt(2))",
    caught=spellings("log_ndtr"),
)
with_slope(
    "ndtri",
    aten.special_ndtri.default,
    function=torch.special.ndtri,
    slope=lambda x: (2 * math.pi) ** 0.5 * torch.exp(torch.special.ndtri(x).square() / 2),
    words="sqrt(2 pi) exp(ndtri(x)^2 / 2)",
    heavy_slope=True,
    caught=spellings("ndtri"),
)


def _erfcx_slope(x: Tensor) -> Tensor:
    slope: Tensor = 2 * x * torch.special.erfcx(x) - 2 / math.pi**0.5
    return slope


with_slope(
    "erfcx",
    aten.special_erfcx.default,
    function=torch.special.erfcx,
    slope=_erfcx_slope,
    words="2 x erfcx(x) - 2 / sqrt(pi)",
    heavy=True,  # 2 exp(x^2) on the left
    heavy_slope=True,
    caught=spellings("erfcx"),
)
with_slope(
    "entr",
    aten.special_entr.default,
    function=torch.special.entr,
    slope=lambda x: -1 - x.log(),
    words="-1 - ln x",
    caught=spellings("entr"),
)


# --- Bessel and Airy functions ---------------------------------------------------------------


def _i0e_slope(x: Tensor) -> Tensor:
    slope: Tensor = torch.special.i1e(x) - x.sign() * torch.special.i0e(x)
    return slope


with_slope(
    "i0e",
    aten.special_i0e.default,
    function=torch.special.i0e,
    slope=_i0e_slope,
    words="i1e(x) - sign(x) i0e(x)",
    caught=spellings("i0e"),
)
elementwise("i0", aten.i0.default)


def _i1_slope(x: Tensor) -> Tensor:
    near = x.abs() < 2.0**-10
    rest = torch.special.i1(x) / torch.where(near, 1.0, x)
    return torch.where(near, 0.5, torch.special.i0(x) - rest)


def _i1e_slope(x: Tensor) -> Tensor:
    near = x.abs() < 2.0**-10
    share = x.sign() + 1 / torch.where(near, 1.0, x)
    return torch.where(near, 0.5 - x.abs(), torch.special.i0e(x) - torch.special.i1e(x) * share)


with_slope(
    "i1",
    aten.special_i1.default,
    function=torch.special.i1,
    slope=_i1_slope,
    words="i0(x) - i1(x) / x",
    caught=spellings("i1"),
)
with_slope(
    "i1e",
    aten.special_i1e.default,
    function=torch.special.i1e,
    slope=_i1e_slope,
    words="i0e(x) - i1e(x) (sign(x) + 1 / x)",
    caught=spellings("i1e"),
)


for _name in (
    "airy_ai",
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "modified_bessel_i0",
    "modified_bessel_i1",
    "modified_bessel_k0",
    "scaled_modified_bessel_k0",
    "spherical_bessel_j0",
):
    elementwise(_name, getattr(aten, f"special_{_name}").default)

for _name in ("bessel_y1", "modified_bessel_k1", "scaled_modified_bessel_k1"):
    elementwise(_name, getattr(aten, f"special_{_name}").default, heavy=True)


# --- incomplete gamma functions, zeta functions, polynomials ---------------------------------

_POLYNOMIALS = (
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
)


@rule(
    aten.igamma.default,
    aten.igammac.default,
    *(
        getattr(getattr(aten, f"special_{name}"), overload)
        for name in _POLYNOMIALS
        for overload in ("default", "x_scalar", "n_scalar")
    ),
    aten.special_zeta.default,
    aten.special_zeta.self_scalar,
    aten.special_zeta.other_scalar,
    pass_op=True,
)
def of_two(op: Overload, *args: Any) -> Raw:
    """Measured: these functions have no closed second moment."""
    return measured(op(*(value(a).float() if isinstance(a, ScaledTensor) else a for a in args)))


def _pair(x: Any, y: Any) -> tuple[Operand, Operand]:
    like = first_scaled(x, y)
    return operand(x, like), operand(y, like)


# --- division with a remainder ---------------------------------------------------------------


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_rounded(x: Any, y: Any, *, rounding_mode: str | None) -> Raw:
    """r = rx / ry as for `div`, but at least 1/4, since a rounded quotient is zero or at least
    1."""
    if rounding_mode is None:
        return div(x, y)
    a, b = _pair(x, y)
    q = torch.div(a.value, b.value, rounding_mode=rounding_mode)
    rms = (a.rms / b.rms.clamp_min(2.0**-126)).clamp_min(0.25).clamp_max(2.0**126)
    return Raw(q, None, rms)


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: Any, y: Any) -> Raw:
    """Same as `div` with rounding to floor."""
    return div_rounded(x, y, rounding_mode="floor")


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: Any, y: Any) -> Raw:
    """1 / r^2 = 1 / rx^2 + 3 / ry^2: the result is x if |x| < |y|, and spread over (-y, y)
    otherwise."""
    a, b = _pair(x, y)
    rms = (a.rms.square().reciprocal() + 3 / b.rms.square()).rsqrt()
    return Raw(torch.fmod(a.value, b.value), None, rms, nonnegative=a.nonnegative)


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: Any, y: Any) -> Raw:
    """r = 0.64 ry. The result is spread over (0, y), which gives ry / sqrt(3). If x is small it is
    at one of the ends, which gives ry / sqrt(2)."""
    a, b = _pair(x, y)
    q = torch.remainder(a.value, b.value)
    return Raw(q, None, b.rms * 0.64, nonnegative=b.nonnegative)


# --- signs and steps -------------------------------------------------------------------------


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x: Any, y: Any) -> Raw:
    """r = rx."""
    a, b = _pair(x, y)
    return Raw(torch.copysign(a.q, b.q), a.scale, a.rms)


@rule(aten.heaviside.default)
def heaviside(x: Any, y: Any) -> Raw:
    """r = sqrt(1/2): half of the elements are 1. An element is the second operand if x is 0."""
    a, b = _pair(x, y)
    rms = constant(0.5**0.5, a.rms)
    return Raw(torch.heaviside(a.q.float(), b.value), None, rms)


@rule(aten.nextafter.default)
def nextafter(x: Any, y: Any) -> Raw:
    """r = rx. The result is the next float32 number, for any format of the elements."""
    a, b = _pair(x, y)
    return Raw(torch.nextafter(a.value, b.value), None, a.rms)


# --- powers and logarithms -------------------------------------------------------------------


@rule(aten.pow.Tensor_Tensor)
def power(x: Any, y: Any) -> Raw:
    """Measured: E |x|^(2 y) over a Gaussian y is infinite for every rx."""
    a, b = _pair(x, y)
    return measured(torch.pow(a.value, b.value))


@rule(aten.ldexp.Tensor)
def ldexp(x: Any, y: Any) -> Raw:
    """Same as `mul` by 2^y."""
    exponent = plain(y)
    return mul(x, torch.pow(2.0, exponent.float() if isinstance(exponent, Tensor) else exponent))


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(x: Any, y: Any) -> Raw:
    """r = rx sqrt((ln ry - 0.635)^2 + pi^2 / 8) for x ln y. For a number y, r = rx |ln y|."""
    a, b = _pair(x, y)
    rms = b.rms.log().abs() if not isinstance(y, Tensor) else log_rms(b.rms)
    return Raw(torch.xlogy(a.q.float(), b.value), a.scale, a.rms * rms)


@rule(
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar,
)
def xlog1py(x: Any, y: Any) -> Raw:
    """r = rx log1p(ry) for x ln(1 + y)."""
    a, b = _pair(x, y)
    return Raw(torch.special.xlog1py(a.q.float(), b.value), a.scale, a.rms * b.rms.log1p())


def _log_sum(name: str, base: float, function: Callable[..., Tensor], op: Overload) -> None:
    """Register log(b^x + b^y). Autograd writes its gradient as g / (1 + b^(y - x)), and no rule
    sees there that this is g times a sigmoid."""

    def derivative(
        grad: Tensor, x: Tensor, y: Tensor, grad_input_mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        share = torch.sigmoid((x - y) * math.log(base))
        left = unbroadcast(grad * share, x) if grad_input_mask[0] else None
        right = unbroadcast(grad * (1 - share), y) if grad_input_mask[1] else None
        return left, right

    def unbroadcast(grad: Tensor, like: Tensor) -> Tensor:
        return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)

    own = define_operator(f"{name}(Tensor x, Tensor y) -> Tensor", derivative)

    @rule(op, own)
    def log_sum(x: Any, y: Any) -> Raw:
        """r = sqrt((rx^2 + ry^2) / 2 + (log 2)^2): the result is the larger one plus at most log 2,
        in the base of the function."""
        a, b = _pair(x, y)
        more = constant(math.log(2, base), a.rms)
        rms = quadrature(quadrature(a.rms, b.rms) * 0.5**0.5, more)
        return Raw(function(a.value, b.value), None, rms)

    def call(input: Any, other: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(input, other, **kwargs) if kwargs else own(input, other)
        return result

    FUNCTIONS.update(dict.fromkeys(spellings(name), call))


_log_sum("logaddexp", math.e, torch.logaddexp, aten.logaddexp.default)
_log_sum("logaddexp2", 2.0, torch.logaddexp2, aten.logaddexp2.default)


# --- points of the plane ---------------------------------------------------------------------


@rule(aten.hypot.default)
def hypot(x: Any, y: Any) -> Raw:
    """r = sqrt(rx^2 + ry^2), which is exact."""
    a, b = _pair(x, y)
    rms = quadrature(a.rms, b.rms)
    scale, ratio_a, ratio_b = settle(rms, a.scale, b.scale)
    q = torch.hypot(a.q.float() * ratio_a, b.q.float() * ratio_b)
    return Raw(q, scale, rms, settled=True, nonnegative=True)


@rule(aten.atan2.default)
def atan2(x: Any, y: Any) -> Raw:
    """r = pi / sqrt(3): angles are spread over the circle. For unequal rx and ry the true RMS is
    from pi / 2 to pi / sqrt(2). If y is known to be nonnegative, the angles are spread over half of
    the circle, and r = pi / 2 rx / (rx + ry)."""
    a, b = _pair(x, y)
    rms = constant(math.pi / 3**0.5, a.rms)
    if b.nonnegative:
        rms = math.pi / 2 * a.rms / (a.rms + b.rms).clamp_min(2.0**-126)
    return Raw(torch.atan2(a.value, b.value), None, rms, nonnegative=a.nonnegative)
