"""`check_cast`: compares a custom cast or kernel with the exact answer."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, ShapeError
from scaledtensor.formats import Format, FormatLike, get
from scaledtensor.formats.rounding import Overflow, Rounding
from scaledtensor.formats.tensors import FLOATS
from scaledtensor.testing.reference import ladder, near_ties, reference_codes, values_of
from scaledtensor.testing.rules import bits, name_of

__all__ = ["check_cast"]

_HALVES = (torch.bfloat16, torch.float16)
#: The number of differences that a message looks at, and the number that it shows of each kind.
_LOOKED_AT, _OF_A_KIND = 200, 2


def check_cast(
    function: Callable[[Tensor], Tensor],
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    random: int = 1 << 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Compare `function` with the exact cast to `fmt`, and show the first differences.

    The inputs, in each of `dtypes`, are:

    - the value of every code;
    - every 16-bit input: all numbers of a 16-bit dtype, and in float32 and float64 the values of
      all bfloat16 and float16 numbers;
    - the middle between every two values, and numbers up to 3 ulp beside it;
    - zeros, infinities, NaNs and subnormals;
    - `random` numbers, one half with random bits and one half within the range of `fmt`.

    A NaN has to become any NaN, if the format has one. The sign of a zero is compared only if
    `function` returns codes.

    Args:
        function: takes a tensor of one dimension on `device`, and returns, in the same shape, codes
            (the storage dtype of `fmt`, or integers) or values (floats).
        fmt: a format of up to 16 bits, its name, or the torch dtype of its codes.
        rounding, overflow: the promise of `function`; see `scaledtensor.formats.encode`.
        dtypes: dtypes of the inputs, out of float32, bfloat16, float16 and float64.
        random: number of random inputs, for each dtype.
        seed: seed of the random inputs.
        device: device of the inputs.

    Returns:
        The number of inputs that were compared. In each dtype, a bit pattern counts once.

    Raises:
        AssertionError: `function` differs. The message has the number of differences, and for each
            kind (tie, subnormal, beyond max, ...) the smallest one: input, result and exact answer,
            by bit pattern.
        DTypeError: `function` returned neither codes nor values, or a dtype of inputs is unknown.
        FormatError: `fmt`, `rounding` or `overflow` is unknown.
        ShapeError: `function` returned another shape.
        UnsupportedError: "stochastic" rounding, which has several answers, or a format of more than
            16 bits.
    """
    fmt = get(fmt)
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise DTypeError(f"check_cast makes inputs of {_names(FLOATS)}, got {dtype}")
    total, how = 0, (rounding, overflow)
    for dtype in dtypes:
        x = _distinct(torch.cat(list(_inputs(fmt, dtype, random, seed))))
        want = reference_codes(x, fmt, rounding, overflow)
        got = function(x.to(device))
        if not isinstance(got, Tensor):
            raise DTypeError(f"the cast returned no tensor but {type(got).__name__}")
        if got.shape != x.shape:
            raise ShapeError(f"given shape {[*x.shape]}, the cast returned {[*got.shape]}")
        found = _Found(fmt, x, got.detach().cpu(), want)
        if found.wrong.any():
            raise AssertionError(found.message(name_of(function), how))
        total += x.numel()
    return total


def _inputs(fmt: Format, dtype: torch.dtype, random: int, seed: int) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    tiny = torch.finfo(dtype).smallest_normal
    yield torch.cat((special.to(dtype), torch.tensor([tiny, -tiny, tiny / 2], dtype=dtype)))
    yield near_ties(fmt, torch.float64 if dtype is torch.float64 else torch.float32).to(dtype)
    every = torch.arange(1 << 16).to(torch.int16)
    for half in (dtype,) if dtype in _HALVES else _HALVES:
        yield every.view(half).to(dtype)
    words = torch.randint(-(2**31), 2**31, (random - random // 2,), generator=rng)
    yield words.to(torch.int32).view(torch.float32).to(dtype)
    # Magnitudes that are spread evenly over the binades of the format.
    low, high = (math.log2(v) for v in (float(ladder(fmt)[1]), fmt.max))
    power = torch.rand(random // 2, generator=rng, dtype=torch.float64) * (high - low + 4) + low - 2
    sign = torch.randint(0, 2, power.shape, generator=rng) * 2 - 1
    yield (power.exp2() * sign).to(dtype)


def _distinct(x: Tensor) -> Tensor:
    """The elements of `x` with each bit pattern once, in the order of the patterns."""
    patterns = bits(x).sort().values
    first = torch.cat((torch.tensor([True]), patterns[1:] != patterns[:-1]))
    return patterns[first].view(x.dtype)


class _Found:
    """The results of a cast beside the exact answers."""

    def __init__(self, fmt: Format, x: Tensor, got: Tensor, want: Tensor) -> None:
        self.fmt, self.x, self.want = fmt, x, want
        mask = fmt.num_codes - 1
        self.codes: Tensor | None = None
        if got.dtype is fmt.storage_dtype or not got.is_floating_point():
            if got.dtype.is_complex or got.dtype is torch.bool:
                raise DTypeError(f"the cast returned {got.dtype}: neither codes nor values")
            self.codes = bits(got).long() & mask
            self.values = values_of(self.codes, fmt)
            wrong = self.codes != want
        elif got.dtype in FLOATS:
            self.values = got.double()
            wrong = self.values != values_of(want, fmt)
            wrong &= ~(self.values.isnan() & values_of(want, fmt).isnan())
        else:
            raise DTypeError(
                f"the cast returned {got.dtype}; codes of {fmt.name} are {fmt.storage_dtype} or"
                f" integers, and values {_names(FLOATS)}"
            )
        nan = x.isnan()
        self.wrong = torch.where(nan, ~self.values.isnan() if fmt.has_nan else False, wrong)

    def message(self, name: str, how: tuple[str, str]) -> str:
        places = self.wrong.nonzero().flatten()
        order = places[self.x[places].double().abs().nan_to_num(math.inf).argsort(stable=True)]
        shown = self._examples(order)
        lines = [self._line(i, kind) for kind, i in shown]
        rounding, overflow = how
        return (
            f"{name} is not the cast to {self.fmt!r} with rounding {rounding!r} and overflow"
            f" {overflow!r}: it differs at {len(places):,} of {self.x.numel():,} inputs of"
            f" {_names([self.x.dtype])}, for example\n  " + "\n  ".join(lines)
        )

    def _examples(self, order: Tensor) -> list[tuple[str, int]]:
        """The places to show: the first ones of each kind, out of the first three and of places
        spread over all others."""
        step = max(1, len(order) // _LOOKED_AT)
        found: list[tuple[str, int]] = []
        for i in [*order[:3].tolist(), *order[3::step].tolist()]:
            kind = _kind(float(self.x[i]), self.fmt)
            if sum(k == kind for k, _ in found) < _OF_A_KIND:
                found.append((kind, i))
        return found

    def _line(self, i: int, kind: str) -> str:
        x, width = self.x[i], self.x.dtype.itemsize
        pattern = int(bits(x)) & ((1 << 8 * width) - 1)
        got, want = float(self.values[i]), int(self.want[i])
        right = float(values_of(self.want[i], self.fmt))
        shown = f"{got!r}"
        if self.codes is not None:
            shown = f"code 0x{int(self.codes[i]):02x} ({got!r})"
        answer = "any NaN" if x.isnan() else f"code 0x{want:02x} ({right!r})"
        return (
            f"0x{pattern:0{2 * width}x} ({float(x)!r}), {kind}: got {shown},"
            f" the exact answer is {answer}"
        )


def _kind(value: float, fmt: Format) -> str:
    """The place of a number among the values of a format, as a hint at the cause of a
    difference."""
    if math.isnan(value):
        return "a NaN"
    if math.isinf(value):
        return "an infinity"
    size = Fraction(abs(value))
    values = ladder(fmt)
    if size > values[-1]:
        return "beyond max"
    if not fmt.signed and value <= 0:
        return "not above zero"
    next_one = bisect_right(values, size)
    low = values[max(next_one - 1, 0)]  # E8M0 has no value below its smallest
    if size == low:
        return "a value of the format"
    place = "a subnormal, " if fmt.has_subnormals and size < Fraction(fmt.min_normal) else ""
    high = values[next_one]
    middle = (low + high) / 2
    if size == middle:
        return place + "a tie"
    near = abs(size - middle) < (high - low) / 1024
    side = "above" if size > middle else "below"
    return place + (f"just {side} a tie" if near else "between two values")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
