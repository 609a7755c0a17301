"""Casts on a CPU in one pass over memory, by the loops of `scaledtensor/native/casts.cpp`. Eager
casts run there, and on AVX2 those compiled ones that Inductor's C++ does slowly.

PyTorch's operators take ten passes over a tensor for one cast, and twenty for stochastic rounding.
The same arithmetic in one loop of C++ takes a tenth of the time on a CPU without AVX-512
(`python -m benchmarks.casts`). The Python of `bits.py` stays the reference: tests hold both to the
same bits, and a machine without a compiler runs it.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch, native
from scaledtensor.formats import bits
from scaledtensor.formats.bits import Mode, Rounding
from scaledtensor.formats.format import Format, Specials

__all__ = ["decode", "encode", "encode_with_values", "fake_quantize", "rounded_values"]

_ENCODE, _ROUND, _DECODE = range(3)
_KINDS = {Specials.FNUZ: 1, Specials.P3109: 1, Specials.INTEGER: 2}
_UNSIGNED = 3
_FLOATS = (torch.float32, torch.bfloat16)


class _Facts(ctypes.Structure):
    """`Facts` of the source: what its arithmetic reads of a format and of how to round."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("bits", "mantissa", "bias")),
        *((name, ctypes.c_int32) for name in ("max_code", "top_code", "nan_code", "kind")),
        *((name, ctypes.c_int32) for name in ("has_nan", "has_inf", "p3109")),
        *((name, ctypes.c_int32) for name in ("above", "infinity", "kept")),
        *((name, ctypes.c_float) for name in ("min_normal", "min_subnormal", "limit")),
    )


_Known = tuple[Any, float, float]
"""A reference to `_Facts`, and the two powers of two of stochastic rounding."""


# --- the casts -------------------------------------------------------------------------------


def encode(x: Tensor, fmt: Format, mode: Mode) -> Tensor | None:
    """The codes of `x`; None where PyTorch's operators have to make them."""
    if not (x.dtype in _FLOATS and serves(fmt, mode) and _takes(x, mode.key is not None)):
        return None
    return _run(_ENCODE, x, fmt, mode, fmt.storage_dtype, x.dtype)


def fake_quantize(x: Tensor, fmt: Format, mode: Mode) -> Tensor | None:
    """`x` rounded to the values of `fmt`; None where PyTorch's operators have to do it."""
    if not (x.dtype in _FLOATS and serves(fmt, mode) and _takes(x, mode.key is not None)):
        return None
    return _run(_ROUND, x, fmt, mode, x.dtype, x.dtype)


def encode_with_values(x: Tensor, fmt: Format, mode: Mode) -> tuple[Tensor, Tensor] | None:
    """The codes of `x`, and what they decode to in float32, from one pass of an eager loop; None
    where there is none for this."""
    if not _makes_values(x, fmt, mode):
        return None
    codes, values = (torch.empty_like(x, dtype=t) for t in (fmt.storage_dtype, torch.float32))
    _write(x, fmt, mode, codes.data_ptr(), values)
    return codes, values


def rounded_values(x: Tensor, fmt: Format, mode: Mode) -> Tensor | None:
    """`x` rounded to the values of `fmt`, in float32; None as above."""
    if not _makes_values(x, fmt, mode):
        return None
    values = torch.empty_like(x, dtype=torch.float32)
    _write(x, fmt, mode, None, values)
    return values


def _makes_values(x: Tensor, fmt: Format, mode: Mode) -> bool:
    return (
        mode.key is None
        and x.dtype in _FLOATS
        and x.is_contiguous()
        and not torch.compiler.is_compiling()
        and serves(fmt, mode)
        and native.takes(x)
    )


def _write(x: Tensor, fmt: Format, mode: Mode, codes: int | None, values: Tensor) -> None:
    record, first, second = _known_facts(fmt, mode.overflow, mode.kept, False)
    half, places = x.dtype is torch.bfloat16, (x.data_ptr(), codes, values.data_ptr())
    threads = torch.get_num_threads()
    native.library().scaledtensor_cast(
        _ENCODE, half, record, None, first, second, *places, x.numel(), threads
    )


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor | None:
    """The values of codes in `dtype`; None where PyTorch's operators have to make them."""
    if not (dtype in _FLOATS and _is_narrow(fmt) and _takes(codes, True)):
        return None
    return _run(_DECODE, codes, fmt, Mode(), dtype, dtype)


def serves(fmt: Format, mode: Mode) -> bool:
    """Whether the source has the arithmetic of `bits.py` for this."""
    answer = _serves if torch.compiler.is_compiling() else _known_to_serve
    return answer(fmt, mode.rounding)


def _serves(fmt: Format, rounding: Rounding) -> bool:
    if not _is_narrow(fmt):
        return False
    if rounding == "nearest_even":
        return bits.rounds_in_float32(fmt) and (not fmt.signed or bits.has_normals(fmt))
    # With the exponents of float32 itself, subnormals are a case of their own.
    return rounding == "stochastic" and (not fmt.signed or fmt.bias < 127)


_known_to_serve = cache(_serves)


def _is_narrow(fmt: Format) -> bool:
    return fmt.storage_dtype.itemsize == 1


def _takes(x: Tensor, slow_in_inductor: bool) -> bool:
    """Whether `x` is real memory of this process, and enough of it, or stands for such in code that
    is compiled.

    Compiled code casts in the kernels that Inductor writes, which fuse. On AVX2 alone those that
    load bytes or int32 do so by way of a buffer that they wait for: decoding takes 1.5 ns an
    element there and 0.4 here, stochastic rounding 3 and 1.3.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy

        return (
            slow_in_inductor
            and bits.ON_AVX2
            and x.is_cpu
            and not torch.compiler.is_exporting()
            and not _torch.is_transforming()
            and statically_known_true(x.numel() >= native.WORTH_IT)
            and native.built()
        )
    return native.takes(x)


def _run(
    cast: int, x: Tensor, fmt: Format, mode: Mode, dtype: torch.dtype, wide: torch.dtype
) -> Tensor | None:
    random = mode.key is not None
    if random and x.numel() >= 1 << 31:  # which is refused there
        return None
    if torch.compiler.is_compiling():
        facts = _facts(fmt, mode.overflow, mode.kept, random)
        made: Tensor = torch.ops.scaledtensor.cast(x, mode.key, cast, *facts, dtype, wide)
        return made
    known = _known_facts(fmt, mode.overflow, mode.kept, random)
    return _called(x, mode.key, cast, known, dtype, wide)


def _called(
    x: Tensor,
    key: Tensor | None,
    cast: int,
    facts: _Known,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> Tensor | None:
    out = torch.empty_like(x, dtype=dtype)
    if type(out) is not Tensor:  # under a mode that makes tensors without memory
        return None
    # What fills its memory is taken as it lies there, unless the place of an element counts.
    if not x.is_contiguous() and (key is not None or out.stride() != x.stride()):
        made = _called(x.contiguous(), key, cast, facts, dtype, wide)
        return None if made is None else out.copy_(made)
    words = None if key is None else (ctypes.c_int32 * 2)(*key.tolist())
    record, first, second = facts
    half, count = wide is torch.bfloat16, x.numel()
    threads = torch.get_num_threads()
    places = x.data_ptr(), out.data_ptr(), None
    native.library().scaledtensor_cast(
        cast, half, record, words, first, second, *places, count, threads
    )
    return out


def _facts(fmt: Format, overflow: Any, kept: int, random: bool) -> tuple[list[int], list[float]]:
    """The fields of `_Facts`, and the two powers of two, of which the product makes an integer of a
    number below `min_normal`."""
    mode = Mode("stochastic" if random else "nearest_even", overflow)
    kind = _KINDS.get(fmt.specials, 0) if fmt.signed else _UNSIGNED
    nan_code = -1 if fmt.nan_code is None else fmt.nan_code
    codes = [fmt.max_code, bits.top_code(fmt, mode), nan_code, kind]
    special = [int(fmt.has_nan), int(fmt.has_inf), int(fmt.specials is Specials.P3109)]
    above = bits.INFINITY - int(bits.infinity_is_nan(fmt, mode))
    infinity = fmt.max_code + 1 if fmt.has_inf and bits.keeps_infinities(fmt, mode) else 0
    special += [above, infinity]
    integers = [fmt.bits, fmt.mantissa_bits, fmt.bias, *codes, *special, kept]
    if not fmt.signed:
        return integers, [0.0, 0.0, 0.0, 1.0, 1.0]
    exponent = fmt.bias - 1 + 30
    powers = [2.0 ** min(exponent, 127), 2.0 ** max(exponent - 127, 0)]
    limit = bits.limit_of_subnormals(fmt, mode)
    return integers, [fmt.min_normal, fmt.min_subnormal, limit, *powers]


@cache
def _known_facts(fmt: Format, overflow: Any, kept: int, random: bool) -> _Known:
    return _recorded(*_facts(fmt, overflow, kept, random))


def _recorded(integers: Sequence[int], floats: Sequence[float]) -> _Known:
    *numbers, first, second = floats
    # As what the library is given, which is made once: it keeps the record itself.
    return ctypes.byref(_Facts(*integers, *numbers)), first, second


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "cast(Tensor x, Tensor? key, int cast, int[] integers, float[] floats, ScalarType dtype, "
    "ScalarType wide) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def _cast_op(
    x: Tensor,
    key: Tensor | None,
    cast: int,
    integers: Sequence[int],
    floats: Sequence[float],
    dtype: torch.dtype,
    wide: torch.dtype,
) -> Tensor:
    made = _called(x, key, cast, _recorded(integers, floats), dtype, wide)
    assert made is not None  # nothing but real tensors comes here
    return made


_LIBRARY.impl("cast", _cast_op, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::cast", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(x: Tensor, key: Tensor | None, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=rest[-2])
