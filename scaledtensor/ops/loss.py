"""Losses. They leave as plain float32; their gradients enter again with the loss's scale."""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import first_scaled, operand, plain, value
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.tensor import ScaledTensor

aten = torch.ops.aten

_MEAN = 1  # at::Reduction::Mean


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, pass_op=True)
def nll_loss(op: Overload, x: ScaledTensor, target: Tensor, weight: Any, *args: Any) -> Any:
    """A statistic: plain float32."""
    w = plain(weight)
    return op(value(x).float(), target, w, *args)


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
    """One entry of g / B in each row of V: r = r_g / (B sqrt V), B the total weight of the tokens
    that count (those not ignored)."""
    left = operand(g, x)
    w = plain(weight)
    classes = x.shape[1] if x.dim() > 1 else x.shape[0]
    rms = left.rms / math.sqrt(max(classes, 1))
    scale = left.scale
    unit = torch.ones_like(total_weight)
    if reduction == _MEAN:
        # B moves into the scale, so that the elements are near 1 however many tokens there are.
        rms, scale = rms / total_weight, scale / total_weight
    q = op(left.q.float(), value(x).float(), target, w, reduction, ignore_index, unit)
    return Raw(q, scale, rms, format=FP32)


@rule(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, pass_op=True)
def elementwise_loss(op: Overload, x: Any, y: Any, reduction: int = _MEAN, *args: Any) -> Any:
    """Reduced: a statistic in plain float32. Unreduced: (rx^2 + ry^2) sqrt(3)."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    left, right = a.q.float() * a.scale, b.q.float() * b.scale
    loss = op(left, right, reduction, *args)
    if reduction:
        return loss
    rms = (a.rms.square() + b.rms.square()) * math.sqrt(3)
    return Raw(loss, None, rms, format=FP32, nonnegative=True)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(g: Any, x: Any, y: Any, reduction: int) -> Raw:
    """2 g (x - y) / n: r = 2 r_g sqrt(rx^2 + ry^2) / n."""
    like = first_scaled(x, y, g)
    c, a, b = (operand(t, like) for t in (g, x, y))
    n = max(x.numel(), 1) if reduction == _MEAN else 1
    spread = (a.rms.square() + b.rms.square()).sqrt()
    difference = a.q.float() * a.scale - b.q.float() * b.scale
    return Raw(c.q * difference, c.scale * (2 / n), c.rms * spread * (2 / n))
