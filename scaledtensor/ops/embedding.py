"""Embedding tables."""

from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import elements, side, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.tensor import ScaledTensor


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
