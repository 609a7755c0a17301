"""Cast every float32 to every format that ml_dtypes knows, and compare with ml_dtypes.

    python -m benchmarks.exhaustive [--formats NAME ...] [--processes 2] [--slice 64 [--offset N]]

All 2^32 inputs go through `encode` and `fake_quantize`, to nearest even, in the three overflow
modes: eager (in C++), eager by PyTorch's operators (which a machine without a compiler runs), and
compiled. `astype` of ml_dtypes gives the expected codes. "saturate" clips the inputs of `astype`
first, and "saturate_finite" clips the finite ones. `astype` does not round to integers, so the
inputs of integer formats are rounded first as well. ml_dtypes decodes the expected codes to the
expected values. Both are compared byte for byte, with two exceptions for NaN inputs. In 16 and 32
bits torch's casts choose among the NaNs, so any NaN is right. In a format without NaN a NaN becomes
zero, and its sign is free. The program exits with 1 on any mismatch.

`--slice S` takes one of every S neighbouring inputs, at places that a hash scatters over low bits.
The S offsets together are all inputs. The default of `--offset` is the number of the day, modulo S.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaledtensor import native
from scaledtensor.formats import FORMATS, Format, decode, encode, fake_quantize, get
from scaledtensor.formats.rounding import OVERFLOWS as MODES

PATHS = ("eager", "operators", "compiled")
BLOCK = 1 << 18  # inputs at a time: 1 MB, so that a block and its results stay in the cache
INPUTS = 1 << 32
DAY = 86_400
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass
class Tally:
    """The result for one format."""

    name: str
    inputs: int = 0
    seconds: float = 0.0
    mismatches: dict[str, int] = field(default_factory=dict)
    """Mismatches of each call; 0 for a call without any."""
    first: dict[str, str] = field(default_factory=dict)

    def add(self, call: str, x: Tensor, got: Tensor, want: Tensor, wrong: Tensor) -> None:
        count = int(wrong.sum())
        self.mismatches[call] = self.mismatches.get(call, 0) + count
        if count and call not in self.first:
            i = int(wrong.nonzero()[0])
            bits, is_, should = (int(t[i]) for t in (_bits(x), got, want))
            self.first[call] = (
                f"{call}: input 0x{bits & 0xFFFFFFFF:08x} ({x[i].item()!r}) gives"
                f" 0x{is_ & 0xFFFFFFFF:x}, ml_dtypes 0x{should & 0xFFFFFFFF:x}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [fmt.name for fmt in FORMATS.values() if fmt.ml_dtype]
    parser.add_argument("--formats", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--slice", type=power_of_two, default=1, metavar="S")
    parser.add_argument("--offset", type=int, metavar="N")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    options = parser.parse_args(arguments)
    if options.offset is None:
        options.offset = int(time.time()) // DAY % options.slice
    if not 0 <= options.offset < options.slice:
        parser.error(f"--offset is 0 to {options.slice - 1}, got {options.offset}")

    print(f"1/{options.slice} of 2^32 inputs; to repeat: {repetition(options)}", flush=True)
    jobs = [(name, options.slice, options.offset, tuple(options.paths)) for name in options.formats]
    start, bad = time.time(), 0
    for tally in tallies(jobs, options.processes):
        show(tally)
        bad += sum(tally.mismatches.values())
    print(f"{len(jobs)} formats, {bad} mismatches, {time.time() - start:.0f} s")
    return int(bad > 0)


def power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1) or number > INPUTS // BLOCK:
        raise argparse.ArgumentTypeError(f"a power of two up to {INPUTS // BLOCK}, got {text}")
    return number


def repetition(options: argparse.Namespace) -> str:
    sliced = f" --slice {options.slice} --offset {options.offset}" if options.slice > 1 else ""
    return f"python -m benchmarks.exhaustive{sliced}"


Job = tuple[str, int, int, tuple[str, ...]]


def tallies(jobs: Sequence[Job], processes: int) -> Iterator[Tally]:
    if processes <= 1:
        yield from map(sweep, jobs)
        return
    # Not forked: a process that has run torch may hold locks of threads that a fork leaves behind.
    # An executor, since a `Pool` restarts workers for ever if they cannot start.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(sweep, jobs)


def show(tally: Tally) -> None:
    wrong = {call: n for call, n in tally.mismatches.items() if n}
    verdict = ", ".join(f"{call} {n}" for call, n in wrong.items()) or "none"
    print(
        f"{tally.name:12} {tally.inputs:>10} inputs x {len(tally.mismatches)} casts,"
        f" {tally.seconds:4.0f} s, mismatches: {verdict}"
    )
    for line in tally.first.values():
        print(f"    {line}")
    sys.stdout.flush()


def sweep(job: Job) -> Tally:
    """Compare one format over its share of the inputs."""
    name, share, offset, paths = job
    torch.set_num_threads(1)
    fmt, tally, start = get(name), Tally(name), time.time()
    reference = Reference(fmt)
    casts = {path: cast_all(fmt, path) for path in paths}
    for x in blocks(share, offset):
        want = reference(x)
        tally.inputs += x.numel()
        for path, cast in casts.items():
            for (mode, (codes, values)), got in zip(want.items(), cast(x), strict=True):
                check_codes(tally, f"{path} encode {mode}", x, got[0], codes, fmt)
                check_values(tally, f"{path} fake_quantize {mode}", x, got[1], values)
    tally.seconds = time.time() - start
    return tally


def blocks(share: int, offset: int) -> Iterator[Tensor]:
    """Yield the inputs, `BLOCK` at a time, as float32."""
    inside = torch.arange(BLOCK, dtype=torch.int32)
    for start in range(0, INPUTS // share, BLOCK):
        group = inside + _signed(start)
        # The high bits of Fibonacci hashing depend on every bit of the group's number; for each
        # group the offsets 0 to S - 1 reach each of its S members once.
        member = (((group * _signed(0x9E3779B1)) >> 18) + offset) & (share - 1)
        yield (group * share + member).view(torch.float32)


def _signed(bits: int) -> int:
    """The int32 of these 32 bits. Sums and products of int32 wrap around, as bits should."""
    return bits - (bits >> 31 << 32)


Casts = Callable[[Tensor], list[tuple[Tensor, Tensor]]]


def cast_all(fmt: Format, path: str) -> Casts:
    """Return codes and rounded values for each of `MODES`; compiled, all six are one kernel."""

    def casts(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [
            (encode(x, fmt, overflow=mode), fake_quantize(x, fmt, overflow=mode)) for mode in MODES
        ]

    def by_operators(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        with native.left_out():
            return casts(x)

    if path != "compiled":
        return casts if path == "eager" else by_operators
    torch.compiler.reset()
    return torch.compile(casts, fullgraph=True, dynamic=False)


class Reference:
    """Return ml_dtypes' result for a block: for each mode, its codes and their float32 values.

    Codes are held in the torch integer of their width. Clipping changes only inputs beyond ±max,
    and makes them ±max. So "saturate" is the cast of x except for these inputs, and their cast is
    the code of ±max: one cast serves all modes.
    """

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.low, self.high = ml_codes(np.array([fmt.min, fmt.max], np.float32), fmt)
        if fmt.bits <= 16:
            raw = np.arange(fmt.num_codes).astype(_UNSIGNED[np.dtype(fmt.ml_dtype).itemsize])
            self.table = torch.from_numpy(raw.view(fmt.ml_dtype).astype(np.float32))

    def __call__(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        codes = ml_codes(x.numpy(), self.fmt)
        plain = codes, self._values(codes)
        # Magnitudes never fall along a block, so if its last input is in range, all are. (A NaN,
        # which sorts behind them, is not.)
        if x[-1].abs() <= self.fmt.max:
            return dict.fromkeys(MODES, plain)
        codes = torch.where(x > self.fmt.max, self.high, codes)
        if self.fmt.signed:
            codes = torch.where(x < self.fmt.min, self.low, codes)
        finite = torch.where(x.isinf(), plain[0], codes)
        found = {"saturate": codes, "saturate_finite": finite}
        return {mode: plain if mode == "ieee" else self._with_values(found[mode]) for mode in MODES}

    def _with_values(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        return codes, self._values(codes)

    def _values(self, codes: Tensor) -> Tensor:
        if self.fmt.bits > 16:
            return codes.view(torch.float32)
        return self.table.index_select(0, codes.int() & (self.fmt.num_codes - 1))


def check_codes(tally: Tally, call: str, x: Tensor, got: Tensor, want: Tensor, fmt: Format) -> None:
    raw = got.view(_SIGNED[got.element_size()])
    if _same_bytes(raw, want):
        tally.mismatches.setdefault(call, 0)
        return
    differ = raw != want
    if fmt.bits > 8:
        differ &= ~(x.isnan() & decode(got, fmt).isnan())
    tally.add(call, x, raw, want, differ)


def check_values(tally: Tally, call: str, x: Tensor, got: Tensor, want: Tensor) -> None:
    if _same_bytes(got, want):
        tally.mismatches.setdefault(call, 0)
        return
    # NaN matches NaN; -0 for 0 is a mismatch, unless a NaN became it.
    differ = (_bits(got) != _bits(want)) & ~(got.isnan() & want.isnan())
    differ &= ~(x.isnan() & (got == 0) & (want == 0))
    tally.add(call, x, _bits(got), _bits(want), differ)


def ml_codes(array: NDArray[Any], fmt: Format) -> Tensor:
    """The codes that ml_dtypes rounds float32 to, held in the torch integer of their width."""
    with np.errstate(all="ignore"):
        if fmt.is_integer:
            # The cast of an integer type truncates, and its result for NaN is undefined.
            array = np.nan_to_num(np.rint(array).clip(fmt.min, fmt.max), nan=0.0)
        if fmt.ml_dtype is np.float16:
            array = _within_reach_of_half(array)
        codes = array.astype(fmt.ml_dtype)
    raw = torch.from_numpy(codes.view(_UNSIGNED[codes.itemsize])).view(_SIGNED[codes.itemsize])
    return raw & (fmt.num_codes - 1) if fmt.is_integer else raw


def _within_reach_of_half(array: NDArray[Any]) -> NDArray[Any]:
    """Replace tiny and huge inputs by zero and infinity. The results do not change: rounding is
    monotone, 2^-26 rounds to zero and 2^17 to infinity.

    numpy's cast takes 65 ns for each number that underflows or overflows, 3 for the others.
    """
    size = np.abs(array)
    array = np.where(size < 2.0**-26, np.copysign(0, array), array)
    return np.where(size > 2.0**17, np.copysign(np.inf, array), array)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int64), b.view(torch.int64))  # eight at a time


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


if __name__ == "__main__":
    sys.exit(main())
