"""Sparse tensors: products with a dense operand, and tensors whose stored values are scaled.

Let A have N rows and E stored elements of RMS ra = sqrt(sum a^2 / E). Let h have independent
elements of mean zero and RMS rh. The sum of a row, y_i = sum_j a_ij h_j, has the mean square rh^2
sum_j a_ij^2. Over all rows this gives

    mean y^2 = rh^2 / N sum_ij a_ij^2        r = ra rh sqrt(E / N)

for any degrees, even if the elements depend on them (1 / degree in a GCN). It is the RMS of the
dense product, ra rb sqrt(K), for the E / N terms of a mean row (Blake et al. 2023, section 4.1). E
and N are metadata, so no element is read.

This holds for one product. A graph network multiplies by the same A in each layer, so neighbours
become alike. For equal terms a row-normalised A keeps the RMS, and does not divide it by sqrt(E /
N): in ten layers this is a factor of thousands. So the RMS of the result is measured. For
independent elements it equals the formula, which is used if the result has no finite RMS other than
zero. The rules are homogeneous in both operands, so powers of two move only scales.

The sparse operand may be plain (COO, CSR, CSC), like an adjacency matrix, or a `SparseTensor`
(COO). Both are multiplied in float32: no hardware multiplies sparse FP8 operands, and no recipe
casts them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import BF16, FP32, from_dtype
from scaledtensor.ops.algebra import Operand, elements, first_scaled, operand, rms_seen
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, dispatch, rule
from scaledtensor.ops.results import store
from scaledtensor.ops.rules.reduction import growth
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import nearest_power_of_two, quadrature, settle, settle_in_place
from scaledtensor.scales.singles import put, single_of
from scaledtensor.tensors import verbs
from scaledtensor.tensors.memo import after_write
from scaledtensor.tensors.sparse import TABLE, SparseTensor, coo, is_sparse
from scaledtensor.tensors.steps import watch
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS", "made", "product", "wrapped"]


F = TypeVar("F", bound=Callable[..., Any])


def takes_sparse(*ops: Overload) -> Callable[[F], F]:
    """Register a function for operators on a SparseTensor."""

    def register(function: F) -> F:
        TABLE.update(dict.fromkeys(ops, function))
        return function

    return register


def _both(*ops: Overload) -> Callable[[F], F]:
    """Register a rule for operators on a SparseTensor and on a dense ScaledTensor."""

    def register(function: F) -> F:
        TABLE.update({op: partial(_by_rule, op) for op in ops})
        return rule(*ops)(function)

    return register


def _by_rule(op: Overload, *args: Any, **kwargs: Any) -> Any:
    return dispatch(op, args, kwargs)


# --- products --------------------------------------------------------------------------------


def product(matmul: Callable[..., Any], a: Any, b: Any) -> Raw:
    """Return `matmul(a, b)` for one sparse and one dense operand: r = ra rb sqrt(E / N)."""
    if is_sparse(a) and is_sparse(b):
        of_two(a, b)
    like = first_scaled(a, b)
    x, y = _operand(a, like), _operand(b, like)
    q = matmul(x.q, y.q)
    matrix, summed = (a, -1) if is_sparse(a) else (b, -2)
    shape = matrix.shape
    stored = (matrix.qdata if isinstance(matrix, SparseTensor) else matrix)._nnz()
    terms = stored * shape[summed] / max(shape.numel(), 1)
    scale = x.scale * y.scale
    expected = x.rms * y.rms * terms**0.5
    return Raw(q, scale, rms_seen(q, expected / scale) * scale)


@takes_sparse(aten._sparse_sparse_matmul.default)
def of_two(a: Tensor, b: Tensor) -> Tensor:
    """Raises UnsupportedError: a product of two sparse tensors."""
    raise UnsupportedError(
        "a product of two sparse tensors of which one is scaled: multiply their plain values "
        "(x.dequantize()), or A @ (B @ h) in place of (A @ B) @ h"
    )


def _operand(x: Any, like: ScaledTensor) -> Operand:
    """Return an operand in float32. The RMS of a plain sparse tensor is the RMS of its values."""
    if not is_sparse(x) or isinstance(x, SparseTensor):
        dense = operand(x, like)
        return dense._replace(q=dense.q.float())
    q = x.float()
    rms = measured_rms(q._values() if q.layout == torch.sparse_coo else q.values())
    scale = nearest_power_of_two(rms)
    return Operand(_divided(q, scale), single_of(scale), single_of(rms))


def _divided(q: Tensor, scale: Tensor) -> Tensor:
    """Return a sparse tensor of any layout with its values divided by a scale."""
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
    """Measured: a product with the sum, the mean or the extreme of the terms of a row."""
    y = operand(b, b)
    q, chosen = aten._sparse_mm_reduce_impl.default(a.float(), y.q.float(), reduce)
    return Raw(q, y.scale, rms_seen(q, y.rms / y.scale) * y.scale), chosen


# --- sparse tensors from dense ones, and back ------------------------------------------------


def made(
    q: Tensor, held: Tensor, rms: Tensor, like: ScaledTensor, nonnegative: bool = False
) -> SparseTensor:
    """Make a SparseTensor with the RMS `rms` from plain COO elements under the scale `held`."""
    scale, ratio = settle(rms, held)
    fmt = FP32 if q.dtype == torch.float32 else from_dtype(q.dtype)
    held_q = coo(q, store(q._values() * ratio, fmt))
    return SparseTensor.make(held_q, scale, rms, fmt, like.dtype, like.recipe, nonnegative)


def _around(x: SparseTensor, q: Tensor) -> SparseTensor:
    """Return the values of `x` in other places or in other memory."""
    return x.like(q, x.scale.clone(), x.rms.clone())


def wrapped(x: Tensor, like: ScaledTensor) -> SparseTensor:
    """Make a SparseTensor from a plain sparse tensor, with the measured RMS of its values."""
    q = (x if x.layout == torch.sparse_coo else x.to_sparse()).float()
    rms = measured_rms(q._values())
    one = torch.ones_like(rms)
    held = made(q, one, rms, like)
    return SparseTensor.make(held.qdata, held.scale, rms, held.format, x.dtype, like.recipe)


@takes_sparse(aten._values.default)
def values(x: SparseTensor) -> ScaledTensor:
    """r: a dense ScaledTensor of the stored values, which shares their memory."""
    context = x.__tensor_flatten__()[1]
    return ScaledTensor.make(x.qdata._values(), x.scale, x.rms, *context)


@takes_sparse(aten.values.default)
def _values_of_coalesced(x: SparseTensor) -> ScaledTensor:
    """Same as `_values`, for a tensor without repeated places."""
    x.qdata.values()  # raises torch's own error if places repeat
    return values(x)


@_both(aten._sparse_coo_tensor_with_dims_and_tensors.default)
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
    """r of the values. The sparse tensor shares their memory and scale, like torch's."""
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
    """r sqrt(n / stored): the elements other than zero, in the layout `torch.sparse_coo`."""
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
    """r sqrt(stored / n): the values among zeros. The scale stays."""
    whole = x.qdata.to_dense()
    share = (x.qdata._values().numel() / max(whole.numel(), 1)) ** 0.5
    return ScaledTensor.make(
        whole, x.scale.clone(), x.rms * min(share, 1.0), *x.__tensor_flatten__()[1]
    )


@_both(aten.sparse_mask.default)
def sparse_mask(x: Any, mask: Any, *_: Any) -> Any:
    """r: the elements at the places of another tensor."""
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
    """r, like `sparse_mask`."""
    places = mask.qdata if isinstance(mask, SparseTensor) else mask
    op = aten._sparse_mask_projection.default
    return _around(x, op(x.qdata, _as(places, x.qdata.dtype), *args))


@takes_sparse(aten._coalesce.default)
def coalesce(x: SparseTensor) -> SparseTensor:
    """r sqrt(n): the n elements at a place, in the mean, are added."""
    q = x.qdata.float().coalesce()
    n = x.qdata._nnz() / max(q._nnz(), 1)
    rms = x.rms * growth(n, x.nonnegative and n > 1)
    return made(q, x.scale, rms, x, x.nonnegative)


# --- copies and metadata ---------------------------------------------------------------------


@takes_sparse(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _share(x: SparseTensor) -> SparseTensor:
    """r: a view, which shares the scale."""
    return x.viewed(x.qdata)


@takes_sparse(aten.clone.default)
def _clone(x: SparseTensor, **_: Any) -> SparseTensor:
    """r: a copy."""
    return _around(x, x.qdata.clone())


@takes_sparse(aten._to_copy.default)
def _to(x: SparseTensor, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Same as `_to_copy` of the dense values."""
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
    """Makes a ScaledTensor of a plain operand beside a sparse one."""
    return x if isinstance(x, ScaledTensor) else verbs.promote(x, values(like))


# --- arithmetic ------------------------------------------------------------------------------


def _of_values(op: Overload, x: Any, *args: Any, **kwargs: Any) -> SparseTensor:
    """Apply a linear function to each value, so that repeated places have the right sum too."""
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
        _of_values(op, x, *args)  # raises the error that names the operands
    op(values(x), *args)
    return x


for _op in (
    *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar),
    *(aten.neg_.default,),
):
    TABLE[_op] = partial(_of_values_in_place, _op)


def _sum(a: SparseTensor, b: SparseTensor, alpha: float) -> SparseTensor:
    """Return a + alpha b with r^2 = (na ra^2 + nb (alpha rb)^2) / n for na, nb and n stored
    values."""
    both = quadrature(a.rms * a.qdata._nnz() ** 0.5, b.rms * (abs(alpha) * b.qdata._nnz() ** 0.5))
    scale = nearest_power_of_two(both)
    x, y = (coo(t.qdata, t.qdata._values().float() * (t.scale / scale)) for t in (a, b))
    q = torch.add(x, y, alpha=alpha)
    rms = both / max(q._nnz(), 1) ** 0.5
    return made(q, scale, rms, a, a.nonnegative and b.nonnegative and alpha > 0)


@takes_sparse(aten.add.Tensor)
def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """r = sqrt((nx rx^2 + ny ry^2) / n) for two sparse tensors with nx and ny stored values, and n
    in the sum. r = sqrt(rx^2 + h ry^2) for a dense tensor and a sparse one with a share h of the
    places."""
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
    """Same as `add`. It reads and writes only the places of the sparse tensor, such as rows of a
    table."""
    if isinstance(x, SparseTensor):
        return _become(x, _add(x, y, alpha=alpha))
    if not isinstance(x, ScaledTensor):
        return x.add_(verbs.dequantize(y), alpha=alpha)
    watch(x)
    stored = coo(y.qdata, y.qdata._values().float()).coalesce()
    term = y.rms * abs(alpha)
    share = min(stored._values().numel() / max(x.numel(), 1), 1.0)
    # A few values among many zeros have the scale of the values.
    rms = torch.where(x.rms == 0, term, quadrature(x.rms, term * share**0.5))
    was = x.scale if x.memo.agreed else x.rms
    scale, ratio = settle_in_place(x.scale, was, rms, y.scale, False)
    places = tuple(stored._indices())
    added = stored._values() * (ratio * alpha)
    x.qdata.index_put_(places, store(elements(x)[places].float() + added, x.format))
    after_write(x)
    put(x, None if scale is x.scale else scale, rms)
    x.nonnegative = x.nonnegative and y.nonnegative and alpha > 0
    return x


@takes_sparse(aten.sub.Tensor)
def _sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """Same as `add`."""
    return _add(x, y, alpha=-alpha)


@takes_sparse(aten.sub_.Tensor)
def _sub_in_place(x: Any, y: Any, *, alpha: float = 1) -> Any:
    """Same as `add_`."""
    return _add_in_place(x, y, alpha=-alpha)


def _become(x: SparseTensor, other: SparseTensor) -> SparseTensor:
    """Change `x` in place, with its places, into `other`."""
    x.qdata, x.scale, x.rms = other.qdata, other.scale, other.rms
    x.format, x.nonnegative = other.format, other.nonnegative
    return x


@takes_sparse(aten.copy_.default)
def _copy(x: Any, y: Any, non_blocking: bool = False) -> Any:
    """Overwrites the values and the places."""
    if not (isinstance(x, SparseTensor) and isinstance(y, SparseTensor)):
        raise UnsupportedError("a sparse ScaledTensor is copied into another of its kind")
    moved: Any = y if y.device == x.device else y.to(x.device)
    return _become(x, _clone(moved))


@takes_sparse(aten.zero_.default)
def _zero(x: SparseTensor) -> SparseTensor:
    """Zeros at the same places. They take the scale of the next value that is written."""
    q = x.qdata.clone().zero_()
    return _become(x, x.like(q, torch.ones_like(x.scale), torch.zeros_like(x.rms)))


@takes_sparse(aten._coalesced_.default)
def _coalesced(x: SparseTensor, coalesced: bool) -> SparseTensor:
    """Sets whether no place repeats, which the caller knows."""
    x.qdata._coalesced_(coalesced)
    return x


# --- functions of torch ----------------------------------------------------------------------


def _new(x: Tensor, *args: Any) -> Tensor:
    """Works like `Tensor.new`, with which SparseAdam makes its updates."""
    if isinstance(x, SparseTensor) and args:
        return torch.sparse_coo_tensor(*args, check_invariants=False)
    made: Tensor = x.new(*args)
    return made


#: Function of torch -> the same function for scaled tensors.
FUNCTIONS: dict[Any, Callable[..., Any]] = {Tensor.new: _new}
