"""ml_dtypes as a reference, beside the exact one of `scaledtensor.testing`; and inputs."""

import ml_dtypes
import numpy as np
import torch

from scaledtensor.formats import FORMATS, FP32, custom
from scaledtensor.testing import reference

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
    """Return the bytes of a tensor of codes as unsigned numbers."""
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
    """Return ml_dtypes' codes: clip-then-astype for "saturate", and the same for the finite numbers
    under "saturate_finite"."""
    with np.errstate(all="ignore"):
        a = to_numpy(x)
        if overflow != "ieee":
            clipped = np.clip(a.astype(np.float32), -fmt.max if fmt.signed else None, fmt.max)
            kept = np.isinf(a) & (overflow == "saturate_finite")
            a = np.where(kept, a.astype(np.float32), clipped)
        codes = a.astype(fmt.ml_dtype)
    return torch.from_numpy(codes.view(f"u{codes.itemsize}").astype(np.int64))


def ml_decode(codes, fmt):
    """Return the values by ml_dtypes, by numpy for integers, or else by the definition of the
    format."""
    if fmt.is_integer:
        small = {4: ml_dtypes.int4, 8: np.int8}[fmt.bits]
        numbers = raw(codes).numpy().astype(np.uint8).view(small).astype(np.float32)
        return torch.from_numpy(numbers) * 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
    if fmt.ml_dtype is None:
        return reference.values_of(raw(codes), fmt).float()
    values = raw(codes).numpy().astype(f"u{codes.dtype.itemsize}").view(fmt.ml_dtype)
    return torch.from_numpy(values.astype(np.float32))


def same(a, b):
    """Compare elements, with the sign of zero; NaN equals NaN."""
    return (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()


def is_nan_code(codes, fmt):
    found = torch.zeros(codes.shape, dtype=torch.bool)
    for span in fmt.nan_codes:
        found |= (codes >= span.start) & (codes < span.stop)
    return found


def assert_codes(got, want, fmt, x):
    """Compare byte for byte. torch's casts choose the code of a NaN in more than 8 bits."""
    nan = x.isnan()
    assert torch.equal(raw(got)[~nan], want[~nan])
    if fmt.has_nan:
        assert_nan_codes(raw(got)[nan], fmt, x[nan])


def assert_nan_codes(codes, fmt, x):
    """Check the codes of NaNs."""
    assert is_nan_code(codes, fmt).all()
    if fmt.bits > 8:
        return
    signs = len(fmt.nan_codes) > 1  # Otherwise there is one NaN, which has no sign.
    want = fmt.nan_code + (x.signbit().int() << (fmt.bits - 1)) * signs
    assert torch.equal(codes.int(), want.int())


def near_ties(fmt, dtype):
    """Return every value and midpoint of `fmt`, and numbers a hair to either side, of both
    signs."""
    if fmt is not FP32:
        return reference.near_ties(fmt, dtype)
    values = torch.tensor([1.0, 1.5, fmt.min_normal, fmt.min_subnormal, fmt.max / 2]).double()
    step = torch.tensor([fmt.eps, fmt.eps, *[fmt.min_subnormal] * 2, fmt.max * fmt.eps / 4])
    return reference.around(torch.cat((values, values + step.double() / 2)), dtype)
