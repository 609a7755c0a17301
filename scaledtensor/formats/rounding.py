"""Three pure functions over a `Format`: encode, decode, and the two in a row.

Each exists twice, bit for bit the same function. Eager calls lean on torch's own casts, which are
one pass each; under `torch.compile` everything is 32-bit integer arithmetic, which Inductor fuses
and vectorises where it would run the casts one element at a time.

Both overflow modes follow ml_dtypes: "ieee" is its `astype`, "saturate" its `astype` after a clip
to [-max, max]. Inputs are rounded once, float64 included (which ml_dtypes rounds twice). NaN
becomes
  - NAN_ONLY and FNUZ: the only NaN there is;
  - IEEE: the quiet NaN, except in E5M2, where it is the all-ones code that torch's cast writes;
  - NONE: the zero of the opposite sign, as in ml_dtypes;
and its sign, where the format keeps one, is the only thing in which the two may differ.
E8M0 is a scale code: zero and negative values become NaN, positive ones the nearest power of two,
ties up; between its two smallest codes, 2^-127 and 2^-126, everything rounds up, as in ml_dtypes.
"""

import functools
import sys
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats.format import FORMATS, Format, Specials

Overflow = Literal["saturate", "ieee"]
Rounding = Literal["nearest_even"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_MAGNITUDE = 0x7FFFFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000
_PIECE = 1 << 20
_PAIR = {torch.float32: torch.int64, torch.bfloat16: torch.int32, torch.float16: torch.int32}


def encode(
    x: Tensor, fmt: Format, *, rounding: Rounding = "nearest_even", overflow: Overflow = "saturate"
) -> Tensor:
    """The codes of `x` in `fmt`, a tensor of `fmt.storage_dtype` and of the shape of `x`.

    "saturate" sends values beyond ±max, and infinities, to ±max. "ieee" sends them to infinity, to
    NaN where there is no infinity, and to ±max where there is neither.
    """
    if x.dtype not in _FLOATS:
        raise DTypeError(f"cannot encode a tensor of {x.dtype}; allowed are {_names(_FLOATS)}")
    if rounding != "nearest_even":
        raise FormatError(f"unknown rounding {rounding!r}; allowed is 'nearest_even'")
    if overflow != "saturate" and overflow != "ieee":
        raise FormatError(f"unknown overflow {overflow!r}; allowed are 'saturate', 'ieee'")
    storage = fmt.storage_dtype
    if x.dtype is torch.float64 and storage is not torch.float32:
        x = _round_to_odd(x)
    if not fmt.signed:
        return _encode_exponent(x.float(), fmt, overflow)
    compiling = torch.compiler.is_compiling()
    # Opaque where it pays: on 16-bit floats Inductor's C++ takes 2.3 ns per element for the integer
    # arithmetic and 1.5 for torch's cast, which alone takes 0.6 (1024 x 1024, one thread).
    if compiling and x.is_cpu and x.dtype in _HALVES and _is_native_8_bit(fmt, overflow):
        codes: Tensor = torch.ops.scaledtensor.cast_in_range(x.clamp(-fmt.max, fmt.max), fmt.name)
        return codes
    native = storage is not torch.uint8 and not compiling
    if storage is torch.float32 or (native and (overflow == "saturate" or storage in _WIDE)):
        return _in_pieces(lambda t: _cast(t, fmt, overflow), x, storage)
    return _in_pieces(lambda t: _encode_bits(t.float(), fmt, overflow), x, storage)


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `codes`, in `dtype`.

    Exact where `dtype` holds every value of `fmt`, else rounded once to nearest even.
    """
    if codes.dtype is not fmt.storage_dtype:
        raise DTypeError(f"codes of {fmt!r} are {fmt.storage_dtype}, got {codes.dtype}")
    if dtype not in _FLOATS:
        raise DTypeError(f"cannot decode to {dtype}; allowed are {_names(_FLOATS)}")
    compiling = torch.compiler.is_compiling()
    if codes.dtype is torch.float32 or (codes.dtype in _WIDE and not compiling):
        return codes.to(dtype)
    # Other types (FakeTensor for one) stand for data that a table of real numbers cannot meet.
    if not compiling and codes.is_cpu and type(codes) is Tensor:
        return _in_pieces(lambda t: _look_up(t, fmt, dtype), codes, dtype)
    # An opaque operator where it pays: decoding straight to 16-bit floats, Inductor's C++ takes
    # 2.7 ns per element and the table 0.4 (1024 x 1024, one thread).
    if (
        codes.dtype.itemsize == 1
        and codes.is_cpu
        and dtype in _HALVES
        and FORMATS.get(fmt.name) is fmt
    ):
        values: Tensor = torch.ops.scaledtensor.look_up(codes, fmt.name, dtype)
        return values
    return (_decode_bits(codes, fmt) if fmt.signed else codes.float()).to(dtype)


def fake_quantize(
    x: Tensor, fmt: Format, *, rounding: Rounding = "nearest_even", overflow: Overflow = "saturate"
) -> Tensor:
    """`x` rounded to the values of `fmt`, in the dtype of `x`."""
    return decode(encode(x, fmt, rounding=rounding, overflow=overflow), fmt, x.dtype)


def round_by_arithmetic(x: Tensor, fmt: Format) -> Tensor:
    """`fake_quantize(x, fmt)` of a 16- or 32-bit float, saturating, up to the sign of zero.

    Float32 sums and products alone, which Inductor's C++ vectorises where it would spill the
    integer arithmetic of `encode` (0.2 against 0.8 ns per element). Normal numbers by Veltkamp's
    splitting (Dekker 1971, Numerische Mathematik 18), which rounds to nearest even at every float32
    here (tested); subnormals by adding a number whose last place is their step. Not for compilers
    that contract a product and a sum into one rounding, as those for GPUs do.
    """
    wide = x.float().clamp(-fmt.max, fmt.max)
    split = wide * (2.0 ** (23 - fmt.mantissa_bits) + 1)
    normal = split - (split - wide)
    step = 1.5 * 2.0**23 * fmt.min_subnormal
    subnormal = (wide + step) - step
    return torch.where(wide.abs() < fmt.min_normal, subnormal, normal)


def _in_pieces(f: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """`f(x)`, elementwise, of a large CPU tensor piece by piece.

    A large temporary is fresh memory, and the kernel takes longer to hand it out than `f` to run.
    """
    if x.numel() <= _PIECE or torch.compiler.is_compiling() or not (x.is_cpu and x.is_contiguous()):
        return f(x)
    out = torch.empty(x.shape, dtype=dtype)
    source, target = x.view(-1), out.view(-1)
    for start in range(0, x.numel(), _PIECE):
        target[start : start + _PIECE] = f(source[start : start + _PIECE])
    return out


def _cast(x: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    if overflow == "saturate":
        # The maxima of the wide formats are not values of the other 16-bit dtype.
        if fmt.storage_dtype in _WIDE and x.dtype is not fmt.storage_dtype:
            x = x if x.dtype is torch.float64 else x.float()
        x = x.clamp(-fmt.max, fmt.max)
    return x.to(fmt.storage_dtype)


def _is_native_8_bit(fmt: Format, overflow: Overflow) -> bool:
    eight = fmt.storage_dtype.itemsize == 1 and fmt.storage_dtype is not torch.uint8
    return eight and overflow == "saturate" and FORMATS.get(fmt.name) is fmt


def _round_to_odd(x: Tensor) -> Tensor:
    """float64 to float32, towards zero but with an odd last bit wherever bits were lost.

    A later rounding to a shorter format then sees every tie as the tie, or not, that it was
    (Boldo and Melquiond, "When double rounding is odd").
    """
    near = x.float()
    back = near.double()
    bits = near.view(torch.int32)
    bits = bits - (back.abs() > x.abs()).int()  # one step down the magnitude, whatever the sign
    return (bits | (back != x).int()).view(torch.float32)


def _encode_bits(x: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    # Past `limit` all inputs share a code: that of max, or the next one, which is inf or NaN.
    beyond = overflow == "ieee" and fmt.has_nan
    shift = 23 - fmt.mantissa_bits
    rebias = (127 - fmt.bias) << fmt.mantissa_bits
    clipped = magnitude.clamp(max=(fmt.max_code + beyond + rebias) << shift)

    half = (1 << (shift - 1)) - 1
    rounded = (clipped + half + ((clipped >> shift) & 1)) >> shift
    code = rounded - rebias
    if fmt.bias < 127:  # with float32's own exponents the subnormals need no care
        # Adding 2^23 steps lets the float adder round to a multiple of one step.
        exponent = 24 - fmt.bias - fmt.mantissa_bits
        subnormal = (clipped.view(torch.float32) + 2.0**exponent).view(torch.int32)
        subnormal = subnormal - ((127 + exponent) << 23)
        code = torch.where(clipped < (128 - fmt.bias) << 23, subnormal, code)

    sign = (bits >> (32 - fmt.bits)) & (1 << (fmt.bits - 1))
    nan = magnitude > _INF
    if fmt.specials is Specials.FNUZ:
        code = torch.where(code == 0, 0, code | sign)
        code = torch.where(nan, 1 << (fmt.bits - 1), code)
    else:
        code = torch.where(nan, sign ^ _nan_code(fmt), code | sign)
    return _store(code, fmt)


def _decode_bits(codes: Tensor, fmt: Format) -> Tensor:
    raw = _load(codes)
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
    if fmt.specials is Specials.IEEE:
        bits = torch.where(magnitude > fmt.max_code, bits | _INF, bits)
    elif fmt.specials is Specials.NAN_ONLY:
        bits = torch.where(magnitude > fmt.max_code, _NAN, bits)
    elif fmt.specials is Specials.FNUZ:
        bits = torch.where(raw == sign_bit, _NAN, bits)
    return (bits | ((raw & sign_bit) << (32 - fmt.bits))).view(torch.float32)


def _look_up(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    flat = codes.contiguous().view(torch.uint8).view(-1)
    pairs = flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0
    index = (flat.view(torch.uint16) if pairs else flat).to(torch.int32)
    return _table(fmt, dtype, pairs).index_select(0, index).view(dtype).view(codes.shape)


@functools.cache
def _table(fmt: Format, dtype: torch.dtype, pairs: bool) -> Tensor:
    """The value of each code or, two for the price of one, of each two adjacent codes."""
    values = torch.from_numpy(np.array([fmt.value(code) for code in range(256)])).to(dtype)
    if not pairs:
        return values
    first = values.repeat(256)
    second = values.repeat_interleave(256)
    both = torch.stack((first, second) if sys.byteorder == "little" else (second, first), 1)
    return both if dtype is torch.float64 else both.view(_PAIR[dtype]).view(-1)


def _encode_exponent(x: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    bits = x.view(torch.int32)
    tiny, half = 1 << 22, 1 << 22  # 2^-127, a float32 subnormal; half a binade
    power = torch.where(bits <= tiny, tiny, (bits + half) & _INF)
    if overflow == "saturate":
        power = power.clamp(max=_INF - (1 << 23))
    # As integers, zero and the negative floats are those below 1, the NaNs those above infinity.
    power = torch.where((bits < 1) | (bits > _INF) | (power == _INF), _NAN, power)
    # torch's cast is exact on powers of two, and all that Inductor can do with this dtype.
    return power.view(torch.float32).to(fmt.storage_dtype)


def _load(codes: Tensor) -> Tensor:
    """Codes as int32, zero-extended."""
    if codes.dtype.itemsize == 2:
        return codes.view(torch.int16).int() & 0xFFFF
    return codes.view(torch.uint8).int()


def _store(code: Tensor, fmt: Format) -> Tensor:
    raw = torch.int16 if fmt.storage_dtype.itemsize == 2 else torch.uint8
    return code.to(raw).view(fmt.storage_dtype)


def _nan_code(fmt: Format) -> int:
    """The code that a positive NaN becomes, except in FNUZ formats."""
    sign_bit = 1 << (fmt.bits - 1)
    if fmt.specials is Specials.NONE:
        return sign_bit
    if fmt.specials is Specials.IEEE and fmt.storage_dtype is not torch.float8_e5m2:
        return fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
    return sign_bit - 1


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


# The operators that stay opaque to Inductor, defined at the low level: `custom_op` costs 50 us a
# call.

_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("cast_in_range(Tensor x, str format) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("look_up(Tensor codes, str format, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]


def _cast_op(x: Tensor, name: str) -> Tensor:
    return x.to(FORMATS[name].storage_dtype)


def _look_up_op(codes: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return _in_pieces(lambda t: _look_up(t, FORMATS[name], dtype), codes, dtype)


_LIBRARY.impl("cast_in_range", _cast_op, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("look_up", _look_up_op, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::cast_in_range", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x, dtype=FORMATS[name].storage_dtype)


@torch.library.register_fake("scaledtensor::look_up", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(codes: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)
