"""Casts by table, for eager CPU tensors: one gather, whatever the format.

Types with few values have tables: 8-bit codes, and 16-bit floats. A table takes 65,536 casts to
make and is kept for its format and mode. Without the C++ loops a gather takes a quarter of the time
of the arithmetic of `bits.py` (0.5 against 2.2 to 3.3 ns per element).
"""

import functools
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.formats.bits import Mode
from scaledtensor.formats.format import Format
from scaledtensor.formats.tensors import HALVES, in_pieces

__all__ = ["encode", "fake_quantize", "look_up", "serves"]

_PAIR = {torch.float32: torch.int64, torch.bfloat16: torch.int32, torch.float16: torch.int32}
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_WORTH_IT = 1 << 16
_TABLES: dict[tuple[object, ...], Tensor] = {}


def serves(x: Tensor) -> bool:
    """Whether a table is worth its making for `x`: real data of 16-bit floats, and enough of it."""
    # Other classes, such as FakeTensor, have no data to look up.
    return x.dtype in HALVES and backend_of(x).host and type(x) is Tensor and x.numel() >= _WORTH_IT


def encode(
    x: Tensor, fmt: Format, mode: Mode, cast: Callable[[Tensor, Format, Mode], Tensor]
) -> Tensor:
    """The codes of 16-bit floats; `cast` makes the table."""
    key = ("encode", fmt, mode.rounding, mode.overflow, x.dtype)
    return _gather(x, key, lambda every: cast(every, fmt, mode))


def fake_quantize(x: Tensor, fmt: Format, mode: Mode, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """The rounded values of 16-bit floats; `cast` makes the table."""
    return _gather(x, ("round", fmt, mode.rounding, mode.overflow, x.dtype), cast)


def _gather(x: Tensor, key: tuple[object, ...], cast: Callable[[Tensor], Tensor]) -> Tensor:
    table = _TABLES.get(key)
    if table is None:
        every = torch.arange(1 << 16, device="cpu").to(torch.int16).view(x.dtype)
        table = _TABLES[key] = cast(every)
    raw = table.view(_RAW[table.dtype.itemsize])

    def gather(piece: Tensor, _: int, out: Tensor | None) -> Tensor:
        return _selected(raw, piece.contiguous().view(torch.uint16), piece, table.dtype, out)

    return in_pieces(gather, x, table.dtype)


def look_up(codes: Tensor, fmt: Format, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The values of 8-bit codes, into `out` if given. The table has 256 entries, or 65,536 for two
    codes at once."""
    flat = codes.contiguous().view(torch.uint8).view(-1)
    # An empty tensor may have a stride that no view of pairs can have.
    even = flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0
    pairs = even and flat.numel() > 0
    index = flat.view(torch.uint16) if pairs else flat
    return _selected(_table(fmt, dtype, pairs), index, codes, dtype, out)


def _selected(
    table: Tensor, index: Tensor, source: Tensor, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """The entries at `index`, into `out` if given, else in the shape of `source`."""
    if out is None:
        out = torch.empty(source.shape, dtype=dtype, device="cpu")
    entries = out.view(-1).view(table.dtype).view(-1, *table.shape[1:])
    torch.index_select(table, 0, index.view(-1).to(torch.int32), out=entries)
    return out


@functools.cache
def _table(fmt: Format, dtype: torch.dtype, pairs: bool) -> Tensor:
    """The value of each code, or with `pairs` the values of each pair of adjacent codes, which one
    look-up then finds."""
    values = torch.from_numpy(np.array([fmt.value(code) for code in range(256)])).to(dtype)
    if not pairs:
        return values
    first = values.repeat(256)
    second = values.repeat_interleave(256)
    both = torch.stack((first, second) if sys.byteorder == "little" else (second, first), 1)
    return both if dtype is torch.float64 else both.view(_PAIR[dtype]).view(-1)
