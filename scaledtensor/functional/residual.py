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
    "residual_weights",
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

    A gradient is a sum over the dimensions in which its tensor is repeated. A number, or a tensor
    of one element, shifts the other term and does not change its scale.

    Raises:
        UnsupportedError: `out` is given. Autograd does not take it either.
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
    """input * other at unit scale. A product of independent factors has RMS 1, a square sqrt(3).

    A gradient is a sum over the dimensions in which its tensor is repeated. A number multiplies
    without a scale, since a constant in the code is intended.
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
    """Return `input` twice, as (residual, skip), for `residual_add` to join.

    The gradient of a branch is scaled here and not at the branch's end, so that it has unit scale
    along the branch (Blake et al. 2023, section 5.2).

    Args:
        input: of any shape.
        tau: scale of the residual branch, relative to the skip connection.
    """
    residual, skip = residual_weights(tau)
    return scale_bwd(input, residual), scale_bwd(input, skip)


def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """Join the two results of `residual_split`: (tau residual + skip) / sqrt(1 + tau^2)."""
    of_residual, of_skip = residual_weights(tau)
    return scale_fwd(residual, of_residual) + scale_fwd(skip, of_skip)


def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """Run `fn` as a residual branch: split `input`, apply `fn`, add."""
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def residual_weights(tau: float) -> tuple[float, float]:
    """Return the factors of the residual branch and of the skip connection. Their squares sum to
    1."""
    skip = (1 + tau**2) ** -0.5
    return tau * skip, skip


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualRule:
    """Return a rule for tau in a transformer whose branches alternate: attention (first), then MLP.

    All attention branches contribute the same variance to the last layer, and so do all MLP
    branches. On average all branches together contribute `residual_mult`^2 times the variance of
    the embedding (u-muP, Blake et al. 2024, appendix G).

    Args:
        residual_mult: contribution of the branches, relative to the embedding.
        residual_attn_ratio: contribution of an attention branch, relative to an MLP branch.

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
