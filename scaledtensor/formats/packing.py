"""Codes shorter than a byte without the unused bits: FP4 two in a byte, FP6 four in three bytes.

The last dimension is packed as a little-endian stream of bits: element i of a b-bit format takes
the bits b i to b i + b - 1 of its row, bit k of a row being bit k % 8 of byte k // 8. So an even
FP4 element is in the low nibble, and four FP6 codes are the 24-bit number c0 | c1 << 6 | c2 << 12 |
c3 << 18 with its lowest byte first. A row of K elements takes ceil(b K / 8) bytes whatever K is;
the bits left over are zero. Formats of 8 bits and more have no unused bits and pass as they are.
"""

import sys
from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import DTypeError, ShapeError
from scaledtensor.formats.format import Format, FormatLike, get
from scaledtensor.formats.given import check_tensor


class _Stream(NamedTuple):
    """The least number of codes that fill whole bytes, and the number of those bytes."""

    bits: int
    codes: int
    bytes: int

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def word(self) -> torch.dtype:
        """The integer of as many bytes as a group has codes."""
        return _WORDS[self.codes]


_PIECE = 1 << 18
_BIG_ENDIAN = sys.byteorder == "big"
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Looked up rather than computed: torch.compile then takes the numbers as constants.
_STREAMS = {bits: _Stream(bits, 8 // gcd(bits, 8), bits // gcd(bits, 8)) for bits in range(1, 8)}


def packed_shape(fmt: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the packed form of codes of `shape`; that of a 0-dim tensor is (1,)."""
    if fmt.bits not in _STREAMS:
        return tuple(shape)
    *rows, last = shape or (1,)
    return (*rows, -(-last * fmt.bits // 8))


def pack(codes: Tensor, fmt: FormatLike) -> Tensor:
    """`codes`, in the storage dtype of `fmt`, as uint8 of shape `packed_shape(fmt, codes.shape)`.

    Bits of a code above `fmt.bits` are ignored, as in `decode`. A format of 8 bits or more is
    returned as it is, in its own dtype.

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
    """The codes of `shape` that `pack` made `packed` of, in the storage dtype of `fmt`.

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
    """Of codes [groups, codes] the bytes [groups, bytes]."""
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
    """Of bytes [groups, bytes] the codes [groups, codes]."""
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
    """One number of `dtype` a group, with the i-th part at bit `width` i.

    For compiled code, which cannot see that the bytes of a group lie at a multiple of their number,
    as a view of them as one number wants it.
    """
    total = parts[0].to(dtype)
    for i, part in enumerate(parts[1:], 1):
        total = total | part.to(dtype) << width * i
    return total.unsqueeze(-1)


def _words(groups: Tensor, stream: _Stream) -> Tensor:
    """One number a group of `stream.codes` bytes, the first byte its lowest."""
    groups = groups.flip(-1) if _BIG_ENDIAN else groups
    if groups.storage_offset() % stream.codes:
        groups = groups.clone()
    return groups.view(stream.word)


def _bytes(words: Tensor, stream: _Stream) -> Tensor:
    """The other way round: [groups, 1] as bytes, those of a packed group or of as many codes."""
    groups = words.view(torch.uint8)
    return groups.flip(-1) if _BIG_ENDIAN else groups


def _by_group(
    f: Callable[[Tensor, _Stream], Tensor], x: Tensor, inner: int, outer: int, stream: _Stream
) -> Tensor:
    """`f` of `x`, whose last dimension is whole groups of `inner` bytes that become `outer`.

    A large CPU tensor piece by piece, so that what is computed on the way stays in cache.
    """
    shape = (*x.shape[:-1], x.shape[-1] // inner * outer)
    if not x.numel():
        return x.new_empty(shape)
    groups = x.reshape(-1, inner)
    if torch.compiler.is_compiling() or not x.is_cpu or len(groups) <= _PIECE:
        return f(groups, stream)[:, :outer].reshape(shape)
    out = torch.empty(len(groups), outer, dtype=torch.uint8)
    for start in range(0, len(groups), _PIECE):
        out[start : start + _PIECE] = f(groups[start : start + _PIECE], stream)[:, :outer]
    return out.view(shape)
