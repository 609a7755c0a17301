"""Three functions over a `Format`: encode, decode, and the two in a row.

Every result is the exact value rounded once, float64 included (which torch and ml_dtypes round
twice through float32); eager and compiled give the same bits. Of several exact ways each call
takes the fastest that was measured: on a CPU, eager, one loop of C++ (`native.py`); without a
compiler torch's own casts after a clamp, tables of 65,536 entries for 16-bit floats, or float32
sums; else the bits (`bits.py`), which serve everything and fuse.

Overflow. "saturate" takes numbers beyond ±max, and infinities, to ±max. "ieee" takes them to
infinity, to NaN where there is no infinity, and to ±max where there is neither. "saturate_finite"
takes numbers as "saturate" does and infinities as "ieee" does. What is not finite so stays not
finite, as far as the format has a code for it. A product casts its operands by this policy. What
counts as beyond follows the rounding as in IEEE 754: to nearest, what would round past max; toward
zero and to odd, infinities only; stochastic, what the draw rounds past max. To nearest even both
follow ml_dtypes byte for byte: "ieee" is its `astype`, "saturate" its `astype` after a clip.

NaN becomes
  - NAN_ONLY, FNUZ, P3109: the only NaN there is;
  - IEEE: the quiet NaN;
  - NONE: the zero of the opposite sign; INTEGER: zero;
and keeps its sign where the format has one, byte for byte as in ml_dtypes. Two things are left
open: what remains of a NaN in BF16, FP16 and FP32 (sign, payload), which torch's own casts decide,
and which zero `fake_quantize` makes of a NaN.
-0 stays where it has a code. `Format.policy` says all of this for one format.

E8M0 is a scale code: zero and negative values become NaN, positive ones the nearest power of two,
ties up; between its two smallest codes, 2^-127 and 2^-126, to nearest means up, as in ml_dtypes;
below them there is only 2^-127.
"""

from typing import get_args

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats import native, tables
from scaledtensor.formats.bits import (
    Mode,
    Overflow,
    Rounding,
    decode_bits,
    encode_bits,
    loop_of_its_own,
    round_bits,
    rounds_in_float32,
)
from scaledtensor.formats.format import Format, FormatLike, Specials, get
from scaledtensor.formats.stochastic import Randomness, checked_random_bits, key_for
from scaledtensor.formats.tensors import check_tensor, in_pieces

__all__ = [
    "FLOATS",
    "OVERFLOWS",
    "ROUNDINGS",
    "Overflow",
    "Rounding",
    "decode",
    "encode",
    "fake_quantize",
    "round_by_arithmetic",
]


# Rounding to nearest even in float32, without making codes.  Two forms of the same function, each
# the fastest in its place: sums and products for Inductor's C++, which vectorises them where a
# change between float and integer bits costs it a trip through memory; and, eager, a sum with a
# number whose last place is the wanted step, in a few passes over pieces that stay in the cache.
# E8M0, whose values are powers of two, is an integer sum in both.
_EXPONENT = 0x7F800000


_SIGN = -0x80000000


_MIN_NORMAL = 1 << 23


_MAX = torch.finfo(torch.float32).max


_HALF = 1 << 22  # of a float32's mantissa, and the bits of 2^-127


def fuses(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether `fuse_rounding` is the fastest for the format and numbers of `dtype`."""
    if not fmt.signed:
        return dtype is torch.float32  # bits, which Inductor's C++ takes one by one beside halves
    return rounds_in_float32(fmt)


def round_by_arithmetic(x: Tensor, fmt: Format) -> Tensor:
    """`fake_quantize(x, fmt, overflow="saturate_finite")` of a 16- or 32-bit float, up to the sign
    of zero.

    Float32 sums and products alone, which Inductor's C++ vectorises where it would spill the
    integer arithmetic of `encode` (0.2 against 0.8 ns per element). Normal numbers by Veltkamp's
    splitting (Dekker 1971, Numerische Mathematik 18), which rounds to nearest even at every float32
    here (tested); subnormals by adding a number whose last place is their step. Not for compilers
    that contract a product and a sum into one rounding, as those for GPUs do.
    """
    given = x.float()
    wide = given.clamp(fmt.min, fmt.max)
    step = 1.5 * 2.0**23 * fmt.min_subnormal
    subnormal = (wide + step) - step
    if fmt.is_integer:
        return subnormal
    value = torch.where(wide.abs() < fmt.min_normal, subnormal, _split(wide, fmt))
    return value + _infinities(given, fmt) if fmt.has_nan else value


def _infinities(x: Tensor, fmt: Format) -> Tensor:
    """Zero, but of an infinity that infinity, or NaN where the format has none."""
    return x - (x.clamp(-_MAX, _MAX) if fmt.has_inf else x)


def fuse_rounding(x: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """`fake_quantize(x, fmt, overflow=overflow)` of a 16- or 32-bit float, in float32.

    For Inductor's C++, as `round_by_arithmetic`, with the sign of zero and with what lies beyond
    the largest number.
    """
    wide = x.float()
    if not fmt.signed:
        value = _nearest_power(wide).view(torch.float32)
        if overflow != "ieee":
            value = value.clamp(max=fmt.max)
        value = torch.where(wide > 0, value, torch.nan)
        if overflow == "saturate_finite":
            value = torch.where(wide == torch.inf, torch.nan, value)
        return torch.where(value > fmt.max, torch.nan, value)
    if not fmt.has_nan:
        wide = torch.where(wide == wide, wide, 0.0)
    saturate, given = overflow != "ieee" or not fmt.has_nan, wide
    # Past 2 max everything overflows alike, and the splitting stays finite.
    low, high = (fmt.min, fmt.max) if saturate else (-2 * fmt.max, 2 * fmt.max)
    wide = wide.clamp(low, high)
    if fmt.has_signed_zero:
        # The nearest multiple, with the sign of `x` where that is zero.
        subnormal = (wide * (1 / fmt.min_subnormal)).round() * fmt.min_subnormal
    else:
        step = 1.5 * 2.0**23 * fmt.min_subnormal
        subnormal = (wide + step) - step
    if fmt.is_integer:
        return subnormal
    value = torch.where(wide.abs() < fmt.min_normal, subnormal, _split(wide, fmt))
    if overflow == "saturate_finite" and fmt.has_nan:
        return torch.where(given.abs() == torch.inf, given if fmt.has_inf else torch.nan, value)
    if saturate:
        return value
    if fmt.has_inf:
        value = torch.where(value > fmt.max, torch.inf, value)
        return torch.where(value < -fmt.max, -torch.inf, value)
    return torch.where(value.abs() > fmt.max, torch.nan, value)


def _split(x: Tensor, fmt: Format) -> Tensor:
    """The leading digits of normal numbers, by Veltkamp's splitting."""
    split = x * (2.0 ** (23 - fmt.mantissa_bits) + 1)
    return split - (split - x)


def _nearest_power(x: Tensor) -> Tensor:
    """As float32 bits, the power of two nearest to x > 0 that E8M0 has, or infinity.

    Ties go up, and so does everything between 2^-127, a float32 subnormal, and 2^-126.
    """
    size = x.view(torch.int32).clamp(_HALF, _EXPONENT)
    down = (size - _MIN_NORMAL) >> 31  # takes 2^-127 itself below 2^-126
    return ((size + down + _HALF) & _EXPONENT).clamp_(min=_HALF)


def round_piece(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    """`fake_quantize(x, fmt, overflow=overflow)` of a float32 piece, eager, into `out` if given.

    The number added is a multiple of the power of two below |x|, so its last place is the step
    between values there. Seven passes of a vectorised operator each.
    """
    if not fmt.signed:
        return _round_to_power(x, fmt, overflow, torch.empty_like(x) if out is None else out)
    saturate = overflow != "ieee" or not fmt.has_nan
    low, high = (fmt.min, fmt.max) if saturate else (-2 * fmt.max, 2 * fmt.max)
    value = x.clamp(low, high) if out is None else torch.clamp(x, low, high, out=out)
    if not fmt.has_nan:
        value.nan_to_num_(nan=0.0)
    if fmt.is_integer:
        magic = 1.5 * 2.0**23 * fmt.min_subnormal
        return value.add_(magic).sub_(magic)
    bits = value.view(torch.int32)
    power = (bits & _EXPONENT).view(torch.float32).clamp_(min=fmt.min_normal)
    steps = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    value.add_(power, alpha=steps).sub_(power, alpha=steps)
    if not saturate:
        _overflow_(value, fmt)
    elif overflow == "saturate_finite" and fmt.has_nan:
        value.add_(_infinities(x, fmt))
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        return value
    # The sum takes -0, and what rounds to it, to +0. The zero of a NaN has the other sign, as codes
    # have it.
    sign = x.view(torch.int32)
    if not fmt.has_nan:
        sign = sign ^ (_EXPONENT - (sign & ~_SIGN))
    bits.bitwise_or_(sign & _SIGN)
    return value


def _overflow_(value: Tensor, fmt: Format) -> None:
    """Numbers beyond max, in place: to infinity, or to NaN where there is none."""
    # Times 2^127 twice the excess over max is past float32, or, within the range, exactly nothing.
    excess = value - value.clamp(-fmt.max, fmt.max)
    excess.mul_(2.0**127).mul_(2.0**127)
    value.add_(excess if fmt.has_inf else excess.mul_(0.0))


def _round_to_power(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor) -> Tensor:
    """To E8M0, in place in `out`: the steps of `_nearest_power`."""
    size = torch.clamp(x.view(torch.int32), _HALF, _EXPONENT, out=out.view(torch.int32))
    down = (size - _MIN_NORMAL).bitwise_right_shift_(31)
    size.add_(down).add_(_HALF).bitwise_and_(_EXPONENT).clamp_(min=_HALF)
    if overflow != "ieee":
        out.clamp_(max=fmt.max)
        if overflow == "saturate_finite":
            out.add_(x - x)  # infinity to NaN
    else:
        out.add_(out * 0.0)  # infinity to NaN
    valid = x.sign().relu_()
    return out.mul_(valid).div_(valid)  # 0 / 0 where x is not above zero


OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)


ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


_WIDE = (torch.float32, torch.bfloat16, torch.float16)


_HALVES = (torch.bfloat16, torch.float16)


_RAW = (torch.uint8, torch.int16)


def encode(
    x: Tensor,
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    generator: Randomness = None,
    random_bits: int | None = None,
) -> Tensor:
    """The codes of `x` in `fmt`, a tensor of the format's `storage_dtype` and the shape of `x`.

    Args:
        x: float64, float32, bfloat16 or float16, of any shape and strides. No gradient flows.
        fmt: the format: a `Format`, its name, or the torch dtype of its codes.
        rounding: "nearest_even"; "nearest_away" (ties away from zero); "toward_zero"; "to_odd"
            (of the two neighbours of an inexact number the one with the odd code, so that a later
            rounding to fewer bits is as if it were the first); "stochastic" (up with a chance equal
            to the distance from below in steps: unbiased).
        overflow: "saturate", "saturate_finite" or "ieee", see above.
        generator: for "stochastic", where its random numbers come from: a torch.Generator, a
            `random_key`, or None for the device's default generator.
        random_bits: for "stochastic", how many bits decide, 1 to 32; the distance from below is
            then cut to that many bits, as hardware does. None takes all there are. The chance is
            then exact for a number that is normal in `fmt`, and for subnormals within
            2^(mantissa_bits - 30) of a step (exact unless the number has digits below that);
            for float64 within 2^(mantissa_bits - 62).

    Raises DTypeError for anything but such a tensor, FormatError for unknown names and for
    `generator` or `random_bits` without "stochastic", UnsupportedError for "stochastic" on 2^31
    elements or more.
    """
    check_tensor(x, "encode")
    mode = _checked(x, rounding, overflow, generator, random_bits)
    return _encode(_numbers(x), get(fmt), mode)


def encode_with_values(
    x: Tensor, fmt: FormatLike, overflow: Overflow = "saturate"
) -> tuple[Tensor, Tensor] | None:
    """(encode(x, ...), decode(of that)) to nearest even from one pass over memory; None where no
    loop does that."""
    mode = _checked(x, "nearest_even", overflow, None, None)
    return native.encode_with_values(_numbers(x), get(fmt), mode)


def rounded_values(x: Tensor, fmt: FormatLike, overflow: Overflow = "saturate") -> Tensor | None:
    """The second of `encode_with_values` alone."""
    mode = _checked(x, "nearest_even", overflow, None, None)
    return native.rounded_values(_numbers(x), get(fmt), mode)


def decode(codes: Tensor, fmt: FormatLike, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `codes`, in `dtype`.

    Exact where `dtype` holds every value of `fmt`, else rounded once to nearest even. Raises
    DTypeError for codes of another dtype than the format's `storage_dtype`, or another `dtype` than
    float64, float32, bfloat16 and float16.
    """
    check_tensor(codes, "decode", "codes")
    fmt = get(fmt)
    if codes.dtype is not fmt.storage_dtype:
        raise DTypeError(f"codes of {fmt!r} are {fmt.storage_dtype}, got {codes.dtype}")
    if dtype not in FLOATS:
        raise DTypeError(f"cannot decode to {dtype}; allowed are {_names(FLOATS)}")
    if codes.dtype in _WIDE:
        mixed = {codes.dtype, dtype} == {*_HALVES}  # which Inductor's C++ would not vectorise well
        return _as(loop_of_its_own(codes.float()) if mixed else codes, dtype)
    made = native.decode(codes, fmt, dtype)
    if made is not None:
        return made
    # Other types (FakeTensor for one) stand for data that a table of real numbers cannot meet.
    real = not torch.compiler.is_compiling() and codes.is_cpu and type(codes) is Tensor
    if real and codes.dtype.itemsize == 1:
        return in_pieces(lambda t, _, out: tables.look_up(t, fmt, dtype, out), codes, dtype)
    return _as(loop_of_its_own(decode_bits(codes, fmt)), dtype)


def fake_quantize(
    x: Tensor,
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    generator: Randomness = None,
    random_bits: int | None = None,
) -> Tensor:
    """`x` rounded to the values of `fmt`, in the dtype of `x`: decode(encode(x, ...), x.dtype).

    Takes and raises what `encode` does. No gradient flows.
    """
    check_tensor(x, "fake_quantize")
    mode, fmt = _checked(x, rounding, overflow, generator, random_bits), get(fmt)
    x = _numbers(x)
    nearest, storage = rounding == "nearest_even", fmt.storage_dtype
    made = native.fake_quantize(x, fmt, mode)
    if made is not None:
        return made
    if torch.compiler.is_compiling():
        # GPU compilers contract a product and a sum; there the bits are as fast.
        if nearest and x.is_cpu and x.dtype not in (torch.float64, storage) and fuses(fmt, x.dtype):
            return _as(fuse_rounding(x, fmt, overflow), x.dtype)
        if storage is not torch.float32 and x.dtype is not storage:
            wide = _carried(x, fmt, mode)
            if wide.dtype is not x.dtype:  # and so no view of the caller's
                wide = loop_of_its_own(wide)
            return _as(loop_of_its_own(round_bits(wide, fmt, mode)), x.dtype)
    elif nearest and storage not in _WIDE and rounds_in_float32(fmt):
        if tables.serves(x):
            return tables.fake_quantize(x, fmt, mode, lambda t: _rounded(t, fmt, overflow))
        return in_pieces(lambda t, _, out: _rounded(t, fmt, overflow, out), x, x.dtype)
    return decode(_encode(x, fmt, mode), fmt, x.dtype)


def _numbers(x: Tensor) -> Tensor:
    """`x` without a gradient, and with the signs in memory that it has: what torch has negated by a
    bit of the tensor alone, as the imaginary part of a conjugate, has others."""
    x = x.detach() if x.requires_grad else x
    return x if torch.compiler.is_compiling() else x.resolve_neg()


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which a graph of Dynamo has only where it does something.

    A node that returns its input would give an autograd.Function one tensor under two names. Dynamo
    of torch 2.11 returns both, and loses the gradient of the first.
    """
    return x if x.dtype is dtype else x.to(dtype)


def _encode(x: Tensor, fmt: Format, mode: Mode) -> Tensor:
    storage, nearest = fmt.storage_dtype, mode.rounding == "nearest_even"
    made = native.encode(x, fmt, mode)
    if made is not None:
        return made
    if torch.compiler.is_compiling():
        if nearest and (storage is torch.float32 or x.dtype is storage):
            return _cast(x, fmt, mode.overflow)
        if nearest and storage is torch.float16 and x.is_cpu and x.dtype is not torch.float64:
            # Inductor drops a cast to 16 bits that is undone in the same kernel, so the rounding
            # is done before it.
            return loop_of_its_own(fuse_rounding(x, fmt, mode.overflow)).to(storage)
        return _by_bits(x, fmt, mode)
    castable = nearest and storage not in _RAW and fmt.signed
    if castable and (mode.overflow != "ieee" or storage in _WIDE):
        return in_pieces(lambda t, _, out: _cast(t, fmt, mode.overflow, out), x, storage)
    if tables.serves(x) and mode.key is None:
        return tables.encode(x, fmt, mode, _by_bits)
    return in_pieces(
        lambda t, start, _: _by_bits(t, fmt, mode, start), x, storage, mode.key is None
    )


def _carried(x: Tensor, fmt: Format, mode: Mode) -> Tensor:
    """`x` as what `encode_bits` takes: float32, or float64 where one rounding has to see it all."""
    by_its_own_digits = fmt.signed and mode.rounding != "nearest_even"
    return x if x.dtype is torch.float64 and by_its_own_digits else _single(x)


def _single(x: Tensor) -> Tensor:
    """`x` in float32, such that rounding to nearest even from there is rounding from `x`."""
    return _round_to_odd(x) if x.dtype is torch.float64 else x.float()


def _checked(
    x: Tensor,
    rounding: Rounding,
    overflow: Overflow,
    generator: Randomness,
    random_bits: int | None,
) -> Mode:
    if x.dtype not in FLOATS:
        raise DTypeError(f"cannot encode a tensor of {x.dtype}; allowed are {_names(FLOATS)}")
    if rounding not in ROUNDINGS:
        allowed = ", ".join(map(repr, ROUNDINGS))
        raise FormatError(f"unknown rounding {rounding!r}; allowed are {allowed}")
    if overflow not in OVERFLOWS:
        allowed = ", ".join(map(repr, OVERFLOWS))
        raise FormatError(f"unknown overflow {overflow!r}; allowed are {allowed}")
    if rounding == "stochastic":
        kept = checked_random_bits(random_bits)
        return Mode(rounding, overflow, key_for(x, generator), kept)
    for name, given in (("generator", generator), ("random_bits", random_bits)):
        if given is not None:
            raise FormatError(f"{name} is for rounding 'stochastic' only, got it with {rounding!r}")
    return Mode(rounding, overflow)


def _by_bits(x: Tensor, fmt: Format, mode: Mode, start: int = 0) -> Tensor:
    return encode_bits(_carried(x, fmt, mode), fmt, mode, start)


def _rounded(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    if x.dtype is torch.float32:
        return round_piece(x, fmt, overflow, out)
    return round_piece(_single(x), fmt, overflow).to(x.dtype)


def _cast(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    """By torch's own casts, into `out` if given."""
    storage = fmt.storage_dtype
    if x.dtype is torch.float64 and storage is not torch.float32:
        x = _round_to_odd(x)
    if overflow != "ieee":
        given = x
        # Other 16-bit floats lack the maxima of the wide formats; and their clamp, by way of
        # float32 itself, drops the sign of a NaN.
        if x.dtype in _HALVES and x.dtype is not storage:
            x = x.float().clamp_(-fmt.max, fmt.max)
        else:
            x = x.clamp(-fmt.max, fmt.max)
        if overflow == "saturate_finite":
            kept = given if fmt.has_inf else torch.full_like(given, torch.nan).copysign_(given)
            x = torch.where(given.abs() == torch.inf, kept, x)
    codes = _as(x, storage) if out is None else out.copy_(x)
    if storage is torch.float8_e5m2:
        raw = codes.view(torch.uint8)
        nan = raw & 0x7F
        raw.sub_(torch.eq(nan, 0x7F, out=nan))  # torch writes NaN as all ones; see `nan_code`
    return codes


def _round_to_odd(x: Tensor) -> Tensor:
    """float64 to float32, towards zero but with an odd last bit wherever bits were lost.

    A later rounding to a shorter format then sees every tie as the tie, or not, that it was
    (Boldo and Melquiond, "When double rounding is odd").
    """
    near = x.float()
    # The absolute value is taken between the two conversions: GCC 12 drops a bare pair of them
    # where it makes vectors of eight float64.
    back, size = near.abs().double(), x.abs()
    bits = near.view(torch.int32)
    bits = bits - (back > size).int()  # one step down the magnitude, whatever the sign
    return (bits | (back != size).int()).view(torch.float32)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
