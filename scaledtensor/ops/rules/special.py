"""Elementary functions of two arguments."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import (
    Operand,
    at_value,
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
from scaledtensor.ops.rules.arithmetic import div, log_rms, mul
from scaledtensor.ops.rules.elementary import elementwise, spellings, with_slope
from scaledtensor.scales.powers import settle
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


# Special functions: gamma, Bessel, polynomials.  Those of one argument have a Gaussian integral
# by quadrature (`moments`). Those of two that are no simple product have no closed form, and
# nobody trains through them: they are measured, and say so.
# --- gamma -----------------------------------------------------------------------------------

elementwise("lgamma", aten.lgamma.default)


elementwise("digamma", aten.digamma.default, heavy=True)


_POLYGAMMA = integrand("polygamma", lambda v, n: torch.polygamma(int(n), v), heavy=True)


@rule(aten.polygamma.default)
def polygamma(n: int, x: ScaledTensor) -> Raw:
    """median |polygamma(n, rx z)|: no second moment, by the poles at 0, -1, -2, .."""
    rms = gaussian_rms(_POLYGAMMA, x.rms, n, nonnegative=x.nonnegative)
    return at_value(lambda v: torch.polygamma(n, v.float()), x, rms)


@rule(aten.mvlgamma.default)
def mvlgamma(x: ScaledTensor, p: int) -> Raw:
    """Measured: log of a product of gamma functions, each over a domain of its own."""
    return measured(torch.mvlgamma(value(x).float(), p))


# --- normal distribution ---------------------------------------------------------------------

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


# --- Bessel and Airy -------------------------------------------------------------------------


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


# --- of two arguments ------------------------------------------------------------------------

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
    """Measured: incomplete gamma functions, Hurwitz's zeta, and polynomials whose degree is data
    have no closed second moment."""
    return measured(op(*(_wide(a) for a in args)))


def _wide(x: Any) -> Any:
    v = plain(x)
    return v.float() if isinstance(x, ScaledTensor) else v


def _pair(x: Any, y: Any) -> tuple[Operand, Operand, Tensor, Tensor]:
    """Both sides as operands, and both values in float32."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    return a, b, a.q.float() * a.scale, b.q.float() * b.scale


# --- division with a remainder ---------------------------------------------------------------

_MODES: dict[Any, Callable[[Tensor], Tensor]] = {"trunc": torch.trunc, "floor": torch.floor}


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_rounded(x: Any, y: Any, *, rounding_mode: str | None) -> Raw:
    """As div, r = rx / ry, not under 1/4: what is not zero is at least 1."""
    if rounding_mode is None:
        return div(x, y)
    a, b, left, right = _pair(x, y)
    q = torch.div(left, right, rounding_mode=rounding_mode)
    rms = (a.rms / b.rms.clamp_min(2.0**-126)).clamp(0.25, 2.0**126)
    return Raw(q, None, rms)


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: Any, y: Any) -> Raw:
    """As div rounded down."""
    return div_rounded(x, y, rounding_mode="floor")


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: Any, y: Any) -> Raw:
    """x where |x| < |y|, else spread over (-y, y): 1 / r^2 = 1 / rx^2 + 3 / ry^2."""
    a, b, left, right = _pair(x, y)
    rms = (a.rms.square().reciprocal() + 3 / b.rms.square()).rsqrt()
    return Raw(torch.fmod(left, right), None, rms, nonnegative=a.nonnegative)


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: Any, y: Any) -> Raw:
    """Spread over (0, y), at either end where x is small: r from ry / sqrt(3) to ry / sqrt(2)."""
    _, b, left, right = _pair(x, y)
    return Raw(torch.remainder(left, right), None, b.rms * 0.64, nonnegative=b.nonnegative)


# --- signs and steps -------------------------------------------------------------------------


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x: Any, y: Any) -> Raw:
    """r."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    # Not a 0-dim sign: it has no say in the dtype.
    return Raw(torch.copysign(a.q, b.q), a.scale, a.rms)


@rule(aten.heaviside.default)
def heaviside(x: Any, y: Any) -> Raw:
    """0, 1, or the given value where x is 0: r = sqrt(1/2)."""
    a, _, _, values = _pair(x, y)
    rms = torch.full_like(a.rms, 0.5**0.5)
    return Raw(torch.heaviside(a.q.float(), values), None, rms)


@rule(aten.nextafter.default)
def nextafter(x: Any, y: Any) -> Raw:
    """r. The next number of the dtype that the tensor appears in, so in float32."""
    a, _, left, right = _pair(x, y)
    return Raw(torch.nextafter(left, right), None, a.rms)


# --- powers and logarithms -------------------------------------------------------------------


@rule(aten.pow.Tensor_Tensor)
def power(x: Any, y: Any) -> Raw:
    """Measured: E |x|^(2 y) over a Gaussian y is infinite for every rx."""
    _, _, base, exponent = _pair(x, y)
    return measured(torch.pow(base, exponent))


@rule(aten.ldexp.Tensor)
def ldexp(x: Any, y: Any) -> Raw:
    """x 2^y, as a product."""
    exponent = plain(y)
    return mul(x, torch.pow(2.0, exponent.float() if isinstance(exponent, Tensor) else exponent))


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(x: Any, y: Any) -> Raw:
    """x ln y: r = rx sqrt((ln ry - 0.635)^2 + pi^2 / 8), by a number |ln y|."""
    a, b, _, right = _pair(x, y)
    rms = b.rms.log().abs() if not isinstance(y, Tensor) else log_rms(b.rms)
    return Raw(torch.xlogy(a.q.float(), right), a.scale, a.rms * rms)


@rule(
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar,
)
def xlog1py(x: Any, y: Any) -> Raw:
    """x ln(1 + y): r = rx log1p(ry)."""
    a, b, _, right = _pair(x, y)
    return Raw(torch.special.xlog1py(a.q.float(), right), a.scale, a.rms * b.rms.log1p())


def _larger(a: Operand, b: Operand, at_zero: float) -> Tensor:
    """Of max(x, y) plus what is `at_zero` where they are equal and falls off from there."""
    rms: Tensor = quadrature(quadrature(a.rms, b.rms) * 0.5**0.5, torch.full_like(a.rms, at_zero))
    return rms


def _unbroadcast(grad: Tensor, like: Tensor) -> Tensor:
    return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)


def _log_sum(name: str, base: float, function: Callable[..., Tensor], op: Overload) -> None:
    """log(b^x + b^y), whose gradient autograd writes as g / (1 + b^(y - x)): a sigmoid."""

    def derivative(
        grad: Tensor, x: Tensor, y: Tensor, grad_input_mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        share = torch.sigmoid((x - y) * math.log(base))
        left = _unbroadcast(grad * share, x) if grad_input_mask[0] else None
        right = _unbroadcast(grad * (1 - share), y) if grad_input_mask[1] else None
        return left, right

    own = define_operator(f"{name}(Tensor x, Tensor y) -> Tensor", derivative)

    @rule(op, own)
    def log_sum(x: Any, y: Any) -> Raw:
        """The larger, and up to log 2 more: r = sqrt((rx^2 + ry^2) / 2 + (log 2)^2)."""
        a, b, left, right = _pair(x, y)
        return Raw(function(left, right), None, _larger(a, b, math.log(2, base)))

    def call(input: Any, other: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(input, other, **kwargs) if kwargs else own(input, other)
        return result

    FUNCTIONS.update(dict.fromkeys(spellings(name), call))


#: function that a user may call -> the same with a derivative that has a rule.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {}


_log_sum("logaddexp", math.e, torch.logaddexp, aten.logaddexp.default)


_log_sum("logaddexp2", 2.0, torch.logaddexp2, aten.logaddexp2.default)


# --- plane -----------------------------------------------------------------------------------


@rule(aten.hypot.default)
def hypot(x: Any, y: Any) -> Raw:
    """r = sqrt(rx^2 + ry^2), exact."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    rms = quadrature(a.rms, b.rms)
    scale, ratio_a, ratio_b = settle(rms, a.scale, b.scale)
    q = torch.hypot(a.q.float() * ratio_a, b.q.float() * ratio_b)
    return Raw(q, scale, rms, settled=True, nonnegative=True)


@rule(aten.atan2.default)
def atan2(x: Any, y: Any) -> Raw:
    """Spread over the circle: r = pi / sqrt(3), from pi / 2 to pi / sqrt(2) for unequal sides. Over
    half of it where y is known not to be negative: pi / 2 rx / (rx + ry)."""
    a, b, left, right = _pair(x, y)
    rms = torch.full_like(a.rms, math.pi / 3**0.5)
    if b.nonnegative:
        rms = math.pi / 2 * a.rms / (a.rms + b.rms).clamp_min(2.0**-126)
    return Raw(torch.atan2(left, right), None, rms, nonnegative=a.nonnegative)
