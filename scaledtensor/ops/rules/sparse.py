"""Sparse tensors: products with a dense operand, and tensors whose stored values are scaled.

Let A have N rows and E stored elements of RMS ra = sqrt(sum a^2 / E), however many to a row, and h
independent elements of zero mean and RMS rh. A row's sum y_i = sum_j a_ij h_j has E[y_i^2] =
rh^2 sum_j a_ij^2, so that over the rows

    mean E[y^2] = rh^2 / N sum_ij a_ij^2        r = ra rh sqrt(E / N)

whatever the degrees are, and however the elements depend on them (1 / degree, as of a GCN): the
dense product's ra rb sqrt(K) for the E / N terms that a row has on average (Blake et al. 2023,
section 4.1). E, N are metadata and read nothing.

That holds for one product. A graph network multiplies by the same A at each layer, which makes
neighbours alike, and of alike terms a row-normalised A keeps the RMS instead of dividing it by
sqrt(E / N): in ten layers a factor of thousands. So the RMS that is carried on is the one that the
result is seen to have, which for independent elements is the formula's, and the formula's where it
has none. The rules below are homogeneous in both operands, so this is equivariant to the bit.

The sparse operand may be plain (COO, CSR, CSC), as an adjacency is, or a `SparseTensor` (COO). Both
are multiplied in float32: no hardware multiplies sparse FP8 operands, and a recipe casts none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import BF16, FP32, from_dtype
from scaledtensor.ops.algebra import elements, first_scaled, operand, rms_seen
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, dispatch, rule
from scaledtensor.ops.results import store
from scaledtensor.ops.rules.reduction import growth
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import nearest_power_of_two, quadrature, settle, settle_in_place
from scaledtensor.scales.singles import put
from scaledtensor.tensors import verbs
from scaledtensor.tensors.memo import after_write
from scaledtensor.tensors.sparse import TABLE, SparseTensor, coo, is_sparse
from scaledtensor.tensors.steps import watch
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS", "made", "product", "wrapped"]


F = Callable[..., Any]


def takes_sparse(*ops: Overload) -> Callable[[F], F]:
    """Register what operators do that meet a SparseTensor."""

    def register(function: F) -> F:
        TABLE.update(dict.fromkeys(ops, function))
        return function

    return register


def _both(*ops: Overload) -> Callable[[F], F]:
    """Register a rule for operators that a dense ScaledTensor meets as well."""

    def register(function: F) -> F:
        TABLE.update({op: partial(_by_rule, op) for op in ops})
        return rule(*ops)(function)

    return register


def _by_rule(op: Overload, *args: Any, **kwargs: Any) -> Any:
    return dispatch(op, args, kwargs)


# --- products --------------------------------------------------------------------------------


def product(matmul: F, a: Any, b: Any) -> Raw:
    """`matmul(a, b)`, one of them sparse and one dense: r = ra rb sqrt(E / N)."""
    if is_sparse(a) and is_sparse(b):
        of_two(a, b)
    like = first_scaled(a, b)
    x, y = _operand(a, like), _operand(b, like)
    q = matmul(x.q, y.q)
    matrix, summed = (a, -1) if is_sparse(a) else (b, -2)
    shape = matrix.shape
    terms = _count(matrix) * shape[summed] / max(shape.numel(), 1)
    scale = x.scale * y.scale
    expected = x.rms * y.rms * terms**0.5
    return Raw(q, scale, rms_seen(q, expected / scale) * scale)


@takes_sparse(aten._sparse_sparse_matmul.default)
def of_two(a: Tensor, b: Tensor) -> Tensor:
    """A product of two sparse tensors: UnsupportedError."""
    raise UnsupportedError(
        "a product of two sparse tensors of which one is scaled: multiply their plain values "
        "(x.dequantize()), or A @ (B @ h) in place of (A @ B) @ h"
    )


def _count(x: Tensor) -> int:
    """How many elements are stored."""
    return (x.qdata if isinstance(x, SparseTensor) else x)._nnz()


def _operand(x: Any, like: ScaledTensor) -> Any:
    """In float32; a plain sparse tensor under the power of two next to the RMS of its values."""
    if not is_sparse(x) or isinstance(x, SparseTensor):
        side = operand(x, like)
        return side._replace(q=_wide(side.q))
    q = _wide(x)
    rms = measured_rms(_stored(q))
    scale = nearest_power_of_two(rms)
    return operand(rms, like)._replace(q=_divided(q, scale), scale=scale, rms=rms)


def _stored(x: Tensor) -> Tensor:
    return x._values() if x.layout == torch.sparse_coo else x.values()


def _wide(q: Tensor) -> Tensor:
    return q.to(torch.float32)


def _divided(q: Tensor, scale: Tensor) -> Tensor:
    if q.layout == torch.sparse_coo:
        return coo(q, q._values() / scale)
    by_row = q.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (q.crow_indices(), q.col_indices()) if by_row else (q.ccol_indices(), q.row_indices())
    return torch.sparse_compressed_tensor(
        *places, q.values() / scale, q.shape, layout=q.layout, check_invariants=False
    )


for _op in (
    *(aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default),
    *(aten.baddbmm.default, aten.addmv.default, aten._sparse_addmm.default),
):
    TABLE[_op] = partial(_by_rule, _op)


@rule(aten._sparse_mm_reduce_impl.default)
def sparse_mm_reduce(a: Tensor, b: Any, reduce: str) -> Any:
    """As a product, with the sum, mean or extreme of a row's terms: measured."""
    y = operand(b, b)
    q, chosen = aten._sparse_mm_reduce_impl.default(_wide(a), _wide(y.q), reduce)
    return Raw(q, y.scale, rms_seen(q, y.rms / y.scale) * y.scale), chosen


# --- made, taken apart -----------------------------------------------------------------------


def made(
    q: Tensor, held: Tensor, rms: Tensor, like: ScaledTensor, nonnegative: bool = False
) -> SparseTensor:
    """Plain COO elements under a scale, as a SparseTensor under that of their RMS."""
    scale, ratio = settle(rms, held)
    fmt = FP32 if q.dtype == torch.float32 else from_dtype(q.dtype)
    held_q = coo(q, store(q._values() * ratio, fmt))
    return SparseTensor.make(held_q, scale, rms, fmt, like.dtype, like.recipe, nonnegative)


def _around(x: SparseTensor, q: Tensor) -> SparseTensor:
    """Other places, or other memory, of the same values."""
    return x.like(q, x.scale.clone(), x.rms.clone())


def wrapped(x: Tensor, like: ScaledTensor) -> SparseTensor:
    """A plain sparse tensor under the power of two next to the RMS of its values."""
    q = _wide(x if x.layout == torch.sparse_coo else x.to_sparse())
    rms = measured_rms(q._values())
    one = torch.ones_like(rms)
    held = made(q, one, rms, like)
    return SparseTensor.make(held.qdata, held.scale, rms, held.format, x.dtype, like.recipe)


def values(x: SparseTensor, *_: Any) -> ScaledTensor:
    """The stored values as a dense ScaledTensor, a view: r."""
    context = x.__tensor_flatten__()[1]
    return ScaledTensor.make(x.qdata._values(), x.scale, x.rms, *context)


@takes_sparse(aten._values.default)
def _values(x: SparseTensor) -> ScaledTensor:
    """The stored values as a dense ScaledTensor, a view: r."""
    return values(x)


@takes_sparse(aten.values.default)
def _values_of_coalesced(x: SparseTensor) -> ScaledTensor:
    """The same, where no place repeats."""
    x.qdata.values()  # torch's own error where places repeat
    return values(x)


@_both(
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
)
def sparse_coo_tensor(
    sparse_dim: int,
    dense_dim: int,
    size: Any,
    indices: Tensor,
    values: Any,
    *,
    is_coalesced: bool | None = None,
    **layout: Any,
) -> SparseTensor:
    """The values at their places: r of the values. Shares their memory and scale, as torch does."""
    if not isinstance(values, ScaledTensor):
        raise UnsupportedError("places are plain integers; the values may be a ScaledTensor")
    fmt = values.format if values.qdata.itemsize > 1 else BF16
    held = values.qdata if fmt == values.format else store(elements(values), fmt)
    q = torch.sparse_coo_tensor(
        indices, held, tuple(size), is_coalesced=is_coalesced, check_invariants=False
    )
    context = values.__tensor_flatten__()[1][1:]
    return SparseTensor.make(q, values.scale, values.rms, fmt, *context)


@_both(aten._to_sparse.default, aten._to_sparse.sparse_dim)
def to_sparse(x: ScaledTensor, sparse_dim: int | None = None, **layout: Any) -> Any:
    """What is not zero, in the layout torch.sparse_coo: r sqrt(n / nnz)."""
    if layout.get("layout") not in (None, torch.sparse_coo):
        raise UnsupportedError(
            f"a sparse ScaledTensor has the layout torch.sparse_coo; got {layout['layout']}. "
            "x.dequantize() goes into any"
        )
    if isinstance(x, SparseTensor):
        return _around(x, x.qdata)
    q = elements(x)
    held = q.to_sparse(x.dim() if sparse_dim is None else sparse_dim)
    rms = x.rms * (x.numel() / max(held._values().numel(), 1)) ** 0.5
    return made(held, x.scale, rms, x, x.nonnegative)


@takes_sparse(aten._to_dense.default)
def to_dense(x: SparseTensor, *_: Any, **__: Any) -> ScaledTensor:
    """Zeros between the values: the scale stays, r sqrt(nnz / n)."""
    whole = x.qdata.to_dense()
    share = (x.qdata._values().numel() / max(whole.numel(), 1)) ** 0.5
    return ScaledTensor.make(
        whole, x.scale.clone(), x.rms * min(share, 1.0), *x.__tensor_flatten__()[1]
    )


@_both(aten.sparse_mask.default)
def sparse_mask(x: Any, mask: Any, *_: Any) -> Any:
    """The elements at the places of another: r."""
    if not isinstance(x, ScaledTensor):
        return aten.sparse_mask.default(x, mask.qdata)
    places = mask.qdata if isinstance(mask, SparseTensor) else mask
    if places.layout != torch.sparse_coo:
        raise UnsupportedError(
            f"a sparse ScaledTensor has the layout torch.sparse_coo; got a mask in {places.layout}:"
            " take mask.to_sparse_coo()"
        )
    q = elements(x).sparse_mask(_as(places, elements(x).dtype))
    context = x.__tensor_flatten__()[1][1:]
    return SparseTensor.make(q, x.scale.clone(), x.rms.clone(), from_dtype(q.dtype), *context)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


@takes_sparse(aten._sparse_mask_projection.default)
def sparse_mask_projection(x: SparseTensor, mask: Any, *args: Any) -> SparseTensor:
    """As sparse_mask: r."""
    places = mask.qdata if isinstance(mask, SparseTensor) else mask
    op = aten._sparse_mask_projection.default
    return _around(x, op(x.qdata, _as(places, x.qdata.dtype), *args))


@takes_sparse(aten._coalesce.default)
def coalesce(x: SparseTensor) -> SparseTensor:
    """n elements at a place on average add up: r sqrt(n)."""
    q = _wide(x.qdata).coalesce()
    n = x.qdata._nnz() / max(q._nnz(), 1)
    rms = x.rms * growth(n, x.nonnegative and n > 1)
    return made(q, x.scale, rms, x, x.nonnegative)


# --- as they are -----------------------------------------------------------------------------


@takes_sparse(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _share(x: SparseTensor) -> SparseTensor:
    """The same places and values: the same scale."""
    return x.viewed(x.qdata)


@takes_sparse(aten.clone.default)
def _clone(x: SparseTensor, **_: Any) -> SparseTensor:
    """A copy: r."""
    return _around(x, x.qdata.clone())


@takes_sparse(aten._to_copy.default)
def _to(x: SparseTensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """As of a dense ScaledTensor, of the values."""
    if options.get("layout") not in (None, torch.sparse_coo):
        return to_dense(x).to(dtype=dtype, **options)
    moved = {k: v for k, v in options.items() if k in ("device", "non_blocking")}
    stored = aten._to_copy.default(values(x), dtype=dtype, **moved)
    places = torch.sparse_coo_tensor(
        x.qdata._indices().to(stored.device),
        stored.qdata if isinstance(stored, ScaledTensor) else stored,
        x.shape,
        is_coalesced=x.qdata.is_coalesced(),
        check_invariants=False,
    )
    if not isinstance(stored, ScaledTensor):
        return places
    return SparseTensor.make(places, stored.scale, stored.rms, *stored.__tensor_flatten__()[1])


def _metadata(op: Overload, x: SparseTensor, *args: Any) -> Any:
    return op(x.qdata, *args)


for _op in (
    *(aten._nnz.default, aten.is_coalesced.default, aten._indices.default, aten.indices.default),
    *(aten.sparse_dim.default, aten.dense_dim.default, aten._dimI.default, aten._dimV.default),
):
    TABLE[_op] = partial(_metadata, _op)


def _moved(op: Overload, x: SparseTensor, *args: Any) -> SparseTensor:
    return _around(x, op(x.qdata, *args))


for _op in (aten.t.default, aten.transpose.int):
    TABLE[_op] = partial(_moved, _op)


@takes_sparse(verbs.dequantize)
def _dequantize(x: SparseTensor) -> Tensor:
    """The plain sparse tensor of the same value."""
    return coo(x.qdata, verbs.dequantize(values(x)))


@takes_sparse(verbs.promote)
def _promote(x: Tensor, like: Any) -> Any:
    """A plain tensor enters beside a sparse one."""
    return x if isinstance(x, ScaledTensor) else verbs.promote(x, values(like))


# --- arithmetic ------------------------------------------------------------------------------


def _of_values(op: Overload, x: Any, *args: Any, **kwargs: Any) -> SparseTensor:
    """A function of each value that is linear: of the places that repeat as well."""
    if not isinstance(x, SparseTensor) or any(isinstance(a, Tensor) and a.dim() for a in args):
        raise UnsupportedError(
            f"{op} of a sparse ScaledTensor takes a number or a 0-dim tensor beside it; of "
            "two tensors, multiply their values"
        )
    each = op(values(x), *args, **kwargs)
    q = coo(x.qdata, each.qdata)
    return SparseTensor.make(q, each.scale, each.rms, *each.__tensor_flatten__()[1])


for _op in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default):
    TABLE[_op] = partial(_of_values, _op)


def _of_values_in_place(op: Overload, x: SparseTensor, *args: Any) -> SparseTensor:
    if any(isinstance(a, Tensor) and a.dim() for a in args):
        _of_values(op, x, *args)  # which says what is taken
    op(values(x), *args)
    return x


for _op in (
    *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar),
    *(aten.neg_.default,),
):
    TABLE[_op] = partial(_of_values_in_place, _op)


def _sum(a: SparseTensor, b: SparseTensor, alpha: float) -> SparseTensor:
    """The energy of both over the places of the sum: r^2 = (na ra^2 + nb (alpha rb)^2) / n."""
    both = quadrature(a.rms * a.qdata._nnz() ** 0.5, b.rms * (abs(alpha) * b.qdata._nnz() ** 0.5))
    scale = nearest_power_of_two(both)
    x, y = (coo(t.qdata, _wide(t.qdata._values()) * (t.scale / scale)) for t in (a, b))
    q = torch.add(x, y, alpha=alpha)
    rms = both / max(q._nnz(), 1) ** 0.5
    return made(q, scale, rms, a, a.nonnegative and b.nonnegative and alpha > 0)


@takes_sparse(aten.add.Tensor)
def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """Two sparse tensors: the energy of both over the places of the sum. A dense one and a sparse
    one: r = sqrt(rx^2 + h ry^2) for a share h of places."""
    if isinstance(x, SparseTensor) and isinstance(y, SparseTensor):
        return _sum(x, y, alpha)
    if not isinstance(x, Tensor) or x.layout != torch.strided or not isinstance(y, SparseTensor):
        raise UnsupportedError(
            "a sparse ScaledTensor is added to a dense tensor (dense + sparse), or to another "
            "sparse ScaledTensor; torch.sparse_coo_tensor makes one of scaled values"
        )
    base = x.clone() if isinstance(x, ScaledTensor) else verbs.promote(x, values(y))
    return _add_in_place(base, y, alpha=alpha)


@takes_sparse(aten.add_.Tensor)
def _add_in_place(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """As add. Reads and writes the places of the sparse one alone: rows of a table."""
    if isinstance(x, SparseTensor):
        return _become(x, _add(x, y, alpha=alpha))
    if not isinstance(x, ScaledTensor):
        return x.add_(verbs.dequantize(y), alpha=alpha)
    watch(x)
    stored = coo(y.qdata, _wide(y.qdata._values())).coalesce()
    term = y.rms * abs(alpha)
    share = min(stored._values().numel() / max(x.numel(), 1), 1.0)
    # Few among many zeros: the scale fits those that are there.
    rms = torch.where(x.rms == 0, term, quadrature(x.rms, term * share**0.5))
    was = x.scale if x.memo.agreed else x.rms
    scale, ratio = settle_in_place(x.scale, was, rms, y.scale, False)
    places = tuple(stored._indices())
    added = stored._values() * (ratio * alpha)
    x.qdata.index_put_(places, store(_wide(elements(x)[places]) + added, x.format))
    after_write(x)
    put(x, None if scale is x.scale else scale, rms)
    x.nonnegative = x.nonnegative and y.nonnegative and alpha > 0
    return x


@takes_sparse(aten.sub.Tensor)
def _sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """As add."""
    return _add(x, y, alpha=-alpha)


@takes_sparse(aten.sub_.Tensor)
def _sub_in_place(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """As add, in place."""
    return _add_in_place(x, y, alpha=-alpha)


def _become(x: SparseTensor, other: SparseTensor) -> SparseTensor:
    """In place, where the places change too."""
    x.qdata, x.scale, x.rms = other.qdata, other.scale, other.rms
    x.format, x.nonnegative = other.format, other.nonnegative
    return x


@takes_sparse(aten.copy_.default)
def _copy(x: Any, y: Any, non_blocking: bool = False) -> Any:
    """An overwrite, places included."""
    if not (isinstance(x, SparseTensor) and isinstance(y, SparseTensor)):
        raise UnsupportedError("a sparse ScaledTensor is copied into another of its kind")
    return _become(x, _clone(y if y.device == x.device else y.to(x.device)))


@takes_sparse(aten.zero_.default)
def _zero(x: SparseTensor) -> SparseTensor:
    """Zeros at the same places, which take any scale."""
    q = x.qdata.clone().zero_()
    return _become(x, x.like(q, torch.ones_like(x.scale), torch.zeros_like(x.rms)))


@takes_sparse(aten._coalesced_.default)
def _coalesced(x: SparseTensor, coalesced: bool) -> SparseTensor:
    """Whether no place repeats, as who makes the tensor knows."""
    x.qdata._coalesced_(coalesced)
    return x


# --- above autograd --------------------------------------------------------------------------


def _new(x: Tensor, *args: Any) -> Tensor:
    """The constructor of a tensor's own kind, by which SparseAdam makes its updates."""
    if isinstance(x, SparseTensor) and args:
        return torch.sparse_coo_tensor(*args, check_invariants=False)
    made: Tensor = x.new(*args)
    return made


#: function that a user may call -> the same on scaled tensors.
FUNCTIONS: dict[Any, Callable[..., Any]] = {Tensor.new: _new}
