"""Losses that ask for a margin between scores.

A pair of scores of RMS r violates a margin m with P(m + sqrt(2) r z > 0) = Phi(t), t = m / (r
sqrt 2), here (1 + t / sqrt(t^2 + pi / 2)) / 2: within 2% of Phi.
"""

import math
from typing import Any

from torch import Tensor

from scaledtensor.ops.algebra import bounded_square, first_scaled, operand
from scaledtensor.ops.loss import incoming, unreduced, wide
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.tensor import ScaledTensor


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
