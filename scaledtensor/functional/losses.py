"""Losses. The values are torch's. The gradients are the gradients of a sum, scaled so that every
element of `input` gets a gradient at unit scale. The learning rate takes the place of the divisor
of "mean" (Blake et al. 2023, table A.2)."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import OptionError, ShapeError
from scaledtensor.functional.scaling import (
    Constraint,
    cached_constants,
    gaussian_rms,
    parameter_scale,
    positive,
    scale,
    scale_bwd,
)

__all__ = [
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    mult: float = 1.0,
    constraint: Constraint = None,
) -> Tensor:
    """Cross-entropy of the logits mult * input, with a gradient at unit scale.

    softmax - onehot has RMS sqrt(V - 1) / V at uniform probabilities over V classes. Smoothed
    targets multiply this RMS by 1 - label_smoothing. Ignored targets have no gradient. The gradient
    of the other targets is larger instead, so that the RMS over all elements stays 1. Class weights
    are accounted for in the same way.

    Args:
        input: (V,), (N, V) or (N, V, ...).
        target: indices of shape (), (N,) or (N, ...), or probabilities of `input`'s shape.
        weight: (V,), a weight for each class.
        ignore_index: value of targets that count neither in the mean nor in the batch size.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1).
        mult: sharpness of the logits. The gradient does not have this factor.
        constraint: "exact" gives the true gradient.

    Raises:
        ShapeError: `input` has no dimension of classes.
        OptionError: `size_average` or `reduce`, torch's former names of `reduction`.
    """
    _refuse_former(size_average, reduce)
    if input.dim() == 0:
        raise ShapeError("cross_entropy takes logits of shape (V,), (N, V) or (N, V, ...); got ()")
    classes = input.shape[0 if input.dim() == 1 else 1]
    options: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    if constraint == "exact":
        return F.cross_entropy(input * mult, target, reduction=reduction, **options)
    at_once = _onehot(classes) / max(1 - label_smoothing, 1e-3)
    input = scale(input, mult, parameter_scale(constraint, at_once))
    loss = F.cross_entropy(input, target, reduction=reduction, **options)
    if target.is_floating_point():
        return _as_sum(loss, reduction, target.numel() // max(classes, 1))
    return _as_counted_sum(loss, reduction, target, weight, ignore_index)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    constraint: Constraint = None,
) -> Tensor:
    """Negative log-likelihood of log-probabilities, with a gradient at unit scale: -1 in one of V
    classes has RMS 1 / sqrt(V). See `cross_entropy` for arguments and errors."""
    _refuse_former(size_average, reduce)
    if input.dim() == 0:
        raise ShapeError("nll_loss takes input of shape (V,), (N, V) or (N, V, ...); got ()")
    classes = input.shape[0 if input.dim() == 1 else 1]
    input = scale_bwd(input, parameter_scale(constraint, max(classes, 1) ** 0.5))
    loss = F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    if constraint == "exact":
        return loss
    return _as_counted_sum(loss, reduction, target, weight, ignore_index)


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    constraint: Constraint = None,
) -> Tensor:
    """Squared error, with gradients at unit scale: 2 (x - y) has RMS sqrt(8) for two independent
    tensors of unit variance. `constraint="exact"` gives the true gradients.

    Raises:
        ShapeError: `input` and `target` have different shapes.
        OptionError: `size_average` or `reduce`.
    """
    _refuse_former(size_average, reduce)
    input, target = _both(input, target, "mse_loss", constraint, 8**-0.5)
    loss = F.mse_loss(input, target, reduction=reduction)
    return _as_sum(loss, _unless_exact(reduction, constraint), input.numel())


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    constraint: Constraint = None,
) -> Tensor:
    """Absolute error. Its gradient is a sign, which has RMS 1. Otherwise same as `mse_loss`."""
    _refuse_former(size_average, reduce)
    input, target = _both(input, target, "l1_loss", constraint, 1.0)
    loss = F.l1_loss(input, target, reduction=reduction)
    return _as_sum(loss, _unless_exact(reduction, constraint), input.numel())


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
    constraint: Constraint = None,
) -> Tensor:
    """Huber's error over beta. The gradient is clamp((x - y) / beta, -1, 1). A quadrature computes
    its RMS for x - y of variance 2. Otherwise same as `mse_loss`."""
    _refuse_former(size_average, reduce)
    (rms,) = _clamped(float(beta))
    input, target = _both(input, target, "smooth_l1_loss", constraint, 1 / rms)
    loss = F.smooth_l1_loss(input, target, reduction=reduction, beta=beta)
    return _as_sum(loss, _unless_exact(reduction, constraint), input.numel())


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
    mult: float = 1.0,
    constraint: Constraint = None,
) -> Tensor:
    """Binary cross-entropy of the logits mult * input, with a gradient at unit scale.

    The gradient is sigmoid(z) - y with y = 0 or 1. If y is independent of the logits, it has the
    RMS of sigmoid(z), which is symmetric about 1/2; a quadrature computes it. `weight` and
    `pos_weight` multiply the gradient, and are assumed to have RMS 1.

    Raises:
        ShapeError: `input` and `target` have different shapes.
        OptionError: `size_average` or `reduce`.
    """
    _refuse_former(size_average, reduce)
    _check_shapes("binary_cross_entropy_with_logits", input, target)
    (rms,) = _sigmoid_rms(float(mult))
    input = scale(input, mult, parameter_scale(constraint, 1 / rms, mult))
    loss = F.binary_cross_entropy_with_logits(
        input, target, weight, reduction=reduction, pos_weight=pos_weight
    )
    return _as_sum(loss, _unless_exact(reduction, constraint), input.numel())


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
    constraint: Constraint = None,
) -> Tensor:
    """Kullback-Leibler divergence from log-probabilities, with a gradient at unit scale.

    The gradient is -target. Probabilities over the V classes of the last dimension have second
    moment e / V^2 (log-normal) if their logits have unit variance.

    Raises:
        ShapeError: `input` and `target` have different shapes.
        OptionError: `size_average` or `reduce`.
    """
    _refuse_former(size_average, reduce)
    _check_shapes("kl_div", input, target)
    classes = input.shape[-1] if input.dim() else 1
    input = scale_bwd(input, parameter_scale(constraint, max(classes, 1) * math.exp(-0.5)))
    loss = F.kl_div(input, target, reduction=reduction, log_target=log_target)
    over = input.shape[0] if reduction == "batchmean" else input.numel()
    return _as_sum(loss, _unless_exact(reduction, constraint), over)


# --- gradients of sums -----------------------------------------------------------------------


def _as_sum(loss: Tensor, reduction: str, count: int) -> Tensor:
    """Return `loss`, a mean over `count` terms, with the gradient of their sum."""
    if reduction not in ("mean", "batchmean"):
        return loss
    # A copy, since autograd refuses writes into the original, such as `loss += penalty`.
    return scale_bwd(loss, max(count, 1)).clone()


def _as_counted_sum(
    loss: Tensor, reduction: str, target: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """`_as_sum` for targets that are ignored or weighted. A mean divides by the sum of the weights
    w. Over all N rows the gradient of the sum has the RMS sqrt(sum w^2 / N)."""
    if reduction == "none":
        return loss
    counted = target != ignore_index
    weights = counted.to(loss.dtype if loss.dtype == torch.float64 else torch.float32)
    if weight is not None:
        weights = weights * weight.detach()[target.clamp(0, weight.shape[0] - 1)]
    energy = weights.square().sum().clamp_min(1e-30)
    factor = (max(target.numel(), 1) / energy).sqrt()
    if reduction == "mean":
        factor = factor * weights.sum()
    # The factor depends on data. The value is the value of `loss`, and the gradient is the gradient
    # of `loss * factor`.
    wide = loss.to(factor.dtype)
    scaled = wide * factor
    return (wide.detach() + (scaled - scaled.detach())).to(loss.dtype)


def _unless_exact(reduction: str, constraint: str | None) -> str:
    return "none" if constraint == "exact" else reduction


def _both(
    input: Tensor, target: Tensor, name: str, constraint: str | None, free: float
) -> tuple[Tensor, Tensor]:
    _check_shapes(name, input, target)
    c = parameter_scale(constraint, free)
    return scale_bwd(input, c), scale_bwd(target, c)


def _check_shapes(name: str, input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        raise ShapeError(
            f"{name} takes input and target of one shape; got {tuple(input.shape)} and "
            f"{tuple(target.shape)}. Expand one of them first"
        )


def _refuse_former(size_average: bool | None, reduce: bool | None) -> None:
    if size_average is not None or reduce is not None:
        raise OptionError(
            "size_average and reduce are torch's former names; say reduction='mean', 'sum' or "
            "'none'"
        )


def _onehot(classes: int) -> float:
    """1 / RMS of softmax - onehot at uniform probabilities."""
    inverse: float = classes / (classes - 1) ** 0.5 if classes > 1 else 1.0
    return inverse


@cached_constants
def _clamped(beta: float) -> tuple[float, ...]:
    if beta == 0:
        return (1.0,)
    return (gaussian_rms(lambda z: np.clip(2**0.5 * z / beta, -1, 1)),)


@cached_constants
def _sigmoid_rms(mult: float) -> tuple[float, ...]:
    positive(mult, "mult")
    return (gaussian_rms(lambda z: (1 + np.tanh(mult * z / 2)) / 2),)
