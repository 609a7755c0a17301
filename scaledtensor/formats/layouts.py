"""Layouts: which elements of a tensor share a scale, and how short codes are packed into bytes.

A granularity is a frozen record that says which elements share a scale. Functions calculate, for a
tensor of a given shape, the shape of its scales, the scale of each element, and the tensor cut into
blocks. Every granularity cuts each dimension into equal blocks. The last block may be shorter:

                        blocks                          shape of the scales
    PerTensor()         one                             ()
    PerAxis(dim)        one for each index of `dim`     1 except in `dim`: they broadcast
    PerBlock((1, 32))   over the last dimensions        ceil(size / block) in each dimension

`pack` stores codes shorter than a byte without their unused bits: two FP4 codes in a byte, four FP6
codes in three bytes. Each row of the last dimension is a little-endian stream of bits. Element i of
a b-bit format takes the bits b i to b i + b - 1 of its row, and bit k of a row is bit k % 8 of byte
k // 8. So an even FP4 element is in the low nibble, and four FP6 codes are the 24-bit number c0 |
c1 << 6 | c2 << 12 | c3 << 18, lowest byte first. A row of K elements takes ceil(b K / 8) bytes, for
every K; the bits left over are zero. Formats of 8 bits and more have no unused bits; `pack` returns
their codes unchanged.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_constant

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, ShapeError
from scaledtensor.formats.format import Format, FormatLike, get
from scaledtensor.formats.tensors import PIECE, check_tensor

__all__ = [
    "Granularity",
    "PerAxis",
    "PerBlock",
    "PerTensor",
    "as_granularity",
    "beside_blocks",
    "block_dims",
    "check_scale_shape",
    "expand_scale",
    "from_blocks",
    "pack",
    "packed_shape",
    "scale_shape",
    "to_blocks",
    "unpack",
]


# --- granularities -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerTensor:
    """One scale for the tensor."""


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index of dimension `dim`, which may count from the end.

    For a matrix, PerAxis(0) gives one scale per row and PerAxis(1) one per column.
    """

    dim: int

    def __post_init__(self) -> None:
        if not _is_int(self.dim):
            raise ShapeError(f"PerAxis takes one dimension, an int; got {self.dim!r}")


@dataclass(frozen=True)
class PerBlock:
    """One scale for each block of the last `len(block)` dimensions. In the other dimensions a block
    has size 1.

    (1, 32) or (32,) are the blocks of OCP MX, (128, 128) are squares, (1, -1) are rows: -1 stands
    for a whole dimension. The last block of a dimension may be shorter. A tensor of fewer
    dimensions is treated as if it had leading dimensions of size 1.
    """

    block: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.block, tuple | list):
            raise ShapeError(f"PerBlock takes a tuple of sizes, as (1, 32); got {self.block!r}")
        object.__setattr__(self, "block", tuple(self.block))
        if not self.block or not all(_is_int(n) and (n > 0 or n == -1) for n in self.block):
            raise ShapeError(
                "a block has one or more sizes, positive ints or -1 for all of a dimension; got "
                f"{self.block!r}"
            )


Granularity = PerTensor | PerAxis | PerBlock


# torch.compile takes them as constants, not as sources of symbolic integers.
for _record in (PerTensor, PerAxis, PerBlock):
    register_constant(_record)


def as_granularity(given: "Granularity | int | Sequence[int]") -> Granularity:
    """`given` as a granularity. A block size, or the sizes of a block, become a `PerBlock`.

    Raises:
        ShapeError: `given` is none of these.
    """
    if isinstance(given, Granularity):
        return given
    if isinstance(given, tuple | list):
        return PerBlock(tuple(given))
    if isinstance(given, int) and _is_int(given) and given > 0:
        return PerBlock((given,))
    raise ShapeError(
        "a granularity is PerTensor(), PerAxis(dim) or PerBlock(sizes), a block size as 32 or the"
        f" sizes of a block as (1, 32); got {given!r}"
    )


def scale_shape(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape`.

    Raises:
        ShapeError: the tensor does not have the dimension of `PerAxis`.
    """
    if isinstance(granularity, PerTensor):
        return ()
    return tuple(count for count, _ in _cuts(granularity, shape))


def expand_scale(scale: Tensor, granularity: Granularity, shape: Sequence[int]) -> Tensor:
    """The scale of each element of a tensor of `shape`. It is a view if broadcasting is enough.

    Raises:
        ShapeError: `scale` does not have the shape that `scale_shape` gives.
    """
    check_scale_shape(scale, granularity, shape)
    if not isinstance(granularity, PerBlock):
        return scale.expand(tuple(shape))
    cuts = _cuts(granularity, shape)
    blocks = beside_blocks(scale, granularity, shape).expand(_interleaved(cuts))
    return from_blocks(blocks, granularity, shape)


def check_scale_shape(scale: Tensor, granularity: Granularity, shape: Sequence[int]) -> None:
    """Raise ShapeError unless `scale` has the shape of the scales of a tensor of `shape`."""
    wanted = scale_shape(granularity, shape)
    if tuple(scale.shape) != wanted:
        raise ShapeError(
            f"the scales of a tensor of shape {tuple(shape)}, {granularity}, have shape {wanted};"
            f" got {tuple(scale.shape)}"
        )


def to_blocks(x: Tensor, granularity: Granularity) -> Tensor:
    """`x` with each dimension cut in two, [blocks, elements of a block].

    Zeros fill shorter last blocks. Without shorter blocks the result is a view of `x`.
    """
    cuts = _cuts(granularity, x.shape)
    missing = [count * size - n for (count, size), n in zip(cuts, x.shape, strict=True)]
    if any(missing):
        x = F.pad(x, [side for n in reversed(missing) for side in (0, n)])
    return x.view(_interleaved(cuts))


def from_blocks(blocks: Tensor, granularity: Granularity, shape: Sequence[int]) -> Tensor:
    """Undo `to_blocks`: the tensor of `shape`."""
    whole = blocks.reshape([count * size for count, size in _cuts(granularity, shape)])
    if tuple(whole.shape) == tuple(shape):
        return whole
    if torch.compiler.is_compiling() and backend_of(whole).writes_cpp:
        # If Inductor fuses a crop with a tensor that is read once per block, its C++ (torch 2.13,
        # `try_loop_split`) visits whole blocks only, and leaves the other elements unwritten.
        # Before it reads a tensor by strides, it computes the whole tensor in a loop of its own.
        # The strides cover `whole`, so a copy of `whole` (pytorch issue 197431) is as good.
        whole = whole.contiguous()
        part = whole.as_strided(tuple(shape), whole.stride())
    else:
        part = whole
        for dim, n in enumerate(shape):
            part = part.narrow(dim, 0, n)
    return part.clone(memory_format=torch.contiguous_format)


def beside_blocks(scale: Tensor, granularity: Granularity, shape: Sequence[int]) -> Tensor:
    """`scale`, which has the shape of `scale_shape`, as a view that broadcasts to `to_blocks`."""
    return scale.view(_interleaved([(count, 1) for count, _ in _cuts(granularity, shape)]))


def block_dims(blocks: Tensor) -> list[int]:
    """The dimensions of the result of `to_blocks` that run over the elements of a block."""
    return list(range(1, blocks.dim(), 2))


def _cuts(granularity: Granularity, shape: Sequence[int]) -> list[tuple[int, int]]:
    """(number of blocks, size of a block) for each dimension."""
    if isinstance(granularity, PerTensor):
        return [(1, n) for n in shape]
    if isinstance(granularity, PerAxis):
        dim = _dimension(granularity, shape)
        return [(n, 1) if i == dim else (1, n) for i, n in enumerate(shape)]
    sizes = (1,) * (len(shape) - len(granularity.block)) + granularity.block
    sizes = sizes[len(sizes) - len(shape) :]
    return [
        (1, n) if size == -1 else (-(-n // size), size)
        for n, size in zip(shape, sizes, strict=True)
    ]


def _dimension(granularity: PerAxis, shape: Sequence[int]) -> int:
    dims = len(shape)
    if not -dims <= granularity.dim < dims:
        allowed = f"{-dims} to {dims - 1}" if dims else "none, since it is 0-dim"
        raise ShapeError(
            f"{granularity} of a tensor of shape {tuple(shape)}: its dimensions are {allowed}"
        )
    return granularity.dim % dims


def _interleaved(cuts: Sequence[tuple[int, int]]) -> list[int]:
    return [n for cut in cuts for n in cut]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- packed codes --------------------------------------------------------------------------------


class _Stream(NamedTuple):
    """A group of packed codes: the least number of codes that fill whole bytes, and those bytes."""

    bits: int
    codes: int
    bytes: int

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def word(self) -> torch.dtype:
        """The integer dtype that has one byte for each code of a group."""
        return _WORDS[self.codes]


_BIG_ENDIAN = sys.byteorder == "big"
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# torch.compile takes numbers that are looked up in a table as constants.
_STREAMS = {bits: _Stream(bits, 8 // gcd(bits, 8), bits // gcd(bits, 8)) for bits in range(1, 8)}


def packed_shape(fmt: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of packed codes of `shape`. A 0-dim tensor is packed in shape (1,)."""
    if fmt.bits not in _STREAMS:
        return tuple(shape)
    *rows, last = shape or (1,)
    return (*rows, -(-last * fmt.bits // 8))


def pack(codes: Tensor, fmt: FormatLike) -> Tensor:
    """`codes`, in the storage dtype of `fmt`, as uint8 of shape `packed_shape(fmt, codes.shape)`.

    Bits of a code above `fmt.bits` are ignored, as in `decode`. Codes of 8 bits or more are
    returned unchanged, in their own dtype.

    Raises:
        DTypeError: `codes` are not in the storage dtype of `fmt`.
    """
    check_tensor(codes, "pack", "codes")
    fmt = get(fmt)
    if codes.dtype is not fmt.storage_dtype:
        raise DTypeError(f"codes of {fmt!r} are {fmt.storage_dtype}, got {codes.dtype}")
    if fmt.bits not in _STREAMS:
        return codes
    stream = _STREAMS[fmt.bits]
    codes = codes.reshape(1) if codes.dim() == 0 else codes
    missing = -codes.shape[-1] % stream.codes
    whole = F.pad(codes, (0, missing)) if missing else codes
    packed = _by_group(_pack_groups, whole, stream.codes, stream.bytes, stream)
    return packed[..., : packed_shape(fmt, codes.shape)[-1]].contiguous() if missing else packed


def unpack(packed: Tensor, fmt: FormatLike, shape: Sequence[int]) -> Tensor:
    """The codes of `shape`, from the result of `pack`, in the storage dtype of `fmt`.

    Raises:
        DTypeError: `packed` is not uint8 (for a format of 8 bits or more, its storage dtype).
        ShapeError: `packed` is not of shape `packed_shape(fmt, shape)`.
    """
    check_tensor(packed, "unpack", "packed")
    fmt, shape = get(fmt), tuple(shape)
    stream = _STREAMS.get(fmt.bits)
    dtype = torch.uint8 if stream else fmt.storage_dtype
    if packed.dtype is not dtype:
        raise DTypeError(f"packed codes of {fmt!r} are {dtype}, got {packed.dtype}")
    wanted = packed_shape(fmt, shape)
    if tuple(packed.shape) != wanted:
        raise ShapeError(
            f"codes of {fmt!r} of shape {shape} are packed in shape {wanted};"
            f" got {tuple(packed.shape)}"
        )
    if stream is None:
        return packed
    missing = -packed.shape[-1] % stream.bytes
    whole = F.pad(packed, (0, missing)) if missing else packed
    codes = _by_group(_unpack_groups, whole, stream.bytes, stream.codes, stream)
    last = shape[-1] if shape else 1
    codes = codes if codes.shape[-1] == last else codes[..., :last].contiguous()
    return codes.view(shape)


def _pack_groups(groups: Tensor, stream: _Stream) -> Tensor:
    """Pack codes [groups, codes] into bytes [groups, bytes]."""
    if torch.compiler.is_compiling():
        codes = [groups[:, i] & stream.mask for i in range(stream.codes)]
        if stream.bytes == 1:
            return _sum(codes, stream.bits, torch.uint8)
        return _bytes(_sum(codes, stream.bits, stream.word), stream)
    words = _words(groups, stream)
    packed = words & stream.mask
    for i in range(1, stream.codes):
        moved = words >> (8 - stream.bits) * i
        packed |= moved.bitwise_and_(stream.mask << stream.bits * i)
    return packed.to(torch.uint8) if stream.bytes == 1 else _bytes(packed, stream)


def _unpack_groups(groups: Tensor, stream: _Stream) -> Tensor:
    """Unpack bytes [groups, bytes] into codes [groups, codes]."""
    if stream.bytes == 1 or torch.compiler.is_compiling():
        words = _sum([groups[:, i] for i in range(stream.bytes)], 8, stream.word)
    else:
        words = _words(F.pad(groups, (0, stream.codes - stream.bytes)), stream)
    codes = words & stream.mask
    for i in range(1, stream.codes):
        moved = words << (8 - stream.bits) * i
        codes |= moved.bitwise_and_(stream.mask << 8 * i)
    return _bytes(codes, stream)


def _sum(parts: list[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    """One number of `dtype` per group, with the i-th part at bit `width` i.

    Compiled code uses this in place of `_words`. It cannot know that the bytes of a group are
    aligned, as the view of them as one number requires.
    """
    total = parts[0].to(dtype)
    for i, part in enumerate(parts[1:], 1):
        total = total | part.to(dtype) << width * i
    return total.unsqueeze(-1)


def _words(groups: Tensor, stream: _Stream) -> Tensor:
    """One number per group of `stream.codes` bytes; the first byte is the lowest."""
    groups = groups.flip(-1) if _BIG_ENDIAN else groups
    if groups.storage_offset() % stream.codes:
        groups = groups.clone()
    return groups.view(stream.word)


def _bytes(words: Tensor, stream: _Stream) -> Tensor:
    """Undo `_words`: numbers [groups, 1] as their bytes."""
    groups = words.view(torch.uint8)
    return groups.flip(-1) if _BIG_ENDIAN else groups


def _by_group(
    f: Callable[[Tensor, _Stream], Tensor], x: Tensor, inner: int, outer: int, stream: _Stream
) -> Tensor:
    """Apply `f` to the groups of `x`: `inner` bytes of its last dimension become `outer` bytes.

    A large CPU tensor is processed piece by piece, so that temporaries stay in cache.
    """
    shape = (*x.shape[:-1], x.shape[-1] // inner * outer)
    if not x.numel():
        return x.new_empty(shape)
    groups = x.reshape(-1, inner)
    if torch.compiler.is_compiling() or not backend_of(x).host or len(groups) <= PIECE:
        return f(groups, stream)[:, :outer].reshape(shape)
    out = torch.empty(len(groups), outer, dtype=torch.uint8, device="cpu")
    for start in range(0, len(groups), PIECE):
        out[start : start + PIECE] = f(groups[start : start + PIECE], stream)[:, :outer]
    return out.view(shape)
