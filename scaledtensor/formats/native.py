"""Casts on a CPU in one pass over memory, by the loops of `scaledtensor/native/casts.cpp`.

Eager casts run there. On AVX2 two compiled casts also run there, which Inductor's C++ does slowly:
decoding and stochastic rounding.

PyTorch's operators take ten passes over a tensor for one cast, and twenty for stochastic rounding.
The same arithmetic in one loop of C++ takes a tenth of the time on a CPU without AVX-512
(`python -m benchmarks.casts`). The Python code of `bits.py` is the reference. Tests compare both
bit for bit, and a machine without a compiler runs the Python code.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch, native
from scaledtensor.backends import backend_of
from scaledtensor.formats import bits
from scaledtensor.formats.bits import Mode, Rounding
from scaledtensor.formats.format import Format, Specials

__all__ = ["ValueLoop", "decode", "encode", "fake_quantize", "serves", "value_loop"]

_ENCODE, _ROUND, _DECODE = range(3)
_KINDS = {Specials.FNUZ: 1, Specials.P3109: 1, Specials.INTEGER: 2}
_UNSIGNED = 3
_FLOATS = (torch.float32, torch.bfloat16)


class _Facts(ctypes.Structure):
    """`Facts` of the C++ source: the numbers of a format and of a rounding that its loops read."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("bits", "mantissa", "bias")),
        *((name, ctypes.c_int32) for name in ("max_code", "top_code", "nan_code", "kind")),
        *((name, ctypes.c_int32) for name in ("has_nan", "has_inf", "p3109")),
        *((name, ctypes.c_int32) for name in ("above", "infinity", "kept")),
        *((name, ctypes.c_float) for name in ("min_normal", "min_subnormal", "limit")),
    )


_Known = tuple[Any, float, float]
"""A reference to `_Facts`, and the two powers of two of stochastic rounding."""


# --- the casts: None if PyTorch's operators have to make the result ------------------------------


def encode(x: Tensor, fmt: Format, mode: Mode) -> Tensor | None:
    """The codes of `x`, or None."""
    if not _casts(x, fmt, mode):
        return None
    return _run(_ENCODE, x, fmt, mode, fmt.storage_dtype, x.dtype)


def fake_quantize(x: Tensor, fmt: Format, mode: Mode) -> Tensor | None:
    """`x` rounded to the values of `fmt`, or None."""
    if not _casts(x, fmt, mode):
        return None
    return _run(_ROUND, x, fmt, mode, x.dtype, x.dtype)


def _casts(x: Tensor, fmt: Format, mode: Mode) -> bool:
    return x.dtype in _FLOATS and serves(fmt, mode) and _takes(x, mode.key is not None)


class ValueLoop:
    """The casts of one format to nearest even that also write values, in float32 or bfloat16.

    The caller passes float32 or bfloat16 tensors without gaps, which `native.takes`.
    """

    def __init__(self, fmt: Format, mode: Mode, dtype: torch.dtype) -> None:
        self._storage, self._dtype = fmt.storage_dtype, dtype
        self._facts = _known_facts(fmt, mode.overflow, mode.kept, False)
        self._halves = dtype is torch.bfloat16

    def codes_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of `x` and their values, from one pass over memory."""
        codes = torch.empty_like(x, dtype=self._storage)
        return codes, self._run(x, codes.data_ptr())

    def values(self, x: Tensor) -> Tensor:
        """`x` rounded to the values of the format."""
        return self._run(x, None)

    def _run(self, x: Tensor, codes: int | None) -> Tensor:
        values = torch.empty_like(x, dtype=self._dtype)
        record, first, second = self._facts
        native.library().scaledtensor_cast(
            *(_ENCODE, x.dtype is torch.bfloat16, record, None, first, second),
            *(x.data_ptr(), codes, values.data_ptr(), self._halves),
            *(x.numel(), torch.get_num_threads()),
        )
        return values


@cache
def value_loop(fmt: Format, mode: Mode, dtype: torch.dtype) -> ValueLoop | None:
    """The loop for a cast to nearest even, or None if there is none."""
    served = mode.key is None and dtype in _FLOATS and _known_to_serve(fmt, mode.rounding)
    return ValueLoop(fmt, mode, dtype) if served else None


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor | None:
    """The values of codes in `dtype`, or None."""
    if not (dtype in _FLOATS and _is_narrow(fmt) and _takes(codes, True)):
        return None
    return _run(_DECODE, codes, fmt, Mode(), dtype, dtype)


def serves(fmt: Format, mode: Mode) -> bool:
    """Whether the C++ source has the arithmetic of `bits.py` for this format and rounding."""
    answer = _serves if torch.compiler.is_compiling() else _known_to_serve
    return answer(fmt, mode.rounding)


def _serves(fmt: Format, rounding: Rounding) -> bool:
    if not _is_narrow(fmt) or rounding not in ("nearest_even", "stochastic"):
        return False
    if not fmt.signed:
        return True
    if rounding == "nearest_even":
        return bits.rounds_in_float32(fmt) and bits.has_normals(fmt)
    return fmt.bias < 127  # the loop has no case for float32's own subnormals


_known_to_serve = cache(_serves)


def _is_narrow(fmt: Format) -> bool:
    return fmt.storage_dtype.itemsize == 1


def _takes(x: Tensor, slow_in_inductor: bool) -> bool:
    """Whether the loops take `x`: in eager code real memory of this process, and enough of it; in
    compiled code a CPU tensor of enough elements, if Inductor's kernel would be slow.

    Compiled code casts in the kernels that Inductor writes, since they fuse. Only on AVX2 is a
    kernel slow that loads bytes or int32, because it waits for a buffer: decoding takes 1.5 ns per
    element there and 0.4 here, stochastic rounding 3 and 1.3.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy

        return (
            slow_in_inductor
            and bits.ON_AVX2
            and backend_of(x).writes_cpp
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
    if random and x.numel() >= 1 << 31:  # PyTorch's operators raise an error for so many
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
    # A tensor without gaps in memory is cast in the order of memory, unless the order counts.
    if not x.is_contiguous() and (key is not None or out.stride() != x.stride()):
        made = _called(x.contiguous(), key, cast, facts, dtype, wide)
        return None if made is None else out.copy_(made)
    words = None if key is None else (ctypes.c_int32 * 2)(*key.tolist())
    record, first, second = facts
    half, count = wide is torch.bfloat16, x.numel()
    threads = torch.get_num_threads()
    places = x.data_ptr(), out.data_ptr(), None
    native.library().scaledtensor_cast(
        cast, half, record, words, first, second, *places, False, count, threads
    )
    return out


def _facts(fmt: Format, overflow: Any, kept: int, random: bool) -> tuple[list[int], list[float]]:
    """The fields of `_Facts`, and two powers of two. A number below `min_normal` times both is an
    integer."""
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
    # The reference is made once. It keeps the record alive.
    return ctypes.byref(_Facts(*integers, *numbers)), first, second


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define(
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
    assert made is not None  # the operator's arguments are real tensors
    return made


_LIBRARY.impl("cast", _cast_op, "CPU")


@torch.library.register_fake("scaledtensor::cast", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(x: Tensor, key: Tensor | None, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=rest[-2])
