"""The casts of a `Format`: `encode`, `decode`, and `fake_quantize`, which does both.

Every result is the exact value rounded once. That includes float64, which torch and ml_dtypes round
twice, through float32. Eager and compiled code give the same bits. There are several exact ways to
make a cast, each the fastest in its place. A loop of C++ (`native.py`) makes those casts that it
can; `_way` chooses among the others.

Overflow. "saturate" takes numbers beyond ±max, and infinities, to ±max. "ieee" takes them to
infinity, to NaN if the format has no infinity, and to ±max if it has neither. "saturate_finite"
takes numbers to ±max as "saturate" does, and infinities to infinity or NaN as "ieee" does. So
infinities and NaNs stay visible, if the format has a code for them. Products cast their operands by
this policy. The rounding decides which numbers are beyond ±max, as in IEEE 754. To nearest, they
are the numbers that would round past max; toward zero and to odd, only infinities; stochastic, the
numbers that the draw rounds past max. To nearest even, ml_dtypes gives the same
bytes: "ieee" is its `astype`, "saturate" its `astype` after a clip.

A NaN becomes
  - NAN_ONLY, FNUZ, P3109: the only NaN of the format;
  - IEEE: the quiet NaN;
  - NONE: the zero of the opposite sign; INTEGER: zero.
It keeps its sign if the format has signed NaNs, byte for byte as in ml_dtypes. Two things are not
specified: the sign and the payload of a NaN in BF16, FP16 and FP32, which torch's own casts choose,
and the sign of the zero that `fake_quantize` makes of a NaN.
-0 stays -0 if it has a code. `Format.policy` says all of this for one format.

E8M0 is the format of scales. Zero and negative numbers become NaN. Positive numbers become the
nearest power of two; ties go up. Between its two smallest codes, 2^-127 and 2^-126, every number
rounds up, as in ml_dtypes; smaller numbers become 2^-127.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats import native, tables
from scaledtensor.formats.bits import (
    INFINITY,
    SIGN,
    Mode,
    Overflow,
    Rounding,
    decode_bits,
    encode_bits,
    loop_of_its_own,
    round_bits,
    rounds_in_float32,
)
from scaledtensor.formats.format import Format, FormatLike, Specials, get
from scaledtensor.formats.stochastic import Randomness, checked_random_bits, key_for
from scaledtensor.formats.tensors import FLOATS, HALVES, check_tensor, in_pieces, named

__all__ = [
    "OVERFLOWS",
    "ROUNDINGS",
    "Overflow",
    "Rounding",
    "decode",
    "encode",
    "fake_quantize",
    "round_by_arithmetic",
]

OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

_WIDE = (torch.float32, torch.bfloat16, torch.float16)
_RAW = (torch.uint8, torch.int16)
_MAX = torch.finfo(torch.float32).max


# --- the casts -----------------------------------------------------------------------------------


def encode(
    x: Tensor,
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    generator: Randomness = None,
    random_bits: int | None = None,
) -> Tensor:
    """The codes of `x` in `fmt`, a tensor of the format's `storage_dtype` and the shape of `x`.

    Args:
        x: float64, float32, bfloat16 or float16, of any shape and strides. No gradient flows.
        fmt: the format: a `Format`, its name, or the torch dtype of its codes.
        rounding: "nearest_even"; "nearest_away" (ties away from zero); "toward_zero"; "to_odd" (an
            inexact number becomes its neighbour with the odd code, so that a later rounding to
            fewer bits gives the result of a single rounding); "stochastic" (unbiased: the chance of
            rounding up is the distance from the lower neighbour, in steps).
        overflow: "saturate", "saturate_finite" or "ieee"; the module's docstring explains them.
        generator: the source of the random numbers of "stochastic": a torch.Generator, a
            `random_key`, or None for the device's default generator.
        random_bits: for "stochastic", how many bits decide, 1 to 32. The distance from the lower
            neighbour is cut to that many bits, as hardware does. None takes all bits. The chance is
            then exact for a number that is normal in `fmt`, and for subnormals within
            2^(mantissa_bits - 30) of a step (exact unless the number has digits below that);
            for float64 within 2^(mantissa_bits - 62).

    Raises DTypeError if `x` is not such a tensor, FormatError for unknown names and for
    `generator` or `random_bits` without "stochastic", UnsupportedError for "stochastic" on 2^31
    elements or more.
    """
    check_tensor(x, "encode")
    mode = _checked(x, rounding, overflow, generator, random_bits)
    return _encode(_numbers(x), get(fmt), mode)


def _encode(x: Tensor, fmt: Format, mode: Mode) -> Tensor:
    made = native.encode(x, fmt, mode)
    if made is not None:
        return made
    storage, way = fmt.storage_dtype, _way("encode", x, fmt, mode)
    if way == "torch":
        return in_pieces(lambda t, _, out: _cast(t, fmt, mode.overflow, out), x, storage)
    if way == "table":
        return tables.encode(x, fmt, mode, _by_bits)
    if way == "arithmetic":
        # Inductor drops a cast to 16 bits that is undone in the same kernel, so the rounding is
        # done before the cast.
        return loop_of_its_own(_fused_rounding(x, fmt, mode.overflow)).to(storage)
    return in_pieces(
        lambda t, start, _: _by_bits(t, fmt, mode, start), x, storage, mode.key is None
    )


def decode(codes: Tensor, fmt: FormatLike, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `codes`, in `dtype`.

    They are exact if `dtype` holds every value of `fmt`, else rounded once to nearest even. Raises
    DTypeError for codes of another dtype than the format's `storage_dtype`, or another `dtype` than
    float64, float32, bfloat16 and float16.
    """
    check_tensor(codes, "decode", "codes")
    fmt = get(fmt)
    if codes.dtype is not fmt.storage_dtype:
        raise DTypeError(f"codes of {fmt!r} are {fmt.storage_dtype}, got {codes.dtype}")
    if dtype not in FLOATS:
        raise DTypeError(f"cannot decode to {dtype}; allowed are {named(FLOATS)}")
    made = native.decode(codes, fmt, dtype)
    if made is not None:
        return made
    way = _way("decode", codes, fmt, Mode())
    if way == "torch":
        mixed = {codes.dtype, dtype} == {*HALVES}  # Inductor's C++ vectorises this cast badly
        return _as(loop_of_its_own(codes.float()) if mixed else codes, dtype)
    if way == "table":
        return in_pieces(lambda t, _, out: tables.look_up(t, fmt, dtype, out), codes, dtype)
    return _as(loop_of_its_own(decode_bits(codes, fmt)), dtype)


def fake_quantize(
    x: Tensor,
    fmt: FormatLike,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    generator: Randomness = None,
    random_bits: int | None = None,
) -> Tensor:
    """`x` rounded to the values of `fmt`, in the dtype of `x`: decode(encode(x, ...), x.dtype).

    Takes the arguments of `encode` and raises its errors. No gradient flows.
    """
    check_tensor(x, "fake_quantize")
    mode, fmt = _checked(x, rounding, overflow, generator, random_bits), get(fmt)
    x = _numbers(x)
    made = native.fake_quantize(x, fmt, mode)
    if made is not None:
        return made
    way = _way("fake_quantize", x, fmt, mode)
    if way == "arithmetic":
        if torch.compiler.is_compiling():
            return _as(_fused_rounding(x, fmt, overflow), x.dtype)
        return in_pieces(lambda t, _, out: _rounded(t, fmt, overflow, out), x, x.dtype)
    if way == "table":
        return tables.fake_quantize(x, fmt, mode, lambda t: _rounded(t, fmt, overflow))
    if way == "bits":
        wide = _carried(x, fmt, mode)
        if wide.dtype is not x.dtype:  # so it is no view of the caller's tensor
            wide = loop_of_its_own(wide)
        return _as(loop_of_its_own(round_bits(wide, fmt, mode)), x.dtype)
    return decode(_encode(x, fmt, mode), fmt, x.dtype)


# --- the choice of the way -----------------------------------------------------------------------


def _way(
    cast: Literal["encode", "decode", "fake_quantize"], x: Tensor, fmt: Format, mode: Mode
) -> Literal["torch", "table", "arithmetic", "bits", "codes"]:
    """The fastest way of a cast that no loop of C++ makes.

    torch       torch's own cast, after a clamp: to nearest even, for a dtype that torch has
    table       one gather (`tables.py`): eager, on a CPU, of 8-bit codes or many 16-bit floats
    arithmetic  float32 sums and products: values to nearest even, eager or in Inductor's C++
    bits        integer arithmetic (`bits.py`): all other casts, on any device; it fuses
    codes       `encode` and then `decode`, for a `fake_quantize` that the other ways do not serve
    """
    storage, nearest = fmt.storage_dtype, mode.rounding == "nearest_even"
    compiled = torch.compiler.is_compiling()
    if cast == "decode":
        if storage in _WIDE:
            return "torch"
        # Other classes, such as FakeTensor, have no data to look up.
        if compiled or type(x) is not Tensor or storage.itemsize > 1:
            return "bits"
        if backend_of(x).host:
            return "table"
        return "bits" if storage in _RAW else "torch"
    if not compiled:
        if cast == "fake_quantize":
            if not nearest or storage in _WIDE or not rounds_in_float32(fmt):
                return "codes"
            return "table" if tables.serves(x) else "arithmetic"
        castable = nearest and storage not in _RAW and fmt.signed
        if castable and (mode.overflow != "ieee" or storage in _WIDE):
            return "torch"
        return "table" if tables.serves(x) and mode.key is None else "bits"
    # Compilers for GPUs contract a product and a sum into one rounding; there bits are as fast.
    sums = nearest and backend_of(x).writes_cpp and x.dtype is not torch.float64
    same = storage is torch.float32 or x.dtype is storage
    if cast == "fake_quantize":
        if sums and x.dtype is not storage and rounds_in_float32(fmt):
            return "arithmetic"
        return "codes" if same else "bits"
    if nearest and same:
        return "torch"
    return "arithmetic" if sums and storage is torch.float16 else "bits"


# --- arguments -----------------------------------------------------------------------------------


def _checked(
    x: Tensor,
    rounding: Rounding,
    overflow: Overflow,
    generator: Randomness,
    random_bits: int | None,
) -> Mode:
    if x.dtype not in FLOATS:
        raise DTypeError(f"cannot encode a tensor of {x.dtype}; allowed are {named(FLOATS)}")
    if rounding not in ROUNDINGS:
        allowed = ", ".join(map(repr, ROUNDINGS))
        raise FormatError(f"unknown rounding {rounding!r}; allowed are {allowed}")
    if overflow not in OVERFLOWS:
        allowed = ", ".join(map(repr, OVERFLOWS))
        raise FormatError(f"unknown overflow {overflow!r}; allowed are {allowed}")
    if rounding == "stochastic":
        kept = checked_random_bits(random_bits)
        return Mode(rounding, overflow, key_for(x, generator), kept)
    for name, given in (("generator", generator), ("random_bits", random_bits)):
        if given is not None:
            raise FormatError(f"{name} is for rounding 'stochastic' only, got it with {rounding!r}")
    return Mode(rounding, overflow)


def _numbers(x: Tensor) -> Tensor:
    """`x` without a gradient, and with its signs in memory. torch may negate a tensor by a flag
    alone, as it does for the imaginary part of a conjugate."""
    x = x.detach() if x.requires_grad else x
    return x if torch.compiler.is_compiling() else x.resolve_neg()


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`. If `x` has that dtype, Dynamo's graph gets no node.

    A node that returns its input would give an autograd.Function one tensor under two names. Dynamo
    of torch 2.11 returns both, and loses the gradient of the first.
    """
    return x if x.dtype is dtype else x.to(dtype)


def _carried(x: Tensor, fmt: Format, mode: Mode) -> Tensor:
    """`x` in a dtype that `encode_bits` takes: float32, or float64 if the rounding needs all digits
    of a float64 number."""
    by_its_own_digits = fmt.signed and mode.rounding != "nearest_even"
    return x if x.dtype is torch.float64 and by_its_own_digits else _single(x)


def _single(x: Tensor) -> Tensor:
    """`x` in float32, such that rounding the result to nearest even is rounding `x`."""
    return _round_to_odd(x) if x.dtype is torch.float64 else x.float()


def _round_to_odd(x: Tensor) -> Tensor:
    """float64 to float32: toward zero, with an odd last bit if bits were lost.

    A tie of a later rounding to a shorter format is then a tie of the float64 number too (Boldo and
    Melquiond, "When double rounding is odd").
    """
    near = x.float()
    # The absolute value is taken between the two conversions: GCC 12 drops a bare pair of them
    # where it makes vectors of eight float64.
    back, size = near.abs().double(), x.abs()
    bits = near.view(torch.int32)
    bits = bits - (back > size).int()  # the next smaller magnitude, for either sign
    return (bits | (back != size).int()).view(torch.float32)


# --- by bits, and by torch's own casts -----------------------------------------------------------


def _by_bits(x: Tensor, fmt: Format, mode: Mode, start: int = 0) -> Tensor:
    return encode_bits(_carried(x, fmt, mode), fmt, mode, start)


def _cast(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    """The codes of `x` by torch's own casts, into `out` if given."""
    storage = fmt.storage_dtype
    if x.dtype is torch.float64 and storage is not torch.float32:
        x = _round_to_odd(x)
    if overflow != "ieee":
        # Other 16-bit floats do not have the maxima of the wide formats. Their clamp, which goes
        # through float32 itself, drops the sign of a NaN.
        given = x.float() if x.dtype in HALVES and x.dtype is not storage else x
        x = given.clamp(-fmt.max, fmt.max)
        if overflow == "saturate_finite":
            kept = given if fmt.has_inf else torch.full_like(given, torch.nan).copysign_(given)
            x = torch.where(given.abs() == torch.inf, kept, x)
    codes = _as(x, storage) if out is None else out.copy_(x)
    if storage is torch.float8_e5m2:
        raw = codes.view(torch.uint8)
        nan = raw & 0x7F
        raw.sub_(torch.eq(nan, 0x7F, out=nan))  # torch writes NaN as all ones; see `nan_code`
    return codes


# --- by arithmetic: float32 sums and products round to nearest even, without codes ---------------


def round_by_arithmetic(x: Tensor, fmt: Format) -> Tensor:
    """`fake_quantize(x, fmt, overflow="saturate_finite")` of a 16- or 32-bit float, except for the
    sign of zero.

    Compiled C++ has the function as one operation (`scales/_inductor_operations.py`), which takes
    0.3 ns per element. `_fused_rounding`, which Inductor writes itself, would take 1.2 to 4 times
    as long if it read bits in the same way (measured).
    """
    given = x.float()
    wide = given.clamp(fmt.min, fmt.max)
    if fmt.is_integer:
        return _in_steps(wide, fmt)
    value = _nearest(wide, fmt)
    return value + _infinities(given, fmt) if fmt.has_nan else value


def _nearest(x: Tensor, fmt: Format) -> Tensor:
    """The nearest number with the digits of the format, for finite float32. Zeros are positive.

    The addend is 1.5 * 2^(23 - mantissa bits) times the power of two at or below |x|, or times the
    least normal number if that is larger. So the last place of the sum is the step between the
    format's values at `x`. The addend has two digits, so that a compiler that contracts its product
    and the sums into one rounding gives the same bits.
    """
    power = (x.view(torch.int32) & INFINITY).view(torch.float32).clamp(min=fmt.min_normal)
    addend = power * (1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    return (x + addend) - addend


def _fused_rounding(x: Tensor, fmt: Format, overflow: Overflow) -> Tensor:
    """`fake_quantize(x, fmt, overflow=overflow)` of a 16- or 32-bit float, in float32, for
    Inductor's C++: `round_by_arithmetic` with the sign of zero, and with every `overflow`. It has
    float32 sums, products and comparisons only, which Inductor's C++ vectorises."""
    wide = x.float()
    if not fmt.has_nan:
        wide = torch.where(wide == wide, wide, 0.0)
    saturate, given = overflow != "ieee" or not fmt.has_nan, wide
    # All numbers past 2 max overflow alike; clamped there, the splitting stays finite.
    low, high = (fmt.min, fmt.max) if saturate else (-2 * fmt.max, 2 * fmt.max)
    wide = wide.clamp(low, high)
    if fmt.has_signed_zero:
        # The nearest multiple of a step; a zero has the sign of `x`.
        subnormal = (wide * (1 / fmt.min_subnormal)).round() * fmt.min_subnormal
    else:
        subnormal = _in_steps(wide, fmt)
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


def _in_steps(x: Tensor, fmt: Format) -> Tensor:
    """The nearest multiple of `min_subnormal`, by adding a number whose last place is that step."""
    magic = 1.5 * 2.0**23 * fmt.min_subnormal
    return (x + magic) - magic


def _split(x: Tensor, fmt: Format) -> Tensor:
    """The leading digits of normal numbers, by Veltkamp's splitting (Dekker 1971, Numerische
    Mathematik 18), which rounds to nearest even for every float32 here (tested). GPU compilers
    contract its product and a sum into one rounding, so it is not for them."""
    split = x * (2.0 ** (23 - fmt.mantissa_bits) + 1)
    return split - (split - x)


def _infinities(x: Tensor, fmt: Format) -> Tensor:
    """Zeros, and for each infinity of `x` that infinity, or NaN if the format has no infinity."""
    return x - (x.clamp(-_MAX, _MAX) if fmt.has_inf else x)


def _rounded(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    if x.dtype is torch.float32:
        return _round_piece(x, fmt, overflow, out)
    return _round_piece(_single(x), fmt, overflow).to(x.dtype)


def _round_piece(x: Tensor, fmt: Format, overflow: Overflow, out: Tensor | None = None) -> Tensor:
    """`fake_quantize(x, fmt, overflow=overflow)` of a float32 piece, eager, into `out` if given.

    The addend is a multiple of the power of two at or below |x|, so the last place of the sum is
    the step between values there. The piece is read by about seven vectorised operators.
    """
    saturate = overflow != "ieee" or not fmt.has_nan
    low, high = (fmt.min, fmt.max) if saturate else (-2 * fmt.max, 2 * fmt.max)
    value = x.clamp(low, high) if out is None else torch.clamp(x, low, high, out=out)
    if not fmt.has_nan:
        value.nan_to_num_(nan=0.0)
    if fmt.is_integer:
        magic = 1.5 * 2.0**23 * fmt.min_subnormal
        return value.add_(magic).sub_(magic)
    bits = value.view(torch.int32)
    power = (bits & INFINITY).view(torch.float32).clamp_(min=fmt.min_normal)
    steps = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    value.add_(power, alpha=steps).sub_(power, alpha=steps)
    if not saturate:
        # Numbers beyond max become infinity, or NaN if the format has no infinity. Their excess
        # over max times 2^254 overflows float32; for all others the excess is exactly zero.
        excess = value - value.clamp(-fmt.max, fmt.max)
        excess.mul_(2.0**127).mul_(2.0**127)
        value.add_(excess if fmt.has_inf else excess.mul_(0.0))
    elif overflow == "saturate_finite" and fmt.has_nan:
        value.add_(_infinities(x, fmt))
    if fmt.specials in (Specials.FNUZ, Specials.P3109):
        return value
    # The sum makes +0 of -0 and of numbers that round to -0. A NaN that becomes a zero has the
    # opposite sign, as in `encode`.
    sign = x.view(torch.int32)
    if not fmt.has_nan:
        sign = sign ^ (INFINITY - (sign & ~SIGN))
    bits.bitwise_or_(sign & SIGN)
    return value
