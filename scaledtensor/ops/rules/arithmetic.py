"""Sums, products, and the choices between two operands."""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.native.elements import total
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import (
    Operand,
    constant,
    elements,
    first_scaled,
    gaussian_moment,
    measured,
    operand,
    plain,
    quadrature,
    real,
    rms_seen,
    value,
    within,
)
from scaledtensor.ops.operators import aten, prims
from scaledtensor.ops.plausible import bounded, of_factors
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import (
    FILL,
    HUGE,
    LARGEST,
    Total,
    Towards,
    is_table,
    limited,
    saturated,
    starts_at,
)
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import finite_norm, measured_rms
from scaledtensor.scales.powers import product_of, quotient_of, settle, settle_sum, times
from scaledtensor.scales.singles import (
    ONE,
    Amount,
    Single,
    amounts_of,
    calculates,
    rms_of,
    rounded,
    scale_of,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "chosen",
    "div",
    "mul",
    "plus_product",
    "product",
    "rms_beside_fills",
    "rms_of_lerp",
    "rms_with_product",
    "rms_with_quotient",
    "under",
]

# --- sums ------------------------------------------------------------------------------------


# Second derivatives come in part from torch's Python references, which call prims.
@rule(aten.add.Tensor, aten.add.Scalar, prims.add.default)
def add(x: Any, y: Any, alpha: float = 1) -> Raw:
    """r = sqrt(rx^2 + ry^2) for independent terms: a residual stream grows over depth. A number c
    has the RMS |c|."""
    return _sum(x, y, alpha)


@rule(aten.sub.Tensor, aten.sub.Scalar, prims.sub.default)
def sub(x: Any, y: Any, alpha: float = 1) -> Raw:
    """Same as `add`."""
    raw = _sum(x, y, -alpha)
    if alpha == 1 and isinstance(x, ScaledTensor) and isinstance(y, ScaledTensor):
        return raw._replace(towards=Towards(y.qdata, rms_of(x)))
    return raw


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Any, y: Any, alpha: float = 1) -> Raw:
    """Same as `add`."""
    return _sum(y, x, -alpha)


def _sum(x: Any, y: Any, alpha: float) -> Raw:
    if type(x) is type(y) is ScaledTensor and not torch.compiler.is_compiling():
        return _sum_of_two(x, y, alpha)
    like = first_scaled(x, y)
    a, b = term(x, like), term(y, like)
    scale, ratio_a, ratio_b, rms = settle_sum((a.scale, a.rms), (b.scale, b.rms), alpha)
    q: Tensor | Total
    if _is_one_node(x, y, ratio_a, ratio_b):
        q = Total(a.q, ratio_a, b.q, ratio_b, alpha)
    elif b.fills:
        q = torch.add(under(a, ratio_a, like), under(b, ratio_b, like), alpha=alpha)
    else:
        q = _added(under(a, ratio_a, like), ONE, b.q, ratio_b, alpha)
    positive = a.nonnegative and b.nonnegative and alpha > 0
    return Raw(q, scale, rms, settled=True, nonnegative=positive)


def _sum_of_two(x: ScaledTensor, y: ScaledTensor, alpha: float) -> Raw:
    """The steps of `_sum` that are left in eager code for two ScaledTensors."""
    scale, first, second, rms = settle_sum(amounts_of(x), amounts_of(y), alpha)
    made = _added(elements(x), first, elements(y), second, alpha)
    positive = x.nonnegative and y.nonnegative and alpha > 0
    return Raw(made, scale, rms, settled=True, nonnegative=positive)


def _is_one_node(x: Any, y: Any, *ratios: Amount) -> bool:
    """Whether the sum of two terms is one node of the graph that is being traced."""
    return (
        all(isinstance(ratio, Form) for ratio in ratios)
        and all(isinstance(t, ScaledTensor) and t.dim() for t in (x, y))
        and not _torch.is_transforming()
    )


def _added(a: Tensor, first: Amount, b: Tensor, ratio: Amount, alpha: float) -> Tensor:
    """Return `a * first + alpha * ratio * b`. One pass is enough for numbers, because a product
    with a power of two rounds nothing. 16-bit elements are converted first if the other term is
    float32, such as a bias: the kernel for two dtypes takes twice the time."""
    if type(ratio) is not Single or not float(ratio) * abs(alpha) < HUGE:
        return torch.add(times(a, first), times(b, ratio), alpha=alpha)
    alpha = float(ratio) * alpha
    if type(first) is Single and (made := total(a, first, b, alpha)) is not None:
        return made
    a = times(a, first)
    if a.dtype == b.dtype:
        return torch.add(a, b, alpha=alpha)
    wide = a.float()
    if wide is not a and a.shape[a.dim() - b.dim() :] == b.shape:
        return wide.add_(b, alpha=alpha)
    return torch.add(wide, b.float(), alpha=alpha)


def term(x: Any, like: ScaledTensor) -> Operand:
    """Return `x` as a term of a sum. Its RMS leaves out the fills of a mask."""
    return _table(x.float(), None) if is_table(x) else operand(x, like)


def chosen(x: Any, like: ScaledTensor) -> Operand:
    """Return `x` as a side of a choice, a part of a whole, or a source that is written into places.
    Its RMS leaves out the fills of a mask. A table of fills alone takes the RMS of `like`."""
    if not is_table(x):
        return operand(x, like)
    measures = not (torch.compiler.is_compiling() or invariant.assumes_unit_scale())
    if measures and calculates(like):
        made = operand(x, like)
        if type(made.rms) is Single and made.rms * x.numel() ** 0.5 < -FILL:
            return made  # no element is as large as a fill
    return _table(x if x.dtype == torch.bfloat16 else x.float(), like)


def _table(x: Tensor, like: ScaledTensor | None) -> Operand:
    x = x.to_dense() if x.is_sparse else x
    if invariant.assumes_unit_scale():
        rms: Any = ONE
    else:
        norm = None if torch.compiler.is_compiling() else finite_norm(x)
        if norm is not None and norm < -FILL and x.numel():  # no element is larger
            return Operand(x, ONE, Single(rounded(norm / x.numel() ** 0.5)))
        rms = single_of(_table_rms(x, like))
    scale = torch.ones_like(rms) if isinstance(rms, Tensor) else ONE
    return Operand(x, scale, rms, fills=True)


def _table_rms(x: Tensor, like: ScaledTensor | None) -> Tensor:
    """RMS of a plain tensor without fills: without huge magnitudes, and without its least element
    if that is a fill. Fills alone have the RMS of `like`, or their magnitude."""
    if x.numel() == 0:
        return measured_rms(x)
    least = x.amin()
    fills = (x == least) & (least <= FILL)
    rms = measured_rms(x.masked_fill(fills, 0.0), below=HUGE)
    alone = least.abs().clamp_max(HUGE) if like is None else rms_beside_fills(like)
    return torch.where(fills.all(), alone, rms)


def rms_beside_fills(x: ScaledTensor) -> Tensor:
    """Return the RMS of `x` for fills of a mask beside it, which fit any scale. It is 1 if `x` is
    all zeros."""
    rms = tensor_of(rms_of(x))
    return torch.where(rms > 0, rms, 1.0)


def under(part: Operand, ratio: Amount, like: ScaledTensor) -> Tensor:
    """Return the elements of an operand under another scale, for a result with elements as `like`
    has them. `ratio` is the old scale over the new."""
    if not part.fills:
        return times(part.q, ratio)
    # A finite fill stays finite, as an element and as a value: it saturates to the largest bfloat16
    # before the division and after. An infinity stays, because a mask may mean it.
    return saturated(part.q, limited(part.q) * ratio, like.format)


# --- products --------------------------------------------------------------------------------


@rule(aten.mul.Tensor, aten.mul.Scalar, prims.mul.default)
def mul(x: Any, y: Any) -> Raw:
    """r = rx ry. The power of two of a number goes into the scale, which is exact."""
    x, y = (x, y) if isinstance(x, Tensor) else (y, x)
    if not isinstance(y, Tensor):
        c = real(y)
        nonnegative = x.nonnegative and c >= 0
        if c in (math.inf, -math.inf) or c != c:  # it has no scale, so it shows in the elements
            q = elements(x) * c
            return Raw(q, scale_of(x), rms_of(x), settled=True, nonnegative=nonnegative)
        return Raw(elements(x), scale_of(x) * c, rms_of(x) * abs(c), nonnegative=nonnegative)
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    rms = bounded(_factor(x, a.rms) * _factor(y, b.rms) * (gaussian_moment(2) if x is y else 1.0))
    positive = x is y or (a.nonnegative and b.nonnegative)
    scale, ratio = settle(rms, product_of(a.scale, b.scale))
    # The ratio comes first: the product alone might leave the range of the elements.
    q = times(a.q, ratio) * b.q if a.q.dim() <= b.q.dim() else a.q * times(b.q, ratio)
    return product(q, scale, rms, (a.rms, b.rms), nonnegative=positive)


def product(
    q: Tensor, scale: Any, rms: Any, factors: tuple[Any, ...], nonnegative: bool = False
) -> Raw:
    """Return the new elements `q` as the product of factors with these RMS. It keeps `scale`, which
    follows from `rms`, if the elements are not far below it."""
    found = of_factors(rms, q, scale, *factors)
    return Raw(q, scale, found, settled=found is rms, nonnegative=nonnegative, fresh=True)


def _factor(x: Tensor, rms: Amount) -> Any:
    """RMS of a factor. An infinite or NaN number shows in the elements, and counts as 1 here."""
    if isinstance(x, ScaledTensor) or x.dim():
        return rms
    if isinstance(rms, Single):
        return rms if math.isfinite(rms) else ONE
    if isinstance(rms, Form):
        return Form("finite", rms)
    return torch.where(rms.isfinite(), rms, torch.ones_like(rms))


@rule(aten.div.Tensor, aten.div.Scalar, prims.div.default)
def div(x: Any, y: Any) -> Raw:
    """r = rx / ry. A division by zero shows in the elements, never as a scale of inf or NaN."""
    if not isinstance(y, Tensor):
        rms = rms_of(x) / abs(real(y))
        positive = x.nonnegative and y > 0
        return Raw(elements(x) / y, scale_of(x), rms, nonnegative=positive, fresh=True)
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    rms = a.rms / _divisor(b.rms)
    scale, ratio = settle(rms, quotient_of(a.scale, b.scale))
    # A 0-dim divisor stays float32, as a 0-dim factor does.
    q = times(a.q, ratio) / b.q
    factors = (a.rms, _divisor(b.rms).reciprocal())
    return product(q, scale, rms, factors, nonnegative=a.nonnegative and b.nonnegative)


def _divisor(rms: Amount) -> Any:
    """RMS of a divisor; 1 if the divisor is known to be all zeros."""
    if isinstance(rms, Single):
        return rms if rms else ONE
    if isinstance(rms, Form):
        return Form("nonzero", rms)
    return torch.where(rms == 0, torch.ones_like(rms), rms)


@rule(aten.addcmul.default)
def addcmul(x: Any, a: Any, b: Any, value: float = 1) -> Raw:
    """r = sqrt(rx^2 + (c ra rb)^2) for x + c a b. If a is b, the squares (Adam's second moment) all
    have one sign, and r = rx + c sqrt(3) ra^2."""
    like = first_scaled(x, a, b)
    base, left, right = (operand(t, like) for t in (x, a, b))
    if starts_at(b, x):
        # This is x + w (y - x): Dynamo writes the lerp of an optimizer's first moment like this.
        rms = rms_of_lerp(base.rms, b.memo.towards.rms, (left.q * left.scale * value).mean())
    else:
        rms = rms_with_product(base.rms, left.rms, right.rms, a is b, value)
    scale, ratio, held = settle(rms, base.scale, product_of(left.scale, right.scale))
    # The ratio comes first: the product alone might leave the range of the elements.
    q = times(base.q, ratio).add(times(left.q, held) * right.q, alpha=value)
    positive = base.nonnegative and a is b and value >= 0
    return Raw(q, scale, rms, settled=True, nonnegative=positive)


def rms_with_product(base: Any, left: Any, right: Any, is_square: bool, value: float) -> Any:
    """RMS of x + value a b, for the RMS of x, a and b."""
    if is_square and value >= 0:
        return base + left.square() * (gaussian_moment(2) * value)
    return quadrature(base, left * right * abs(value))


@rule(prims.fma.default)
def fma(a: Any, b: Any, x: Any) -> Raw:
    """a b + x: measured. Dynamo writes the steps of optimizers in this operator, and a rule cannot
    tell there whether a b is a square or a step from x."""
    like = first_scaled(a, b, x)
    left, right, base = (operand(t, like) for t in (a, b, x))
    rms = quadrature(base.rms, left.rms * right.rms)
    scale, ratio, factor = settle(rms, base.scale, product_of(left.scale, right.scale))
    q = torch.addcmul(times(base.q, ratio), times(left.q, factor), right.q)
    positive = base.nonnegative and left.nonnegative and right.nonnegative
    return measured(q, scale, nonnegative=positive)


@rule(aten.addcdiv.default)
def addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> Raw:
    """r = sqrt(rx^2 + (c ra / rb)^2) for x + c a / b, the update of an optimizer."""
    like = first_scaled(x, a, b)
    base, left, right = (operand(t, like) for t in (x, a, b))
    rms = rms_with_quotient(base.rms, left.rms, right.rms, value)
    scale, ratio, held = settle(rms, base.scale, quotient_of(left.scale, right.scale))
    q = times(base.q, ratio).add(times(left.q, held) / right.q, alpha=value)
    return Raw(q, scale, rms, settled=True)


def rms_with_quotient(base: Any, left: Any, right: Any, value: float) -> Any:
    """RMS of x + value a / b, for the RMS of x, a and b."""
    return quadrature(base, left / _divisor(right) * abs(value))


def plus_product(
    base: Tensor, ratio: Amount, product: Tensor, held: Amount, value: float
) -> Tensor:
    """Return base * ratio + value * held * product."""
    start = times(base, ratio)
    if isinstance(held, Single):
        # The factor stays finite, because 0 * inf is NaN.
        largest = torch.finfo(torch.float32).max
        return torch.add(start, product, alpha=max(min(held * value, largest), -largest))
    return torch.addcmul(start, product, tensor_of(held), value=value)


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(x: Any, y: Any, weight: Any) -> Raw:
    """r = sqrt(((1 - w) rx)^2 + (w ry)^2) for x + w (y - x), such as Adam's first moment."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    w = plain(weight)
    if isinstance(a.rms, Single) and isinstance(b.rms, Single) and not isinstance(w, Tensor):
        w = Single(rounded(w))
    elif not isinstance(w, Tensor):
        w = torch.full((), w, device=like.device, dtype=torch.float32)
    mean = w.mean() if isinstance(w, Tensor) and w.dim() else w
    rms = rms_of_lerp(a.rms, b.rms, mean)
    scale, ratio_a, ratio_b = settle(rms, a.scale, b.scale)
    left, right = times(a.q, ratio_a), times(b.q, ratio_b)
    if isinstance(w, Single) and left.dtype == right.dtype:
        return Raw(torch.lerp(left, right, w), scale, rms, settled=True)
    return Raw(left + w * (right - left), scale, rms, settled=True)


def rms_of_lerp(start: Amount, end: Amount, weight: Amount) -> Any:
    """RMS of (1 - w) x + w y for independent x and y. The terms of x + w (y - x) are not
    independent: as their sum, the RMS would grow in each step of an optimizer."""
    return quadrature(start * (1 - weight), end * weight)


# --- homogeneous -----------------------------------------------------------------------------


@rule(aten.neg.default)
def neg(x: ScaledTensor) -> Raw:
    """r. The scale stays."""
    return Raw(-elements(x), scale_of(x), rms_of(x), settled=True)


@rule(aten.abs.default)
def abs_(x: ScaledTensor) -> Raw:
    """r. The scale stays."""
    return Raw(elements(x).abs(), scale_of(x), rms_of(x), settled=True, nonnegative=True)


@rule(aten.sign.default, aten.sgn.default)
def sign(x: ScaledTensor) -> Raw:
    """r = 1: every element is -1, 0 or 1."""
    return Raw(elements(x).sign(), None, constant(1.0, rms_of(x)), settled=True)


@rule(
    aten.maximum.default,
    aten.minimum.default,
    aten.fmax.default,
    aten.fmin.default,
    pass_op=True,
)
def extremum(op: Overload, x: Any, y: Any) -> Raw:
    """r = sqrt((rx^2 + ry^2) / 2) for two independent Gaussians. The huge number from which a
    running maximum starts does not count. The RMS is measured if rx and ry differ by more than
    2^20."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    rms = _without_huge(a.rms, b.rms) * 0.5**0.5
    scale, ratio_a, ratio_b = settle(rms, a.scale, b.scale)
    left, right = _finite(a.q, ratio_a, like), _finite(b.q, ratio_b, like)
    wide = torch.promote_types(left.dtype, right.dtype)
    positive = a.nonnegative and b.nonnegative
    out = op(left.to(wide), right.to(wide))
    found = _chosen_rms(out, scale, rms, a.rms, b.rms)
    return Raw(out, scale, found, settled=found is rms, nonnegative=positive, fresh=True)


def _finite(q: Tensor, ratio: Amount, like: ScaledTensor) -> Tensor:
    """Return elements times a ratio, where finite ones stay finite."""
    made = times(q, ratio)
    if type(ratio) is Single and not torch.compiler.is_compiling():
        norm = finite_norm(q)  # it takes a fifth of the time, and no element is larger
        if norm is not None and norm <= min(LARGEST, like.format.max) / max(ratio, 1.0):
            return made
    return saturated(q, made, like.format)


def _without_huge(of_a: Amount, of_b: Amount) -> Any:
    """Return the quadrature of two RMS, of those below HUGE if there is one above zero."""
    both = of_a, of_b
    if type(of_a) is type(of_b) is Single:
        seen = quadrature(*(r for r in both if r < HUGE))
        return seen if seen > 0 else quadrature(*both)
    counted = quadrature(*(torch.where(r < HUGE, r, 0.0) for r in map(tensor_of, both)))
    return torch.where(counted > 0, counted, tensor_of(quadrature(*both)))


def _chosen_rms(q: Tensor, scale: Amount, rms: Amount, of_a: Amount, of_b: Amount) -> Any:
    """RMS of elements under `scale` that are chosen from two operands. If the operands are of very
    different size, the result may have no element of the larger one, so its RMS is measured."""
    if type(of_a) is type(of_b) is Single:
        low, high = sorted((of_a, of_b))
        apart = low > 0 and low * 2.0**20 < high < HUGE
        return rms_seen(q, rms / scale) * scale if apart else rms
    a, b, rms, scale = map(tensor_of, (of_a, of_b, rms, scale))
    least, most = torch.minimum(a, b), torch.maximum(a, b)
    seen = rms_seen(q, rms / scale) * scale
    return torch.where((least > 0) & (most > least * 2.0**20) & (most < HUGE), seen, rms)


@rule(
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.clamp.Tensor,
    aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
    aten.hardtanh.default,
    pass_op=True,
)
def clamp(op: Overload, x: ScaledTensor, *bounds: Any, **named: Any) -> Raw:
    """r, but at most the larger of two bounds. With a bound at 0, r / sqrt(2)."""
    v, rms = value(x), rms_of(x)
    bounds = tuple(within(plain(b), v.dtype) for b in bounds)
    named = {k: within(plain(b), v.dtype) for k, b in named.items()}
    numbers = [float(b) for b in (*bounds, *named.values()) if not isinstance(b, Tensor | None)]
    if len(numbers) == 2:
        rms = rms.clamp_max(max(map(abs, numbers)))
    if 0.0 in numbers:
        rms = rms * 0.5**0.5
    return Raw(op(v, *bounds, **named), None, rms)
