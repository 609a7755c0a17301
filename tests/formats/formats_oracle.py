"""Two references: ml_dtypes, and exact rational arithmetic that shares nothing with the library."""

from bisect import bisect_left
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import torch

from scaledtensor.formats import FORMATS, FP32, Format

ALL = list(FORMATS.values())
SIGNED = [fmt for fmt in ALL if fmt.signed]
SHORT = [fmt for fmt in ALL if fmt.bits <= 16]
BYTES = [fmt for fmt in SIGNED if fmt.bits <= 8]
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
    """The codes that ml_dtypes gives, by clip-then-astype for "saturate"."""
    with np.errstate(all="ignore"):
        a = to_numpy(x)
        if overflow == "saturate":
            a = np.clip(a.astype(np.float32), -fmt.max if fmt.signed else None, fmt.max)
        codes = a.astype(fmt.ml_dtype)
    return torch.from_numpy(codes.view(f"u{codes.itemsize}").astype(np.int64))


def ml_decode(codes, fmt):
    values = raw(codes).numpy().astype(f"u{codes.dtype.itemsize}").view(fmt.ml_dtype)
    return torch.from_numpy(values.astype(np.float32))


def same(a, b):
    """Equal, with the sign of zero; NaN equals NaN."""
    return (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()


def is_nan_code(codes, fmt):
    found = torch.zeros(codes.shape, dtype=torch.bool)
    for span in fmt.nan_codes:
        found |= (codes >= span.start) & (codes < span.stop)
    return found


def assert_codes(got, want, fmt, x):
    """Byte for byte, except for NaN inputs: NaN there, where the format has one."""
    nan = x.isnan()
    assert torch.equal(raw(got)[~nan], want[~nan])
    if fmt.has_nan:
        assert is_nan_code(raw(got)[nan], fmt).all()


@cache
def _ladder(fmt: Format) -> list[Fraction]:
    """The value of every sign-less finite code, from the ml_dtypes reading of the codes."""
    codes = all_codes(fmt)[: fmt.max_code + 1]
    return [Fraction(v) for v in ml_decode(codes, fmt).tolist()]


def exact_saturating_code(value: float, fmt: Format) -> int:
    """Round-to-nearest-even of a finite number by comparison of fractions."""
    ladder, size = _ladder(fmt), abs(Fraction(value))
    above = bisect_left(ladder, size)
    if above == len(ladder):
        code = fmt.max_code
    elif above == 0:
        code = 0
    else:
        low, high = size - ladder[above - 1], ladder[above] - size
        code = above if high < low or (high == low and above % 2 == 0) else above - 1
    negative = np.signbit(value) and (fmt.has_signed_zero or code > 0)
    return code | int(negative) << (fmt.bits - 1)


def near_ties(fmt, dtype):
    """Every value and midpoint of `fmt`, and numbers a hair to either side, of both signs."""
    if fmt is FP32:
        values = torch.tensor([1.0, 1.5, fmt.min_normal, fmt.min_subnormal, fmt.max / 2]).double()
        step = torch.tensor([fmt.eps, fmt.eps, *[fmt.min_subnormal] * 2, fmt.max * fmt.eps / 4])
        middle = values + step.double() / 2
    else:
        values = ml_decode(all_codes(fmt)[: fmt.max_code + 1], fmt).double()
        overflow = 2 * values[-1] - values[-2]
        middle = (values + torch.cat((values[1:], overflow[None]))) / 2
    points = torch.cat((values, middle)).to(dtype)
    if dtype is torch.float64:
        hairs = [points * (1 + d) for d in (0, 2**-52, -(2**-52), 2**-30, -(2**-30), 2**-26)]
    else:
        bits = points.view(torch.int32)
        hairs = [(bits + d).clamp(0, 0x7F800000).view(dtype) for d in range(-3, 4)]
    points = torch.cat(hairs)
    return torch.cat((points, -points))
