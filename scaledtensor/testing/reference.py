"""The exact answer of a cast, by comparison of fractions.

This module shares no arithmetic with `scaledtensor.formats`. It derives a format's values from its
facts, as fractions, and rounds a number by comparing it with the two values around it.
`reference_codes` does the same for a tensor in float64, where every comparison is exact.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError, UnsupportedError
from scaledtensor.formats import Format, FormatLike, get
from scaledtensor.formats.rounding import OVERFLOWS, ROUNDINGS, Overflow, Rounding

__all__ = [
    "around",
    "ladder",
    "near_ties",
    "reference_code",
    "reference_codes",
    "reference_round",
    "values_of",
]


@cache
def ladder(fmt: Format) -> tuple[Fraction, ...]:
    """The values of the codes from 0 to the code of max.

    Raises UnsupportedError for formats of more than 16 bits, which have too many values to list.
    """
    if fmt.bits > 16:
        raise UnsupportedError(f"{fmt.name} has too many values to list; take one of up to 16 bits")
    return tuple(_definition(code, fmt) for code in range(fmt.max_code + 1))


def _definition(code: int, fmt: Format) -> Fraction:
    """The value of a code without its sign, by the facts of the format. The code may be past the
    code of max."""
    bits = fmt.mantissa_bits
    field, mantissa = divmod(code, 1 << bits)
    if fmt.is_integer:
        field, mantissa = 0, code
    lead = int(field > 0 or not fmt.signed)
    exponent = (field if lead else 1) - fmt.bias - bits
    return (lead * (1 << bits) + mantissa) * Fraction(2) ** exponent


@cache
def _ends(fmt: Format) -> tuple[Fraction, ...]:
    """The ladder, and the value that would follow max."""
    return *ladder(fmt), _definition(fmt.max_code + 1, fmt)


def _code_beyond(fmt: Format, overflow: str, infinite: bool = False) -> int:
    """The code, without its sign, of a number that overflows. FNUZ sets the sign bit for its
    NaN."""
    kept = overflow == "ieee" or (infinite and overflow == "saturate_finite")
    return fmt.max_code + int(kept and fmt.has_nan)


# --- one number ------------------------------------------------------------------------------


def reference_code(
    value: float,
    fmt: FormatLike,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    draw: Fraction | None = None,
) -> int | None:
    """Return the code of one number; None for a NaN, since a format may have several NaNs or none.

    Args:
        value: any float, taken as a float64.
        fmt: a format of up to 16 bits, its name, or the torch dtype of its codes.
        rounding, overflow: see `scaledtensor.formats.encode`.
        draw: for "stochastic", a fraction in [0, 1). A number goes up if its distance from the
            value below, in steps, plus `draw` is 1 or more.

    Raises:
        FormatError: `fmt`, `rounding` or `overflow` is unknown, or "stochastic" has no `draw`.
        UnsupportedError: a format of more than 16 bits.
    """
    fmt = get(fmt)
    _check(rounding, overflow)
    if rounding == "stochastic" and draw is None:
        raise FormatError("rounding 'stochastic' takes draw, a fraction in [0, 1)")
    if math.isnan(value):
        return None
    if not fmt.signed and value <= 0:
        return fmt.num_codes - 1
    negative = math.copysign(1, value) < 0
    code = _magnitude(abs(value), fmt, rounding, overflow, negative, draw)
    if fmt.is_integer:
        return -code % fmt.num_codes if negative else code
    top = 1 << (fmt.bits - 1)
    if not fmt.has_signed_zero:
        return top if code == top else code | top * (negative and code > 0)
    return code | top * negative


def reference_round(
    value: float,
    fmt: FormatLike,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    draw: Fraction | None = None,
) -> float:
    """Return `value`, rounded once: the value of `reference_code`. NaN stays NaN.

    The arguments and the errors are the same as for `reference_code`.
    """
    fmt = get(fmt)
    code = reference_code(value, fmt, rounding, overflow, draw)
    return math.nan if code is None else float(_values(fmt)[code])


def _check(rounding: str, overflow: str) -> None:
    for given, allowed in ((rounding, ROUNDINGS), (overflow, OVERFLOWS)):
        if given not in allowed:
            names = ", ".join(map(repr, allowed))
            raise FormatError(f"{given!r} is unknown here; allowed are {names}")


def _magnitude(
    value: float,
    fmt: Format,
    rounding: str,
    overflow: str,
    negative: bool,
    draw: Fraction | None,
) -> int:
    top = fmt.max_code + int(fmt.is_integer and negative)
    finite_stay = rounding in ("toward_zero", "to_odd")
    if math.isinf(value):
        return _code_beyond(fmt, overflow, True) if top == fmt.max_code else top
    size, values = Fraction(value), _ends(fmt)
    below = bisect_right(values, size) - 1
    if below < 0:
        return 0  # E8M0 has no value below its smallest
    if below > fmt.max_code:
        over = top > fmt.max_code or finite_stay
        return top if over else _code_beyond(fmt, overflow)
    low, high = values[below], values[below + 1]
    share = (size - low) / (high - low)
    code = below + _goes_up(share, below, rounding, fmt, draw)
    if code <= top:
        return code
    return top if finite_stay else _code_beyond(fmt, overflow)


def _goes_up(share: Fraction, below: int, rounding: str, fmt: Format, draw: Fraction | None) -> int:
    half = Fraction(1, 2)
    if share == 0 or rounding == "toward_zero":
        return 0
    if rounding == "to_odd":
        return 1 - below % 2
    if draw is not None and rounding == "stochastic":
        return int(share + draw >= 1)
    if not fmt.signed:  # same as ml_dtypes: ties go up, and so do all numbers in the first gap
        return int(share >= half or below == 0)
    if rounding == "nearest_away":
        return int(share >= half)
    return int(share > half or (share == half and below % 2 == 1))


# --- a tensor --------------------------------------------------------------------------------


def reference_codes(
    x: Tensor,
    fmt: FormatLike,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
) -> Tensor:
    """Return the codes of `x` as int64, in its shape. They are the same as from `reference_code`.

    The code of a NaN is arbitrary.

    Args:
        x: float64, float32, bfloat16 or float16, of any shape.
        fmt, rounding, overflow: same as for `reference_code`, except for "stochastic".

    Raises:
        DTypeError: `x` is of another dtype.
        FormatError: `fmt`, `rounding` or `overflow` is unknown.
        UnsupportedError: "stochastic" rounding, which has several answers, or a format of more than
            16 bits.
    """
    fmt = get(fmt)
    _check(rounding, overflow)
    if rounding == "stochastic":
        raise UnsupportedError("rounding 'stochastic' has no one answer; reference_code takes draw")
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        raise DTypeError(f"reference_codes takes a tensor of floats, got {_kind(x)}")
    values = np.array([float(v) for v in _ends(fmt)])
    wide: Any = x.detach().cpu().double().numpy()
    size = np.abs(wide)
    below = np.maximum(np.searchsorted(values, size, side="right") - 1, 0)
    low, high = values[below], np.append(values, np.inf)[below + 1]
    code = below + _up(fmt, rounding, size, low, high, below)
    negative = np.signbit(wide)
    top = fmt.max_code + (fmt.is_integer & negative)
    code = np.minimum(code, fmt.max_code + 1)
    stay = rounding in ("toward_zero", "to_odd")
    over = (code > fmt.max_code) & (not stay) | np.isinf(size)
    kept = np.where(np.isinf(size), *(_code_beyond(fmt, overflow, i) for i in (True, False)))
    beyond = np.where(top > fmt.max_code, top, kept)
    code = np.where(over, beyond, np.minimum(code, top))
    if fmt.is_integer:
        code = np.where(negative, -code, code) % fmt.num_codes
    elif not fmt.signed:
        code = np.where(wide > 0, code, fmt.num_codes - 1)
    else:
        sign = 1 << (fmt.bits - 1)
        keep = (code > 0) | fmt.has_signed_zero
        code = np.where(code == sign, sign, code | sign * (negative & keep))
    return torch.from_numpy(code.astype(np.int64))


def _up(fmt: Format, rounding: str, size: Any, low: Any, high: Any, below: Any) -> Any:
    middle = (low + high) / 2
    if rounding == "toward_zero":
        return np.zeros(size.shape, bool)
    if rounding == "to_odd":
        return (size > low) & (below % 2 == 0) & (below <= fmt.max_code)
    if not fmt.signed:
        return (size >= middle) | ((below == 0) & (size > low))
    if rounding == "nearest_away":
        return size >= middle
    return (size > middle) | ((size == middle) & (below % 2 == 1))


@cache
def _values(fmt: Format) -> Tensor:
    """The float64 value of every code."""
    return torch.tensor(_listed(fmt), dtype=torch.float64)


def _listed(fmt: Format) -> Sequence[float]:
    """The values of all codes: both signs of the ladder, then infinities and NaNs."""
    finite = [float(v) for v in ladder(fmt)]
    if not fmt.signed:
        return [*finite, math.nan]
    top = 1 << (fmt.bits - 1)
    if fmt.is_integer:
        return [*finite, *(float(-Fraction(top - i) * ladder(fmt)[1]) for i in range(top))]
    half = finite + [math.inf] * int(fmt.has_inf)
    half += [math.nan] * (top - len(half))
    other = [-v for v in half]
    if not fmt.has_signed_zero:
        other[0] = math.nan
    return half + other


def values_of(codes: Tensor, fmt: Format) -> Tensor:
    """The float64 values of int64 codes."""
    return _values(fmt)[codes]


# --- inputs ----------------------------------------------------------------------------------


def near_ties(fmt: FormatLike, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the inputs on which casts are most likely to be wrong, with both signs.

    They are every value of `fmt`, the middle between every two values, and numbers a hair to either
    side of each. In float32 a hair is up to 3 ulp.

    Args:
        fmt: a format of up to 16 bits, its name, or the torch dtype of its codes.
        dtype: float32 or float64.

    Raises:
        DTypeError: another dtype.
        UnsupportedError: a format of more than 16 bits.
    """
    fmt = get(fmt)
    if dtype not in (torch.float32, torch.float64):
        raise DTypeError(f"near_ties makes float32 and float64, got {dtype}")
    ends = torch.tensor([float(v) for v in _ends(fmt)]).double()
    return around(torch.cat((ends[:-1], (ends[:-1] + ends[1:]) / 2)), dtype)


def around(points: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive numbers, their neighbours within a hair, and the same with the other sign."""
    points = points.to(dtype)
    if dtype is torch.float64:
        hairs = [points * (1 + d) for d in (0, 2**-52, -(2**-52), 2**-30, -(2**-30), 2**-26)]
    else:
        bits = points.view(torch.int32)
        hairs = [(bits + d).clamp(0, 0x7F800000).view(dtype) for d in range(-3, 4)]
    points = torch.cat(hairs)
    return torch.cat((points, -points))


def _kind(x: Any) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
