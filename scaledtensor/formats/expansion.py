"""Groups whose range is widened to that of an 8-bit format before they are cast: for the states of
an optimizer, which a linear scale serves badly (COAT, arXiv 2410.19313, section 3).

In a group with the largest magnitude M and the least one m, zeros aside, of a format with the
largest value F and the least positive one f:

    code  = round(sign(x) F (|x| / M)^p)          value = sign(code) M (|code| / F)^(1/p)
    p     = log(F / 2f) / log(M / m), rounded down to 1/16, between 1/16 and 255/16

So M becomes F, m at least 2f, and nothing but zero becomes zero (in less than 149 binades): for
E4M3FN 16.8 binades are spread over however many the group has, whether it has more (p < 1) or, as
it usually does, fewer (p > 1).
The published formula, with c = sqrt(M m) and a scale (M/c)^p / F, is the same: c cancels. It has
F / 2f = 448^2 / 2, which is as good for E4M3FN and says nothing of other formats.

A group of one magnitude (M = m) has p = 1, one without finite numbers but zeros M = 1. An infinity
has no say in M and m and saturates; a NaN has none either and stays one, where the format has NaNs.
For E4M3FN the codes of 128 elements take 128 + 4 + 1 bytes.

Powers are those of float32, within a few units of its last place: a code is that of the exact power
unless this lies as near to where rounding changes sides. Compiled code may differ there.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError, ShapeError
from scaledtensor.formats.format import Format, get
from scaledtensor.formats.rounding import FLOATS, Rounding, decode, encode
from scaledtensor.formats.stochastic import Randomness

__all__ = ["Expanded", "dequantize_expanded", "quantize_expanded"]

_STEPS = 16  # of a power, in one


class Expanded(NamedTuple):
    """What `quantize_expanded` returns: a tensor in groups of consecutive elements."""

    codes: Tensor
    """Of the shape of the tensor."""
    amax: Tensor
    """M of each group, float32."""
    power: Tensor
    """p of each group in sixteenths, uint8."""


def quantize_expanded(
    x: Tensor,
    fmt: Format | str,
    group: int = 128,
    *,
    rounding: Rounding = "nearest_even",
    generator: Randomness = None,
) -> Expanded:
    """Codes in groups of `group` consecutive elements, each widened to the range of `fmt`.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape. No gradient flows through.
        fmt: a signed format of 8 bits or fewer with a zero, or its name.
        group: how many elements share M and p, in the order of memory of a contiguous tensor. The
            last group may be shorter.
        rounding, generator: of the codes, as `encode` takes them.

    Raises:
        DTypeError: `x` is not of one of these dtypes.
        FormatError: another format.
        ShapeError: `group` is no positive int.
    """
    fmt = _checked(fmt, group)
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(f"groups are of float32, bfloat16, float16 or float64; got {given}")
    rows = _rows(x.detach().float(), group)
    size = rows.abs()
    finite = torch.where(size < math.inf, size, 0.0)
    amax = finite.amax(1)
    amax = torch.where(amax > 0, amax, 1.0)
    least = torch.where(finite > 0, finite, math.inf).amin(1)
    power = _power(amax, least, fmt)
    unit = size / amax.unsqueeze(1)
    wide = torch.copysign(unit.pow(_exponent(power)) * fmt.max, rows)
    options: dict[str, Any] = {"rounding": rounding, "generator": generator}
    codes = encode(wide, fmt, overflow="saturate", **options)
    return Expanded(codes.flatten()[: x.numel()].view(x.shape), amax, power)


def dequantize_expanded(
    expanded: Expanded, fmt: Format | str, group: int = 128, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of what `quantize_expanded` made with the same `fmt` and `group`, in `dtype`.

    Raises:
        DTypeError: the codes are not in the dtype of `fmt`.
        FormatError, ShapeError: as of `quantize_expanded`; or there is not one M and p a group.
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
    rows = _rows(decode(codes, fmt, torch.float32), group)
    unit = (rows.abs() / fmt.max).pow(1 / _exponent(power))
    values = torch.copysign(unit * amax.unsqueeze(1), rows)
    return values.flatten()[: codes.numel()].view(codes.shape).to(dtype)


def _checked(fmt: Format | str, group: int) -> Format:
    found = get(fmt)
    if found.bits > 8 or not found.signed or not found.has_zero:
        raise FormatError(
            f"groups are widened to signed formats of 8 bits or fewer with a zero; got {found.name}"
        )
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise ShapeError(f"a group has a positive number of elements; got {group!r}")
    return found


def _rows(x: Tensor, group: int) -> Tensor:
    flat = x.flatten()
    return F.pad(flat, (0, -flat.numel() % group)).view(-1, group)


def _power(amax: Tensor, least: Tensor, fmt: Format) -> Tensor:
    # A difference of logarithms, since the quotient of two float32 numbers may be none.
    binades = amax.log2() - least.log2()
    wanted = math.log2(fmt.max / (2 * fmt.min_subnormal)) * _STEPS / binades
    # Of one magnitude, or none: the quotient is infinite, negative or NaN.
    wanted = torch.where(binades > 0, wanted, float(_STEPS))
    return wanted.floor().clamp(1, 255).to(torch.uint8)


def _exponent(power: Tensor) -> Tensor:
    return (power.float() / _STEPS).unsqueeze(1)
