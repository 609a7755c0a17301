"""Elementary functions of one argument: trigonometric, hyperbolic, error functions, roundings.

Where autograd writes a derivative in parts whose RMS no rule can follow (1 / (1 + x^2) has most of
its second moment near zero, however large x), the function has an operator of its own, caught where
Python calls it, whose backward is one operator with the slope's own second moment. When a graph of
the backward pass is wanted, the slope is spelled in torch's operators, so that it can be
differentiated again, as often as one likes.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import at_value, elements, gaussian_rms, integrand, operand, value
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import LARGEST, saturated
from scaledtensor.ops.rules.arithmetic import exponential
from scaledtensor.scales.powers import settle
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS", "elementwise", "spellings", "with_slope"]

Function = Callable[..., Tensor]

#: function that a user may call -> the same with a derivative that has one rule.
FUNCTIONS: dict[Any, Function] = {}


def elementwise(
    name: str, *ops: Overload, function: Function | None = None, heavy: bool = False
) -> None:
    """Register the Gaussian integral as the rule of an elementwise function of one argument."""
    call = function or ops[0]
    integrand(name, call, heavy=heavy)

    def run(x: ScaledTensor) -> Raw:
        # In float32: torch has many of these in no narrower dtype.
        rms = gaussian_rms(name, x.rms, nonnegative=x.nonnegative)
        return Raw(call(value(x).float()), None, rms)

    run.__doc__ = (
        f"median |{name}(rx z)|: no second moment." if heavy else f"sqrt(E {name}(rx z)^2)."
    )
    rule(*ops)(run)


def with_slope(
    name: str,
    *ops: Overload,
    function: Function,
    slope: Function,
    words: str,
    caught: Iterable[Any] = (),
    heavy: bool = False,
    heavy_slope: bool = False,
) -> None:
    """An elementwise function with a backward operator of its own.

    `slope` is f' in torch's operators, on plain and on scaled tensors; `words` is its formula;
    `caught` are the functions that users call.
    """
    key = integrand(f"{name}_slope", slope, heavy=heavy_slope)

    def derivative(grad: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return grad * slope(x)
        scaled: Tensor = times_slope(grad, x)
        return scaled

    own = define_operator(f"{name}(Tensor x) -> Tensor", derivative)
    times_slope = define_operator(f"{name}_backward(Tensor g, Tensor x) -> Tensor")

    def run_backward(g: Any, x: ScaledTensor) -> Raw:
        left = operand(g, x)
        rms = left.rms * gaussian_rms(key, x.rms, nonnegative=x.nonnegative)
        return Raw(left.q.float() * slope(value(x).float()), left.scale, rms)

    mean = "median |f'(rx z)|" if heavy_slope else "sqrt(E f'(rx z)^2)"
    run_backward.__doc__ = f"g f', f' = {words}: rg {mean}."
    rule(times_slope)(run_backward)
    elementwise(name, *ops, own, function=function, heavy=heavy)

    def call(input: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = function(input, **kwargs) if kwargs else own(input)
        return result

    FUNCTIONS.update(dict.fromkeys(caught, call))


def spellings(*names: str, places: Iterable[Any] = (torch, Tensor, torch.special)) -> set[Any]:
    """The functions of these names, wherever among `places` this version of torch has them."""
    return {getattr(p, n) for p in places for n in names if hasattr(p, n)}


# --- trigonometric ---------------------------------------------------------------------------

elementwise("tan", aten.tan.default, heavy=True)
elementwise("asin", aten.asin.default)
elementwise("acos", aten.acos.default)
with_slope(
    "atan",
    aten.atan.default,
    function=torch.atan,
    slope=lambda x: 1 / (1 + x.square()),
    words="1 / (1 + x^2)",
    caught=spellings("atan", "arctan"),
)


def _sinc_slope(x: Tensor) -> Tensor:
    # The closed form is a difference of near equals where x is small; its series is exact there.
    y = (math.pi * x).square()
    series = x * (-(math.pi**2) / 3) * (1 - y / 10 + y.square() / 280)
    near = x.abs() < 0.125
    far = torch.where(near, 1.0, x)
    return torch.where(near, series, ((math.pi * far).cos() - torch.sinc(far)) / far)


with_slope(
    "sinc",
    aten.sinc.default,
    function=torch.sinc,
    slope=_sinc_slope,
    words="(cos(pi x) - sinc(x)) / x",
    caught=spellings("sinc"),
)


@rule(aten.deg2rad.default, aten.rad2deg.default, pass_op=True)
def degrees(op: Overload, x: ScaledTensor) -> Raw:
    """Times pi / 180, or its inverse."""
    c = math.pi / 180 if op is aten.deg2rad.default else 180 / math.pi
    return Raw(elements(x), x.scale * c, x.rms * c, nonnegative=x.nonnegative)


# --- hyperbolic ------------------------------------------------------------------------------


def _cosh_square(rms: Tensor) -> Tensor:
    # exp(2 r^2) bounded as that of exp, for the same reason.
    return (2 * rms.square().clamp_max(4.0)).exp()


@rule(aten.sinh.default)
def sinh(x: ScaledTensor) -> Raw:
    """r = sqrt((exp(2 rx^2) - 1) / 2), bounded as exp; rx when small."""
    doubled = 2 * x.rms.square().clamp_max(4.0)
    return at_value(torch.sinh, x, (doubled.expm1() / 2).sqrt(), nonnegative=x.nonnegative)


@rule(aten.cosh.default)
def cosh(x: ScaledTensor) -> Raw:
    """r = sqrt((exp(2 rx^2) + 1) / 2), bounded as exp."""
    rms = ((_cosh_square(x.rms) + 1) / 2).sqrt()
    return at_value(torch.cosh, x, rms, nonnegative=True)


with_slope(
    "asinh",
    aten.asinh.default,
    function=torch.asinh,
    slope=lambda x: torch.rsqrt(1 + x.square()),
    words="1 / sqrt(1 + x^2)",
    caught=spellings("asinh", "arcsinh"),
)
elementwise("acosh", aten.acosh.default)
elementwise("atanh", aten.atanh.default)

with_slope(
    "tanhshrink",
    # In float64: x - tanh(x) is a difference of near equals.
    function=lambda x: (x.double() - x.double().tanh()).float(),
    slope=lambda x: x.tanh().square(),
    words="tanh(x)^2",
    caught=(torch.nn.functional.tanhshrink,),
)
with_slope(
    "softsign",
    function=lambda x: x / (1 + x.abs()),
    slope=lambda x: (1 + x.abs()).reciprocal().square(),
    words="1 / (1 + |x|)^2",
    caught=(torch.nn.functional.softsign,),
)


# --- exponential -----------------------------------------------------------------------------


@rule(aten.exp2.default)
def exp2(x: ScaledTensor) -> Raw:
    """Measured, as exp."""
    return exponential(x, torch.exp2, math.log(2))


with_slope(
    "erfc",
    aten.erfc.default,
    function=torch.erfc,
    slope=lambda x: (-2 / math.pi**0.5) * torch.exp(-x.square()),
    words="-2 / sqrt(pi) exp(-x^2)",
    caught=spellings("erfc"),
)
with_slope(
    "erfinv",
    aten.erfinv.default,
    function=torch.erfinv,
    slope=lambda x: (math.pi**0.5 / 2) * torch.exp(torch.erfinv(x).square()),
    words="sqrt(pi) / 2 exp(erfinv(x)^2)",
    heavy_slope=True,
    caught=spellings("erfinv"),
)


def _logit_square(rms: Tensor) -> Tensor:
    """E z^2 of the logits z, by the RMS of sigmoid(z): the rule of sigmoid, inverted. Evenly spread
    shares have 2 by this (and pi^2 / 3 in truth); those all near zero (ln r)^2."""
    share = (4 * rms.square() - 1).clamp(2.0**-5, 1 - 2.0**-10)
    return 4 * share / (1 - share) + (2 * rms).clamp(2.0**-126, 1.0).log().square()


@rule(aten.logit.default)
def logit(x: ScaledTensor, eps: float | None = None) -> Raw:
    """The RMS of what sigmoid would give this from: 4 s / (1 - s), s = 4 r^2 - 1."""
    return Raw(torch.logit(value(x).float(), eps), None, _logit_square(x.rms).sqrt())


@rule(aten.logit_backward.default)
def logit_backward(g: Any, x: ScaledTensor, eps: float | None = None) -> Raw:
    """g / (x (1 - x)) = g (2 + 2 cosh z) for logits z: r_g (2 + 2 exp(E z^2 / 2)), bounded, for
    evenly spread shares have no second moment of this."""
    left = operand(g, x)
    q = aten.logit_backward.default(left.q.float(), value(x).float(), eps)
    slope = 2 + 2 * (_logit_square(x.rms).clamp_max(2.0) / 2).exp()
    return Raw(q, left.scale, left.rms * slope)


# --- rounding --------------------------------------------------------------------------------

#: A rounded value is zero or at least 1: no scale of it is finer than this.
_RARE = 0.25


@rule(aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default, pass_op=True)
def rounded(op: Overload, x: ScaledTensor) -> Raw:
    """sqrt(E f(rx z)^2), not under 1/4: few elements of a tensor of small ones are not zero."""
    name = op._schema.name.split("::")[1]
    rms = gaussian_rms(name, x.rms, nonnegative=x.nonnegative).clamp_min(_RARE)
    return at_value(op, x, rms, nonnegative=x.nonnegative)


for _name in ("floor", "ceil", "round", "trunc"):
    integrand(_name, getattr(torch, _name))


@rule(aten.round.decimals)
def round_decimals(x: ScaledTensor, *, decimals: int) -> Raw:
    """As round of 10^d x, over 10^d."""
    unit = 10.0**-decimals
    rms = gaussian_rms("round", x.rms / unit, nonnegative=x.nonnegative).clamp_min(_RARE) * unit
    q = aten.round.decimals(value(x).float(), decimals=decimals)
    return Raw(q, None, rms, nonnegative=x.nonnegative)


elementwise("frac", aten.frac.default)


@rule(aten.angle.default)
def angle(x: ScaledTensor) -> Raw:
    """0 or pi, by the sign: pi / sqrt(2)."""
    rms = torch.full_like(x.rms, math.pi * 0.5**0.5)
    return at_value(torch.angle, x, rms, nonnegative=True)


@rule(aten.nan_to_num.default)
def nan_to_num(
    x: ScaledTensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Raw:
    """r: what is replaced is the exception. Infinities become the largest bfloat16 by default, as
    an element and as a value."""
    high = LARGEST if posinf is None else posinf
    low = -LARGEST if neginf is None else neginf
    replaced = torch.nan_to_num(value(x).float(), nan, high, low)
    scale, ratio = settle(x.rms, torch.ones_like(x.rms))
    return Raw(saturated(replaced, replaced * ratio), scale, x.rms, settled=True)


@rule(aten.frexp.Tensor)
def frexp(x: ScaledTensor) -> tuple[Raw, Tensor]:
    """The mantissa, in [1/2, 1), evenly spread over ln: r = sqrt(3/8 / ln 2). The exponents are
    plain."""
    mantissa, exponent = torch.frexp(value(x))
    rms = torch.full_like(x.rms, (0.375 / math.log(2)) ** 0.5)
    return Raw(mantissa, None, rms), exponent
