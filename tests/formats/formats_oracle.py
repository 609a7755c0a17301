"""Two references: ml_dtypes, and exact rational arithmetic that shares nothing with the library."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import torch

from scaledtensor.formats import FORMATS, FP32, Format, custom
from scaledtensor.formats.format import Specials

ALL = list(FORMATS.values())
SIGNED = [fmt for fmt in ALL if fmt.signed]
SHORT = [fmt for fmt in ALL if fmt.bits <= 16]
BYTES = [fmt for fmt in SIGNED if fmt.bits <= 8]
INTEGERS = [fmt for fmt in ALL if fmt.is_integer]
REFERENCED = [fmt for fmt in ALL if fmt.ml_dtype is not None and not fmt.is_integer]
ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "to_odd")
OWN = [
    custom(5, 1),
    custom(2, 4, bias=9, has_inf=False),
    custom(4, 3, bias=8, signed_zero=False),
    custom(3, 0, has_inf=False, has_nan=False),
    custom(8, 3),
    custom(1, 5, bias=-3, has_inf=False, has_nan=False),
    custom(6, 9),
    custom(7, 8, bias=126, has_inf=False, has_nan=False),
    custom(4, 8, bias=100, has_inf=False),
]
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def raw(codes):
    """The bytes of a tensor of codes, as unsigned numbers."""
    width = codes.dtype.itemsize
    return codes.contiguous().view(_RAW[width]).long() & ((1 << 8 * width) - 1)


def all_codes(fmt):
    dtype = torch.uint8 if fmt.bits <= 8 else torch.int16
    return torch.arange(fmt.num_codes).to(dtype).view(fmt.storage_dtype)


def every_16_bit(dtype):
    return torch.arange(1 << 16).to(torch.int16).view(dtype)


def to_numpy(x):
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def ml_encode(x, fmt, overflow):
    """The codes that ml_dtypes gives, by clip-then-astype for "saturate", and likewise of what is
    finite for "saturate_finite"."""
    with np.errstate(all="ignore"):
        a = to_numpy(x)
        if overflow != "ieee":
            clipped = np.clip(a.astype(np.float32), -fmt.max if fmt.signed else None, fmt.max)
            kept = np.isinf(a) & (overflow == "saturate_finite")
            a = np.where(kept, a.astype(np.float32), clipped)
        codes = a.astype(fmt.ml_dtype)
    return torch.from_numpy(codes.view(f"u{codes.itemsize}").astype(np.int64))


def ml_decode(codes, fmt):
    """The values by ml_dtypes, or numpy's for integers; by the definition where neither has any."""
    if fmt.is_integer:
        small = {4: ml_dtypes.int4, 8: np.int8}[fmt.bits]
        numbers = raw(codes).numpy().astype(np.uint8).view(small).astype(np.float32)
        return torch.from_numpy(numbers) * 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
    if fmt.ml_dtype is None:
        return _ladder_decode(codes, fmt)
    values = raw(codes).numpy().astype(f"u{codes.dtype.itemsize}").view(fmt.ml_dtype)
    return torch.from_numpy(values.astype(np.float32))


def _ladder_decode(codes, fmt):
    """Both signs of the ladder, and what lies past it by the kind of specials."""
    top = 1 << (fmt.bits - 1)
    finite = [float(v) for v in ladder(fmt)]
    past = [math.inf] if fmt.specials in (Specials.IEEE, Specials.P3109) else []
    half = finite + past
    half += [math.nan] * (top - len(half))
    other = [-v for v in half]
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        other[0] = math.nan
    return torch.tensor(half + other)[raw(codes)]


def same(a, b):
    """Equal, with the sign of zero; NaN equals NaN."""
    return (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()


def is_nan_code(codes, fmt):
    found = torch.zeros(codes.shape, dtype=torch.bool)
    for span in fmt.nan_codes:
        found |= (codes >= span.start) & (codes < span.stop)
    return found


def assert_codes(got, want, fmt, x):
    """Byte for byte; of a NaN in more than 8 bits torch's casts choose the code."""
    nan = x.isnan()
    assert torch.equal(raw(got)[~nan], want[~nan])
    if fmt.has_nan:
        assert_nan_codes(raw(got)[nan], fmt, x[nan])


def assert_nan_codes(codes, fmt, x):
    """What NaNs became."""
    assert is_nan_code(codes, fmt).all()
    if fmt.bits > 8:
        return
    signs = len(fmt.nan_codes) > 1  # else there is one NaN, without a sign
    want = fmt.nan_code + (x.signbit().int() << (fmt.bits - 1)) * signs
    assert torch.equal(codes.int(), want.int())


def _definition(code: int, fmt: Format) -> Fraction:
    """The value of a sign-less code by the facts alone, also past that of max."""
    bits = fmt.mantissa_bits
    field, mantissa = divmod(code, 1 << bits)
    if fmt.is_integer:
        field, mantissa = 0, code
    lead = int(field > 0 or not fmt.signed)
    exponent = (field if lead else 1) - fmt.bias - bits
    return (lead * (1 << bits) + mantissa) * Fraction(2) ** exponent


@cache
def ladder(fmt: Format) -> tuple[Fraction, ...]:
    """The values of the codes from 0 to that of max."""
    return tuple(_definition(code, fmt) for code in range(fmt.max_code + 1))


def _beyond(fmt: Format) -> Fraction:
    """Where the value after max would be."""
    return _definition(fmt.max_code + 1, fmt)


def _codes_beyond(fmt: Format, overflow: str, infinite: bool = False) -> int:
    """The sign-less code of what overflows; FNUZ reaches its NaN by the sign bit."""
    kept = overflow == "ieee" or (infinite and overflow == "saturate_finite")
    return fmt.max_code + int(kept and fmt.has_nan)


def exact_code(
    value: float, fmt: Format, rounding="nearest_even", overflow="saturate", draw=None
) -> int | None:
    """The code of one number by comparing fractions; None for a NaN that has no one code.

    `draw` is the uniform fraction in [0, 1) of stochastic rounding: up where it and the distance
    from below reach 1 together.
    """
    if math.isnan(value):
        return None
    if not fmt.signed and value <= 0:
        return fmt.num_codes - 1
    negative = math.copysign(1, value) < 0
    code = _exact_magnitude(abs(value), fmt, rounding, overflow, negative, draw)
    if fmt.is_integer:
        return -code % fmt.num_codes if negative else code
    top = 1 << (fmt.bits - 1)
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        return top if code == top else code | top * (negative and code > 0)
    return code | top * negative


def _exact_magnitude(value, fmt, rounding, overflow, negative, draw):
    top = fmt.max_code + int(fmt.is_integer and negative)
    finite_stay = rounding in ("toward_zero", "to_odd")
    if math.isinf(value):
        return _codes_beyond(fmt, overflow, True) if top == fmt.max_code else top
    size, values = Fraction(value), ladder(fmt)
    ends = (_beyond(fmt),)
    below = bisect_right(values + ends, size) - 1
    if below < 0:
        return 0  # E8M0 has nothing below its smallest
    if below > fmt.max_code:
        over = top > fmt.max_code or finite_stay
        return top if over else _codes_beyond(fmt, overflow)
    low, high = values[below], (values + ends)[below + 1]
    share = (size - low) / (high - low)
    up = _goes_up(share, below, rounding, fmt, draw)
    code = below + up
    if code <= top:
        return code
    return top if finite_stay else _codes_beyond(fmt, overflow)


def _goes_up(share, below, rounding, fmt, draw):
    if share == 0 or rounding == "toward_zero":
        return 0
    if rounding == "to_odd":
        return 1 - below % 2
    if rounding == "stochastic":
        return int(share + draw >= 1)
    if not fmt.signed:  # as ml_dtypes: ties up, and all of the first gap
        return int(share >= Fraction(1, 2) or below == 0)
    if rounding == "nearest_away":
        return int(share >= Fraction(1, 2))
    return int(share > Fraction(1, 2) or (share == Fraction(1, 2) and below % 2 == 1))


def grid_encode(x, fmt, rounding="nearest_even", overflow="saturate"):
    """As `exact_code`, of a whole tensor, by comparing float64 numbers, which is exact."""
    values = np.array([float(v) for v in (*ladder(fmt), _beyond(fmt))])
    wide = x.double().numpy()
    size = np.abs(wide)
    below = np.maximum(np.searchsorted(values, size, side="right") - 1, 0)
    low, high = values[below], np.append(values, np.inf)[below + 1]
    middle = (low + high) / 2
    if rounding == "toward_zero":
        up = np.zeros(size.shape, bool)
    elif rounding == "to_odd":
        up = (size > low) & (below % 2 == 0) & (below <= fmt.max_code)
    elif not fmt.signed:
        up = (size >= middle) | ((below == 0) & (size > low))
    elif rounding == "nearest_away":
        up = size >= middle
    else:
        up = (size > middle) | ((size == middle) & (below % 2 == 1))
    negative = np.signbit(wide)
    top = fmt.max_code + (fmt.is_integer & negative)
    code = np.minimum(below + up, fmt.max_code + 1)
    stay = rounding in ("toward_zero", "to_odd")
    over = np.where((code > fmt.max_code) & ~stay | np.isinf(size), 1, 0)
    kept = np.where(np.isinf(size), *(_codes_beyond(fmt, overflow, i) for i in (True, False)))
    beyond = np.where(top > fmt.max_code, top, kept)
    code = np.where(over == 1, beyond, np.minimum(code, top))
    if fmt.is_integer:
        code = np.where(negative, -code, code) % fmt.num_codes
    elif not fmt.signed:
        code = np.where(wide > 0, code, fmt.num_codes - 1)
    else:
        sign = 1 << (fmt.bits - 1)
        keep = (code > 0) | (not fmt.specials.value.endswith(("fnuz", "p3109")))
        code = np.where(code == sign, sign, code | sign * (negative & keep))
    return torch.from_numpy(code.astype(np.int64))


def near_ties(fmt, dtype):
    """Every value and midpoint of `fmt`, and numbers a hair to either side, of both signs."""
    if fmt is FP32:
        values = torch.tensor([1.0, 1.5, fmt.min_normal, fmt.min_subnormal, fmt.max / 2]).double()
        step = torch.tensor([fmt.eps, fmt.eps, *[fmt.min_subnormal] * 2, fmt.max * fmt.eps / 4])
        middle = values + step.double() / 2
    else:
        values = torch.tensor([float(v) for v in ladder(fmt)]).double()
        overflow = torch.tensor(float(_beyond(fmt))).double()
        middle = (values + torch.cat((values[1:], overflow[None]))) / 2
    points = torch.cat((values, middle)).to(dtype)
    if dtype is torch.float64:
        hairs = [points * (1 + d) for d in (0, 2**-52, -(2**-52), 2**-30, -(2**-30), 2**-26)]
    else:
        bits = points.view(torch.int32)
        hairs = [(bits + d).clamp(0, 0x7F800000).view(dtype) for d in range(-3, 4)]
    points = torch.cat(hairs)
    return torch.cat((points, -points))
