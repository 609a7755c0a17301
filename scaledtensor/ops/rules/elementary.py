"""Elementary functions of one argument: trigonometric, hyperbolic, error functions, roundings.

Autograd writes some derivatives in parts for which no rule has a moment. For example, most of the
second moment of 1 / (1 + x^2) is near zero for any x. Such a function runs as an operator of this
library, in place of torch's function. Its backward pass is one operator, with the second moment of
the slope. If autograd records the backward pass, the slope is computed by torch's operators, so it
has derivatives of any order.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import (
    at_value,
    constant,
    elements,
    gaussian_rms,
    integrand,
    operand,
    value,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import LARGEST, saturated
from scaledtensor.ops.rules.powers import exponential
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import settle, times
from scaledtensor.scales.singles import ONE, Single, amount, rms_of, scale_of, tensor_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS", "elementwise", "spellings", "with_slope"]

Function = Callable[..., Tensor]

#: Function of torch -> the same function with a derivative that has one rule.
FUNCTIONS: dict[Any, Function] = {}


def elementwise(
    name: str, *ops: Overload, function: Function | None = None, heavy: bool = False
) -> None:
    """Register an elementwise function of one argument, with a Gaussian integral as its rule.

    `heavy` marks a function without a second moment.
    """
    call = function or ops[0]
    integrand(name, call, heavy=heavy)

    def run(x: ScaledTensor) -> Raw:
        # torch has many of these functions in float32 only.
        rms = gaussian_rms(name, rms_of(x), nonnegative=x.nonnegative)
        return Raw(call(value(x).float()), None, rms)

    run.__doc__ = (
        f"median |{name}(r z)|, since there is no second moment."
        if heavy
        else f"sqrt(E {name}(r z)^2)."
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
    """Register an elementwise function with a backward operator.

    `slope` is f' in torch's operators, for plain and for scaled tensors. `words` is the formula of
    f'. `caught` are the functions of torch that this one replaces.
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
        rms = left.rms * gaussian_rms(key, rms_of(x), nonnegative=x.nonnegative)
        return Raw(left.q.float() * slope(value(x).float()), left.scale, rms)

    mean = "median |f'(r z)|" if heavy_slope else "sqrt(E f'(r z)^2)"
    run_backward.__doc__ = f"r_g {mean} for the slope f' = {words}."
    rule(times_slope)(run_backward)
    elementwise(name, *ops, own, function=function, heavy=heavy)

    def call(input: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = function(input, **kwargs) if kwargs else own(input)
        return result

    FUNCTIONS.update(dict.fromkeys(caught, call))


def spellings(*names: str, places: Iterable[Any] = (torch, Tensor, torch.special)) -> set[Any]:
    """Return the functions of these names in `places`, as far as this version of torch has them."""
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
    # For small x the closed form is a difference of nearly equal numbers. The series is exact
    # there.
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
    """r pi / 180 to radians, and r 180 / pi to degrees."""
    c = math.pi / 180 if op is aten.deg2rad.default else 180 / math.pi
    return Raw(elements(x), scale_of(x) * c, rms_of(x) * c, nonnegative=x.nonnegative)


# --- hyperbolic ------------------------------------------------------------------------------


@rule(aten.sinh.default)
def sinh(x: ScaledTensor) -> Raw:
    """r = sqrt((exp(2 rx^2) - 1) / 2), where rx counts as 2 at most; close to rx if rx is small."""
    doubled = 2 * rms_of(x).square().clamp_max(4.0)
    return at_value(torch.sinh, x, (doubled.expm1() / 2).sqrt(), nonnegative=x.nonnegative)


@rule(aten.cosh.default)
def cosh(x: ScaledTensor) -> Raw:
    """r = sqrt((exp(2 rx^2) + 1) / 2), where rx counts as 2 at most."""
    doubled = 2 * rms_of(x).square().clamp_max(4.0)
    rms = ((doubled.exp() + 1) / 2).sqrt()
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
    # x - tanh(x) is a difference of nearly equal numbers, so it runs in float64.
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
    """Measured, like `exp`."""
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


def _logit_square(rms: Any) -> Any:
    """Return E z^2 of the logits z from the RMS of sigmoid(z), by the inverse of the rule of
    sigmoid.

    For probabilities spread evenly it is 2 (the true moment is pi^2 / 3). For probabilities near
    zero it is (ln r)^2.
    """
    share = (4 * rms.square() - 1).clamp_min(2.0**-5).clamp_max(1 - 2.0**-10)
    logarithm = (2 * rms).clamp_min(2.0**-126).clamp_max(1.0).log()
    return 4 * share / (1 - share) + logarithm.square()


@rule(aten.logit.default)
def logit(x: ScaledTensor, eps: float | None = None) -> Raw:
    """The square of the result's RMS is 4 s / (1 - s) + (ln 2r)^2 with s = 4 r^2 - 1: the inverse
    of the rule of `sigmoid`, and for small r the square of the logarithm."""
    return Raw(torch.logit(value(x).float(), eps), None, _logit_square(rms_of(x)).sqrt())


@rule(aten.logit_backward.default)
def logit_backward(g: Any, x: ScaledTensor, eps: float | None = None) -> Raw:
    """r_g (2 + 2 exp(m^2 / 2)) for logits of RMS m, for the gradient g / (x (1 - x)) = g (2 + 2
    cosh z) of logits z. m^2 counts as 2 at most, because the slope has no second moment for
    probabilities that are spread evenly."""
    left = operand(g, x)
    q = aten.logit_backward.default(left.q.float(), value(x).float(), eps)
    slope = 2 + 2 * (_logit_square(rms_of(x)).clamp_max(2.0) / 2).exp()
    return Raw(q, left.scale, left.rms * slope)


# --- rounding --------------------------------------------------------------------------------

#: Least RMS of rounded values, which are zero or at least 1.
_RARE = 0.25


@rule(aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default, pass_op=True)
def rounded(op: Overload, x: ScaledTensor) -> Raw:
    """sqrt(E f(r z)^2) for the function f itself, and at least 1/4: if r is small, few elements are
    not zero."""
    name = op._schema.name.split("::")[1]
    rms = gaussian_rms(name, rms_of(x), nonnegative=x.nonnegative).clamp_min(_RARE)
    return at_value(op, x, rms, nonnegative=x.nonnegative)


for _name in ("floor", "ceil", "round", "trunc"):
    integrand(_name, getattr(torch, _name))


@rule(aten.round.decimals)
def round_decimals(x: ScaledTensor, *, decimals: int) -> Raw:
    """10^-d times the RMS of `round` for 10^d x, with d decimals."""
    unit = 10.0**-decimals
    rms = gaussian_rms("round", rms_of(x) / unit, nonnegative=x.nonnegative).clamp_min(_RARE) * unit
    q = aten.round.decimals(value(x).float(), decimals=decimals)
    return Raw(q, None, rms, nonnegative=x.nonnegative)


elementwise("frac", aten.frac.default)


@rule(aten.angle.default)
def angle(x: ScaledTensor) -> Raw:
    """pi / sqrt(2): the angle is 0 or pi, by the sign."""
    rms = constant(math.pi * 0.5**0.5, rms_of(x))
    return at_value(torch.angle, x, rms, nonnegative=True)


@rule(aten.nan_to_num.default)
def nan_to_num(
    x: ScaledTensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Raw:
    """r, since few elements are replaced; measured if r is not finite. By default an infinity
    becomes the largest bfloat16, as an element and as a value."""
    high = LARGEST if posinf is None else posinf
    low = -LARGEST if neginf is None else neginf
    replaced = torch.nan_to_num(value(x).float(), nan, high, low)
    rms = rms_of(x)
    if type(rms) is not Single:
        rms = tensor_of(rms)
        rms = torch.where(rms.isfinite(), rms, measured_rms(replaced))
    elif not math.isfinite(rms):
        rms = amount(measured_rms(replaced))
    scale, ratio = settle(rms, ONE)
    held = saturated(replaced, times(replaced, ratio), x.format)
    return Raw(held, scale, rms, settled=True)


@rule(aten.frexp.Tensor)
def frexp(x: ScaledTensor) -> tuple[Raw, Tensor]:
    """sqrt(3/8 / ln 2) for the mantissa, whose logarithm is spread evenly over [1/2, 1). The
    exponents are plain."""
    mantissa, exponent = torch.frexp(value(x))
    rms = constant((0.375 / math.log(2)) ** 0.5, rms_of(x))
    return Raw(mantissa, None, rms), exponent
