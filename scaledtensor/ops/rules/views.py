"""Views, data movement and masks: the elements stay the same.

A view shares the scale and RMS objects of its base, so that a write through one of them changes
all. Copied elements get a scale and an RMS of their own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError
from scaledtensor.ops.algebra import (
    Operand,
    elements,
    first_scaled,
    operand,
    quadrature,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.plausible import either
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import FILL, HUGE, LARGEST, dequantized
from scaledtensor.ops.rules.arithmetic import chosen, under
from scaledtensor.ops.rules.windows import sym_max
from scaledtensor.scales.powers import settle
from scaledtensor.scales.singles import (
    Amount,
    Single,
    copied,
    pair_of,
    rms_of,
    scale_of,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.memo import after_write, note
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["fill_under", "masked_fill", "move", "moves_scale", "plain_number", "written"]

# --- views -----------------------------------------------------------------------------------


@rule(aten.detach.default, finished=True)
def detach(x: ScaledTensor) -> ScaledTensor:
    """r: a view, which shares the scale."""
    # It has a rule for speed: nearly half of the operators of an eager training step are `detach`.
    q = x.qdata
    # `x` and `x.detach()` have one count of the writes into their elements.
    if type(q) is not Tensor or torch.compiler.is_compiling() or _torch.is_transforming():
        q = q.detach()
    out = x.viewed(q)
    if x.memo.decoded is not None:
        note(out, decoded=x.memo.decoded.detach(), passing=x.memo.passing, source=x.memo.source)
    return out


#: Views that a method of a plain tensor makes, in half of the time of the call of the overload.
_METHODS: dict[Overload, Callable[..., Tensor]] = {
    aten.permute.default: Tensor.permute,
    aten.select.int: Tensor.select,
    aten.squeeze.dim: Tensor.squeeze,
    aten.t.default: Tensor.t,
    aten.transpose.int: Tensor.transpose,
    aten.unsqueeze.default: Tensor.unsqueeze,
    aten.view.default: Tensor.view,
}


@rule(
    aten.alias.default,
    aten.as_strided.default,
    aten.diagonal.default,
    aten.expand.default,
    aten.lift_fresh.default,
    aten.permute.default,
    aten._reshape_alias.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unfold.default,
    aten.unsqueeze.default,
    aten._unsafe_view.default,
    aten.view.default,
    pass_op=True,
    finished=True,
)
def view(op: Overload, x: ScaledTensor, *args: object, **kwargs: object) -> Any:
    """r: a view, which shares the scale."""
    q = x.qdata
    method = _METHODS.get(op) if type(q) is Tensor and not kwargs else None
    q = op(q, *args, **kwargs) if method is None else method(q, *args)
    if isinstance(q, (list, tuple)):
        return [x.viewed(part) for part in q]
    out = x.viewed(q)
    if x.memo.decoded is not None:
        source = x.memo.source if op is aten.t.default else None
        source = None if source is None else source._replace(turned=not source.turned)
        decoded = op(x.memo.decoded, *args, **kwargs)
        note(out, decoded=decoded, passing=x.memo.passing, source=source)
    return out


@rule(
    aten.as_strided_.default,
    aten.detach_.default,
    aten.resize_.default,
    aten.resize_as_.default,
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.swapaxes_.default,
    aten.swapdims_.default,
    aten.t_.default,
    aten.transpose_.default,
    aten.unsqueeze_.default,
    pass_op=True,
)
def reshaped_in_place(op: Overload, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """r: the tensor changes its shape or strides, and keeps its scale."""
    template = [a.qdata if isinstance(a, ScaledTensor) else a for a in args]
    if not isinstance(x, ScaledTensor):
        return op(x, *template, **kwargs)  # type: ignore[no-any-return]
    x.qdata = op(x.qdata.detach(), *template, **kwargs)
    after_write(x)
    _torch.reshape_wrapper(op, x, *template, **kwargs)
    return x


@rule(aten.view.dtype)
def reinterpret(x: ScaledTensor, dtype: torch.dtype) -> Tensor:
    """Raises DTypeError: a scaled value has no bits to read as another dtype."""
    raise DTypeError(
        f"view({dtype}) reinterprets bits, which a scaled value does not have; "
        "use .qdata.view(...) for the elements or .to(...) to convert"
    )


# --- elements in other places ----------------------------------------------------------------


@rule(
    aten.alias_copy.default,
    aten.as_strided_copy.default,
    aten.clone.default,
    aten.detach_copy.default,
    aten.diagonal_copy.default,
    aten.expand_copy.default,
    aten.flip.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.lift_fresh_copy.default,
    aten.masked_select.default,
    aten.narrow_copy.default,
    aten.permute_copy.default,
    aten.repeat.default,
    aten._reshape_copy.default,
    aten.roll.default,
    aten.rot90.default,
    aten.select_copy.int,
    aten.slice_copy.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.t_copy.default,
    aten.take.default,
    aten.transpose_copy.int,
    aten.unbind_copy.int,
    aten.unfold_copy.default,
    aten._unsafe_index.Tensor,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsqueeze_copy.default,
    aten.view_copy.default,
    pass_op=True,
)
def move(op: Overload, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """r: a choice of the elements, under the same scale."""
    # torch moves bytes by every operator, and 8-bit floats by some.
    narrow = x.qdata.dtype.itemsize == 1
    q = op(x.qdata.view(torch.uint8) if narrow else x.qdata, *args, **kwargs)
    parts = q if isinstance(q, (list, tuple)) else [q]
    scale, rms = scale_of(x), rms_of(x)
    if op is aten.clone.default and torch.compiler.is_compiling() and pair_of(x) is None:
        # AOTAutograd copies an input that a graph writes to, and expects the same inner tensors.
        scale, rms = x.scale, x.rms
    out = [
        x.like(p.view(x.qdata.dtype) if narrow else p, copied(scale), copied(rms)) for p in parts
    ]
    return out if isinstance(q, (list, tuple)) else out[0]


@rule(
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
    pass_op=True,
)
def zero_filled(op: Overload, g: ScaledTensor, sizes: Sequence[int], *args: Any) -> Raw:
    """r_g sqrt(share) for the share of elements that are not zeros. The scale stays."""
    share = (g.numel() / max(math.prod(sizes), 1)) ** 0.5
    return Raw(op(elements(g), sizes, *args), scale_of(g), rms_of(g) * share, settled=True)


@rule(aten.diag_embed.default)
def diag_embed(x: ScaledTensor, *args: Any, **kwargs: Any) -> Raw:
    """r sqrt(share) for the share of elements that are not zeros. The scale stays."""
    q = aten.diag_embed.default(elements(x), *args, **kwargs)
    share = (x.numel() / max(q.numel(), 1)) ** 0.5
    rms = rms_of(x) * share
    return Raw(q, scale_of(x), rms, settled=True, nonnegative=x.nonnegative)


@rule(aten.unfold_backward.default)
def unfold_backward(g: ScaledTensor, sizes: Sequence[int], dim: int, size: int, step: int) -> Raw:
    """r_g sqrt(windows) for the mean number of windows over an element, whose gradients add up."""
    q = aten.unfold_backward.default(elements(g), sizes, dim, size, step)
    share = (g.numel() / max(math.prod(sizes), 1)) ** 0.5
    return Raw(q, scale_of(g), rms_of(g) * share)


@rule(aten.tril.default, aten.triu.default, pass_op=True)
def triangle(op: Overload, x: ScaledTensor, diagonal: int = 0) -> Raw:
    """r sqrt(share) for the share of elements in the triangle. The others become zeros."""
    rows, columns = x.shape[-2:]
    first = diagonal + (op is aten.tril.default)  # elements of the first row
    below = _below(rows + first - 1, columns) - _below(first - 1, columns)
    kept = below if op is aten.tril.default else rows * columns - below
    share = (max(kept, 1) / max(rows * columns, 1)) ** 0.5
    q, positive = op(elements(x), diagonal), x.nonnegative
    return Raw(q, scale_of(x), rms_of(x) * share, nonnegative=positive)


def _below(last: Any, columns: Any) -> Any:
    """Return the sum of min(i, columns) over i = 0..last. No loop counts a symbolic size."""
    if last <= columns:
        return last * (last + 1) // 2 if last > 0 else 0
    return columns * (columns + 1) // 2 + (last - columns) * columns


@rule(aten.constant_pad_nd.default)
def pad(x: ScaledTensor, padding: Sequence[int], value: float = 0) -> Raw:
    """r: the padding does not move the scale."""
    if value == 0 or abs(value) == float("inf"):
        q = aten.constant_pad_nd.default(elements(x), padding, value)
    else:
        fill = fill_under(value, tensor_of(scale_of(x)), elements(x))
        mask = aten.constant_pad_nd.default(torch.zeros_like(elements(x)), padding, 1)
        q = torch.where(mask.bool(), fill, aten.constant_pad_nd.default(elements(x), padding, 0))
    return Raw(q, scale_of(x), rms_of(x), settled=True)


@rule(aten._pack_padded_sequence.default)
def pack(x: ScaledTensor, lengths: Tensor, batch_first: bool) -> list[Any]:
    """r: the elements that are no padding, under the same scale. The sizes of the steps' batches
    are a plain tensor."""
    q, sizes = aten._pack_padded_sequence.default(elements(x), lengths, batch_first)
    positive = x.nonnegative
    return [Raw(q, scale_of(x), rms_of(x), settled=True, nonnegative=positive), sizes]


# --- tensors joined --------------------------------------------------------------------------


@rule(aten.cat.default)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Raw:
    """The root of the mean square over the elements of all parts, which get one scale."""
    q, scale, rms, nonnegative = _join(tensors)
    return Raw(torch.cat(q, dim), scale, rms, settled=True, nonnegative=nonnegative)


@rule(aten.stack.default)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Raw:
    """Same as `cat`."""
    q, scale, rms, nonnegative = _join(tensors)
    return Raw(torch.stack(q, dim), scale, rms, settled=True, nonnegative=nonnegative)


@rule(aten.block_diag.default)
def block_diag(tensors: Sequence[Tensor]) -> Raw:
    """The RMS of `cat` times the root of the share of elements in the blocks. The others are
    zeros."""
    q, scale, rms, nonnegative = _join(tensors)
    out = aten.block_diag.default(q)
    share = (sum(part.numel() for part in q) / max(out.numel(), 1)) ** 0.5
    return Raw(out, scale, rms * share, settled=True, nonnegative=nonnegative)


@rule(aten._chunk_cat.default)
def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Raw:
    """Same as `cat`, for parts that are padded with zeros to a multiple of the chunks."""
    q, scale, rms, nonnegative = _join(tensors)
    out = aten._chunk_cat.default(q, dim, num_chunks)
    return Raw(out, scale, rms, settled=True, nonnegative=nonnegative)


def _join(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any, Any, bool]:
    like = first_scaled(*tensors)
    held = [t for t in tensors if not _is_empty(t)]
    if len(held) == 1:
        # A cache of keys and values begins with an empty tensor, whose RMS nobody has to measure.
        (part,) = (operand(t, like) for t in held)
        q = [part.q if t is held[0] else dequantized(t).to(part.q.dtype) for t in tensors]
        return q, copied(part.scale), copied(part.rms), part.nonnegative
    parts = [chosen(t, like) for t in tensors]
    total = sym_max(sum(t.numel() for t in tensors), 1)
    rms = quadrature(
        *(p.rms * (t.numel() / total) ** 0.5 for p, t in zip(parts, tensors, strict=True))
    )
    scale, *ratios = settle(rms, *(p.scale for p in parts))
    aligned = [under(part, ratio, like) for part, ratio in zip(parts, ratios, strict=True)]
    return aligned, scale, rms, all(p.nonnegative for p in parts)


def _is_empty(x: Tensor) -> bool:
    """Whether a tensor has no elements. A size that is a symbol is taken for larger than 0."""
    return any(isinstance(size, int) and size == 0 for size in x.shape)


# --- masks -----------------------------------------------------------------------------------


def fill_under(number: float, scale: Amount, like: Tensor) -> Tensor:
    """Return a fill value under a scale.

    It saturates before the division and after, so that a mask of `torch.finfo(...).min` stays
    finite, as an element and as a value. Infinities stay.
    """
    finite = abs(number) != float("inf")
    if finite:
        number = min(max(number, -LARGEST), LARGEST)
    fill = torch.full((), number, dtype=torch.float64, device=like.device) / scale
    if finite:
        limit = torch.finfo(like.dtype).max
        fill = fill.clamp(-limit, limit)
    return fill.to(like.dtype)


def moves_scale(number: Any) -> Any:
    """Whether a number moves the scale: zeros, infinities and the fills of masks do not. For a
    number in a tensor, the answer is a tensor."""
    return (number != 0) & (number > FILL) & (number < HUGE)


def written(x: Any, like: ScaledTensor) -> Operand:
    """Return the operand that is written into places. Traced code does not know the number in a
    0-dim tensor, which may be a fill. Its RMS is 0 if it does not move the scale."""
    made = chosen(x, like)
    if not isinstance(x, Tensor) or isinstance(x, ScaledTensor) or x.dim():
        return made
    rms = torch.where(moves_scale(x), x.abs(), 0.0).float()
    return made._replace(rms=rms, fills=True)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: ScaledTensor, mask: Tensor, number: Any) -> Raw:
    """r. Zeros, infinities and the fills of masks do not move the scale. The RMS of another fill
    counts if it is larger."""
    return _where(mask, number, x)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(condition: Tensor, x: Any, y: Any) -> Raw:
    """The larger of rx and ry. Zeros, infinities and the fills of masks do not count."""
    return _where(condition, x, y)


def _where(condition: Tensor, x: Any, y: Any) -> Raw:
    if isinstance(condition, ScaledTensor):
        condition = elements(condition) != 0
    x, y = (plain_number(s) for s in (x, y))
    like = first_scaled(x, y)
    sides = [written(s, like) for s in (x, y)]
    deciding = [
        p.rms for p, s in zip(sides, (x, y), strict=True) if isinstance(s, Tensor) or moves_scale(s)
    ]
    rms = deciding[0] if len(deciding) == 1 else either(_larger(*deciding), *deciding)
    (scale,) = settle(rms)
    left, right = (_aligned(s, p, scale, like) for s, p in zip((x, y), sides, strict=True))
    nonnegative = all(p.nonnegative for p in sides)
    return Raw(
        torch.where(condition, left, right), scale, rms, settled=True, nonnegative=nonnegative
    )


def _larger(a: Amount, b: Amount) -> Any:
    """Return the larger RMS. An RMS that is NaN, for example of a root that the condition guards,
    does not count."""
    if type(a) is type(b) is Single:
        return a if a >= b or b != b else b
    return single_of(torch.fmax(tensor_of(a), tensor_of(b)))


def plain_number(x: Any) -> Any:
    """Return the number in a plain 0-dim tensor on the host, outside tracing; else `x` itself."""
    if isinstance(x, Tensor) and type(x) is Tensor and x.dim() == 0 and backend_of(x).host:
        return x.item()
    return x


def _aligned(x: Any, part: Operand, scale: Amount, like: ScaledTensor) -> Tensor:
    if not isinstance(x, Tensor):
        return fill_under(x, scale, elements(like))
    return under(part, part.scale / scale, like)
