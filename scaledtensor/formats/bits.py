"""Encoding and decoding by the bits of a float: every format, every rounding, any device.

To nearest even, one float32 sum counts the steps of both normal and subnormal numbers. In the other
roundings a number is rounded twice: as if it were normal, and as if it were subnormal. Both results
grow with the number and are equal at `min_normal`. Above it the first is the larger, below it the
second, so the code is their maximum. This integer arithmetic needs no `torch.where`, which takes
3 ns per element in eager mode.

float64 goes through the same formulas in int64, so it is rounded once in every mode.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.formats.format import Format, Specials
from scaledtensor.formats.stochastic import random_double_words, random_words

__all__ = [
    "INFINITY",
    "ON_AVX2",
    "SIGN",
    "Mode",
    "Overflow",
    "Rounding",
    "decode_bits",
    "encode_bits",
    "has_normals",
    "infinity_is_nan",
    "keeps_infinities",
    "limit_of_subnormals",
    "loop_of_its_own",
    "round_bits",
    "rounds_in_float32",
    "top_code",
]

Overflow = Literal["saturate", "saturate_finite", "ieee"]
Rounding = Literal["nearest_even", "nearest_away", "toward_zero", "to_odd", "stochastic"]

#: Inductor has no vectors of these dtypes.
_SCALAR_IN_INDUCTOR = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
#: Whether Inductor writes C++ for AVX2.
ON_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
#: The bits of a float32 infinity, which are the exponent bits of a float32.
INFINITY = 0x7F800000
_NAN = 0x7FC00000
#: The sign bit of a float32, as an int32.
SIGN = -(1 << 31)


class Mode(NamedTuple):
    """How to round. "stochastic" also has the key of its random words and the number of their bits
    that count."""

    rounding: Rounding = "nearest_even"
    overflow: Overflow = "saturate"
    key: Tensor | None = None
    kept: int = 32


class _Carrier(NamedTuple):
    """The bit layout of the float type that holds a number before its cast."""

    ints: torch.dtype
    width: int
    mantissa: int
    bias: int

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.mantissa

    @property
    def largest(self) -> int:
        """All bits but the sign's."""
        return (1 << (self.width - 1)) - 1


_SINGLE = _Carrier(torch.int32, 32, 23, 127)
_DOUBLE = _Carrier(torch.int64, 64, 52, 1023)


def rounds_in_float32(fmt: Format) -> bool:
    """Whether float32 sums and products round to the format's values.

    The numbers that they add and multiply by have to be float32, and ties have to go by the parity
    of a mantissa. E8M0 has no mantissa.
    """
    return (
        fmt.signed
        and 1 <= fmt.mantissa_bits <= 14
        and fmt.max * 2.0 ** (25 - fmt.mantissa_bits) < 2.0**128
        and fmt.min_subnormal > 2.0**-126
    )


def encode_bits(x: Tensor, fmt: Format, mode: Mode, start: int = 0) -> Tensor:
    """The codes of float32 or float64 numbers, in `fmt.storage_dtype`.

    If `x` is a piece of a tensor, `start` is the number of elements before it.
    """
    storage = fmt.storage_dtype
    if torch.compiler.is_compiling() and storage in backend_of(x).compiled_casts:
        # Inductor's C++ has no vectors of 16-bit integers. On other devices, casts are the only way
        # in which Inductor makes E8M0. The cast of a rounded value is exact.
        return loop_of_its_own(round_bits(x, fmt, mode)).to(storage)
    code = _code(x, fmt, mode, start)
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[storage.itemsize]
    code = loop_of_its_own(code)
    if storage.itemsize == 1 and ON_AVX2 and _compiled_for_cpu(code):
        # Inductor's C++ for AVX2 makes vectors of bytes from floats, and not from integers: 0.6
        # against 1.3 ns per element. A code is a small integer, so float32 holds it exactly.
        code = code.int().float()
    return loop_of_its_own(code.to(narrow)).view(storage)


def round_bits(x: Tensor, fmt: Format, mode: Mode) -> Tensor:
    """`decode_bits(encode_bits(x, fmt, mode), fmt)`, mostly without making codes."""
    if not fmt.signed or fmt.is_integer or not has_normals(fmt):
        return _value(_code(x, fmt, mode, 0).int(), fmt)
    carrier = _carrier(x)
    bits = x.view(carrier.ints)
    magnitude = bits & carrier.largest
    chance = _chance(x, fmt, mode, carrier, 0)
    digits = -(1 << (carrier.mantissa - fmt.mantissa_bits))
    value = (_leading(magnitude, fmt, mode, carrier, chance) & digits).view(x.dtype).float()
    if fmt.bias < carrier.bias:
        steps = _as_subnormal(x, fmt, mode, carrier, chance)
        small = steps.float() * fmt.min_subnormal
        value = torch.where(magnitude < _lowest(fmt, carrier), small, value)
    if mode.overflow != "saturate" and fmt.has_nan:
        over = magnitude >= carrier.infinity if _only_infinities(mode) else value > fmt.max
        value = torch.where(over, torch.inf if fmt.has_inf else torch.nan, value)
    value = torch.where(magnitude > carrier.infinity, torch.nan if fmt.has_nan else 0.0, value)
    if not fmt.has_nan and fmt.has_signed_zero:  # a NaN becomes the zero of the opposite sign
        bits = bits ^ (carrier.infinity - magnitude)
    return torch.where(bits < 0, -value if fmt.has_signed_zero else 0.0 - value, value)


def decode_bits(codes: Tensor, fmt: Format) -> Tensor:
    """The float32 values of codes."""
    if not fmt.signed and fmt.storage_dtype in backend_of(codes).compiled_casts:
        return codes.float()
    if codes.dtype.itemsize == 2:
        return _value(codes.view(torch.int16).int() & 0xFFFF, fmt)
    return _value(_bytes(codes).int(), fmt)


def _code(x: Tensor, fmt: Format, mode: Mode, start: int) -> Tensor:
    if not fmt.signed:
        return _exponent(x, fmt, mode, start)
    carrier = _carrier(x)
    bits = x.view(carrier.ints)
    magnitude = bits & carrier.largest
    if mode.rounding == "nearest_even" and rounds_in_float32(fmt) and has_normals(fmt):
        code = _nearest(magnitude, fmt, mode)
    else:
        code = _side_by_side(x, magnitude, fmt, mode, carrier, start)
    # All ones for an element whose code is NaN, else zero.
    nan = (carrier.infinity - int(infinity_is_nan(fmt, mode)) - magnitude) >> (carrier.width - 1)
    if fmt.has_inf and keeps_infinities(fmt, mode):
        infinite = (carrier.infinity - 1 - magnitude) >> (carrier.width - 1)
        code = torch.maximum(code, infinite & (fmt.max_code + 1))
    return _with_sign(code, bits, nan, fmt, carrier)


def _nearest(magnitude: Tensor, fmt: Format, mode: Mode) -> Tensor:
    """The code of a float32 magnitude, to nearest even.

    The addend is 2^(23 - mantissa_bits) times the power of two at or below the magnitude, and at
    least times `min_normal`. So the last place of the sum is the step between codes there, and the
    last digits of the sum count these steps.
    """
    shift = 23 - fmt.mantissa_bits
    lowest = _lowest(fmt, _SINGLE)
    if fmt.is_integer:
        size = magnitude.clamp(max=lowest).view(torch.float32)
        return (size + 2.0**23 * fmt.min_subnormal).view(torch.int32) - (lowest + (shift << 23))
    clipped = magnitude.clamp(max=(top_code(fmt, mode) + _rebias(fmt, _SINGLE)) << shift)
    power = clipped.clamp(min=lowest) & INFINITY
    addend = power + (shift << 23)
    total = clipped.view(torch.float32) + addend.view(torch.float32)
    return (total.view(torch.int32) - addend) + ((power - lowest) >> shift)


def _side_by_side(
    x: Tensor, magnitude: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, start: int
) -> Tensor:
    """The code of a magnitude, in any rounding."""
    chance = _chance(x, fmt, mode, carrier, start)
    if fmt.is_integer:
        return _as_subnormal(x, fmt, mode, carrier, chance)
    shift = carrier.mantissa - fmt.mantissa_bits
    code = (_leading(magnitude, fmt, mode, carrier, chance) >> shift) - _rebias(fmt, carrier)
    if fmt.bias < carrier.bias:  # otherwise the format has the carrier's own subnormals
        code = torch.maximum(code, _as_subnormal(x, fmt, mode, carrier, chance))
    return code


def _leading(
    magnitude: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, chance: Tensor | None
) -> Tensor:
    """The bits of a float whose leading digits are the rounded number, for a number of at least
    `min_normal`. For a smaller number, a result that is not larger than the one of `min_normal`."""
    shift = carrier.mantissa - fmt.mantissa_bits
    rebias = _rebias(fmt, carrier)
    clipped = magnitude.clamp(max=(top_code(fmt, mode) + rebias) << shift)
    if shift == 0:
        return clipped
    half = 1 << (shift - 1)
    if mode.rounding == "nearest_even":
        # Without mantissa bits, the parity of the code's exponent field decides a tie.
        return clipped + (((clipped >> shift) ^ (rebias & 1)) & 1) + (half - 1)
    if mode.rounding == "nearest_away":
        return clipped + half
    if mode.rounding == "to_odd":
        inexact = -(clipped & (2 * half - 1)) >> (carrier.width - 1)
        return clipped + (inexact & ~(clipped ^ (rebias << shift)) & (2 * half))
    if chance is not None:
        # These are the leading bits of the random number that `_as_subnormal` adds. So this never
        # rounds up where `_as_subnormal` does not, and the maximum of both is the right code.
        return clipped + (chance >> (carrier.width - 2 - carrier.mantissa))
    return clipped


def _as_subnormal(
    x: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, chance: Tensor | None
) -> Tensor:
    """The number of steps of `min_subnormal` in a number below `min_normal`. A larger number gives
    the same result as `min_normal`."""
    size = x.abs().clamp(max=limit_of_subnormals(fmt, mode))
    exponent = fmt.mantissa_bits + fmt.bias - 1  # of 1 / min_subnormal
    if mode.rounding == "nearest_even":
        return _times_power(size, exponent).round().to(carrier.ints)
    if mode.rounding == "nearest_away":
        return (_times_power(size, exponent + 1).to(carrier.ints) + 1) >> 1
    if chance is not None:
        fraction = carrier.width - 2 - fmt.mantissa_bits
        fixed = _times_power(size, exponent + fraction).to(carrier.ints)
        return (fixed + chance) >> fraction
    whole = _times_power(size, exponent).to(carrier.ints)
    if mode.rounding == "to_odd":
        lost = size - whole.to(size.dtype) * fmt.min_subnormal  # exact; a division may underflow
        return whole | (lost > 0).to(carrier.ints)
    return whole


def limit_of_subnormals(fmt: Format, mode: Mode) -> float:
    """The number at which `_as_subnormal` stops counting."""
    if not fmt.is_integer and top_code(fmt, mode) == fmt.max_code:
        return min(fmt.min_normal, fmt.max)  # in a format without normal numbers
    return fmt.min_normal


def _only_infinities(mode: Mode) -> bool:
    """Whether only infinities overflow: these roundings never take a number past max."""
    return mode.overflow == "saturate_finite" or mode.rounding in ("toward_zero", "to_odd")


def keeps_infinities(fmt: Format, mode: Mode) -> bool:
    """Whether infinities, and no finite numbers, become the format's infinity or NaN."""
    return mode.overflow != "saturate" and _only_infinities(mode) and fmt.has_nan


def infinity_is_nan(fmt: Format, mode: Mode) -> bool:
    """Whether infinities become NaN in the same step as NaNs, which costs nothing."""
    return keeps_infinities(fmt, mode) and not fmt.has_inf


def top_code(fmt: Format, mode: Mode) -> int:
    """The code at which magnitudes are clipped: the code of max, or the next code, which is
    infinity or NaN."""
    beyond = mode.overflow == "ieee" and fmt.has_nan and not _only_infinities(mode)
    return fmt.max_code + int(beyond)


def _with_sign(code: Tensor, bits: Tensor, nan: Tensor, fmt: Format, carrier: _Carrier) -> Tensor:
    last = carrier.width - 1
    if fmt.is_integer:
        minus = bits >> last
        # The negative side has one step more than the positive side.
        code = torch.minimum(code & ~nan, fmt.max_code - minus)
        return ((code ^ minus) - minus) & (fmt.num_codes - 1)
    top = 1 << (fmt.bits - 1)
    sign = (bits >> (carrier.width - fmt.bits)) & top
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        code = code & ~nan
        return code | (sign & (code + (top - 1))) | (nan & top)  # no sign for code 0
    if fmt.nan_code is None:
        return (code & ~nan) | (sign ^ (nan & top))
    return torch.maximum(code, nan & fmt.nan_code) | sign


def _carrier(x: Tensor) -> _Carrier:
    return _DOUBLE if x.dtype is torch.float64 else _SINGLE


def has_normals(fmt: Format) -> bool:
    """Whether the format has normal numbers. Integers count as having them: their `min_normal` is
    the magnitude of their least number."""
    return fmt.is_integer or fmt.max_code >= 1 << fmt.mantissa_bits


def _rebias(fmt: Format, carrier: _Carrier) -> int:
    """The difference of the leading bits of a carrier and the format's code of the same number."""
    return (carrier.bias - fmt.bias) << fmt.mantissa_bits


def _lowest(fmt: Format, carrier: _Carrier) -> int:
    """The bits of `min_normal` in the carrier."""
    return (1 + carrier.bias - fmt.bias) << carrier.mantissa


def _times_power(x: Tensor, exponent: int) -> Tensor:
    """x * 2^exponent, by two factors if the power is not a float32."""
    if exponent <= 127:
        return x * 2.0**exponent
    return x * 2.0**127 * 2.0 ** (exponent - 127)


def _chance(x: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, start: int) -> Tensor | None:
    """Random numbers for stochastic rounding. They have as many bits as `_as_subnormal` keeps after
    the point."""
    if mode.key is None:
        return None
    draw = random_words if carrier is _SINGLE else random_double_words
    fraction = carrier.width - 2 - fmt.mantissa_bits
    words = draw(mode.key, x.shape, start, mode.kept)
    return (words >> (carrier.width - fraction)) & ((1 << fraction) - 1)


def _exponent(x: Tensor, fmt: Format, mode: Mode, start: int) -> Tensor:
    """The E8M0 code of a float32 number: its exponent, rounded."""
    bits = x.view(torch.int32)
    half, one = 1 << 22, 1 << 23
    size = bits.clamp(half, INFINITY)  # `half` is 2^-127, a float32 subnormal
    tiny = (size - one) >> 31  # all ones below 2^-126
    if mode.rounding == "toward_zero":
        code = size >> 23
    elif mode.rounding == "to_odd":
        lost = (size - (tiny & half)) & (one - 1)
        code = (size >> 23) | ((-lost >> 31) & 1)
    elif mode.key is not None:
        words = random_words(mode.key, x.shape, start, mode.kept)
        chance = (words >> 9) & (one - 1)
        code = (size + chance - ((chance - (chance >> 1)) & tiny)) >> 23
    else:
        # Ties go up, and so does every number between the two smallest codes, as in ml_dtypes.
        code = ((size + half) >> 23) - (((size - half - 1) >> 31) & 1)
    top = top_code(fmt, mode)
    code = code.clamp(max=top)
    # Taken as integers, zero and the negative floats are below 1, and NaNs are above infinity.
    infinity = INFINITY - int(infinity_is_nan(fmt, mode))
    invalid = (bits >> 31) | ((bits - 1) >> 31) | ((infinity - bits) >> 31)
    return code | (invalid & (fmt.num_codes - 1))


def _value(raw: Tensor, fmt: Format) -> Tensor:
    """The float32 value of a code."""
    if not fmt.signed:
        # The middle bit turns code 0 into 2^-127, and the bits of infinity into a NaN.
        middle = (((raw - 1) | (fmt.num_codes - 2 - raw)) >> 31) & (1 << 22)
        return ((raw << 23) | middle).view(torch.float32)
    if fmt.is_integer:
        number = (raw << (32 - fmt.bits)) >> (32 - fmt.bits)
        return number.float() * fmt.min_subnormal
    sign_bit = 1 << (fmt.bits - 1)
    magnitude = raw & (sign_bit - 1)
    bits = (magnitude << (23 - fmt.mantissa_bits)) + ((127 - fmt.bias) << 23)
    value = bits.view(torch.float32)
    if fmt.bias < 127:
        # Field 0 means exponent 1 without the implicit bit. So the bit is added, and its value is
        # subtracted again. No float32 subnormal occurs, so flushing denormals changes nothing.
        subnormal = (bits + (1 << 23)).view(torch.float32) - fmt.min_normal
        value = torch.where(magnitude < 1 << fmt.mantissa_bits, subnormal, value)
    bits = value.view(torch.int32)
    # All ones past the code of max.
    special = (fmt.max_code - magnitude) >> 31
    if fmt.specials is Specials.P3109:
        bits = (bits & ~special) | (special & INFINITY)
    elif fmt.has_nan:
        bits = bits | (special & (INFINITY if fmt.has_inf else _NAN))
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        bits = bits | ((((raw ^ sign_bit) - 1) >> 31) & _NAN)
    return (bits | ((raw & sign_bit) << (32 - fmt.bits))).view(torch.float32)


def _compiled_for_cpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and backend_of(x).writes_cpp


def _bytes(codes: Tensor) -> Tensor:
    """8-bit codes as uint8."""
    if not _compiled_for_cpu(codes) or codes.dtype not in _SCALAR_IN_INDUCTOR:
        return codes.view(torch.uint8)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    # A kernel that reads one of these dtypes is not vectorised. A view as a dtype of the same width
    # is part of the kernel; a view as a dtype of another width is not.
    if codes.is_contiguous() and statically_known_true(codes.numel() % 2 == 0):
        return codes.view(-1).view(torch.int16).view(torch.uint8).view(codes.shape)
    return codes.view(torch.uint8)


def loop_of_its_own(x: Tensor) -> Tensor:
    """`x`, in a graph that is compiled for a CPU as the result of a separate loop.

    `x` must be the result of arithmetic, not a view: for a view of an intermediate, Inductor reads
    beyond the copy that it makes (pytorch issue 197431).

    Inductor's C++ (torch 2.13) still fuses the loops into one kernel, but vectorises it better. A
    kernel has as many lanes as 16-bit floats of its first loop fit into a register. If that is more
    than the number of 32-bit floats, conversions between integers, or from 8 bits to 16, go one
    element at a time (1.9 against 0.4 ns per element). Two loops that differ keep the kernel at the
    lanes of 32-bit floats. If the result of a kernel is viewed as a dtype that Inductor has no
    vectors of (FNUZ, E8M0), nothing of the kernel is vectorised (4.8 ns). The view of a buffer is
    no part of a kernel.
    """
    return x.as_strided(x.shape, x.stride()) if _compiled_for_cpu(x) else x
