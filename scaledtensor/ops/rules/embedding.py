"""Sums, means and maxima over bags of embeddings."""

from typing import Any

from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import elements, first_scaled, operand, side, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.reduction import extreme_rms
from scaledtensor.ops.rules.sparse import made
from scaledtensor.scales.powers import product_of
from scaledtensor.tensors.tensor import ScaledTensor


# Embedding tables.
@rule(aten.embedding.default)
def embedding(
    weight: ScaledTensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Raw:
    """Rows of the table: r. Here a parameter becomes an activation, in the recipe's format."""
    fmt = weight.recipe.activation if weight.recipe is not None else None
    rows = aten.embedding.default(elements(weight), indices)
    return Raw(rows, weight.scale, weight.rms, settled=True, format=fmt)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(
    g: ScaledTensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Raw:
    """B tokens over V rows: r sqrt(max(1, B / V)). Summed in float32."""
    left = side(g, g)
    q = aten.embedding_dense_backward.default(
        left.q.float(), indices, num_weights, padding_idx, scale_grad_by_freq
    )
    hits = max(1.0, indices.numel() / max(num_weights, 1))
    return Raw(q, left.scale, left.rms * hits**0.5, format=FP32)


@rule(aten.embedding_renorm.default)
def embedding_renorm(
    weight: ScaledTensor, indices: Tensor, max_norm: float, norm_type: float
) -> Raw:
    """Rows in use come down to a norm; the table's RMS is that of all rows."""
    table = value(weight).float()
    return Raw(aten.embedding_renorm.default(table, indices, max_norm, norm_type), None, weight.rms)


_SUM, _MEAN, _MAX = 0, 1, 2


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
    """Over bags of n rows on average: r sqrt(n), r / sqrt(n) for the mean, r sqrt(2 ln n) for the
    maximum; times the RMS of the weights of samples. What else it returns is plain."""
    like = first_scaled(weight, per_sample_weights)
    table = operand(weight, like)
    weights, scale, rms = None, table.scale, table.rms
    if per_sample_weights is not None:
        side = operand(per_sample_weights, like)
        weights, scale, rms = side.q.float(), scale * side.scale, rms * side.rms
    q, *rest = op(
        table.q.float(),
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        False,
        weights,
        include_last_offset,
        padding_idx,
    )
    n = max(indices.numel() // max(q.shape[0], 1), 1)
    moved = {_SUM: rms * n**0.5, _MEAN: rms * n**-0.5, _MAX: extreme_rms(rms, n)}
    fmt = None
    if isinstance(weight, ScaledTensor) and weight.recipe is not None:
        fmt = weight.recipe.activation
    return (Raw(q, scale, moved[mode], format=fmt), *rest)


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
    """B rows over V of the table: r sqrt(max(1, B / V)), divided by n for the mean. A sparse one
    has a row for each that a bag takes: r, divided by n for the mean."""
    like = first_scaled(g, per_sample_weights)
    left = operand(g, like)
    scale, rms, weights = left.scale, left.rms, None
    if per_sample_weights is not None:
        side = operand(per_sample_weights, like)
        weights, scale, rms = side.q.float(), scale * side.scale, rms * side.rms
    q = aten._embedding_bag_backward.default(
        left.q.float(),
        indices,
        offsets,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        sparse,
        weights,
        padding_idx,
    )
    bags = max(left.q.shape[0], 1)
    n = max(indices.numel() / bags, 1.0)
    if sparse:
        return made(q, scale, rms / n if mode == _MEAN else rms, like)
    rows = bags if mode == _MAX else indices.numel()
    hits = max(1.0, rows / max(num_weights, 1))
    return Raw(q, scale, rms * (hits**0.5 / (n if mode == _MEAN else 1.0)), format=FP32)


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
    """A dot product of rows of d: r_g r sqrt(d)."""
    like = first_scaled(g, weight)
    left, table = operand(g, like), operand(weight, like)
    q = aten._embedding_bag_per_sample_weights_backward.default(
        left.q.float(), table.q.float(), indices, offsets, offset2bag, mode, padding_idx
    )
    rms = left.rms * table.rms * max(weight.shape[-1], 1) ** 0.5
    return Raw(q, product_of(left.scale, table.scale), rms, format=FP32)
