"""Encoding and decoding by the bits of a float: every format, every rounding, any device.

To nearest even one float32 sum counts the steps of normal and subnormal numbers alike. Otherwise
a number is rounded twice side by side, as if it were normal and as if it were subnormal. The two
meet at `min_normal`; above it the first is the larger, below it the second, and both are monotone,
so the code is their maximum: integer arithmetic without a single selection, as torch's `where`
takes 3 ns per element in eager mode.

float64 goes through the same formulas in int64, so it is rounded once in every mode.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats.format import Format, Specials
from scaledtensor.formats.stochastic import random_double_words, random_words

Overflow = Literal["saturate", "saturate_finite", "ieee"]
Rounding = Literal["nearest_even", "nearest_away", "toward_zero", "to_odd", "stochastic"]

#: Of these dtypes Inductor has no vectors.
_SCALAR_IN_INDUCTOR = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
#: Whether Inductor writes C++ for AVX2.
ON_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
INFINITY = 0x7F800000
_NAN = 0x7FC00000


class Mode(NamedTuple):
    """How to round, and for "stochastic" the key of its words and how many bits of them count."""

    rounding: Rounding = "nearest_even"
    overflow: Overflow = "saturate"
    key: Tensor | None = None
    kept: int = 32


class _Carrier(NamedTuple):
    """The layout of the float type that a number comes in."""

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
    """Whether float32 sums and products round to the format's values: what they add and multiply
    by has to be a float32, and ties to go by the parity of a mantissa. E8M0's are integer sums."""
    return not fmt.signed or (
        1 <= fmt.mantissa_bits <= 14
        and fmt.max * 2.0 ** (25 - fmt.mantissa_bits) < 2.0**128
        and fmt.min_subnormal > 2.0**-126
    )


def encode_bits(x: Tensor, fmt: Format, mode: Mode, start: int = 0) -> Tensor:
    """The codes of float32 or float64 numbers, in `fmt.storage_dtype`.

    `start` counts the elements before `x`, of which this is a piece.
    """
    storage = fmt.storage_dtype
    if torch.compiler.is_compiling():
        # Inductor's C++ has no vectors of 16-bit integers, and elsewhere Inductor knows E8M0 by
        # casts alone. The cast of a value is exact.
        halves = (torch.bfloat16, torch.float16)
        if storage in (halves if x.is_cpu else (torch.float8_e8m0fnu,)):
            return loop_of_its_own(round_bits(x, fmt, mode)).to(storage)
    code = _code(x, fmt, mode, start)
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[storage.itemsize]
    code = loop_of_its_own(code)
    if storage.itemsize == 1 and ON_AVX2 and _compiled_for_cpu(code):
        # Inductor's C++ for AVX2 has vectors of bytes from floats, and not from integers: 0.6
        # against 1.3 ns an element. A code is a small integer, which float32 holds as it is.
        code = code.int().float()
    return loop_of_its_own(code.to(narrow)).view(storage)


def round_bits(x: Tensor, fmt: Format, mode: Mode) -> Tensor:
    """`decode_bits(encode_bits(x, fmt, mode), fmt)`, without making codes where that is shorter."""
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
    if not fmt.has_nan and fmt.has_signed_zero:  # the code of a NaN is the zero of the other sign
        bits = bits ^ (carrier.infinity - magnitude)
    return torch.where(bits < 0, -value if fmt.has_signed_zero else 0.0 - value, value)


def decode_bits(codes: Tensor, fmt: Format) -> Tensor:
    """The float32 values of codes."""
    if not (fmt.signed or codes.is_cpu):
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
    # All ones where the code is NaN's, else zero.
    nan = (carrier.infinity - int(infinity_is_nan(fmt, mode)) - magnitude) >> (carrier.width - 1)
    if fmt.has_inf:
        code = _with_infinity(code, magnitude, fmt, mode, carrier)
    return _with_sign(code, bits, nan, fmt, carrier)


def _nearest(magnitude: Tensor, fmt: Format, mode: Mode) -> Tensor:
    """The code of a float32 magnitude, to nearest even.

    What is added to it is 2^(23 - mantissa_bits) times the power of two below it, or below
    `min_normal`: the sum's last place is the step between codes there, so its last digits are
    their number.
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
    if fmt.bias < carrier.bias:  # with the carrier's own exponents the subnormals need no care
        code = torch.maximum(code, _as_subnormal(x, fmt, mode, carrier, chance))
    return code


def _leading(
    magnitude: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, chance: Tensor | None
) -> Tensor:
    """A carrier of at least `min_normal`, of which the leading digits are the rounded number;
    below `min_normal`, not more than that."""
    shift = carrier.mantissa - fmt.mantissa_bits
    rebias = _rebias(fmt, carrier)
    clipped = magnitude.clamp(max=(top_code(fmt, mode) + rebias) << shift)
    if shift == 0:
        return clipped
    half = 1 << (shift - 1)
    if mode.rounding == "nearest_even":
        # Without mantissa bits the exponent's parity counts, that of the code's field.
        return clipped + (((clipped >> shift) ^ (rebias & 1)) & 1) + (half - 1)
    if mode.rounding == "nearest_away":
        return clipped + half
    if mode.rounding == "to_odd":
        inexact = -(clipped & (2 * half - 1)) >> (carrier.width - 1)
        return clipped + (inexact & ~(clipped ^ (rebias << shift)) & (2 * half))
    if chance is not None:
        # The leading bits of the same number, so that this never rounds up where the other does
        # not: their maximum is then the right one of the two.
        return clipped + (chance >> (carrier.width - 2 - carrier.mantissa))
    return clipped


def _as_subnormal(
    x: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, chance: Tensor | None
) -> Tensor:
    """The number of smallest steps, for a number below `min_normal`; above it, as at it."""
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
        lost = size - whole.to(size.dtype) * fmt.min_subnormal  # exact, where steps may underflow
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
    """Whether infinities, and they alone, become what the format has for them."""
    return mode.overflow != "saturate" and _only_infinities(mode) and fmt.has_nan


def infinity_is_nan(fmt: Format, mode: Mode) -> bool:
    """Whether infinities become NaN as a NaN does, which costs nothing."""
    return keeps_infinities(fmt, mode) and not fmt.has_inf


def top_code(fmt: Format, mode: Mode) -> int:
    """The magnitude at which numbers are clipped. Past that of max lies infinity or NaN."""
    beyond = mode.overflow == "ieee" and fmt.has_nan and not _only_infinities(mode)
    return fmt.max_code + int(beyond)


def _with_infinity(
    code: Tensor, magnitude: Tensor, fmt: Format, mode: Mode, carrier: _Carrier
) -> Tensor:
    if not keeps_infinities(fmt, mode):
        return code
    infinite = (carrier.infinity - 1 - magnitude) >> (carrier.width - 1)
    return torch.maximum(code, infinite & (fmt.max_code + 1))


def _with_sign(code: Tensor, bits: Tensor, nan: Tensor, fmt: Format, carrier: _Carrier) -> Tensor:
    last = carrier.width - 1
    if fmt.is_integer:
        minus = bits >> last
        # One step more to the negative side than to the positive one.
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
    """Integers count as having them: their `min_normal` is the size of their least number."""
    return fmt.is_integer or fmt.max_code >= 1 << fmt.mantissa_bits


def _rebias(fmt: Format, carrier: _Carrier) -> int:
    """From the format's codes to the leading bits of the carrier."""
    return (carrier.bias - fmt.bias) << fmt.mantissa_bits


def _lowest(fmt: Format, carrier: _Carrier) -> int:
    """`min_normal`, as the carrier has it."""
    return (1 + carrier.bias - fmt.bias) << carrier.mantissa


def _times_power(x: Tensor, exponent: int) -> Tensor:
    """x * 2^exponent, in two factors where that power is no float32."""
    if exponent <= 127:
        return x * 2.0**exponent
    return x * 2.0**127 * 2.0 ** (exponent - 127)


def _chance(x: Tensor, fmt: Format, mode: Mode, carrier: _Carrier, start: int) -> Tensor | None:
    """For stochastic rounding, random numbers of as many bits as the steps of subnormals have
    digits after the point."""
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
    size = bits.clamp(half, INFINITY)  # half: 2^-127, the smallest code, is a float32 subnormal
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
        # Ties go up, and so does everything between the two smallest codes, as in ml_dtypes.
        code = ((size + half) >> 23) - (((size - half - 1) >> 31) & 1)
    top = top_code(fmt, mode)
    code = code.clamp(max=top)
    # As integers, zero and the negative floats are those below 1, the NaNs those above infinity.
    infinity = INFINITY - int(infinity_is_nan(fmt, mode))
    invalid = (bits >> 31) | ((bits - 1) >> 31) | ((infinity - bits) >> 31)
    return code | (invalid & (fmt.num_codes - 1))


def _value(raw: Tensor, fmt: Format) -> Tensor:
    """The float32 value of a code."""
    if not fmt.signed:
        # The bit in the middle makes 2^-127 out of code 0, and a NaN of what were infinity.
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
        # Field 0 means exponent 1 without the implicit bit: add it, take its value off again. No
        # float32 subnormal is touched, so this holds with denormals flushed too.
        subnormal = (bits + (1 << 23)).view(torch.float32) - fmt.min_normal
        value = torch.where(magnitude < 1 << fmt.mantissa_bits, subnormal, value)
    bits = value.view(torch.int32)
    # All ones past the code of max, and at the code of -0.
    special = (fmt.max_code - magnitude) >> 31
    if fmt.specials is Specials.P3109:
        bits = (bits & ~special) | (special & INFINITY)
    elif fmt.has_nan:
        bits = bits | (special & (INFINITY if fmt.has_inf else _NAN))
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        bits = bits | ((((raw ^ sign_bit) - 1) >> 31) & _NAN)
    return (bits | ((raw & sign_bit) << (32 - fmt.bits))).view(torch.float32)


def _compiled_for_cpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.is_cpu


def _bytes(codes: Tensor) -> Tensor:
    """8-bit codes as uint8."""
    if not _compiled_for_cpu(codes) or codes.dtype not in _SCALAR_IN_INDUCTOR:
        return codes.view(torch.uint8)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    # A kernel that reads one of these dtypes is not vectorised, and a view between dtypes of one
    # width is part of the kernel; between widths it is not.
    if codes.is_contiguous() and statically_known_true(codes.numel() % 2 == 0):
        return codes.view(-1).view(torch.int16).view(torch.uint8).view(codes.shape)
    return codes.view(torch.uint8)


def loop_of_its_own(x: Tensor) -> Tensor:
    """`x`, in a graph that is compiled for a CPU as the result of a loop of its own.

    `x` is the result of arithmetic and no view: of a view of an intermediate, Inductor reads beyond
    the copy that it makes (pytorch issue 197431).

    Two things hang on that in Inductor's C++ (torch 2.13), which still writes one kernel where the
    loops fuse. A kernel has as many lanes as its first loop's 16-bit floats fit into a register,
    and with more than the 32-bit ones do, conversions between integers, or from 8 bits to 16, go
    one element at a time (1.9 against 0.4 ns per element); two loops that differ keep it at those.
    And where a kernel's own result is viewed as one of the dtypes that Inductor has no vectors of
    (FNUZ, E8M0), nothing of it is vectorised (4.8 ns); the view of a buffer is no kernel.
    """
    return x.as_strided(x.shape, x.stride()) if _compiled_for_cpu(x) else x
