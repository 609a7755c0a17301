"""Embedding tables: their rows, and sums, means and maxima over bags of rows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import FP32, Format
from scaledtensor.ops.algebra import Operand, elements, first_scaled, operand, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.reduction import extreme_rms
from scaledtensor.ops.rules.sparse import made
from scaledtensor.scales.powers import product_of
from scaledtensor.scales.singles import amounts_of
from scaledtensor.tensors.tensor import ScaledTensor

# --- tables ----------------------------------------------------------------------------------


@rule(aten.embedding.default)
def embedding(
    weight: ScaledTensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Raw:
    """r. The rows are activations, so they have the activation format of the recipe."""
    rows = aten.embedding.default(elements(weight), indices)
    held = amounts_of(weight)
    return Raw(rows, *held, settled=True, format=_activation_format(weight))


@rule(aten.embedding_dense_backward.default)
def embedding_backward(
    g: ScaledTensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Raw:
    """r_g sqrt(max(1, B / V)) for B tokens and V rows. The sums run in float32."""
    left = operand(g, g)
    q = aten.embedding_dense_backward.default(
        left.q.float(), indices, num_weights, padding_idx, scale_grad_by_freq
    )
    return Raw(q, left.scale, left.rms * _hits(indices.numel(), num_weights) ** 0.5, format=FP32)


def _hits(tokens: int, rows: int) -> float:
    """Return max(1, B / V). For a symbolic size, Python's `max` would fix which one is larger."""
    hits: float = torch.sym_max(1.0, tokens / max(rows, 1))
    return hits


@rule(aten.embedding_renorm.default)
def embedding_renorm(
    weight: ScaledTensor, indices: Tensor, max_norm: float, norm_type: float
) -> Raw:
    """r: the operator shortens a few rows to a norm, and the RMS is over all rows."""
    table = value(weight).float()
    return Raw(aten.embedding_renorm.default(table, indices, max_norm, norm_type), None, weight.rms)


def _activation_format(weight: Any) -> Format | None:
    recipe = weight.recipe if isinstance(weight, ScaledTensor) else None
    return None if recipe is None else recipe.activation


# --- bags ------------------------------------------------------------------------------------

_SUM, _MEAN, _MAX = 0, 1, 2  # torch's numbers of the modes


class _Weighted(NamedTuple):
    """A table or a gradient, times the weights of its samples if there are any."""

    q: Tensor
    weights: Tensor | None
    scale: Any
    rms: Any

    @staticmethod
    def of(x: Operand, weights: Any, like: ScaledTensor) -> "_Weighted":
        if weights is None:
            return _Weighted(x.q.float(), None, x.scale, x.rms)
        w = operand(weights, like)
        return _Weighted(x.q.float(), w.q.float(), x.scale * w.scale, x.rms * w.rms)


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, pass_op=True)
def embedding_bag(
    op: Overload,
    weight: Any,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """r sqrt(n) for sums over bags of n rows on average, r / sqrt(n) for means, r sqrt(2 ln n) for
    maxima; times the RMS of the samples' weights. The other results are plain."""
    like = first_scaled(weight, per_sample_weights)
    table = _Weighted.of(operand(weight, like), per_sample_weights, like)
    q, *rest = op(
        table.q,
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        False,
        table.weights,
        include_last_offset,
        padding_idx,
    )
    n = max(indices.numel() // max(q.shape[0], 1), 1)
    rms = table.rms
    moved = {_SUM: rms * n**0.5, _MEAN: rms * n**-0.5, _MAX: extreme_rms(rms, n)}
    return Raw(q, table.scale, moved[mode], format=_activation_format(weight)), *rest


@rule(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    g: Any,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    """r_g sqrt(max(1, B / V)) for B rows in bags and V rows of the table; divided by n for means
    over n rows. A sparse gradient has one row for each row in a bag, so r_g, and r_g / n for
    means."""
    like = first_scaled(g, per_sample_weights)
    left = _Weighted.of(operand(g, like), per_sample_weights, like)
    q = aten._embedding_bag_backward.default(
        left.q,
        indices,
        offsets,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        sparse,
        left.weights,
        padding_idx,
    )
    bags = max(left.q.shape[0], 1)
    n = max(indices.numel() / bags, 1.0)
    if sparse:
        return made(q, left.scale, left.rms / n if mode == _MEAN else left.rms, like)
    rows = bags if mode == _MAX else indices.numel()
    factor = _hits(rows, num_weights) ** 0.5 / (n if mode == _MEAN else 1.0)
    return Raw(q, left.scale, left.rms * factor, format=FP32)


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(
    g: Any,
    weight: Any,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Raw:
    """r_g r sqrt(d): a dot product of rows of d elements."""
    like = first_scaled(g, weight)
    left, table = operand(g, like), operand(weight, like)
    q = aten._embedding_bag_per_sample_weights_backward.default(
        left.q.float(), table.q.float(), indices, offsets, offset2bag, mode, padding_idx
    )
    rms = left.rms * table.rms * max(weight.shape[-1], 1) ** 0.5
    return Raw(q, product_of(left.scale, table.scale), rms, format=FP32)
