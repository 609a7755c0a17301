"""Normalisations. Their results and their inputs' gradients have unit scale already. The gradients
of weight and bias are sums over the rows to which these are applied."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from scaledtensor.functional.scaling import (
    Constraint,
    batch_factor,
    parameter_scale,
    root,
    scale_bwd,
)

__all__ = ["batch_norm", "group_norm", "layer_norm", "rms_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    constraint: Constraint = None,
) -> Tensor:
    """F.layer_norm, with the gradients of weight and bias divided by sqrt(rows).

    `constraint="exact"` gives their true gradients. No other constraint reaches them.
    """
    rows = input.numel() // max(math.prod(normalized_shape), 1)
    weight, bias = _over_rows(rows, constraint, weight, bias)
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
    constraint: Constraint = None,
) -> Tensor:
    """F.rms_norm, with the gradient of the weight divided by sqrt(rows); see `layer_norm`."""
    rows = input.numel() // max(math.prod(normalized_shape), 1)
    weight, _ = _over_rows(rows, constraint, weight, None)
    return F.rms_norm(input, normalized_shape, weight, eps)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    constraint: Constraint = None,
) -> Tensor:
    """F.group_norm of (batch, channels, ...). The rows of an element of weight and bias are batch
    times positions; see `layer_norm`."""
    weight, bias = _over_rows(_per_channel(input), constraint, weight, bias)
    return F.group_norm(input, num_groups, weight, bias, eps)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    constraint: Constraint = None,
) -> Tensor:
    """F.batch_norm of (batch, channels, ...); see `group_norm`. Running statistics are torch's."""
    weight, bias = _over_rows(_per_channel(input), constraint, weight, bias)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _per_channel(input: Tensor) -> int:
    return input.numel() // max(input.shape[1], 1)


def _over_rows(
    rows: int, constraint: str | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    free = parameter_scale(constraint, root(rows * batch_factor()))
    scaled = (None if x is None else scale_bwd(x, free) for x in (weight, bias))
    return next(scaled), next(scaled)
