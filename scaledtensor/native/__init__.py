"""Loops in C++ for eager CPU tensors, built at first use.

`casts.cpp` has casts, and `blocks.cpp` has casts under scales of blocks. `adam.cpp` has the fused
step of Adam. `elements.cpp` has loops that would take many passes over memory as PyTorch's
operators. `numbers.cpp` calculates the scales of compiled code. `products.cpp` multiplies by codes,
which PyTorch's operators would decode into memory first. `rows.cpp` decodes the rows of a cache of
keys and values. `steps.cpp` has the steps of optimizers with states in few bits. A call with at
least `WORTH_IT` elements builds the library, which takes some ten seconds on two CPUs. A program
whose tensors are all smaller takes the library from the folder if a program before it built one.
The compiler is the one of `torch.compile`: the environment variable CXX, else g++, clang++ or c++.
The library is in the user's cache folder, under a name that covers the sources, the flags, the
compiler and the CPU. `SCALEDTENSOR_NATIVE=0` leaves it out. `status()` describes the library, and
`scaledtensor.hardware()` prints that. Each caller has the same arithmetic in Python or in PyTorch's
operators too, for machines without a compiler.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of

__all__ = [
    "PLAIN",
    "WORTH_IT",
    "built",
    "is_memory",
    "left_out",
    "library",
    "ready",
    "status",
    "takes",
]

#: A call with this number of elements builds the library. Then the library serves all sizes.
WORTH_IT = 1 << 12

#: The number of smaller calls after which the folder is searched for the library, which takes 16 ms
#: with loading. The loops save some 0.1 ms a call.
LOOK_AFTER = 100
#: The number of smaller calls that lose as much time as building the library takes.
BUILD_AFTER = 100_000

#: The classes of tensors whose elements a loop may read and write.
PLAIN = (Tensor, torch.nn.Parameter)

VARIABLE = "SCALEDTENSOR_NATIVE"
_NAMES = tuple(
    f"{name}.cpp"
    for name in (
        *("adam", "blocks", "casts", "elements", "numbers"),
        *("products", "rows", "steps", "weighted"),
    )
)
_SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"),
)
#: Compilers without OpenMP, such as Apple's, refuse this flag. A loop then runs on one thread.
_THREADS = "-fopenmp"
_SECONDS = 300


def is_memory(x: Tensor) -> bool:
    """Whether loops may read and write `x`: it is memory of this process, and nothing watches the
    operators. No mode sees the loops, so under a mode that records or counts operators PyTorch's
    operators make the same bits."""
    return (
        type(x) in PLAIN
        and backend_of(x).host
        and not _torch.is_transforming()
        and not _torch.recording_modes()
    )


def takes(*operands: Tensor) -> bool:
    """Whether loops of the library can read and write all these, one of which has enough elements
    to build the library."""
    for x in operands:
        if type(x) is not Tensor or x.is_neg() or not backend_of(x).host:
            return False
    if _found is None and not _is_worth_it(max(x.numel() for x in operands)):
        return False
    return is_memory(operands[0]) and library() is not None


def ready(elements: int) -> bool:
    """Whether there is a library for work that takes as long as a cast of so many elements."""
    return (_found is not None or _is_worth_it(elements)) and library() is not None


_lock = threading.Lock()
_found: tuple[Any, str] | None = None
_small_calls = 0


def _is_worth_it(elements: int) -> bool:
    """Whether to use the library for a call with so many elements, which nobody asked for yet."""
    global _found, _small_calls
    if elements >= WORTH_IT:
        return True
    _small_calls += 1
    if _small_calls == LOOK_AFTER:
        with _lock:
            found = _loaded(build=False)
            if _found is None and found[0] is not None:
                _found = found
    return _found is not None or _small_calls >= BUILD_AFTER


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Within this context casts are PyTorch operators, as on a machine without a compiler."""
    global _found
    before, _found = _found, (None, "casts are PyTorch operators: scaledtensor.native")
    try:
        yield
    finally:
        _found = before


def status() -> str:
    """Return how eager casts of large CPU tensors run, and why. Builds the library if it can."""
    library()
    assert _found is not None
    return _found[1]


@_torch.constant_if_compiled
def built() -> bool:
    """Whether there is a library. Traced code may call it."""
    return library() is not None


def library() -> Any:
    """Return the library with its functions declared, or None if it cannot be built."""
    global _found
    if _found is None:
        with _lock:
            if _found is None:
                _found = _loaded()
    return _found[0]


def _loaded(build: bool = True) -> tuple[Any, str]:
    """Return the library, or None, and how casts run. `build` makes the file if there is none."""
    otherwise = "casts are PyTorch operators: "
    if os.environ.get(VARIABLE, "1") == "0":
        return None, f"{otherwise}{VARIABLE}=0"
    compiler = _compiler()
    if compiler is None:
        return None, f"{otherwise}there is no C++ compiler (CXX, {', '.join(_COMPILERS)})"
    try:
        found = _opened(compiler, build)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return None, f"{otherwise}{compiler[0]} did not build the C++ sources: {said.strip()}"
    if found is None:
        return None, f"{otherwise}the C++ sources are not built yet"
    for name, arguments in _FUNCTIONS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    return found, f"casts are C++, built by {compiler[0]}"


_word, _real, _count, _at = ctypes.c_int, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p
#: The functions of the sources, which describe the arguments.
_FUNCTIONS = {
    "scaledtensor_cast": (
        *(_word, _word, _at, _at, _real, _real),
        *(_at, _at, _at, _word, _count, _word),
    ),
    "scaledtensor_adam": (_at, _count, _at, _word),
    "scaledtensor_scaled": (_word, _word, _at, _at, _real, _count, _count, _count, _word),
    "scaledtensor_magnitudes": (_word, _at, _count, _at, _word),
    "scaledtensor_squares": (_word, _at, _count, _word),
    "scaledtensor_within": (_word, _at, _count, _real),
    "scaledtensor_column_sums": (_at, _at, _count, _count, _word),
    "scaledtensor_total": (_at, _at, _at, _real, _real, _count, _word),
    "scaledtensor_rounded_rows": (_word, _at, _at, _at, _real, _real, _real, _count, _count, _word),
    "scaledtensor_numbers": (
        *(_at, _at, _count, _at, _count, _at, _count),
        *(_at, _count, _at, _at, _count, _at),
    ),
    "scaledtensor_product": (_at, _word),
    "scaledtensor_rows": (_at, _word),
    "scaledtensor_step": (_at, _count, _word),
    "scaledtensor_weighted": (_at, _word),
    "scaledtensor_blocks": (_at, _word),
}
#: The results of functions that return something.
_RESULTS = {
    "scaledtensor_blocks": _word,
    "scaledtensor_magnitudes": _real,
    "scaledtensor_squares": ctypes.c_double,
    "scaledtensor_within": _count,
}


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    return next(([name] for name in _COMPILERS if shutil.which(name)), None)


def _opened(compiler: list[str], build: bool) -> ctypes.CDLL | None:
    """Return the library, which `build` makes if it does not exist; None if there is none."""
    for more in ((_THREADS,), ()):
        flags = (*_FLAGS, *_of_cpu(), *more)
        made = _place(compiler, flags)
        try:
            if build and not made.exists():
                _build([*compiler, *flags], made)
            if made.exists():
                return ctypes.CDLL(str(made))
        except (OSError, subprocess.CalledProcessError):
            if not more:
                raise
    return None


def _place(compiler: list[str], flags: tuple[str, ...]) -> Path:
    """Return the path of the library of these sources, whether the file exists or not."""
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True, timeout=_SECONDS
    ).stdout
    facts = sorted(torch.cpu.get_capabilities().items())
    texts = [text.read_text() for text in (*_SOURCES, *_HEADERS)]
    covers = repr((texts, compiler, flags, version, facts))
    name = f"loops-{hashlib.blake2b(covers.encode(), digest_size=12).hexdigest()}.so"
    return _folder() / name


def _build(command: list[str], made: Path) -> None:
    # Other processes may build at the same time, so the library gets its name when it is whole.
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        os.replace(_compiled(command, Path(folder)), made)


def _compiled(command: list[str], folder: Path) -> Path:
    """Compile each source by itself, as many at a time as there are CPUs, and link them in
    `folder`. The largest source comes first, since it takes as long as all others together."""

    def run(made: Path, *arguments: str) -> Path:
        subprocess.run(
            [*command, *arguments, "-o", str(made)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
        return made

    sources = sorted(_SOURCES, key=lambda source: -source.stat().st_size)
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(run, objects, ["-c"] * len(sources), map(str, sources)))
    return run(folder / "loops.so", "-shared", *map(str, built))


def _of_cpu() -> tuple[str, ...]:
    """Return the flags for the instructions that torch itself uses."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return ("-mavx2", "-mfma", "-mf16c")
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)  # compilers for ARM take the CPU by another flag
    # Compilers prefer vectors of 256 bits on CPUs that have more. Casts would take 1.3 times
    # as long.
    wide = ("-mprefer-vector-width=512",) if capability == "AVX512" else ()
    return ("-march=native", *wide)


def _folder() -> Path:
    """Return the folder of libraries, to which no other user can write."""
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
    """Return a folder of this process, for users without a cache folder."""
    return Path(tempfile.mkdtemp(prefix="scaledtensor-"))
