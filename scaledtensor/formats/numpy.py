"""The casts of this package on numpy arrays, for code that has no torch in its loop.

    from scaledtensor.formats import E4M3FN, numpy as fnp
    codes = fnp.encode(np.float32([0.1, 500]), E4M3FN)     # [0.1016, 448], of float8_e4m3fn

Each function gives the bits of the function of the same name in `scaledtensor.formats`, where it is
documented. Arrays of floats are float64, float32, float16 or `ml_dtypes.bfloat16`. Codes are arrays
of `fmt.ml_dtype`, or of the unsigned integer of their width if the format has no `ml_dtype`. Such
integers are always taken as input.

The functions read the memory of an array without a copy, and do not copy results. An array that
torch has no tensor for is copied first: a read-only or byte-swapped one, or one whose strides are
negative or no multiples of its element.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from scaledtensor.errors import DTypeError
from scaledtensor.formats import blocks, layouts
from scaledtensor.formats import rounding as casts
from scaledtensor.formats.format import E4M3FN, E8M0FNU, Format, FormatLike, get
from scaledtensor.formats.layouts import Granularity

__all__ = [
    "TwoLevelScale",
    "decode",
    "dequantize_blocks",
    "encode",
    "fake_quantize",
    "pack",
    "quantize_blocks",
    "unpack",
]

Array = NDArray[Any]

_FLOATS = {
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
}
_NUMPY_FLOATS = {dtype: ours for ours, dtype in _FLOATS.items()}
# NumPy and torch exchange bits as unsigned integers, so their other dtypes need not match.
_RAW: dict[int, tuple[np.dtype[Any], torch.dtype]] = {
    1: (np.dtype(np.uint8), torch.uint8),
    2: (np.dtype(np.uint16), torch.uint16),
    4: (np.dtype(np.uint32), torch.uint32),
    8: (np.dtype(np.uint64), torch.uint64),
}


class TwoLevelScale(NamedTuple):
    """`scaledtensor.formats.TwoLevelScale` with arrays: E4M3FN codes, and a 0-dim float32."""

    block: Array
    tensor: Array


Scale = Array | TwoLevelScale


def encode(
    x: ArrayLike,
    fmt: FormatLike,
    *,
    rounding: casts.Rounding = "nearest_even",
    overflow: casts.Overflow = "saturate",
    generator: np.random.Generator | None = None,
    random_bits: int | None = None,
) -> Array:
    """The codes of `x` in `fmt`, of the shape of `x`; `generator` drives stochastic rounding.

    Raises:
        DTypeError: `x` is not an array of floats of one of the four types.
    """
    fmt = get(fmt)
    codes = casts.encode(
        _floats(x),
        fmt,
        rounding=rounding,
        overflow=overflow,
        generator=_torch_generator(generator),
        random_bits=random_bits,
    )
    return _codes_out(codes, fmt)


def decode(codes: ArrayLike, fmt: FormatLike, dtype: DTypeLike = np.float32) -> Array:
    """The values of `codes` in `dtype`, one of the four types of floats.

    Raises:
        DTypeError: `codes` are of another type than the codes of `fmt`, or `dtype` is unfit.
    """
    fmt = get(fmt)
    return _array(casts.decode(_codes(codes, fmt), fmt, _torch_dtype(dtype)), np.dtype(dtype))


def fake_quantize(
    x: ArrayLike,
    fmt: FormatLike,
    *,
    rounding: casts.Rounding = "nearest_even",
    overflow: casts.Overflow = "saturate",
    generator: np.random.Generator | None = None,
    random_bits: int | None = None,
) -> Array:
    """`x` rounded to the values of `fmt`, of the same shape and type.

    Raises:
        DTypeError: `x` is not an array of floats of one of the four types.
    """
    given = _floats(x)
    rounded = casts.fake_quantize(
        given,
        get(fmt),
        rounding=rounding,
        overflow=overflow,
        generator=_torch_generator(generator),
        random_bits=random_bits,
    )
    return _array(rounded, _NUMPY_FLOATS[given.dtype])


def pack(codes: ArrayLike, fmt: FormatLike) -> Array:
    """`codes` without unused bits, uint8. Codes of 8 bits and more are returned unchanged.

    Raises:
        DTypeError: `codes` are of another type than the codes of `fmt`.
    """
    fmt = get(fmt)
    packed = layouts.pack(_codes(codes, fmt), fmt)
    return _array(packed, np.dtype(np.uint8)) if fmt.bits < 8 else _codes_out(packed, fmt)


def unpack(packed: ArrayLike, fmt: FormatLike, shape: Sequence[int]) -> Array:
    """The codes of `shape`, from the result of `pack`.

    Raises:
        DTypeError: `packed` is not uint8 (of 8 bits or more: not of the type of the codes).
        ShapeError: `packed` does not have the size that codes of `shape` take.
    """
    fmt, given = get(fmt), np.asarray(packed)
    if fmt.bits >= 8:
        return _codes_out(layouts.unpack(_codes(given, fmt), fmt, shape), fmt)
    if given.dtype != np.uint8:
        raise DTypeError(f"packed codes of {fmt!r} are uint8, got {given.dtype}")
    return _codes_out(layouts.unpack(_tensor(given, torch.uint8), fmt, shape), fmt)


def quantize_blocks(
    x: ArrayLike,
    fmt: FormatLike,
    block: Granularity | int | tuple[int, ...],
    scale_format: blocks.ScaleFormat = "e8m0",
    mode: blocks.Mode = "rceil",
    *,
    rounding: casts.Rounding = "nearest_even",
    overflow: casts.Overflow = "saturate",
    generator: np.random.Generator | None = None,
    random_bits: int | None = None,
) -> tuple[Array, Scale]:
    """Codes and scales; scales in `ml_dtypes.float8_e8m0fnu`, float32 or a `TwoLevelScale`.

    Raises:
        DTypeError: `x` is not an array of floats of one of the four types.
        FormatError, ShapeError: see `scaledtensor.formats.quantize_blocks`.
    """
    fmt = get(fmt)
    codes, scale = blocks.quantize_blocks(
        _floats(x),
        fmt,
        block,
        scale_format,
        mode,
        rounding=rounding,
        overflow=overflow,
        generator=_torch_generator(generator),
        random_bits=random_bits,
    )
    return _codes_out(codes, fmt), _scale_out(scale)


def dequantize_blocks(
    codes: ArrayLike,
    scale: Scale,
    fmt: FormatLike,
    block: Granularity | int | tuple[int, ...],
    dtype: DTypeLike = np.float32,
) -> Array:
    """codes * scale, rounded once to `dtype`.

    Raises:
        DTypeError: `codes`, the scales or `dtype` are of an unfit type.
        ShapeError: the scales do not have the shape that these blocks need.
    """
    fmt = get(fmt)
    values = blocks.dequantize_blocks(
        _codes(codes, fmt), _scale_in(scale), fmt, block, _torch_dtype(dtype)
    )
    return _array(values, np.dtype(dtype))


def _floats(x: ArrayLike) -> Tensor:
    given = np.asarray(x)
    dtype = _FLOATS.get(given.dtype.newbyteorder("="))
    if dtype is None:
        raise DTypeError(f"cannot cast an array of {given.dtype}; allowed are {_float_names()}")
    return _tensor(given, dtype)


def _codes(codes: ArrayLike, fmt: Format) -> Tensor:
    given, own = np.asarray(codes), _code_dtype(fmt)
    raw = _RAW[fmt.storage_dtype.itemsize][0]
    if given.dtype.newbyteorder("=") not in (own, raw):
        allowed = raw if own == raw else f"{own} or {raw}"
        raise DTypeError(f"codes of {fmt!r} are arrays of {allowed}, got {given.dtype}")
    return _tensor(given, fmt.storage_dtype)


def _codes_out(codes: Tensor, fmt: Format) -> Array:
    return _array(codes, _code_dtype(fmt))


def _scale_in(scale: Scale) -> blocks.Scale:
    if isinstance(scale, TwoLevelScale):
        return blocks.TwoLevelScale(_one_scale(scale.block), _one_scale(scale.tensor))
    return _one_scale(scale)


def _one_scale(scale: ArrayLike) -> Tensor:
    given = np.asarray(scale)
    known = {_code_dtype(E8M0FNU): E8M0FNU.storage_dtype, _code_dtype(E4M3FN): E4M3FN.storage_dtype}
    dtype = (known | _FLOATS).get(given.dtype.newbyteorder("="))
    if dtype is None:
        raise DTypeError(
            f"scales are arrays of float8_e8m0fnu or float32, or a TwoLevelScale; got {given.dtype}"
        )
    return _tensor(given, dtype)


def _scale_out(scale: blocks.Scale) -> Scale:
    if isinstance(scale, blocks.TwoLevelScale):
        return TwoLevelScale(
            _codes_out(scale.block, E4M3FN), _array(scale.tensor, np.dtype(np.float32))
        )
    if scale.dtype is torch.float32:
        return _array(scale, np.dtype(np.float32))
    return _codes_out(scale, E8M0FNU)


def _code_dtype(fmt: Format) -> np.dtype[Any]:
    reference: Any = fmt.ml_dtype
    return _RAW[fmt.storage_dtype.itemsize][0] if reference is None else np.dtype(reference)


def _torch_dtype(dtype: DTypeLike) -> torch.dtype:
    found = _FLOATS.get(np.dtype(dtype))
    if found is None:
        raise DTypeError(f"cannot decode to {np.dtype(dtype)}; allowed are {_float_names()}")
    return found


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """The bits of `array` as a tensor of `dtype`, without a copy if torch can use its memory."""
    size = array.dtype.itemsize
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not array.flags.writeable or any(step < 0 or step % size for step in array.strides):
        array = array.copy()
    return torch.from_numpy(array.view(_RAW[size][0])).view(dtype)


def _array(tensor: Tensor, dtype: np.dtype[Any]) -> Array:
    """The bits of `tensor` as an array of `dtype` on the same memory."""
    bits: Array = tensor.view(_RAW[tensor.dtype.itemsize][1]).numpy()
    return bits.view(dtype)


def _torch_generator(generator: np.random.Generator | None) -> torch.Generator | None:
    if generator is None:
        return None
    if not isinstance(generator, np.random.Generator):
        raise DTypeError(f"generator is a numpy.random.Generator, got {type(generator).__name__}")
    return torch.Generator().manual_seed(int(generator.integers(2**63 - 1)))


def _float_names() -> str:
    return ", ".join(str(dtype) for dtype in _FLOATS)
