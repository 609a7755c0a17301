"""Sums, products of two activations, and residual branches."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    repeats,
    root,
    scale_bwd,
    scale_fwd,
)

__all__ = [
    "ResidualRule",
    "add",
    "mul",
    "residual_add",
    "residual_apply",
    "residual_split",
    "transformer_residual_scaling_rule",
]

#: (index of a residual branch, number of branches) -> tau.
ResidualRule: TypeAlias = Callable[[int, int], float]


def add(
    input: Tensor | float,
    other: Tensor | float,
    constraint: Constraint = "to_output_scale",
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """input + alpha other at unit scale: independent terms add in quadrature.

    A gradient sums over the dimensions in which its tensor is repeated. A number, or a tensor of
    one element, shifts the other term and does not change its scale.

    Raises:
        UnsupportedError: `out`, which autograd does not take either.
    """
    if out is not None:
        raise UnsupportedError("add(out=) has no gradient; assign the result instead")
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.add(input, other, alpha=alpha)
    shift = input.numel() == 1 or other.numel() == 1 or not alpha
    left, right = repeats(input.shape, other.shape)
    output_scale, left_scale, right_scale = apply_constraint(
        constraint,
        1.0 if shift else (1 + alpha**2) ** -0.5,
        root(left),
        root(right) / (abs(alpha) or 1),
    )
    input = scale_bwd(input, left_scale)
    other = scale_bwd(other, right_scale)
    return scale_fwd(torch.add(input, other, alpha=alpha), output_scale)


def mul(
    input: Tensor | float, other: Tensor | float, constraint: Constraint = "to_output_scale"
) -> Tensor:
    """input * other at unit scale: 1 for independent factors; a square has RMS sqrt(3).

    A gradient sums over the dimensions in which its tensor is repeated. A number multiplies as it
    is: a constant that somebody wrote down is meant.
    """
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return torch.mul(input, other)
    if input is other:
        output_scale, grad_scale = apply_constraint(constraint, 3**-0.5, 0.5)
        input = scale_bwd(input, grad_scale)
        return scale_fwd(input * input, output_scale)
    left, right = repeats(input.shape, other.shape)
    output_scale, left_scale, right_scale = apply_constraint(
        constraint, 1.0, root(left), root(right)
    )
    input = scale_bwd(input, left_scale)
    other = scale_bwd(other, right_scale)
    return scale_fwd(input * other, output_scale)


def residual_split(input: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """`input` as (residual, skip), for `residual_add` to join.

    The gradient of a branch is scaled here and not where the branch ends, so that it has unit scale
    along the branch (Blake et al. 2023, section 5.2).

    Args:
        input: of any shape.
        tau: scale of the residual branch over that of the skip connection.
    """
    residual, skip = residual_weights(tau)
    return scale_bwd(input, residual), scale_bwd(input, skip)


def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """(tau residual + skip) / sqrt(1 + tau^2), for what `residual_split` has split."""
    of_residual, of_skip = residual_weights(tau)
    return scale_fwd(residual, of_residual) + scale_fwd(skip, of_skip)


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """A residual layer around `fn`: split, apply, add."""
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def residual_weights(tau: float) -> tuple[float, float]:
    """Factors of the residual branch and of the skip connection, whose squares add up to 1."""
    skip = (1 + tau**2) ** -0.5
    return tau * skip, skip


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualRule:
    """tau of each branch of a transformer that alternates attention (first) and MLP.

    Every attention branch contributes the same variance to the last layer, every MLP branch the
    same, and all of them together `residual_mult`^2 times that of the embedding on average (u-muP,
    Blake et al. 2024, appendix G).

    Args:
        residual_mult: contribution of the branches over that of the embedding.
        residual_attn_ratio: contribution of an attention branch over that of an MLP branch.

    Returns:
        fn(index, layers) -> tau, for branch `index` of `layers`.
    """
    mlp = residual_mult * (2 / (1 + residual_attn_ratio**2)) ** 0.5
    attention = residual_attn_ratio * mlp

    def tau(index: int, layers: int) -> float:
        own: Any = mlp if index % 2 else attention
        before = layers / 2 + (index + 1) // 2 * attention**2 + index // 2 * mlp**2
        result: float = own / before**0.5
        return result

    return tau
