"""Rounding to nearest even in float32, without making codes.

Two forms of the same function, each the fastest in its place: sums and products for Inductor's
C++, which vectorises them where a change between float and integer bits costs it a trip through
memory; and, eager, a sum with a number whose last place is the wanted step, in a few passes over
pieces that stay in the cache. E8M0, whose values are powers of two, is an integer sum in both.
"""

import torch
from torch import Tensor

from scaledtensor.formats.bits import Overflow, rounds_in_float32
from scaledtensor.formats.format import Format, Specials

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
