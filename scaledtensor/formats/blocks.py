"""Blocks of elements that share a scale: value = code * scale, as in OCP MX and NVFP4.

The scale of a block follows from its amax, the largest finite magnitude:

    e8m0, pow2    2^(e + carry - emax), where amax = 2^e * s with 1 <= s < 2, emax is the exponent
                  of the format's maximum, and the mode decides the carry. e8m0 is stored as a code
                  of E8M0FNU, clamped to 2^-127 .. 2^127, pow2 as a float32, 2^-126 .. 2^127.
    fp32          the least float32 that is not below amax / max
    nvfp4         two levels: t, a float32 for the tensor, is the least that is not below
                  amax / (448 max); each block has the E4M3FN number nearest to amax / (max t), at
                  least 2^-9

The modes decide by the bits of amax, never by a logarithm:

    floor    2^floor(log2(amax)) / 2^emax     no carry (OCP MX 1.0, section 6.3). Elements exceed
                                              max by a factor of up to 2^(emax+1) / max
    rceil    2^ceil(log2(amax / max))         carry if s exceeds the significand of max: the least
                                              power of two under which nothing exceeds max
    ceil     2^ceil(log2(amax)) / 2^emax      carry if s > 1
    even     floor, after amax was rounded    carry if the rounding makes s 2
             to the format's significand

If all finite numbers of a block are zero, its scale is 1, so that zeros decode to zeros. Infinities
and NaNs do not change the scale of their block. An infinity saturates, or with another `overflow`
becomes the format's infinity or NaN. A NaN becomes a NaN element. If the format has no NaN, the
scale of the block becomes NaN (E8M0 0xFF, E4M3FN 0x7F, a float32 NaN), so that all elements of this
block decode to NaN, as in OCP MX. With "saturate_finite" an infinity in such a format has the same
effect.

Each code is the nearest to the exact quotient x / scale (or follows `rounding`). The quotient is
never rounded before the cast in a way that could change a code.
"""

from collections.abc import Callable, Sequence
from math import frexp, inf, nan
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats.format import E4M3FN, E8M0FNU, Format, FormatLike, from_dtype, get
from scaledtensor.formats.layouts import (
    Granularity,
    PerTensor,
    as_granularity,
    beside_blocks,
    block_dims,
    check_scale_shape,
    from_blocks,
    scale_shape,
    to_blocks,
)
from scaledtensor.formats.rounding import Overflow, Rounding, decode, encode
from scaledtensor.formats.stochastic import Randomness
from scaledtensor.formats.tensors import FLOATS, check_tensor, named

__all__ = [
    "LEAST_EXPONENT",
    "MODES",
    "Mode",
    "Scale",
    "ScaleFormat",
    "TwoLevelScale",
    "carry_of",
    "dequantize_blocks",
    "encode_blocks",
    "quantize_blocks",
]

ScaleFormat = Literal["e8m0", "pow2", "fp32", "nvfp4"]
Mode = Literal["floor", "rceil", "ceil", "even"]

MODES = ("floor", "rceil", "ceil", "even")
#: Scale format -> the exponent of its smallest power of two.
LEAST_EXPONENT = {"e8m0": -127, "pow2": -126}
_SCALE_FORMATS = (*LEAST_EXPONENT, "fp32", "nvfp4")
_MANTISSA = 52  # of float64; every amax is exact in it, and normal unless a float64 subnormal
_BIAS = 1023
_PIECE = 1 << 16
_MIN_NORMAL, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class TwoLevelScale(NamedTuple):
    """The scales of NVFP4. The scale of an element is `block`, of its block, times `tensor`."""

    block: Tensor
    """float8_e4m3fn, in the shape of `scale_shape`."""
    tensor: Tensor
    """float32, 0-dim."""


Scale = Tensor | TwoLevelScale
Shape = tuple[int, ...]


def quantize_blocks(
    x: Tensor,
    fmt: FormatLike,
    block: Granularity | int | tuple[int, ...],
    scale_format: ScaleFormat = "e8m0",
    mode: Mode = "rceil",
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    generator: Randomness = None,
    random_bits: int | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Scale]:
    """Codes and scales: codes * scale is `x` up to rounding. The module's docstring has the rules.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape. No gradient flows through.
        fmt: the format of the elements, one with a sign and a zero: a `Format`, its name, or the
            torch dtype of its codes.
        block: a granularity, or a block size (32) or the sizes of a block ((1, 32)) for PerBlock.
        scale_format: "e8m0", "pow2", "fp32" or "nvfp4".
        mode: how e8m0 and pow2 round to a power of two. The other two take only "rceil".
        rounding, overflow, generator, random_bits: how the elements are cast; see `encode`.
        tensor_scale: the scale of the tensor for "nvfp4", 0-dim float32; by default from the amax
            of `x`. A block too large for it gets the largest scale of E4M3FN, and saturates.

    Returns:
        Codes in the storage dtype of `fmt`, of the shape of `x`, and scales in the shape that
        `scale_shape` gives: float8_e8m0fnu, float32, or a `TwoLevelScale`.

    Raises:
        DTypeError: `x` is not of one of these dtypes.
        FormatError: `fmt` cannot hold elements, or `scale_format` or `mode` is unknown or unfit.
        ShapeError: `block` is not a granularity, or does not fit the shape of `x`.
    """
    check_tensor(x, "quantize_blocks")
    fmt, granularity = get(fmt), as_granularity(block)
    _check(x, fmt, scale_format, mode)
    blocks = to_blocks(x.detach(), granularity)
    amax = _amax(blocks)
    lost = None if fmt.has_nan else _any_lost(blocks, overflow)
    shape = scale_shape(granularity, x.shape)
    options: dict[str, Any] = {
        "rounding": rounding,
        "overflow": overflow,
        "generator": generator,
        "random_bits": random_bits,
    }
    if scale_format == "e8m0" or scale_format == "pow2":
        scale, factor = _powers_of_two(amax, lost, fmt, scale_format, mode, shape)
        work = torch.float64 if _needs_float64(x, fmt, rounding) else torch.float32
        divide = _multiplied
    else:
        scale, factor = _ratios(amax, lost, fmt, scale_format, shape, tensor_scale)
        work, divide = torch.float64, _divided
    return _codes(divide, blocks, factor.to(work), fmt, granularity, x.shape, options), scale


def encode_blocks(
    x: Tensor,
    fmt: FormatLike,
    block: Granularity | int | tuple[int, ...],
    scale: Scale,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    generator: Randomness = None,
    random_bits: int | None = None,
) -> Tensor:
    """Codes of `x` under given scales, nearest to the exact x / scale.

    Args:
        scale: positive, in the shape that `scale_shape` gives: float32, float8_e8m0fnu or a
            `TwoLevelScale`.
        x, fmt, block, rounding, overflow, generator, random_bits: the arguments of
            `quantize_blocks`.

    Raises:
        DTypeError, FormatError, ShapeError: an argument is not allowed.
    """
    check_tensor(x, "encode_blocks")
    fmt, granularity = get(fmt), as_granularity(block)
    _check(x, fmt, "fp32", "rceil")
    outer, inner = _levels(scale, "encode_blocks")
    check_scale_shape(inner, granularity, x.shape)
    numbers = inner if inner.dtype is torch.float32 else decode(inner, from_dtype(inner.dtype))
    whole = numbers.double() if outer is None else numbers.double() * outer.double()
    options: dict[str, Any] = {
        "rounding": rounding,
        "overflow": overflow,
        "generator": generator,
        "random_bits": random_bits,
    }
    factor = beside_blocks(whole, granularity, x.shape)
    blocks = to_blocks(x.detach(), granularity)
    return _codes(_divided, blocks, factor, fmt, granularity, x.shape, options)


def _multiplied(part: Tensor, factor: Tensor) -> Tensor:
    return part.to(factor.dtype) * factor


def _divided(part: Tensor, factor: Tensor) -> Tensor:
    return part.to(factor.dtype) / factor


def _codes(
    divide: Callable[[Tensor, Tensor], Tensor],
    blocks: Tensor,
    factor: Tensor,
    fmt: Format,
    granularity: Granularity,
    shape: Sequence[int],
    options: dict[str, Any],
) -> Tensor:
    """The codes of `divide(blocks, factor)`, with one factor per block, in `shape`."""
    if options["rounding"] == "stochastic":  # one draw, which counts the tensor's own elements
        quotient = from_blocks(_scaled(divide, blocks, factor, factor.dtype), granularity, shape)
        return encode(quotient, fmt, **options)
    codes = _scaled(
        lambda part, factor: encode(divide(part, factor), fmt, **options),
        blocks,
        factor,
        fmt.storage_dtype,
    )
    return from_blocks(codes, granularity, shape)


def dequantize_blocks(
    codes: Tensor,
    scale: Scale,
    fmt: FormatLike,
    block: Granularity | int | tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """codes * scale, calculated exactly and rounded once to `dtype`, in the shape of `codes`.

    A product beyond the range of `dtype` is an infinity. An element under a NaN scale is NaN.

    Args:
        codes: in the storage dtype of `fmt`.
        scale: the scale that `quantize_blocks` returned: float8_e8m0fnu, float32 or a
            `TwoLevelScale`.
        fmt: the format of the elements.
        block: the granularity of the scales.
        dtype: float32, bfloat16, float16 or float64.

    Raises:
        DTypeError: `codes`, the scales or `dtype` are of another dtype.
        ShapeError: the scales do not have the shape that `scale_shape` gives.
    """
    check_tensor(codes, "dequantize_blocks", "codes")
    fmt, granularity = get(fmt), as_granularity(block)
    if dtype not in FLOATS:
        raise DTypeError(f"cannot dequantize to {dtype}; allowed are {named(FLOATS)}")
    outer, inner = _levels(scale, "dequantize_blocks")
    check_scale_shape(inner, granularity, codes.shape)
    work = _dtype_of_products(fmt, scale, dtype)
    blocks_scale = inner if inner.dtype is torch.float32 else decode(inner, from_dtype(inner.dtype))
    factor = beside_blocks(blocks_scale.to(work), granularity, codes.shape)

    def elements(part: Tensor, factor: Tensor) -> Tensor:
        values = decode(part, fmt, work) * factor
        if outer is not None:
            values = values * outer.to(work)
        return values if dtype is work else encode(values, from_dtype(dtype), overflow="ieee")

    values = _scaled(elements, to_blocks(codes, granularity), factor, dtype)
    return from_blocks(values, granularity, codes.shape)


def _check(x: Tensor, fmt: Format, scale_format: str, mode: str) -> None:
    if x.dtype not in FLOATS:
        raise DTypeError(f"cannot quantize a tensor of {x.dtype}; allowed are {named(FLOATS)}")
    if not fmt.has_zero:
        raise FormatError(f"{fmt!r} is a format of scales; elements need a sign and a zero")
    if scale_format not in _SCALE_FORMATS:
        raise FormatError(
            f"unknown scale_format {scale_format!r}; allowed are {', '.join(_SCALE_FORMATS)}"
        )
    if mode not in MODES:
        raise FormatError(f"unknown mode {mode!r}; allowed are {', '.join(MODES)}")
    if mode != "rceil" and scale_format not in LEAST_EXPONENT:
        raise FormatError(
            f"mode {mode!r} is a way to round to a power of two, and scales in {scale_format} are"
            " none: leave it out, or take scale_format 'e8m0' or 'pow2'"
        )
    if scale_format == "nvfp4" and fmt.bits > 8:
        raise FormatError(f"two-level scales are for elements of 8 bits or fewer, not {fmt!r}")


def _amax(blocks: Tensor) -> Tensor:
    """The largest finite magnitude of each block, float64; 0 for a block without finite numbers."""
    return _maxima(blocks, _finite_size).double()


def _finite_size(x: Tensor) -> Tensor:
    # Both ways give the same. This one takes a sixth of the time in compiled code, and six times as
    # long in eager code.
    if torch.compiler.is_compiling():
        size = x.abs()
        return torch.where(size < inf, size, 0.0)
    return x.nan_to_num(0.0, 0.0, 0.0).abs_()


def _any_lost(blocks: Tensor, overflow: str) -> Tensor:
    """Whether a block has a NaN, or an infinity to keep, in a format without a code for it. Its
    scale then becomes NaN."""
    keeps = overflow == "saturate_finite"  # infinities too
    # A maximum is NaN if any of its numbers is.
    return _maxima(blocks, lambda t: t - t if keeps else t).isnan()


def _maxima(blocks: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    dims = block_dims(blocks)
    if not blocks.numel():
        return blocks.sum(dims, True)
    pieces = _pieces(blocks)
    if pieces is None:
        return f(blocks).amax(dims, True)
    maxima = [f(blocks.narrow(*piece)).amax(dims, True) for piece in pieces]
    dim = pieces[0][0]
    return torch.stack(maxima).amax(0) if dim in dims else torch.cat(maxima, dim)


def _marked(scale: Tensor, lost: Tensor | None) -> Tensor:
    return scale if lost is None else torch.where(lost, nan, scale)


def carry_of(fmt: Format, mode: str) -> tuple[int, int]:
    """Return a carry and an offset. The exponent of a scale is the exponent field of amax, a
    float64, minus the offset, after the carry was added to the bits of amax."""
    significand, above = frexp(fmt.max)
    ones = (1 << _MANTISSA) - 1
    carry = {
        "floor": 0,
        "rceil": ones - int((2 * significand - 1) * 2**_MANTISSA),
        "ceil": ones,
        "even": 1 << (_MANTISSA - 1 - _bits_of_max(fmt)),
    }[mode]
    return carry, _BIAS + above - 1


def _exponent(amax: Tensor, fmt: Format, mode: str, least: int) -> Tensor:
    """The exponent of the scale, int64, from `least` to 127; 0 for a block of zeros.

    The carry is added to the bits of amax. It reaches the exponent field if the mode wants the next
    power of two.
    """
    carry, above = carry_of(fmt, mode)
    exponent = ((amax.view(torch.int64) + carry) >> _MANTISSA) - above
    return torch.where(amax == 0, 0, exponent.clamp(least, 127))


def _powers_of_two(
    amax: Tensor, lost: Tensor | None, fmt: Format, scale_format: str, mode: str, shape: Shape
) -> tuple[Scale, Tensor]:
    """The scale of each block, and the factor for its elements: exact on every device."""
    exponent = _exponent(amax, fmt, mode, LEAST_EXPONENT[scale_format])
    scale = _marked(_power_of_two(exponent), lost).view(shape)
    scale = encode(scale, E8M0FNU) if scale_format == "e8m0" else scale
    return scale, _power_of_two(-exponent)


def _ratios(
    amax: Tensor,
    lost: Tensor | None,
    fmt: Format,
    scale_format: str,
    shape: Shape,
    tensor: Tensor | None,
) -> tuple[Scale, Tensor]:
    """The scale of each block, and the divisor of its elements, in float64.

    A float64 quotient equals a tie t between two codes only if the exact quotient is t. For t times
    the scale has at most 49 bits, so it is a float64, and the quotient of its neighbours is more
    than half a step away from t.
    """
    if scale_format == "nvfp4":
        if tensor is None:
            whole = amax.amax() if amax.numel() else amax.sum()
            tensor = _least_above(whole, E4M3FN.max * fmt.max)
        ratio = torch.where(amax == 0, 1.0, amax / (tensor.double() * fmt.max))
        of_block = decode(encode(ratio.clamp(min=E4M3FN.min_subnormal), E4M3FN), E4M3FN)
        block = encode(_marked(of_block, lost).view(shape), E4M3FN)
        return TwoLevelScale(block, tensor), of_block.double() * tensor.double()
    scale = _least_above(amax, fmt.max)
    return _marked(scale, lost).view(shape), scale.double()


def _bits_of_max(fmt: Format) -> int:
    """The number of bits after the leading one in numbers near max, which may be fixed point."""
    if fmt.max_code >> fmt.mantissa_bits:
        return fmt.mantissa_bits
    return fmt.max_code.bit_length() - 1


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, for exponents from -127 (a subnormal) to 127."""
    bits = torch.where(exponent < -126, 1 << 22, (exponent + 127) << 23)
    return bits.to(torch.int32).view(torch.float32)


def _least_above(amax: Tensor, limit: float) -> Tensor:
    """The least normal float32 not below amax / limit, or else the largest; 1 for amax 0."""
    near = (amax / limit).float()
    short = near.double() * limit < amax  # exact: 24 bits times at most 24
    least = (near.view(torch.int32) + short.int()).view(torch.float32).clamp(_MIN_NORMAL, _MAX)
    return torch.where(amax == 0, 1.0, least)


def _scaled(
    f: Callable[[Tensor, Tensor], Tensor], blocks: Tensor, factor: Tensor, dtype: torch.dtype
) -> Tensor:
    """`f(blocks, factor)`, elementwise with one factor per block, in `dtype`."""
    pieces = _pieces(blocks)
    if pieces is None:
        return f(blocks, factor)
    out = torch.empty(blocks.shape, dtype=dtype, device="cpu")
    for dim, start, count in pieces:
        own = factor if factor.shape[dim] == 1 else factor.narrow(dim, start, count)
        out.narrow(dim, start, count).copy_(f(blocks.narrow(dim, start, count), own))
    return out


def _pieces(blocks: Tensor) -> list[tuple[int, int, int]] | None:
    """The pieces of a large tensor on a CPU, as (dimension, start, length).

    The temporaries of a piece stay in cache: in float64 that is five times as fast.
    """
    if torch.compiler.is_compiling() or not backend_of(blocks).host or blocks.numel() <= _PIECE:
        return None
    dim = next(i for i, n in enumerate(blocks.shape) if n > 1)
    size = blocks.shape[dim]
    step = max(1, _PIECE * size // blocks.numel())
    return [(dim, start, min(step, size - start)) for start in range(0, size, step)]


def _needs_float64(x: Tensor, fmt: Format, rounding: str) -> bool:
    """Whether x * 2^-k may be inexact in float32, below 2^-126, so that a code could change."""
    return x.dtype is torch.float64 or fmt.min_subnormal < 2.0**-125 or rounding == "to_odd"


def _dtype_of_products(fmt: Format, scale: Scale, dtype: torch.dtype) -> torch.dtype:
    """float32 if code * scale is then rounded only once on the way to `dtype`, else float64."""
    if dtype is torch.float32:
        if not isinstance(scale, TwoLevelScale):
            return torch.float32
        once = fmt.min_subnormal > 2.0**-100 and fmt.max < 2.0**100  # no product leaves the range
    elif isinstance(scale, Tensor) and scale.dtype is torch.float8_e8m0fnu:
        once = fmt.min_subnormal >= 2.0**-22  # times 2^-127 it is still a float32
    else:
        once = False
    return torch.float32 if once and dtype is not torch.float64 else torch.float64


def _levels(scale: Scale, function: str) -> tuple[Tensor | None, Tensor]:
    if isinstance(scale, TwoLevelScale):
        for name, level in scale._asdict().items():
            check_tensor(level, function, f"scale.{name}")
        if scale.block.dtype is not torch.float8_e4m3fn or scale.tensor.dtype is not torch.float32:
            raise DTypeError(
                "a two-level scale is float8_e4m3fn for the blocks and float32 for the tensor; got"
                f" {scale.block.dtype} and {scale.tensor.dtype}"
            )
        check_scale_shape(scale.tensor, PerTensor(), ())
        return scale.tensor, scale.block
    check_tensor(scale, function, "scale")
    if scale.dtype not in (torch.float8_e8m0fnu, torch.float32):
        raise DTypeError(
            f"scales are float8_e8m0fnu, float32 or a TwoLevelScale; got {scale.dtype}"
        )
    return None, scale
