"""Strategies for hypothesis: formats, difficult numbers for casts, scales, and ScaledTensors."""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import FormatError, UnsupportedError
from scaledtensor.formats import FORMATS, Format, FormatLike, custom, get
from scaledtensor.formats.custom import SPECIALS
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.tensors.wrap import scaled
from scaledtensor.testing.reference import near_ties

try:
    from hypothesis import reject
    from hypothesis import strategies as st
except ImportError as error:
    raise UnsupportedError(
        "scaledtensor.testing.strategies needs hypothesis: pip install 'scaledtensor[testing]'"
    ) from error

__all__ = ["custom_formats", "formats", "powers_of_two", "scaled_tensors", "values_near"]

_SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)


def formats(max_bits: int = 16, *, signed: bool | None = None) -> "st.SearchStrategy[Format]":
    """Formats of `scaledtensor.formats.FORMATS` with at most `max_bits` bits.

    Args:
        max_bits: 4 to 32.
        signed: True for signed formats, False for unsigned ones (E8M0 only), None for all.

    Raises:
        FormatError: no format is left.
    """
    wanted = (None, True, False) if signed is None else (signed,)
    found = [f for f in FORMATS.values() if f.bits <= max_bits and f.signed in wanted]
    if not found:
        raise FormatError(f"no format of at most {max_bits} bits has signed={signed}")
    return st.sampled_from(found)


@st.composite
def custom_formats(draw: Any) -> Format:
    """Formats of up to 8 bits by `scaledtensor.formats.custom`, with any facts that fit together. A
    few are equal to a format of `FORMATS`."""
    exponent = draw(st.integers(1, 6))
    mantissa = draw(st.integers(0, 7 - exponent))
    has_inf, has_nan, signed_zero = draw(st.sampled_from(list(SPECIALS)))
    bias = 2 ** (exponent - 1) - 1 + draw(st.integers(-8, 8))
    try:
        return custom(
            *(exponent, mantissa, bias),
            has_inf=has_inf,
            has_nan=has_nan,
            signed_zero=signed_zero,
        )
    except FormatError:  # no code is left for a number
        reject()


def values_near(fmt: FormatLike, dtype: torch.dtype = torch.float32) -> "st.SearchStrategy[float]":
    """Numbers of `dtype` on which a cast to `fmt` is most likely to be wrong.

    They are the format's values, its ties, and numbers up to 3 ulp beside them; zeros, infinities
    and NaN; subnormals of both; and any float.

    Args:
        fmt: a format of up to 16 bits, its name, or the torch dtype of its codes.
        dtype: float32, bfloat16, float16 or float64.

    Raises:
        UnsupportedError: a format of more than 16 bits.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    near = near_ties(get(fmt), wide).to(dtype)
    every = st.floats() if dtype is torch.float64 else st.floats(width=32)

    def rounded(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float64).to(dtype))

    return st.one_of(
        st.integers(0, near.numel() - 1).map(lambda i: float(near[i])),
        st.sampled_from(_SPECIAL),
        every.map(rounded),
    )


def powers_of_two(low: float = MIN_SCALE, high: float = MAX_SCALE) -> "st.SearchStrategy[float]":
    """Exact powers of two in [low, high], by default all powers that a scale can be."""
    least, most = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return st.integers(least, most).map(lambda k: math.ldexp(1.0, k))


@st.composite
def scaled_tensors(
    draw: Any,
    shapes: "st.SearchStrategy[tuple[int, ...]] | None" = None,
    formats: "st.SearchStrategy[FormatLike] | None" = None,
    scales: "st.SearchStrategy[float] | None" = None,
    dtype: torch.dtype = torch.float32,
) -> ScaledTensor | CodedTensor:
    """ScaledTensors of Gaussian elements, which are drawn from a seed. Formats without a dtype of
    torch give CodedTensors.

    Args:
        shapes: strategy for shapes; by default 0 to 3 dimensions of size 1 to 8.
        formats: strategy for formats; by default FP32, BF16, E4M3FN and E5M2.
        scales: strategy for scales; by default powers of two from 2^-40 to 2^40.
        dtype: dtype that autograd and optimizers see.
    """
    if shapes is None:
        shapes = st.lists(st.integers(1, 8), max_size=3).map(tuple)
    if formats is None:
        formats = st.sampled_from(("fp32", "bf16", "e4m3fn", "e5m2"))
    if scales is None:
        scales = powers_of_two(2.0**-40, 2.0**40)
    shape, fmt, scale = draw(shapes), get(draw(formats)), draw(scales)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x: Tensor = torch.randn(shape, generator=rng, dtype=torch.float64) * scale
    return scaled(x.to(dtype), fmt, scale=scale)
