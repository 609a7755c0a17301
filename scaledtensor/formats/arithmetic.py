"""Rounding to nearest even in float32 arithmetic alone, without making codes.

Two forms of the same function, each the fastest in its place: sums and products for Inductor's
C++, which vectorises them where a change between float and integer bits costs it a trip through
memory; and, eager, a sum with a number whose last place is the wanted step, in a few passes over
pieces that stay in the cache.
"""

import torch
from torch import Tensor

from scaledtensor.formats.bits import Overflow
from scaledtensor.formats.format import Format, Specials

_EXPONENT = 0x7F800000
_SIGN = -0x80000000


def rounds_in_float32(fmt: Format) -> bool:
    """Whether these functions serve the format: what they add and multiply by has to be a float32,
    and ties to go by the parity of a mantissa."""
    return (
        fmt.signed
        and 1 <= fmt.mantissa_bits <= 14
        and fmt.max * 2.0 ** (25 - fmt.mantissa_bits) < 2.0**128
        and fmt.min_subnormal > 2.0**-126
    )


def round_by_arithmetic(x: Tensor, fmt: Format) -> Tensor:
    """`fake_quantize(x, fmt)` of a 16- or 32-bit float, saturating, up to the sign of zero.

    Float32 sums and products alone, which Inductor's C++ vectorises where it would spill the
    integer arithmetic of `encode` (0.2 against 0.8 ns per element). Normal numbers by Veltkamp's
    splitting (Dekker 1971, Numerische Mathematik 18), which rounds to nearest even at every float32
    here (tested); subnormals by adding a number whose last place is their step. Not for compilers
    that contract a product and a sum into one rounding, as those for GPUs do.
    """
    wide = x.float().clamp(fmt.min, fmt.max)
    step = 1.5 * 2.0**23 * fmt.min_subnormal
    subnormal = (wide + step) - step
    if fmt.is_integer:
        return subnormal
    return torch.where(wide.abs() < fmt.min_normal, subnormal, _split(wide, fmt))


def fuse_rounding(x: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """`fake_quantize(x, fmt, overflow=overflow)` of a 16- or 32-bit float, in float32.

    For Inductor's C++, as `round_by_arithmetic`, with the sign of zero and with what lies beyond
    the largest number.
    """
    wide = x.float()
    if not fmt.has_nan:
        wide = torch.where(wide == wide, wide, 0.0)
    saturate = overflow == "saturate" or not fmt.has_nan
    # Past 2 max everything overflows alike, and the splitting stays finite.
    low, high = (fmt.min, fmt.max) if saturate else (-2 * fmt.max, 2 * fmt.max)
    wide = wide.clamp(low, high)
    if fmt.has_signed_zero:
        # `round` keeps the sign of what it rounds to zero.
        subnormal = (wide * (1 / fmt.min_subnormal)).round() * fmt.min_subnormal
    else:
        step = 1.5 * 2.0**23 * fmt.min_subnormal
        subnormal = (wide + step) - step
    if fmt.is_integer:
        return subnormal
    value = torch.where(wide.abs() < fmt.min_normal, subnormal, _split(wide, fmt))
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


def round_piece(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    """`fake_quantize(x, fmt, overflow=overflow)` of a float32 piece, eager, into `out` if given.

    The number added is a multiple of the power of two below |x|, so its last place is the step
    between values there. Nine passes of a vectorised operator each.
    """
    saturate = overflow == "saturate" or not fmt.has_nan
    low, high = (fmt.min, fmt.max) if saturate else (-2 * fmt.max, 2 * fmt.max)
    value = x.clamp(low, high) if out is None else torch.clamp(x, low, high, out=out)
    if not fmt.has_nan:
        value.nan_to_num_(nan=0.0)
    if fmt.is_integer:
        magic = 1.5 * 2.0**23 * fmt.min_subnormal
        return value.add_(magic).sub_(magic)
    power = (value.view(torch.int32) & _EXPONENT).view(torch.float32)
    power.clamp_(min=fmt.min_normal).mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    value.add_(power).sub_(power)
    if not saturate:
        _overflow_(value, fmt)
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        return value
    # The sum takes -0, and what rounds to it, to +0.
    value.view(torch.int32).bitwise_or_(x.view(torch.int32) & _SIGN)
    return value


def _overflow_(value: Tensor, fmt: Format) -> None:
    """Numbers beyond max, in place: to infinity, or to NaN where there is none."""
    if fmt.has_inf:
        # Times 2^127 the excess over max is past float32, or, within the range, exactly nothing.
        excess = value - value.clamp(-fmt.max, fmt.max)
        value.add_(excess.mul_(2.0**127).mul_(2.0**127))
        return
    value.masked_fill_(value.abs() > fmt.max, torch.nan)
