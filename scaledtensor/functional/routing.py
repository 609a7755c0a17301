"""Mixtures of experts: which experts, at what weight, and their products."""

import math
from statistics import NormalDist

import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import ShapeError
from scaledtensor.functional.batch import batch_factor
from scaledtensor.functional.constraints import Constraint, apply_constraint, parameter_scale
from scaledtensor.functional.laws import kept, root
from scaledtensor.functional.scaling import scale, scale_bwd, scale_fwd

__all__ = ["grouped_linear", "moe_route"]


def moe_route(
    logits: Tensor,
    top_k: int,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> tuple[Tensor, Tensor]:
    """The experts of each token and the weights to combine their outputs with.

    Weights are softmax(mult logits) over the chosen experts, at a scale under which
    sum_k weight_k output_k has unit variance for independent outputs that have it: over
    sqrt(sum_k p_k^2), where p is the softmax of the expected order statistics of E Gaussians, by
    Blom's formula (1958).

    Args:
        logits: (..., experts), of unit variance.
        top_k: experts a token, from 1 to `experts`.
        mult: sharpness of the logits.
        constraint: of the scale of the weights and that of the gradient of the logits.

    Returns:
        weights and indices, each (..., top_k), the largest weight first.

    Raises:
        ShapeError: `top_k` is outside what it may be.
    """
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ShapeError(f"top_k is from 1 to the {experts} experts; got {top_k}")
    output_scale, grad_scale = apply_constraint(
        constraint, *_route_scales(int(experts), int(top_k), float(mult))
    )
    chosen, indices = scale(logits, mult, mult * grad_scale).topk(top_k, dim=-1)
    return scale_fwd(F.softmax(chosen, dim=-1), output_scale), indices


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    constraint: Constraint = "to_output_scale",
) -> Tensor:
    """The linear layers of experts, each on its own rows, at unit scale.

    As `linear` within each group; the gradient of a weight sums over rows / experts terms, those of
    a balanced routing, so that a favoured expert's gradient stays the larger one.

    Args:
        input: (rows, fan_in), the rows of the first expert first.
        weight: (experts, fan_in, fan_out), of unit variance.
        offsets: (experts,) int32, where the rows of each expert end.
        constraint: of the output's scale and that of the input's gradient.

    Raises:
        ShapeError: the shapes are not these.
    """
    if input.dim() != 2 or weight.dim() != 3 or offsets.shape != weight.shape[:1]:
        raise ShapeError(
            "grouped_linear takes input (rows, fan_in), weight (experts, fan_in, fan_out) and "
            f"offsets (experts,); got {tuple(input.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    experts, fan_in, fan_out = weight.shape
    output_scale, input_scale = apply_constraint(constraint, root(fan_in), root(fan_out))
    over_rows = root(input.shape[0] / max(experts, 1) * batch_factor())
    input = scale_bwd(input, input_scale)
    weight = scale_bwd(weight, parameter_scale(constraint, over_rows, output_scale))
    return scale_fwd(F.grouped_mm(input, weight, offs=offsets), output_scale)


@kept
def _route_scales(experts: int, top_k: int, mult: float) -> tuple[float, ...]:
    normal = NormalDist()
    z = [normal.inv_cdf((experts - i - 0.375) / (experts + 0.25)) for i in range(top_k)]
    raw = [math.exp(mult * (x - z[0])) for x in z]
    p = [x / sum(raw) for x in raw]
    energy = sum(x * x for x in p)
    # d logit_j = p_j (g_j - sum p g), for unit g, and zero for experts that were not chosen.
    moved = sum(x * x * (1 - 2 * x + energy) for x in p) / experts
    # One expert chosen alone has weight 1, whatever its logit: no gradient.
    return energy**-0.5, (1.0 if moved < 1e-12 else moved**-0.5 / mult)
