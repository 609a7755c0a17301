"""Losses. Reduced they leave as plain float32; their gradients enter again with the loss's scale.

A mean over n divides the scale of the gradient, so that its elements are near 1 however many there
are; n counts what counts (tokens that are not ignored, by their weights).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    bounded_square,
    first_scaled,
    operand,
    plain,
    quadrature,
    side,
    value,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.products.table import linear
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.elementary import spellings
from scaledtensor.scales.singles import single_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS", "Incoming", "incoming", "unreduced", "wide"]


_REDUCTIONS = ("none", "mean", "sum")  # in the order of at::Reduction


_NONE, _MEAN, _SUM = range(3)


class Incoming(NamedTuple):
    """The gradient of a loss, with the count of a mean in its scale."""

    q: Tensor
    scale: Tensor
    rms: Tensor
    reduction: int
    """What is left for the kernel to do: no mean."""


def incoming(g: Any, like: ScaledTensor, n: int, reduction: int) -> Incoming:
    """Gradient `g` of a loss over `n` terms."""
    left = operand(g, like)
    share = 1 / max(n, 1) if reduction == _MEAN else 1.0
    rest = _NONE if reduction == _NONE else _SUM
    return Incoming(left.q.float(), left.scale * share, left.rms * share, rest)


def wide(x: Any) -> Any:
    """The value in float32; what is no float tensor as it is."""
    v = plain(x)
    return v.float() if isinstance(v, Tensor) and v.dtype.is_floating_point else v


def unreduced(loss: Tensor, rms: Tensor, reduction: int) -> Any:
    """Reduced, a loss is a statistic in plain float32."""
    return loss if reduction else Raw(loss, None, rms, format=FP32, nonnegative=True)


# --- negative log-likelihood -----------------------------------------------------------------


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, pass_op=True)
def nll_loss(op: Overload, x: ScaledTensor, target: Tensor, weight: Any, *args: Any) -> Any:
    """A statistic: plain float32."""
    return op(value(x).float(), target, wide(weight), *args)


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, pass_op=True)
def nll_loss_backward(
    op: Overload,
    g: Tensor,
    x: ScaledTensor,
    target: Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Raw:
    """One entry of g w / B in each row of V: r = r_g rw / (B sqrt V), B the total weight of the
    tokens that count (those not ignored)."""
    left, counted = side(g, x), single_of(total_weight)
    w = wide(weight)
    classes = x.shape[1] if x.dim() > 1 else x.shape[0]
    rms = left.rms / max(classes, 1) ** 0.5
    if weight is not None:
        rms = rms * side(weight, x).rms
    scale = left.scale
    unit = torch.ones_like(total_weight)
    if reduction == _MEAN:
        # B moves into the scale, so that the elements are near 1 however many tokens there are.
        rms, scale = rms / counted, scale / counted
        unit = total_weight / total_weight  # NaN where nothing counts, as the loss is
    q = op(left.q.float(), value(x).float(), target, w, reduction, ignore_index, unit)
    return Raw(q, scale, rms, format=FP32)


# --- of a difference -------------------------------------------------------------------------


def _differing(x: Any, y: Any, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Both values in float32, and the RMS of their difference."""
    like = first_scaled(x, y, *others)
    a, b = operand(x, like), operand(y, like)
    return a.q.float() * a.scale, b.q.float() * b.scale, quadrature(a.rms, b.rms)


@rule(aten.mse_loss.default)
def mse_loss(x: Any, y: Any, reduction: int = _MEAN) -> Any:
    """Unreduced: (rx^2 + ry^2) sqrt(3)."""
    left, right, spread = _differing(x, y)
    loss = aten.mse_loss.default(left, right, reduction)
    return unreduced(loss, spread.square() * math.sqrt(3), reduction)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(g: Any, x: Any, y: Any, reduction: int) -> Raw:
    """2 g (x - y) / n: r = 2 r_g sqrt(rx^2 + ry^2) / n."""
    into = incoming(g, first_scaled(x, y, g), x.numel(), reduction)
    left, right, spread = _differing(x, y, g)
    return Raw(into.q * (left - right), into.scale * 2, into.rms * spread * 2)


def _huber_rms(spread: Tensor, edge: float) -> Tensor:
    # Of a difference d in units of the edge: sqrt(3) d^2 / 2 within, d far out; within 6% of the
    # integral between.
    d2 = bounded_square(spread / edge)
    return 0.866 * d2 / (1 + 0.78 * d2).sqrt()


def _clamped_rms(spread: Tensor, edge: float) -> Tensor:
    d2 = bounded_square(spread / edge)
    return (d2 / (1 + 0.97 * d2)).sqrt()


@rule(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Any, y: Any, reduction: int = _MEAN, beta: float = 1.0) -> Any:
    """Unreduced, d^2 = (rx^2 + ry^2) / beta^2: beta sqrt(3)/2 d^2 / sqrt(1 + 0.78 d^2)."""
    left, right, spread = _differing(x, y)
    loss = aten.smooth_l1_loss.default(left, right, reduction, beta)
    rms = _huber_rms(spread, beta) * beta if beta else spread
    return unreduced(loss, rms, reduction)


@rule(aten.huber_loss.default)
def huber_loss(x: Any, y: Any, reduction: int = _MEAN, delta: float = 1.0) -> Any:
    """Unreduced: delta times smooth_l1_loss with beta = delta."""
    left, right, spread = _differing(x, y)
    loss = aten.huber_loss.default(left, right, reduction, delta)
    return unreduced(loss, _huber_rms(spread, delta) * delta**2, reduction)


@rule(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default, pass_op=True)
def smooth_l1_loss_backward(
    op: Overload, g: Any, x: Any, y: Any, reduction: int, edge: float
) -> Raw:
    """g clamp(d, -1, 1) / n, d = (x - y) / edge: r = r_g sqrt(d^2 / (1 + 0.97 d^2)) / n, within 7%
    of the integral; times the edge for huber."""
    into = incoming(g, first_scaled(x, y, g), x.numel(), reduction)
    left, right, spread = _differing(x, y, g)
    q = op(into.q, left, right, into.reduction, edge)
    slope = _clamped_rms(spread, edge) if edge else torch.ones_like(spread)
    if op is aten.huber_loss_backward.default:
        slope = slope * edge
    return Raw(q, into.scale, into.rms * slope)


# --- binary cross-entropy --------------------------------------------------------------------


def _weighted(rms: Tensor, weight: Any, like: ScaledTensor) -> Tensor:
    return rms if weight is None else rms * operand(weight, like).rms


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: int = _MEAN) -> Any:
    """Unreduced: 1, between ln 2 for p = 1/2 and sqrt(2) for p evenly spread."""
    like = first_scaled(x, target, weight)
    loss = aten.binary_cross_entropy.default(wide(x), wide(target), wide(weight), reduction)
    return unreduced(loss, _weighted(torch.ones_like(like.rms), weight, like), reduction)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    g: Any, x: Any, target: Any, weight: Any = None, reduction: int = _MEAN
) -> Raw:
    """g (x - t) / (x (1 - x)) / n, +-1 / p of the right class: 2.8 r_g / n, between 2 for p = 1/2
    and 3.4 for the sigmoid of a Gaussian of RMS 1; p evenly spread has no second moment."""
    like = first_scaled(g, x, target, weight)
    into = incoming(g, like, x.numel(), reduction)
    q = aten.binary_cross_entropy_backward.default(
        into.q, wide(x), wide(target), wide(weight), into.reduction
    )
    return Raw(q, into.scale, _weighted(into.rms * 2.8, weight, like))


def _sigmoid_square(rms: Tensor) -> Tensor:
    """E sigmoid(r z)^2, within 5% of the integral."""
    r2 = bounded_square(rms)
    return 0.25 + 0.25 * (r2 / (r2 + 7.4))


def _difference_from_target(
    x: Any, target: Any, pos_weight: Any, like: ScaledTensor
) -> tuple[Tensor, Tensor]:
    """(1 - t + w t) sigmoid(x) - w t, and its RMS. E (sigmoid - t)^2 = E sigmoid^2 - E t (1 - t)
    for x independent of t; the targets are a table, whose mean is read."""
    t, logits = wide(target), wide(x)
    square = _sigmoid_square(operand(x, like).rms) - (t * (1 - t)).mean()
    if pos_weight is None:
        return logits.sigmoid() - t, square.clamp_min(2.0**-12).sqrt()
    w = wide(pos_weight)
    share = 1 - t + w * t
    square = square * (1 - t + w.square() * t).mean()
    return share * logits.sigmoid() - w * t, square.clamp_min(2.0**-12).sqrt()


def _bce_slope(
    g: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: int,
) -> Tensor:
    if not torch.is_grad_enabled():
        scaled: Tensor = _bce_backward(g, x, target, weight, pos_weight, reduction)
        return scaled
    share = 1 if pos_weight is None else 1 - target + pos_weight * target
    grad = share * x.sigmoid() - (target if pos_weight is None else pos_weight * target)
    grad = grad * g if weight is None else grad * g * weight
    return grad / max(x.numel(), 1) if reduction == _MEAN else grad


_BCE = "(Tensor x, Tensor target, Tensor? weight, Tensor? pos_weight, int reduction) -> Tensor"


_bce = define_operator(f"binary_cross_entropy_with_logits{_BCE}", _bce_slope)
_bce_backward = define_operator(
    f"binary_cross_entropy_with_logits_backward{_BCE.replace('(', '(Tensor g, ')}"
)


@rule(aten.binary_cross_entropy_with_logits.default, _bce)
def binary_cross_entropy_with_logits_rule(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> Any:
    """Unreduced, a softplus: sqrt(ln(2)^2 + r^2 / 2), times the RMS of the weights."""
    like = first_scaled(x, target, weight, pos_weight)
    loss = aten.binary_cross_entropy_with_logits.default(
        wide(x), wide(target), wide(weight), wide(pos_weight), reduction
    )
    rms = (math.log(2) ** 2 + bounded_square(operand(x, like).rms) / 2).sqrt()
    return unreduced(loss, _weighted(_weighted(rms, weight, like), pos_weight, like), reduction)


@rule(_bce_backward)
def bce_with_logits_backward(
    g: Any, x: Any, target: Any, weight: Any, pos_weight: Any, reduction: int
) -> Raw:
    """g (sigmoid(x) - t) / n: r_g sqrt(E sigmoid^2 - E t (1 - t)) / n, times the RMS of the
    weights."""
    like = first_scaled(g, x, target, weight, pos_weight)
    into = incoming(g, like, x.numel(), reduction)
    difference, rms = _difference_from_target(x, target, pos_weight, like)
    q = into.q * difference
    q = q if weight is None else q * wide(weight)
    return Raw(q, into.scale, _weighted(into.rms * rms, weight, like))


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """As torch's. Autograd spells the gradient as sigmoid(x) minus the target, a difference that a
    rule takes for one of independent terms."""
    fixed = (target, weight, pos_weight)
    learnt = any(t is not None and t.requires_grad for t in fixed)
    if learnt or size_average is not None or reduce is not None or target.shape != input.shape:
        return torch.nn.functional.binary_cross_entropy_with_logits(
            input, target, weight, size_average, reduce, reduction, pos_weight
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is one of {', '.join(_REDUCTIONS)}; got {reduction!r}")
    loss: Tensor = _bce(input, target, weight, pos_weight, _REDUCTIONS.index(reduction))
    return loss


# --- sequences -------------------------------------------------------------------------------


@rule(aten._ctc_loss.default, aten._ctc_loss.Tensor, pass_op=True)
def ctc_loss(op: Overload, log_probs: Any, targets: Tensor, *args: Any) -> Any:
    """A statistic of each sequence: plain float32, and so are the forward variables."""
    return op(wide(log_probs).contiguous(), targets, *args)


@rule(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor, pass_op=True)
def ctc_loss_backward(op: Overload, g: Any, log_probs: Any, targets: Tensor, *args: Any) -> Raw:
    """g (p - posterior) over C classes, a posterior on two or three of them: r = r_g sqrt(0.4 / C).
    Steps after the end of a sequence are zero."""
    like = first_scaled(g, log_probs, *args)
    left = operand(g, like)
    rest = tuple(wide(a) for a in args)
    q = op(left.q.float(), wide(log_probs).contiguous(), targets, *rest)
    rms = left.rms * (0.4 / max(log_probs.shape[-1], 1)) ** 0.5
    return Raw(q, left.scale, rms, format=FP32)


# --- fused with the last layer ---------------------------------------------------------------


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """As torch's reference for it: a linear layer, then the cross-entropy, each by its rules.
    `options` say how to save memory by chunks, not what is computed."""
    out = linear_weight.shape[:-1]
    bias = linear_bias if linear_bias is None else linear_bias.reshape(-1)
    logits = linear(input, linear_weight.reshape(-1, linear_weight.shape[-1]), bias)
    logits = logits.reshape(*input.shape[:-1], *out)
    return torch.nn.functional.cross_entropy(
        logits,
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


#: function that a user may call -> the same by operators with rules.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.nn.functional.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits,
    # torch 2.11 has none.
    **dict.fromkeys(
        spellings("linear_cross_entropy", places=(torch.nn.functional,)), linear_cross_entropy
    ),
}


# Losses that ask for a margin between scores.  A pair of scores of RMS r violates a margin m with
# P(m + sqrt(2) r z > 0) = Phi(t), t = m / (r sqrt 2), here (1 + t / sqrt(t^2 + pi / 2)) / 2:
# within 2% of Phi.
def _violated(rms: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Share of pairs that violate the margin, and its mean square over rows: a row has its target's
    score in common, so that the share is spread evenly where r is large."""
    t = margin / (2**0.5 * rms.clamp_min(2.0**-60))
    share = (1 + t / (bounded_square(t) + math.pi / 2).sqrt()) / 2
    return share, share.square() + share * (1 - share) / 3


def _rows(x: Tensor) -> tuple[int, int]:
    classes = max(x.shape[-1], 1) if x.dim() else 1
    return x.numel() // classes, classes


@rule(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: Any, target: Tensor, p: float = 1, margin: float = 1, weight: Any = None, reduction: int = 1
) -> Any:
    """Unreduced, mean of (m - x_t + x_j)+^p: sqrt(m^2 + 0.45 r^2), squared for p = 2."""
    like = first_scaled(x, weight)
    loss = aten.multi_margin_loss.default(wide(x), target, p, margin, wide(weight), reduction)
    rms = (margin**2 + 0.45 * bounded_square(operand(x, like).rms)).sqrt().pow(p)
    if weight is not None:
        rms = rms * operand(weight, like).rms
    return unreduced(loss, rms, reduction)


@rule(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    g: Any,
    x: Any,
    target: Tensor,
    p: float,
    margin: float,
    weight: Any = None,
    reduction: int = 1,
) -> Raw:
    """Over C classes: P / C for each violation and their sum for the target. Mean square for p = 1
    ((C - 1) P + (C - 1)^2 E P^2) / C^3; for p = 2 four times ((C - 1)(m^2 + r^2) +
    (C - 1)^2 (m^2 + 0.45 r^2)) / C^3."""
    like = first_scaled(g, x, weight)
    rows, classes = _rows(x)
    into = incoming(g, like, rows, reduction)
    q = aten.multi_margin_loss_backward.default(
        into.q, wide(x), target, p, margin, wide(weight), into.reduction
    )
    r = operand(x, like).rms
    if p == 1:
        each, together = _violated(r, margin)
    else:
        r2 = bounded_square(r)
        each, together = 4 * (margin**2 + r2), 4 * (margin**2 + 0.45 * r2)
    others = max(classes - 1, 1)
    rms = into.rms * ((others * each + others**2 * together) / classes**3).sqrt()
    if weight is not None:
        rms = rms * operand(weight, like).rms
    return Raw(q, into.scale, rms)


@rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x: ScaledTensor, target: Tensor, reduction: int) -> tuple[Any, Tensor]:
    """Unreduced: C f (1 - f) sqrt(1 + 0.45 r^2), f the share of classes that are targets."""
    loss, is_target = aten.multilabel_margin_loss_forward.default(wide(x), target, reduction)
    pairs = _mixed(is_target) * _rows(x)[1]
    rms = pairs * (1 + 0.45 * bounded_square(x.rms)).sqrt()
    return unreduced(loss, rms, reduction), is_target


def _mixed(is_target: Tensor) -> Tensor:
    """f (1 - f), over rows; the targets are a table, and are counted."""
    share = is_target.float().mean(-1)
    return (share * (1 - share)).mean().clamp_min(2.0**-12)


@rule(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(
    g: Any, x: Any, target: Tensor, reduction: int, is_target: Any
) -> Raw:
    """Of a target the violations by all others, and the other way round: r_g sqrt(E P^2 f (1 - f)),
    P the share that violates a margin of 1."""
    like = first_scaled(g, x, is_target)
    into = incoming(g, like, _rows(x)[0], reduction)
    hits = wide(is_target)
    q = aten.multilabel_margin_loss_backward.default(into.q, wide(x), target, into.reduction, hits)
    _, together = _violated(operand(x, like).rms, 1.0)
    return Raw(q, into.scale, into.rms * (together * _mixed(hits)).sqrt())


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    """Unreduced, a softplus of -t x: sqrt(ln(2)^2 + r^2 / 2)."""
    like = first_scaled(x, target)
    loss = aten.soft_margin_loss.default(wide(x), wide(target), reduction)
    r = operand(x, like).rms * operand(target, like).rms
    return unreduced(loss, (math.log(2) ** 2 + bounded_square(r) / 2).sqrt(), reduction)


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(g: Any, x: Any, target: Any, reduction: int) -> Raw:
    """-g t sigmoid(-t x) / n: r_g rt sqrt(1/4 (1 + r^2 / (r^2 + 7.4))) / n."""
    like = first_scaled(g, x, target)
    into = incoming(g, like, x.numel(), reduction)
    q = aten.soft_margin_loss_backward.default(into.q, wide(x), wide(target), into.reduction)
    t = operand(target, like).rms
    r2 = bounded_square(operand(x, like).rms * t)
    slope = (0.25 + 0.25 * (r2 / (r2 + 7.4))).sqrt() * t
    return Raw(q, into.scale, into.rms * slope)
