"""Parts of a quantised weight on several ranks, as `fully_shard` (FSDP2) makes them.

`fully_shard` cuts a parameter along its first dimension and keeps one part on each rank. It makes
the parts by ordinary operators: `torch.chunk`, `new_zeros`, `narrow` and `copy_`. In other programs
these operators read the plain value of a quantised weight. Where `fully_shard` calls them, they cut
codes and scales, so a part is a QuantizedTensor of whole rows. Before a module runs, the codes and
the scales of blocks are gathered as they are: one message of bytes each.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.quantization.parts import rows_of_scales
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.tensors.callers import called_by
from scaledtensor.tensors.shards import is_dtensor, of_all_parts
from scaledtensor.tensors.wrapper import as_bytes

__all__ = ["OPERATORS", "after", "before"]


def _by_fully_shard() -> bool:
    """Whether `fully_shard` calls the operator. `new_zeros` of a program makes a plain tensor."""
    return called_by("torch.distributed.fsdp._fully_shard")


# --- rows of codes and scales ----------------------------------------------------------------


def _height(x: QuantizedTensor) -> int | None:
    return rows_of_scales(x.config.weight, x.matrix_shape)


def _check_cut(x: QuantizedTensor, dim: int, rows: int) -> None:
    """Raises UnsupportedError unless parts of so many rows have blocks of their own."""
    if dim % x.dim() != 0:
        raise UnsupportedError(
            f"fully_shard cuts a weight of {x.config} along dimension {dim}, and its codes are cut "
            "along dimension 0 alone: leave shard_placement_fn out for it"
        )
    if x.order == "columns" and x.dim() == 2:
        raise UnsupportedError(
            f"fully_shard cuts rows, and the codes of a transposed weight of {x.config} (Conv1D of "
            "transformers) lie in columns: leave it out by ignored_params"
        )
    height = _height(x)
    if height is not None and rows % height:
        raise UnsupportedError(
            f"fully_shard cuts a weight of shape {tuple(x.shape)} into parts of {rows} rows, and "
            f"{height} rows share the scales of {x.config}: take blocks of one row, such as the "
            "default of WeightOnly, or leave the weight out by ignored_params"
        )


def _refuse_uneven(x: QuantizedTensor) -> NoReturn:
    raise UnsupportedError(
        f"fully_shard cuts a weight of {x.config} into parts of different sizes, and torch gathers "
        "parts of one size alone: take a number of ranks that divides its rows, or leave the "
        "weight out by ignored_params"
    )


def _rows(x: QuantizedTensor, start: int, end: int) -> QuantizedTensor:
    """The rows from `start` to `end`, which share memory with `x`."""
    height, scale = _height(x), x.scale
    if height is not None:
        scale = scale[start // height : -(-end // height)]
    inner = (x.qdata[start:end], scale, *(getattr(x, name) for name in x.INNER[2:]))
    return x.put_together(inner, (end - start, *x.shape[1:]), x.context)


def _split(x: QuantizedTensor, size: int, dim: int = 0) -> Any:
    if not _by_fully_shard():
        return NotImplemented
    _check_cut(x, dim, size if size < x.shape[0] else 0)
    if x.shape[0] % size:
        _refuse_uneven(x)
    return [_rows(x, at, min(at + size, x.shape[0])) for at in range(0, x.shape[0], size)]


def _slice(
    x: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    return _rows(x, start or 0, end or 0) if dim == 0 and _by_fully_shard() else NotImplemented


def _new_zeros(x: QuantizedTensor, size: Sequence[int], **options: Any) -> Any:
    if not _by_fully_shard():
        return NotImplemented
    height, scale = _height(x), x.scale.clone()
    if height is not None:  # in bytes, since scales of 8 bits have no zero
        rows = as_bytes(scale).new_zeros(-(-size[0] // height), *scale.shape[1:])
        scale = rows.view(scale.dtype)
    inner = (x.qdata.new_zeros(size[0], *x.qdata.shape[1:]), scale)
    others = (getattr(x, name).clone() for name in x.INNER[2:])
    return x.put_together((*inner, *others), size, x.context)


def _flat(x: QuantizedTensor, shape: Sequence[int]) -> Any:
    """`part.view(-1)` of `fully_shard` is the memory that it would send of a plain tensor."""
    if tuple(shape) == tuple(x.shape):
        return x.shared()
    return x.qdata.view(-1) if tuple(shape) == (-1,) and _by_fully_shard() else NotImplemented


def _as_strided(x: QuantizedTensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    same = tuple(size) == tuple(x.shape) and tuple(stride) == x.stride() and not storage_offset
    return x.shared() if same else NotImplemented


_aten = torch.ops.aten

#: Operators that keep codes where `fully_shard` calls them.
OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.new_zeros.default: _new_zeros,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.view.default: _flat,
}


# --- gathers ---------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """The facts that all ranks have, so that nobody sends them."""

    like: QuantizedTensor
    shape: torch.Size
    dtype: torch.dtype


def before(
    part: QuantizedTensor, mesh: Any, outer_size: torch.Size, mp_policy: Any
) -> tuple[tuple[Tensor, ...], _Kept]:
    """Return the codes and scales of a part to send, and the facts of the whole.

    Raises:
        UnsupportedError: the parts differ in size, and torch would have them padded to one size,
            which packed codes and their scales do not have; or in facts that all parts share.
    """
    if outer_size[0] % mesh.size():  # there are more ranks than rows, or `_split` had seen it
        _refuse_uneven(part)
    if not part.agreed:
        _check_agreement(part, mesh.get_group())
    sent = tuple(as_bytes(getattr(part, name)) for name in part.cut)
    if mesh.size() == 1:  # torch takes one message, and this rank has the rest
        sent = sent[:1]
    return sent, _Kept(part, outer_size, mp_policy.param_dtype or part.dtype)


def _check_agreement(part: QuantizedTensor, group: Any) -> None:
    """Raises UnsupportedError, on all ranks, unless the inner tensors that each rank keeps whole
    have the same bits on all of them."""
    shared = [getattr(part, name) for name in part.INNER if name not in part.cut]
    sums = [zlib.crc32(as_bytes(x).cpu().contiguous().numpy().tobytes()) for x in shared]
    own = torch.tensor(sums, dtype=torch.float64, device=part.device)  # 32 bits are exact
    if not (of_all_parts(own, (group,)) == own).all():
        raise UnsupportedError(
            f"the ranks hold different scales or factors for the parts of one weight of "
            f"{part.config}: quantize_ the same weights on each rank, with the same calibration "
            "data, or load one checkpoint on all ranks"
        )
    part.agreed = True


def after(
    arrived: tuple[Tensor, ...], kept: _Kept, out: Any
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """Return the whole weight around the codes that arrived; with `out`, they arrived in it."""
    if out is not None:
        whole: Any = _torch.local_part(out) if is_dtensor(out) else out
        whole.loop = None  # its memory was given back, and is new
        return None
    like = kept.like
    inner = {name: getattr(like, name) for name in like.INNER}
    for name, x in zip(like.cut, arrived, strict=False):
        inner[name] = x.view(inner[name].dtype)
    fmt, _, *rest = like.context
    context = (fmt, kept.dtype, *rest)
    return like.put_together(tuple(inner.values()), kept.shape, context), arrived
