"""Casts on a CPU in one pass over memory: `casts.cpp`, built at first use. Eager casts run there,
and on AVX2 those compiled ones that Inductor's C++ does slowly.

PyTorch's operators take ten passes over a tensor for one cast, and twenty for stochastic rounding.
The same arithmetic in one loop of C++ takes a tenth of the time on a CPU without AVX-512
(`python -m benchmarks.casts`). The Python of `bits.py` stays the reference: tests hold both to the
same bits, and a machine without a compiler runs it.

The source is built when an eager cast first meets `WORTH_IT` elements, by the C++ compiler that
`torch.compile` takes (the environment variable CXX, else g++, clang++ or c++), which takes a few
seconds. The library is kept in the user's cache folder under a name that covers the source, the
flags, the compiler and the CPU. `SCALEDTENSOR_NATIVE=0` leaves it out. `status()` says what was
found, and `scaledtensor.hardware()` prints it.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import bits
from scaledtensor.formats.bits import Mode, Rounding
from scaledtensor.formats.format import Format, Specials

__all__ = ["WORTH_IT", "decode", "encode", "fake_quantize", "left_out", "status"]

#: Elements from which on the library is built. Once it is there it serves all sizes.
WORTH_IT = 1 << 12

VARIABLE = "SCALEDTENSOR_NATIVE"
_SOURCE = Path(__file__).with_name("casts.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-trapping-math"),
)
#: Compilers without OpenMP, as Apple's, refuse it: then a cast runs on one thread.
_THREADS = "-fopenmp"
_SECONDS = 120

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
            and statically_known_true(x.numel() >= WORTH_IT)
            and _is_built()
        )
    return (
        type(x) is Tensor
        and x.is_cpu
        and (_found is not None or x.numel() >= WORTH_IT)
        and not _torch.is_transforming()
        and _library() is not None
    )


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
    _library()(
        cast, half, record, words, first, second, x.data_ptr(), out.data_ptr(), count, threads
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


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Casts are PyTorch operators in here, as on a machine without a compiler."""
    global _found
    before, _found = _found, (None, "casts are PyTorch operators: scaledtensor.formats.native")
    try:
        yield
    finally:
        _found = before


# --- the library -----------------------------------------------------------------------------

_lock = threading.Lock()
_found: tuple[Any, str] | None = None


def status() -> str:
    """How eager casts of large CPU tensors run, and why. Builds the library if it can."""
    _library()
    assert _found is not None
    return _found[1]


@_torch.constant_if_compiled
def _is_built() -> bool:
    return _library() is not None


def _library() -> Any:
    """The function of the library; None where there is none."""
    global _found
    if _found is None:
        with _lock:
            if _found is None:
                _found = _loaded()
    return _found[0]


def _loaded() -> tuple[Any, str]:
    otherwise = "casts are PyTorch operators: "
    if os.environ.get(VARIABLE, "1") == "0":
        return None, f"{otherwise}{VARIABLE}=0"
    compiler = _compiler()
    if compiler is None:
        return None, f"{otherwise}there is no C++ compiler (CXX, {', '.join(_COMPILERS)})"
    try:
        try:
            library = ctypes.CDLL(str(_built(compiler, _THREADS)))
        except (OSError, subprocess.CalledProcessError):
            library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return None, f"{otherwise}{compiler[0]} did not build the C++ source: {said.strip()}"
    run = library.scaledtensor_cast
    word, number, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    run.argtypes = (word, word, pointer, pointer, ctypes.c_float, ctypes.c_float)
    run.argtypes += (pointer, pointer, number, word)
    run.restype = None
    return run, f"casts are C++, built by {compiler[0]}"


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    return next(([name] for name in _COMPILERS if shutil.which(name)), None)


def _built(compiler: list[str], *more: str) -> Path:
    """The library, built where it is not there yet."""
    flags = (*_FLAGS, *_of_cpu(), *more)
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True, timeout=_SECONDS
    ).stdout
    facts = sorted(torch.cpu.get_capabilities().items())
    covers = repr((_SOURCE.read_text(), compiler, flags, version, facts))
    name = f"casts-{hashlib.blake2b(covers.encode(), digest_size=12).hexdigest()}.so"
    library = _folder() / name
    if library.exists():
        return library
    # Under a name of its own first: other processes may build at the same time.
    handle, path = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [*compiler, *flags, str(_SOURCE), "-o", path]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
        os.replace(path, library)
    except BaseException:
        os.unlink(path)
        raise
    return library


def _of_cpu() -> tuple[str, ...]:
    """The instructions that torch itself runs with."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ("-mavx2", "-mfma")
    # Compilers for ARM know the CPU by the other name.
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


def _folder() -> Path:
    """Where libraries are kept: a folder that no other user can write to."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(root) / "scaledtensor"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        if owned and not folder.stat().st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary()


@cache
def _temporary() -> Path:
    """Of this process, where the user has no cache folder."""
    return Path(tempfile.mkdtemp(prefix="scaledtensor-"))
