"""How a `KVCache` keeps one tensor of a layer, its keys or its values: codes, and their scales.

Keys and values have shape (batch, heads, tokens, head_dim). A token is a row. A store has a buffer
of rows for the codes, and buffers of rows for the levels of the scales. Every product of a code
and its scale is exact in float32, and it is rounded once to the dtype of the result. On a CPU a
loop of C++ decodes rows and multiplies by their scales in one pass. Compiled code and other devices
take PyTorch's operators, with the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd, nan

import torch
from torch import Tensor

from scaledtensor.errors import ShapeError
from scaledtensor.formats import E4M3FN, E8M0FNU, Format, decode, encode, pack, unpack
from scaledtensor.formats.layouts import packed_shape
from scaledtensor.native.rows import decoded_rows
from scaledtensor.scales.powers import nearest_power_of_two

__all__ = ["Fixed", "Grouped", "PerToken", "Plan", "Position", "Store", "has_range", "usual_block"]

#: A number of tokens: an int, or a 0-dim int64 tensor in a cache of fixed memory.
Position = int | Tensor

#: Tokens at the RMS of the head that count with the first tokens of a channel.
PRIOR = 8
#: The amax of a fixed scale is this many times the amax of the first tokens: two binades.
HEADROOM = 4.0
_BF16, _POWER = 16, 23  # bits of a float32 that scales in bfloat16, and powers of two, do not have
_LEAST = 2.0**-126


def has_range(fmt: Format) -> bool:
    """Whether the format covers so many binades that its scale may come from an RMS: E4M3, E5M2 and
    the 16-bit formats do, and integers, FP6 and FP4 do not."""
    return fmt.exponent_bits >= 4


def usual_block(fmt: Format) -> int:
    """The number of elements that share a scale in formats without range."""
    return 16 if fmt.bits <= 4 else 32


@dataclass(frozen=True)
class Plan:
    """How keys or values are coded.

    Attributes:
        fmt: the format of the elements.
        scale: "unit", "amax", or the number that is the scale of all elements.
        block: elements that share a scale: tokens of a channel for keys, channels of a token for
            values. None: all later tokens; for values in fewer than 8 bits `usual_block` channels,
            or fewer if the head_dim is no multiple; for other values all channels.
    """

    fmt: Format
    scale: str | float
    block: int | None

    @property
    def two_levels(self) -> bool:
        """Whether a scale is an E4M3FN number times a power of two for the row."""
        return self.scale == "amax" and self.fmt.bits < 8

    def scales(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The levels of the scales of blocks along `dim` of `x`, which leaves the shape.

        A block of zeros has scale 1. In a format without NaN, a NaN makes the scale of its block
        NaN, so that the block decodes to NaN.
        """
        finite = x.nan_to_num(0.0, 0.0, 0.0)
        if self.scale == "unit" and has_range(self.fmt):
            scale = nearest_power_of_two(finite.double().square().mean(dim).sqrt().float())
            return (_codes_of(scale, E8M0FNU),)
        ratio = finite.abs().amax(dim) / self.fmt.max
        whole = _up(ratio.amax(-1, True) / E4M3FN.max, _POWER) if self.two_levels else None
        ratio = torch.where(ratio == 0, 1.0 if whole is None else whole, ratio)
        if not self.fmt.has_nan:
            ratio = torch.where(x.isnan().any(dim), nan, ratio)
        if whole is not None:
            block = (ratio / whole).clamp(min=E4M3FN.min_subnormal)
            return _codes_of(block, E4M3FN), _codes_of(whole, E8M0FNU)
        if self.scale == "unit":
            return (_codes_of(_up(ratio, _POWER), E8M0FNU),)
        return (_up(ratio, _BF16).bfloat16(),)

    def read(self, levels: list[Tensor]) -> Tensor:
        """The float32 scales that levels stand for."""
        if self.two_levels:
            return _values_of(levels[0], E4M3FN) * _values_of(levels[1], E8M0FNU)
        return _values_of(levels[0], E8M0FNU) if self.scale == "unit" else levels[0].float()


def _up(x: Tensor, bits: int) -> Tensor:
    """The least float32 without its last `bits` bits that is not below `x`, which is positive or
    NaN; 2^-126 if `x` is smaller, and 1 for 0."""
    whole = x.clamp(min=_LEAST).view(torch.int32) + ((1 << bits) - 1)
    up = (whole >> bits << bits).view(torch.float32)
    return torch.where(x == 0, 1.0, torch.where(x.isnan(), nan, up))


def _codes_of(x: Tensor, fmt: Format) -> Tensor:
    # torch has few operators for its 8-bit floats, and all for uint8.
    return encode(x, fmt).view(torch.uint8)


def _values_of(codes: Tensor, fmt: Format) -> Tensor:
    return decode(codes.view(fmt.storage_dtype), fmt)


def _put(buffer: Tensor, at: Position, rows: Tensor) -> None:
    """Write `rows` into dimension 2 of a buffer."""
    count = rows.shape[2]
    if isinstance(at, int):
        buffer.narrow(2, at, count).copy_(rows)
    else:
        buffer.index_copy_(2, torch.arange(count, device=rows.device) + at, rows)


class Store:
    """Codes in rows of tokens. The subclasses say which elements share a scale.

    Args:
        plan: how the elements are coded.
        x: tokens of the shape (batch, heads, tokens, head_dim) and the dtype that the store holds.
        rows: tokens for which there is memory.
    """

    #: Tokens that share a scale. A row of `levels` is as many tokens.
    group = 1

    def __init__(self, plan: Plan, x: Tensor, rows: int) -> None:
        self.plan, self.dtype, self.head_dim = plan, x.dtype, x.shape[-1]
        width = packed_shape(plan.fmt, (self.head_dim,))[-1]
        wide = plan.fmt.bits > 8
        dtype = plan.fmt.storage_dtype if wide else torch.uint8
        self.codes = x.new_zeros((*x.shape[:2], rows, width), dtype=dtype)
        self.levels: list[Tensor] = []
        self.beside: list[Tensor] = []
        self.saturated = torch.zeros((), dtype=torch.int64, device=x.device)

    @property
    def rows(self) -> int:
        """Tokens for which there is memory."""
        return self.codes.shape[2]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the store that have a dimension of the batch."""
        yield from (self.codes, *self.levels, *self.beside)

    def map(self, f: Callable[[Tensor], Tensor]) -> None:
        """Replace all these tensors by `f` of them."""
        self.codes, self.levels = f(self.codes), [f(t) for t in self.levels]
        self.beside = [f(t) for t in self.beside]

    def move(self, start: int, stop: int, rows: int) -> None:
        """Keep the tokens from `start` to `stop`, as the first of a new buffer of `rows` tokens.
        `start` and `rows` are multiples of `group`."""

        def moved(buffer: Tensor, tokens: int) -> Tensor:
            new = buffer.new_zeros((*buffer.shape[:2], rows // tokens, *buffer.shape[3:]))
            held = buffer[:, :, start // tokens : -(-stop // tokens)]
            new[:, :, : held.shape[2]] = held
            return new

        self.codes = moved(self.codes, 1)
        self.levels = [moved(level, self.group) for level in self.levels]

    def write(self, x: Tensor, at: Position) -> None:
        """Code the tokens `x` as the rows from `at` on."""
        raise NotImplementedError

    def read(self, start: int, stop: int, end: Position) -> Tensor:
        """The values of the rows from `start` to `stop`, out of `end` rows that were written."""
        raise NotImplementedError

    def crop(self, stop: int, end: int) -> None:
        """Forget the rows from `stop` on, out of `end` rows."""

    def reset(self) -> None:
        """Forget all rows, and keep their memory."""
        self.saturated.zero_()

    def _encode(self, quotients: Tensor) -> Tensor:
        """Codes of float32 elements over their scales."""
        codes = encode(quotients, self.plan.fmt)
        if self.plan.fmt.bits < 8:
            return pack(codes, self.plan.fmt)
        return codes.view(torch.uint8) if self.plan.fmt.bits == 8 else codes

    def _decode(self, start: int, stop: int) -> Tensor:
        """The float32 values of codes, before their scales."""
        fmt, codes = self.plan.fmt, self.codes[:, :, start:stop]
        if fmt.bits < 8:
            return decode(unpack(codes, fmt, (*codes.shape[:3], self.head_dim)), fmt)
        return decode(codes.view(fmt.storage_dtype), fmt)

    def _products(
        self, start: int, stop: int, scale: Tensor | float, group: int = 1
    ) -> Tensor | None:
        """The values of rows, in one pass; or None if PyTorch's operators have to make them."""
        codes, first = self.codes[:, :, start:stop], start % group
        facts = self.plan.fmt, scale, self.head_dim, self.dtype
        return decoded_rows(codes, *facts, group, first)

    def _count(self, x: Tensor, scale: Tensor | float) -> None:
        if self.plan.fmt.exponent_bits < 8:  # others have the range of float32
            self.saturated.add_((x.abs() > scale * self.plan.fmt.max).sum())


class Fixed(Store):
    """A scale for each channel of a head, from the tokens of the first write, for all later tokens.

    "unit" is the power of two nearest to the RMS of the channel. The RMS counts `PRIOR` more tokens
    that have the RMS of the head, so that one first token is enough. "amax" is
    `HEADROOM` times the largest magnitude of the channel, at least the RMS of the head, over the
    largest number of the format. A number is the scale itself.
    """

    def __init__(self, plan: Plan, x: Tensor, rows: int) -> None:
        super().__init__(plan, x, rows)
        self.measured = not isinstance(plan.scale, str)
        if not self.measured:
            self.beside = [x.new_ones((*x.shape[:2], 1, self.head_dim), dtype=torch.float32)]

    def _measure(self, x: Tensor) -> Tensor:
        finite = x.double().nan_to_num(0.0, 0.0, 0.0)
        square = finite.square()
        head = square.mean((2, 3), True)
        if self.plan.scale == "unit":
            channel = square.sum(2, True).add_(PRIOR * head) / (x.shape[2] + PRIOR)
            return nearest_power_of_two(channel.sqrt().float())
        largest = torch.maximum(finite.abs().amax(2, True), head.sqrt())
        return _up((largest * (HEADROOM / self.plan.fmt.max)).float(), _BF16)

    def reset(self) -> None:
        super().reset()
        self.measured = not isinstance(self.plan.scale, str)

    @property
    def _scale(self) -> Tensor | float:
        return self.beside[0] if isinstance(self.plan.scale, str) else self.plan.scale

    def write(self, x: Tensor, at: Position) -> None:
        x = x.float()
        if not self.measured:
            self.beside[0].copy_(self._measure(x))
            self.measured = True
        self._count(x, self._scale)
        _put(self.codes, at, self._encode(x / self._scale))

    def read(self, start: int, stop: int, end: Position) -> Tensor:
        made = self._products(start, stop, self._scale)
        if made is not None:
            return made
        return (self._decode(start, stop) * self._scale).to(self.dtype)


class PerToken(Store):
    """A scale for each token of a head, or for each block of its channels."""

    def __init__(self, plan: Plan, x: Tensor, rows: int) -> None:
        super().__init__(plan, x, rows)
        usual = gcd(usual_block(plan.fmt), self.head_dim) if plan.fmt.bits < 8 else self.head_dim
        block = plan.block or usual
        if self.head_dim % block:
            raise ShapeError(
                f"values of head_dim {self.head_dim} have no whole blocks of {block} channels; "
                f"give a `block` that divides {self.head_dim}"
            )
        self.blocks = (self.head_dim // block, block)
        new = plan.scales(torch.unflatten(x[:, :, :0].float(), 3, self.blocks), 4)
        self.levels = [t.new_zeros((*t.shape[:2], rows, *t.shape[3:])) for t in new]

    def write(self, x: Tensor, at: Position) -> None:
        x = torch.unflatten(x.float(), 3, self.blocks)
        levels = self.plan.scales(x, 4)
        scale = self.plan.read(list(levels)).unsqueeze(4)
        _put(self.codes, at, self._encode((x / scale).flatten(3)))
        for level, rows in zip(self.levels, levels, strict=True):
            _put(level, at, rows)

    def read(self, start: int, stop: int, end: Position) -> Tensor:
        scale = self.plan.read([level[:, :, start:stop] for level in self.levels])
        made = self._products(start, stop, scale)
        if made is not None:
            return made
        values = torch.unflatten(self._decode(start, stop), 3, self.blocks)
        return (values * scale.unsqueeze(4)).flatten(3).to(self.dtype)


class Grouped(Store):
    """A scale for each group of consecutive tokens of a channel, as in KIVI.

    The tokens of a group that is not full wait in `beside`, in their own dtype. They are read from
    there, so a result depends on the tokens, and not on the calls that brought them, except that
    a call sees the tokens of its last group as they came.
    """

    def __init__(self, plan: Plan, x: Tensor, rows: int) -> None:
        super().__init__(plan, x, rows)
        self.group = plan.block or x.shape[2]
        shape = (*x.shape[:2], 0, self.group, self.head_dim)
        new = plan.scales(x.new_zeros(shape, dtype=torch.float32), 3)
        self.levels = [t.new_zeros((*t.shape[:2], rows // self.group, *t.shape[3:])) for t in new]
        self.beside = [x.new_zeros((*x.shape[:2], self.group, self.head_dim))]

    def write(self, x: Tensor, at: Position) -> None:
        inside, tokens, (waiting,) = at % self.group, x.shape[2], self.beside
        # A tensor is no size, so the memory is then for the worst case: the last place of a group.
        most = inside if isinstance(inside, int) else self.group - 1
        count = (most + tokens - 1) // self.group + 1
        groups = x.new_zeros((*x.shape[:2], count * self.group, self.head_dim))
        held = (torch.arange(self.group, device=x.device) < inside)[:, None]
        groups[:, :, : self.group] = torch.where(held, waiting, 0)
        _put(groups, inside, x)
        groups = torch.unflatten(groups, 2, (count, self.group))
        last = (inside + tokens) // self.group
        full = last if isinstance(last, int) else count
        if full:
            self._write_groups(groups[:, :, :full], at // self.group)
        if not isinstance(last, int):  # if no group `last` was touched, nobody reads `waiting`
            index = last.clamp(max=count - 1).reshape(1)
            waiting.copy_(groups.index_select(2, index).squeeze(2))
        elif last < count:
            waiting.copy_(groups[:, :, last])

    def _write_groups(self, groups: Tensor, first: Position) -> None:
        groups = groups.float()
        levels = self.plan.scales(groups, 3)
        scale = self.plan.read(list(levels)).unsqueeze(3)
        codes = self._encode((groups / scale).flatten(2, 3))
        _put(self.codes, first * self.group, codes)
        for level, rows in zip(self.levels, levels, strict=True):
            _put(level, first, rows)

    def read(self, start: int, stop: int, end: Position) -> Tensor:
        full = end // self.group * self.group
        (waiting,) = self.beside
        scale = self._scales(start // self.group, -(-stop // self.group))
        made = self._products(start, stop, scale, self.group)
        if made is not None:
            at = int(full)  # the rows of the group that is not full, which has no codes yet
            first, last = max(start, at), min(stop, at + self.group)
            if first < last:
                made[:, :, first - start : last - start] = waiting[:, :, first - at : last - at]
            return made
        if isinstance(full, int):
            coded = self._groups(start // self.group, full // self.group)
            values = torch.cat((coded, waiting), 2)
            skipped = start // self.group * self.group
            return values[:, :, start - skipped : stop - skipped].contiguous()
        values = self._groups(0, self.rows // self.group)
        _put(values, full, waiting)
        return values[:, :, start:stop].contiguous()

    def _scales(self, start: int, stop: int) -> Tensor:
        return self.plan.read([level[:, :, start:stop] for level in self.levels])

    def _groups(self, start: int, stop: int) -> Tensor:
        scale = self._scales(start, stop).unsqueeze(3)
        values = self._decode(start * self.group, stop * self.group)
        blocks = torch.unflatten(values, 2, (stop - start, self.group))
        return (blocks * scale).flatten(2, 3).to(self.dtype)

    def crop(self, stop: int, end: int) -> None:
        last, tokens = stop // self.group, stop % self.group
        if last < end // self.group and tokens:  # the group is open again, with its decoded values
            self.beside[0].copy_(self._groups(last, last + 1))
