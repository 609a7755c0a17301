"""Losses and their gradients, which have the scale of the loss.

A loss with a reduction is a statistic, and leaves in plain float32. A mean over n divides the scale
of the gradient, so that its elements are near 1 for any n. Here n counts the terms of the mean: the
tokens that are not ignored, times their weights.

A margin loss asks for a margin between scores. A pair of scores of RMS r violates the margin m with
the probability P(m + sqrt(2) r z > 0) = Phi(t), where t = m / (r sqrt 2). The rules take
(1 + t / sqrt(t^2 + pi / 2)) / 2 for Phi(t), which is within 2%.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    bounded_square,
    constant,
    difference,
    first_scaled,
    operand,
    wide,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.products.table import linear
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.activation import softplus_rms
from scaledtensor.ops.rules.elementary import spellings
from scaledtensor.scales.singles import Amount, rms_of, single_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


_REDUCTIONS = ("none", "mean", "sum")  # in the order of at::Reduction
_NONE, _MEAN, _SUM = range(3)


class _Incoming(NamedTuple):
    """The gradient of a loss, with the number of terms of a mean in its scale."""

    q: Tensor
    scale: Any
    rms: Any
    reduction: int
    """The reduction for the kernel, which is never a mean."""

    @staticmethod
    def of(g: Any, like: ScaledTensor, n: int, reduction: int) -> "_Incoming":
        """Take the gradient `g` of a loss over `n` terms."""
        left = operand(g, like)
        share = 1 / max(n, 1) if reduction == _MEAN else 1.0
        rest = _NONE if reduction == _NONE else _SUM
        return _Incoming(left.q.float(), left.scale * share, left.rms * share, rest)


def _loss(loss: Tensor, rms: Amount, reduction: int) -> Any:
    """Return a loss: a plain statistic if it has a reduction."""
    return loss if reduction else Raw(loss, None, rms, format=FP32, nonnegative=True)


def _weighted(rms: Amount, weight: Any, like: ScaledTensor) -> Any:
    return rms if weight is None else rms * operand(weight, like).rms


# --- negative log-likelihood -----------------------------------------------------------------


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, pass_op=True)
def nll_loss(op: Overload, x: ScaledTensor, target: Tensor, weight: Any, *args: Any) -> Any:
    """A plain float32 statistic."""
    return op(wide(x), target, wide(weight), *args)


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
    """r_g rw / (B sqrt(V)): each row of V classes has one entry g w / B. B is the total weight of
    the tokens that are not ignored."""
    left, counted = operand(g, x), single_of(total_weight)
    classes = x.shape[1] if x.dim() > 1 else x.shape[0]
    rms = left.rms / max(classes, 1) ** 0.5
    if weight is not None:
        rms = rms * operand(weight, x).rms
    scale = left.scale
    unit = torch.ones_like(total_weight)
    if reduction == _MEAN:
        # B goes into the scale, so that the elements are near 1 for any number of tokens.
        rms, scale = rms / counted, scale / counted
        unit = total_weight / total_weight  # NaN if all tokens are ignored, like the loss
    w = wide(weight)
    q = op(left.q.float(), wide(x), target, w, reduction, ignore_index, unit)
    return Raw(q, scale, rms, format=FP32)


# --- losses of a difference ------------------------------------------------------------------


@rule(aten.mse_loss.default)
def mse_loss(x: Any, y: Any, reduction: int = _MEAN) -> Any:
    """(rx^2 + ry^2) sqrt(3) without a reduction; otherwise a plain float32 statistic."""
    left, right, spread = difference(x, y)
    loss = aten.mse_loss.default(left, right, reduction)
    return _loss(loss, spread.square() * math.sqrt(3), reduction)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(g: Any, x: Any, y: Any, reduction: int) -> Raw:
    """2 r_g sqrt(rx^2 + ry^2) / n, for the gradient 2 g (x - y) / n."""
    into = _Incoming.of(g, first_scaled(x, y, g), x.numel(), reduction)
    left, right, spread = difference(x, y, g)
    return Raw(into.q * (left - right), into.scale * 2, into.rms * spread * 2)


def _huber_rms(spread: Any, edge: float) -> Any:
    # d is the difference in units of the edge. The ends are sqrt(3) d^2 / 2 for small d, and d for
    # large d. Between them the formula is within 6% of the integral.
    d2 = bounded_square(spread / edge)
    return 0.866 * d2 / (1 + 0.78 * d2).sqrt()


@rule(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Any, y: Any, reduction: int = _MEAN, beta: float = 1.0) -> Any:
    """beta sqrt(3)/2 d^2 / sqrt(1 + 0.78 d^2) with d^2 = (rx^2 + ry^2) / beta^2, without a
    reduction."""
    left, right, spread = difference(x, y)
    loss = aten.smooth_l1_loss.default(left, right, reduction, beta)
    rms = _huber_rms(spread, beta) * beta if beta else spread
    return _loss(loss, rms, reduction)


@rule(aten.huber_loss.default)
def huber_loss(x: Any, y: Any, reduction: int = _MEAN, delta: float = 1.0) -> Any:
    """delta times the RMS of `smooth_l1_loss` with beta = delta."""
    left, right, spread = difference(x, y)
    loss = aten.huber_loss.default(left, right, reduction, delta)
    return _loss(loss, _huber_rms(spread, delta) * delta**2, reduction)


@rule(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default, pass_op=True)
def smooth_l1_loss_backward(
    op: Overload, g: Any, x: Any, y: Any, reduction: int, edge: float
) -> Raw:
    """r_g sqrt(d^2 / (1 + 0.97 d^2)) / n, within 7% of the integral, for the gradient g clamp(d,
    -1, 1) / n with d = (x - y) / beta. For huber_loss it is multiplied by delta."""
    into = _Incoming.of(g, first_scaled(x, y, g), x.numel(), reduction)
    left, right, spread = difference(x, y, g)
    q = op(into.q, left, right, into.reduction, edge)
    slope = constant(1.0, spread)
    if edge:
        d2 = bounded_square(spread / edge)
        slope = (d2 / (1 + 0.97 * d2)).sqrt()
    if op is aten.huber_loss_backward.default:
        slope = slope * edge
    return Raw(q, into.scale, into.rms * slope)


# --- binary cross-entropy --------------------------------------------------------------------


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: int = _MEAN) -> Any:
    """1 without a reduction, times the RMS of the weights. For probabilities of 1/2 the loss is ln
    2, and for probabilities that are spread evenly its RMS is sqrt(2)."""
    like = first_scaled(x, target, weight)
    loss = aten.binary_cross_entropy.default(wide(x), wide(target), wide(weight), reduction)
    return _loss(loss, _weighted(constant(1.0, rms_of(like)), weight, like), reduction)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    g: Any, x: Any, target: Any, weight: Any = None, reduction: int = _MEAN
) -> Raw:
    """2.8 r_g / n, times the RMS of the weights. The gradient is g / n times +-1 / p for the right
    class. The factor is 2 if all p are 1/2, and 3.4 if p is the sigmoid of a Gaussian of RMS 1; for
    p spread evenly there is no second moment."""
    like = first_scaled(g, x, target, weight)
    into = _Incoming.of(g, like, x.numel(), reduction)
    q = aten.binary_cross_entropy_backward.default(
        into.q, wide(x), wide(target), wide(weight), into.reduction
    )
    return Raw(q, into.scale, _weighted(into.rms * 2.8, weight, like))


def _sigmoid_square(rms: Any) -> Any:
    """Return E sigmoid(r z)^2, within 5% of the integral."""
    r2 = bounded_square(rms)
    return 0.25 + 0.25 * (r2 / (r2 + 7.4))


def _difference_from_target(
    x: Any, target: Any, pos_weight: Any, like: ScaledTensor
) -> tuple[Tensor, Any]:
    """Return (1 - t + w t) sigmoid(x) - w t, and its RMS.

    E (sigmoid - t)^2 = E sigmoid^2 - E t (1 - t) if x is independent of t. The means over the
    targets are read from their table.
    """
    t, logits = wide(target), wide(x)
    square = _sigmoid_square(operand(x, like).rms) - single_of((t * (1 - t)).mean())
    if pos_weight is None:
        return logits.sigmoid() - t, square.clamp_min(2.0**-12).sqrt()
    w = wide(pos_weight)
    share = 1 - t + w * t
    square = square * single_of((1 - t + w.square() * t).mean())
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
    """sqrt((ln 2)^2 + r^2 / 2) without a reduction, as for softplus, times the RMS of the
    weights."""
    like = first_scaled(x, target, weight, pos_weight)
    loss = aten.binary_cross_entropy_with_logits.default(
        wide(x), wide(target), wide(weight), wide(pos_weight), reduction
    )
    rms = softplus_rms(operand(x, like).rms)
    return _loss(loss, _weighted(_weighted(rms, weight, like), pos_weight, like), reduction)


@rule(_bce_backward)
def bce_with_logits_backward(
    g: Any, x: Any, target: Any, weight: Any, pos_weight: Any, reduction: int
) -> Raw:
    """r_g sqrt(E sigmoid(r z)^2 - mean of t (1 - t)) / n for targets t, times the RMS of the
    weights. The gradient is g (sigmoid(x) - t) / n."""
    like = first_scaled(g, x, target, weight, pos_weight)
    into = _Incoming.of(g, like, x.numel(), reduction)
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
    """Works like torch's function. Autograd writes the gradient as sigmoid(x) minus the target, and
    a rule takes the two terms for independent."""
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


@rule(
    aten._use_cudnn_ctc_loss.default,
    aten._use_cudnn_ctc_loss.Tensor,
    aten._use_miopen_ctc_loss.default,
    aten._use_miopen_ctc_loss.Tensor,
)
def use_cudnn_ctc_loss(*args: Any) -> bool:
    """Answers no, so that torch takes `_ctc_loss`, which has a rule. torch asks on CUDA alone."""
    return False


@rule(aten._ctc_loss.default, aten._ctc_loss.Tensor, pass_op=True)
def ctc_loss(op: Overload, log_probs: Any, targets: Tensor, *args: Any) -> Any:
    """A plain float32 statistic for each sequence. The forward variables are plain too."""
    return op(wide(log_probs).contiguous(), targets, *args)


@rule(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor, pass_op=True)
def ctc_loss_backward(op: Overload, g: Any, log_probs: Any, targets: Tensor, *args: Any) -> Raw:
    """r_g sqrt(0.4 / C) for the gradient g (p - posterior) over C classes. The posterior is on two
    or three classes. Steps after the end of a sequence are zero."""
    like = first_scaled(g, log_probs, *args)
    left = operand(g, like)
    rest = tuple(wide(a) for a in args)
    q = op(left.q.float(), wide(log_probs).contiguous(), targets, *rest)
    rms = left.rms * (0.4 / max(log_probs.shape[-1], 1)) ** 0.5
    return Raw(q, left.scale, rms, format=FP32)


# --- the loss with the last layer ------------------------------------------------------------


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
    """Works like torch's reference: a linear layer, then the cross-entropy, each by its own rules.
    `options` choose chunks that save memory, and do not change the result."""
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


# --- margins ---------------------------------------------------------------------------------


def _violated(rms: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Return the share of pairs that violate the margin, and its mean square over rows.

    All pairs of a row have the score of its target in common, so for large r the shares of rows are
    spread evenly.
    """
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
    """sqrt(m^2 + 0.45 r^2)^p for the margin m, without a reduction, times the RMS of the weights.
    The loss is the mean over classes j of max(0, m - x_t + x_j)^p for the target t."""
    like = first_scaled(x, weight)
    loss = aten.multi_margin_loss.default(wide(x), target, p, margin, wide(weight), reduction)
    rms = (margin**2 + 0.45 * bounded_square(operand(x, like).rms)).sqrt().pow(p)
    return _loss(loss, _weighted(rms, weight, like), reduction)


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
    """r_g times the root of ((C - 1) P + (C - 1)^2 Q) / C^3 for C classes and p = 1, times the RMS
    of the weights. P is the probability that a class violates the margin m, and Q the mean over
    rows of its square. For p = 2, P is 4 (m^2 + r^2) and Q is 4 (m^2 + 0.45 r^2)."""
    like = first_scaled(g, x, weight)
    rows, classes = _rows(x)
    into = _Incoming.of(g, like, rows, reduction)
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
    return Raw(q, into.scale, _weighted(rms, weight, like))


@rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(x: ScaledTensor, target: Tensor, reduction: int) -> tuple[Any, Tensor]:
    """C f (1 - f) sqrt(1 + 0.45 r^2) for C classes, without a reduction. f is the share of classes
    that are targets."""
    loss, is_target = aten.multilabel_margin_loss_forward.default(wide(x), target, reduction)
    pairs = _mixed(is_target) * _rows(x)[1]
    rms = pairs * (1 + 0.45 * bounded_square(rms_of(x))).sqrt()
    return _loss(loss, rms, reduction), is_target


def _mixed(is_target: Tensor) -> Tensor:
    """Return the mean over rows of f (1 - f), read from the table of targets."""
    share = is_target.float().mean(-1)
    return (share * (1 - share)).mean().clamp_min(2.0**-12)


@rule(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(
    g: Any, x: Any, target: Tensor, reduction: int, is_target: Any
) -> Raw:
    """r_g sqrt(Q f (1 - f)). Q is the mean over rows of P^2 for the share P of pairs that violate a
    margin of 1, and f the share of classes that are targets. A target's gradient sums the
    violations by all others, and the other way round."""
    like = first_scaled(g, x, is_target)
    into = _Incoming.of(g, like, _rows(x)[0], reduction)
    hits = wide(is_target)
    q = aten.multilabel_margin_loss_backward.default(into.q, wide(x), target, into.reduction, hits)
    _, together = _violated(operand(x, like).rms, 1.0)
    return Raw(q, into.scale, into.rms * (together * _mixed(hits)).sqrt())


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    """sqrt((ln 2)^2 + (rx rt)^2 / 2) for targets of RMS rt, without a reduction: the loss is a
    softplus of -t x."""
    like = first_scaled(x, target)
    loss = aten.soft_margin_loss.default(wide(x), wide(target), reduction)
    r = operand(x, like).rms * operand(target, like).rms
    return _loss(loss, softplus_rms(r), reduction)


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(g: Any, x: Any, target: Any, reduction: int) -> Raw:
    """r_g rt sqrt(1/4 (1 + r^2 / (r^2 + 7.4))) / n with r = rx rt, for the gradient -g t sigmoid(-t
    x) / n."""
    like = first_scaled(g, x, target)
    into = _Incoming.of(g, like, x.numel(), reduction)
    q = aten.soft_margin_loss_backward.default(into.q, wide(x), wide(target), into.reduction)
    t = operand(target, like).rms
    slope = _sigmoid_square(operand(x, like).rms * t).sqrt() * t
    return Raw(q, into.scale, into.rms * slope)


#: Function of torch -> the same function by operators with rules.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.nn.functional.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits,
    # torch 2.11 has no such function.
    **dict.fromkeys(
        spellings("linear_cross_entropy", places=(torch.nn.functional,)), linear_cross_entropy
    ),
}
