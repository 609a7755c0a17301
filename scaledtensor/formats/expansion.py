"""Groups of elements whose values are widened to the range of a format before they are cast.

They store the states of an optimizer, which a linear scale serves badly (COAT, arXiv 2410.19313,
section 3). In a group let M be the largest magnitude and m the least one except zeros. For a format
with the largest value F and the least positive value f:

    code  = round(sign(x) F (|x| / M)^p)          value = sign(code) M (|code| / F)^(1/p)
    p     = log(F / 2f) / log(M / m), rounded down to 1/16, between 1/16 and 255/16

So M becomes F, m becomes at least 2f, and only zero becomes zero (if the group spans less than 149
binades). E4M3FN spreads 16.8 binades over the binades of the group. A group usually has fewer (p >
1), and may have more (p < 1). The published formula, with c = sqrt(M m) and a scale (M/c)^p / F, is
the same: c cancels. It has 448^2 / 2 in place of F / 2f, which is as good for E4M3FN and is not
defined for other formats.

A group with one magnitude (M = m) has p = 1. A group whose finite numbers are all zero has M = 1.
Infinities and NaNs do not count for M and m. An infinity saturates; a NaN stays a NaN if the format
has NaNs. The E4M3FN codes of 128 elements take 128 + 4 + 1 bytes.

Powers are calculated as float32's exp2 of a product with log2. They are within 2^-18 of the exact
powers, and within 2^-16 in code that is compiled for a CPU. So a code can differ from the code of
the exact power only if that power lies this near to a boundary of rounding; compiled and eager code
may differ there. Rounding to nearest works on the widened numbers. Stochastic rounding works on the
values: the chance of rounding up is (|x| - value below) / (value above - value below), so that the
mean result is x. (A chance taken from the widened numbers would be biased by the power.)

BF16 and FP16 have enough range, so their groups are not widened. They have a scale, a power of two
that takes M into [2^14, 2^15), so that FP16 holds 38 binades below M. The only error is the
rounding to 11 digits, or 8 for BF16. For these formats `amax` is the scale, and every power is 1.

**A magnitude held apart.** A spike in one gradient would be the M of its group for as long as an
average remembers it, and the codes of all its neighbours would lose digits. So if the largest
magnitude is more than 2^6 times the M that the others would have, it is held apart: it does not
count for M and p. M is then a power of two for the others, and the largest magnitude is kept in
spare bits of M. This takes no more memory:

    bit 31        set; the M of any other group is positive
    bits 30-23    the M of the others: the exponent bits of that power of two
    bits 22-0     the largest magnitude without its sign: its 8 exponent bits and 15 digits

The element with that magnitude has the largest code of the format, with its sign. The M of the
others leaves this code free. BF16 has the range of float32 and holds nothing apart. Neither does a
format of so few codes that none is left for the others.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, FormatError, ShapeError
from scaledtensor.formats.bits import INFINITY, SIGN, Mode, encode_bits, loop_of_its_own
from scaledtensor.formats.format import BF16, E4M3FN, E5M2, FP16, INT8, Format, FormatLike, get
from scaledtensor.formats.rounding import Rounding, decode, encode
from scaledtensor.formats.stochastic import Randomness, key_for, random_words
from scaledtensor.formats.tensors import FLOATS, check_tensor

__all__ = [
    "STEPS",
    "Expanded",
    "below_largest",
    "can_hold_apart",
    "dequantize_expanded",
    "holds_any",
    "joined",
    "narrow_rows",
    "parted",
    "power_of_two_from",
    "quantize_expanded",
    "second_largest",
    "stands_out",
    "value_table",
    "wanted_steps",
    "watched_from",
    "widen_rows",
]


STEPS = 16  # a power is stored in sixteenths
_TOP = 14  # the binade of the largest magnitude of a group in 16 bits
_LEAST_SCALE = 2.0**-126
_RATIO = 2.0**6  # a magnitude larger by this factor is held apart
_JUMP = 4.0  # an M that grows by more in a step may hide a spike
_DIGITS = 0x007FFFFF  # the mantissa bits of a float32
_LOST = 8  # bits of a float32 that a magnitude held apart loses
_LARGEST = 0x7F7FFFFF >> _LOST

#: log2(1 + f) / f for f from 2^-1/2 - 1 to 2^1/2 - 1. It gives log2(1 + f) within 3.1e-7, minimax.
_LOG2 = (
    1.4426997233,
    -0.7213758671,
    0.4804651553,
    -0.3589619873,
    0.2972613750,
    -0.2726967806,
    0.1706368749,
)
#: (2^f - 1) / f for f from 0 to 1. It gives 2^f within 4.2e-6, minimax.
_EXP2 = (0.6930185302, 0.2414455005, 0.0519505550, 0.0135812451)
_ROOT_HALF = 0x3F3504F3  # bits of 2^-1/2


# --- groups ----------------------------------------------------------------------------------


class Expanded(NamedTuple):
    """A tensor in groups of consecutive elements, as `quantize_expanded` returns it."""

    codes: Tensor
    """The codes, in the shape of the tensor."""
    amax: Tensor
    """M of each group, float32; negative if a magnitude is held apart."""
    power: Tensor
    """p of each group in sixteenths, uint8."""


def quantize_expanded(
    x: Tensor,
    fmt: FormatLike,
    group: int = 128,
    *,
    rounding: Rounding = "nearest_even",
    generator: Randomness = None,
) -> Expanded:
    """Codes in groups of `group` consecutive elements, each widened to the range of `fmt`.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape. No gradient flows through.
        fmt: a signed format of 8 bits or fewer with a zero, bf16 or fp16: the record, its name or
            its torch dtype.
        group: how many elements share M and p, in the order of memory of a contiguous tensor. The
            last group may be shorter.
        rounding: "nearest_even", or "stochastic", which is unbiased in the values.
        generator: for "stochastic"; see `encode`.

    Raises:
        DTypeError: `x` is not of one of these dtypes.
        FormatError: the format or the rounding is another.
        ShapeError: `group` is not a positive int.
    """
    check_tensor(x, "quantize_expanded")
    fmt = _checked(fmt, group)
    if x.dtype not in FLOATS:
        raise DTypeError(f"groups are of float32, bfloat16, float16 or float64; got {x.dtype}")
    if rounding not in ("nearest_even", "stochastic"):
        raise FormatError(f"groups are rounded 'nearest_even' or 'stochastic'; got {rounding!r}")
    if generator is not None and rounding != "stochastic":
        raise FormatError("generator is for rounding 'stochastic' only")
    rows = _rows(x.detach().float(), group)
    key = key_for(rows, generator) if rounding == "stochastic" else None
    made = widen_rows(rows, fmt, key)
    return made._replace(codes=made.codes.flatten()[: x.numel()].view(x.shape))


def widen_rows(
    rows: Tensor, fmt: Format, key: Tensor | None = None, start: int = 0, spikes: bool = True
) -> Expanded:
    """`quantize_expanded` for groups that are the rows of a float32 matrix, without checks.

    `key` (`random_key`) is for stochastic rounding; its draws count the elements from `start`.
    Without `spikes` no magnitude is held apart.
    """
    spikes = spikes and can_hold_apart(fmt)
    size = rows.abs()
    finite = torch.where(size < math.inf, size, 0.0)
    largest = finite.amax(1)
    if fmt.bits > 8:
        return _under_powers_of_two(rows, largest, fmt, key, start, spikes)
    amax = kept = torch.where(largest > 0, largest, 1.0)
    least = torch.where(finite > 0, finite, math.inf).amin(1)
    power = _power(amax, least, fmt.max, fmt)
    if spikes:
        second = second_largest(rows, largest)
        top = below_largest(fmt)
        its = _power(second * 2, least, top, fmt)
        # The factor leaves a little more room than needed, since powers are not exact.
        room = (STEPS * math.log2(fmt.max / top) / its.float()).exp2() * (1 + 2.0**-8)
        of_rest = power_of_two_from(second * room)
        apart = stands_out(largest, second, of_rest)
        kept = torch.where(apart, joined(of_rest, largest, key, start), amax)
        amax = torch.where(apart, of_rest, amax)
        power = torch.where(apart, its, power)
    exponent = _exponent(power)
    if key is None and _is_for_vectors(rows) and fmt in (E4M3FN, E5M2, INT8):
        return Expanded(_codes(rows, amax, exponent, fmt), kept, power)
    unit = (size / amax.unsqueeze(1)).clamp(max=1.0)
    wide = _raised(unit, exponent) * fmt.max
    if key is not None:
        wide = _drawn(wide, unit, exponent, fmt, key, start)
    return Expanded(encode(torch.copysign(wide, rows), fmt, overflow="saturate"), kept, power)


def dequantize_expanded(
    expanded: Expanded, fmt: FormatLike, group: int = 128, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of a result of `quantize_expanded` with the same `fmt` and `group`, in `dtype`.

    Raises:
        DTypeError: the codes are not in the dtype of `fmt`.
        FormatError, ShapeError: see `quantize_expanded`. A ShapeError also says that the numbers of
            groups, of M and of p differ.
    """
    fmt = _checked(fmt, group)
    codes, amax, power = expanded
    if codes.dtype != fmt.storage_dtype:
        raise DTypeError(f"codes of {fmt.name} are {fmt.storage_dtype}; got {codes.dtype}")
    count = -(-codes.numel() // group)
    if amax.shape != (count,) or power.shape != (count,):
        raise ShapeError(
            f"{codes.numel()} codes in groups of {group} have {count} largest magnitudes and as "
            f"many powers; got {tuple(amax.shape)} and {tuple(power.shape)}"
        )
    rows = narrow_rows(Expanded(_rows(codes, group), amax, power), fmt)
    return rows.flatten()[: codes.numel()].view(codes.shape).to(dtype)


def narrow_rows(
    expanded: Expanded, fmt: Format, table: Tensor | None = None, spikes: bool | None = None
) -> Tensor:
    """The float32 values of a result of `widen_rows`, without checks.

    `table` is `value_table(fmt)`. `spikes` says whether a group may hold a magnitude apart; with
    None the function looks.
    """
    codes, amax, power = expanded
    if spikes is None:
        spikes = can_hold_apart(fmt) and holds_any(amax)
    of_rest, top = (t.unsqueeze(1) for t in (parted(amax) if spikes else (amax, amax)))
    if table is not None:
        unit = table[codes.view(torch.uint8).int() + (power.int() << 8).unsqueeze(1)]
        return unit * (torch.where(unit.abs() == 1.0, top, of_rest) if spikes else of_rest)
    wide = decode(codes, fmt, torch.float32)
    if spikes:
        most = top * (1 / fmt.max) if fmt.bits > 8 else top
        of_rest = torch.where(wide.abs() == fmt.max, most, of_rest)
    if fmt.bits > 8:
        return wide * of_rest
    unit = _raised(wide.abs() * (1 / fmt.max), 1 / _exponent(power))
    return torch.copysign(unit * of_rest, wide)


@cache
def value_table(fmt: Format, device: torch.device) -> Tensor:
    """The value of each code under each power, in units of the group's M: float32, at index
    256 power + code. The table takes 256 KiB and is made by float64 powers."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes.view(fmt.storage_dtype), fmt, torch.float64) / fmt.max
    power = torch.arange(256, dtype=torch.float64).clamp(min=1).unsqueeze(1)
    unit = torch.copysign(values.abs() ** (STEPS / power), values)
    return unit.float().flatten().to(device)


# --- the steps ------------------------------------------------------------------------------


def _is_for_vectors(x: Tensor) -> bool:
    """Whether Inductor's C++ will run this. There log2 takes four times as long as a logarithm by
    bits and a polynomial, and a cast to 8 bits twice as long as codes made from the logarithm."""
    return torch.compiler.is_compiling() and backend_of(x).writes_cpp


def _checked(fmt: FormatLike, group: int) -> Format:
    found = get(fmt)
    narrow = found.bits <= 8 or found in (BF16, FP16)
    if not narrow or not found.signed or not found.has_zero:
        raise FormatError(
            "groups are kept in signed formats of 8 bits or fewer with a zero, in bf16 or in fp16; "
            f"got {found.name}"
        )
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise ShapeError(f"a group has a positive number of elements; got {group!r}")
    return found


def _rows(x: Tensor, group: int) -> Tensor:
    flat = x.flatten()
    short = -flat.numel() % group
    if not short:
        return flat.view(-1, group)
    if x.dtype.itemsize == 1:  # torch pads no 8-bit floats
        return F.pad(flat.view(torch.uint8), (0, short)).view(x.dtype).view(-1, group)
    return F.pad(flat, (0, short)).view(-1, group)


def _raised(unit: Tensor, exponent: Tensor) -> Tensor:
    # This takes a third of the time of `pow`, which handles cases that do not occur here.
    return (unit.log2() * exponent).exp2()


def _codes(rows: Tensor, amax: Tensor, exponent: Tensor, fmt: Format) -> Tensor:
    """The codes of sign(x) F (|x| / M)^p, from the logarithm of that number."""
    bits = rows.view(torch.int32)
    size = bits & 0x7FFFFFFF
    most = amax.view(torch.int32).unsqueeze(1)
    # `loop_of_its_own` makes the numbers of a group once, not once for each vector of elements.
    place = _log2(torch.minimum(size, most)) - loop_of_its_own(_log2(most))
    place = _torch.fma(place, loop_of_its_own(exponent), math.log2(fmt.max))
    binade = place.floor()
    digits = _exp2(place - binade)
    binade = binade.int()
    # Up to this binade codes count steps from zero; above it, each binade has the same number.
    least = 1 - fmt.bias
    low = binade if fmt.is_integer else binade.clamp(max=least)
    last = 0 if fmt.is_integer else fmt.mantissa_bits - least
    steps = digits * ((low + (last + 127)) << 23).view(torch.float32)
    code = ((steps + 2.0**23).view(torch.int32) & 0xFF) + ((binade - low) << fmt.mantissa_bits)
    code = torch.where(size == 0, 0, code)
    code = torch.where(size > INFINITY, fmt.nan_code or 0, code)
    if fmt.is_integer:
        return torch.where(bits < 0, -code, code).to(fmt.storage_dtype)
    return (code | (bits >> 24) & 0x80).to(torch.uint8).view(fmt.storage_dtype)


def _log2(bits: Tensor) -> Tensor:
    """log2 of normal float32 numbers, given by their bits. Zero and subnormals give about -127."""
    exponent = (bits - _ROOT_HALF) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return _torch.fma(f, _polynomial(f, _LOG2), exponent.float())


def _exp2(f: Tensor) -> Tensor:
    """2^f for f from 0 to 1."""
    return _torch.fma(f, _polynomial(f, _EXP2), 1.0)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The polynomial with these coefficients, the constant first, evaluated by pairs so that few
    operations wait for an earlier one (Estrin 1960)."""
    terms: list[Tensor | float] = list(coefficients)
    while len(terms) > 1:
        last = terms[-1:] if len(terms) % 2 else []
        terms = [
            _torch.fma(x, high, low) for low, high in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms += last
        x = x * x
    return torch.as_tensor(terms[0])


def _drawn(
    wide: Tensor, unit: Tensor, exponent: Tensor, fmt: Format, key: Tensor, start: int
) -> Tensor:
    """One of the two codes around each magnitude, drawn by the distance from their values."""
    below = encode(wide, fmt, rounding="toward_zero", overflow="saturate")
    raw = below.view(torch.uint8)
    above = torch.where(raw < fmt.max_code, raw + 1, raw).view(below.dtype)
    ends = [decode(codes, fmt, torch.float32) for codes in (below, above)]
    low, high = (_raised(end * (1 / fmt.max), 1 / exponent) for end in ends)
    words = random_words(key, wide.shape, start, 32)
    draw = ((words >> 8) & 0xFFFFFF).float() * 2.0**-24
    return torch.where(draw * (high - low) < unit - low, ends[1], ends[0])


def _under_powers_of_two(
    rows: Tensor, largest: Tensor, fmt: Format, key: Tensor | None, start: int, spikes: bool
) -> Expanded:
    scale = kept = _scale_of(largest)
    if spikes:
        second = second_largest(rows, largest)
        of_rest = _scale_of(second)
        apart = stands_out(largest, second, of_rest * 2.0 ** (_TOP + 1))
        kept = torch.where(apart, joined(of_rest, largest, key, start), scale)
        scale = torch.where(apart, of_rest, scale)
    held = rows / scale.unsqueeze(1)
    if spikes:
        held = torch.where(rows.abs() < math.inf, held.clamp(-fmt.max, fmt.max), held)
    if key is None:
        codes = encode(held, fmt, overflow="ieee")
    else:
        codes = encode_bits(held, fmt, Mode("stochastic", "ieee", key), start)
    ones = torch.full(kept.shape, STEPS, dtype=torch.uint8, device=kept.device)
    return Expanded(codes, kept, ones)


def _scale_of(largest: Tensor) -> Tensor:
    binade = (largest.view(torch.int32) & INFINITY).view(torch.float32)
    scale = (binade * 2.0**-_TOP).clamp(min=_LEAST_SCALE)
    return torch.where(largest > 0, scale, 1.0)


def wanted_steps(top: float, fmt: Format) -> float:
    """The power, in sixteenths, that spreads one binade from 2f to `top`."""
    return math.log2(top / (2 * fmt.min_subnormal)) * STEPS


def _power(amax: Tensor, least: Tensor, top: float, fmt: Format) -> Tensor:
    # The quotient of two float32 numbers may overflow, so logarithms are subtracted.
    binades = amax.log2() - least.log2()
    wanted = wanted_steps(top, fmt) / binades
    # A group with one magnitude, or none, makes this infinite, negative or NaN.
    wanted = torch.where(binades > 0, wanted, float(STEPS))
    return wanted.floor().clamp(1, 255).to(torch.uint8)


def _exponent(power: Tensor) -> Tensor:
    return (power.float() / STEPS).unsqueeze(1)


# --- magnitudes held apart ------------------------------------------------------------------


def can_hold_apart(fmt: Format) -> bool:
    """Whether groups of a format can hold a magnitude apart."""
    return fmt is not BF16 and below_largest(fmt) > 2 * fmt.min_subnormal


def below_largest(fmt: Format) -> float:
    """A number that is not above the value of the second largest code."""
    if fmt.is_integer:
        return fmt.max - fmt.min_subnormal
    fraction, exponent = math.frexp(fmt.max)
    step = math.ldexp(1.0, exponent - 1 - fmt.mantissa_bits)
    return fmt.max - (step if fraction > 0.5 else step / 2)


def second_largest(rows: Tensor, largest: Tensor) -> Tensor:
    """The largest magnitude below `largest` in each row of a float32 matrix; 0 if there is none."""
    size = rows.abs()
    return torch.where(size < loop_of_its_own(largest).unsqueeze(1), size, 0.0).amax(1)


def power_of_two_from(x: Tensor) -> Tensor:
    """The least power of two that is not below `x`, and at least 2^-126."""
    return ((x.view(torch.int32) + _DIGITS) & INFINITY).view(torch.float32)


def stands_out(largest: Tensor, second: Tensor, of_rest: Tensor) -> Tensor:
    """Whether the largest magnitude of each group is held apart. It is not if all other elements
    are zeros, which lose nothing."""
    return (second > 0) & (largest > of_rest * _RATIO)


def joined(of_rest: Tensor, largest: Tensor, key: Tensor | None, start: int) -> Tensor:
    """The M of the others and the largest magnitude in the bits of one float32. With `key`, the
    magnitude is rounded stochastically."""
    more: Tensor | int = 1 << (_LOST - 1)
    if key is not None:
        more = random_words(key, largest.shape, start, 32) & ((1 << _LOST) - 1)
    kept = ((largest.view(torch.int32) + more) >> _LOST).clamp(max=_LARGEST)
    return (of_rest.view(torch.int32) | kept | SIGN).view(torch.float32)


def parted(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `joined`: (M of the others, largest magnitude). A group that holds nothing apart has M
    for both."""
    bits = amax.view(torch.int32)
    apart = bits < 0
    of_rest = torch.where(apart, (bits & INFINITY).view(torch.float32), amax)
    largest = ((bits & _DIGITS) << _LOST).view(torch.float32)
    # `loop_of_its_own` makes the numbers of a group once, not once for each vector of elements.
    return loop_of_its_own(of_rest), loop_of_its_own(torch.where(apart, largest, of_rest))


def holds_any(amax: Tensor) -> bool:
    """Whether a group may hold a magnitude apart. True without a look in traced code, and on
    devices where a look would take longer than it can save."""
    compiling = torch.compiler.is_compiling() or _torch.is_tracing(amax)
    if compiling or _torch.is_transforming() or not backend_of(amax).host:
        return True
    return bool((amax < 0).any())


def watched_from(amax: Tensor) -> Tensor:
    """A bound for the M of each group after a step. Above it a magnitude may stand out: M grew
    fast, or a magnitude stood out before, or all elements were zero (M = 1). No element is read."""
    return torch.where((amax < 0) | (amax == 1.0), 0.0, amax * _JUMP)
