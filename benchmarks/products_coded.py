"""Time products of a few rows with a weight in codes, beside float32, bfloat16 and torch's int8.

    python -m benchmarks.products_coded [--size 4096] [--rows 1 4 16] [--threads 1 2] [--json FILE]

The weight is square, and Gaussian. `F.linear` has it in float32 and in bfloat16, torch's
`_weight_int8pack_mm` in int8 with a bfloat16 input, and ours in each format, with float32 inputs. A
row of the table is a format, and the elements that share a scale. All variants of one number of
rows and threads run interleaved in one process. A figure is the median of their CPU times on one
thread, and of their wall times on several threads, which means something on an idle machine only.

The roofline is the time of a sum over as many float32 numbers as the float32 weight has, which
reads memory and does little else. "of the roofline" is the bytes per second of a product, codes and
scales, divided by the bytes per second of that sum. If the weight's codes fit into a cache, the
ratio may exceed 1.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Step, device_name, interleaved
from scaledtensor import native
from scaledtensor.formats import encode, get, pack
from scaledtensor.native.products import coded_product

FLOAT32, READ = "float32, F.linear", "a sum over float32"


@dataclass(frozen=True)
class Coded:
    """A format, the elements that share a scale (0 for a row), and the dtype of scales."""

    format: str
    block: int = 0
    scale: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = str(self.scale).removeprefix("torch.").removeprefix("float8_")
        return f"{self.format}, {kind} for each {self.block or 'row'}"


CODED = (
    Coded("e4m3fn"),
    Coded("e4m3fn", 128),
    Coded("e4m3fn", 32, torch.float8_e8m0fnu),
    Coded("e5m2"),
    Coded("int8"),
    Coded("e3m2fn", 32, torch.float8_e8m0fnu),
    Coded("int4"),
    Coded("int4", 32),
    Coded("e2m1fn"),
    Coded("e2m1fn", 32, torch.float8_e8m0fnu),
    Coded("e2m1fn", 16, torch.float8_e4m3fn),
    Coded("bf16"),
    Coded("fp32"),
)

#: (row of the table, largest ratio to float32's time with one row of x and one thread).
BARS = (("e4m3fn, float32 for each row", 0.5), ("e2m1fn, float32 for each row", 0.4))


@dataclass(frozen=True)
class Figure:
    threads: int
    rows: int
    name: str
    microseconds: float
    to_float32: float
    """The time, divided by the time of float32's product."""
    gigabytes: float
    """Bytes of the weight per nanosecond."""
    of_roofline: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 4, 16), help="rows of x")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args(arguments)
    if native.library() is None:
        parser.error(f"there is no C++ library to time; {native.status()}")
    torch.manual_seed(0)
    found: list[Figure] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(f"torch {torch.__version__}, {device_name(torch.device('cpu'))}")
        for rows in options.rows:
            figures = measure(options.size, rows, threads, options.rounds)
            show(figures, options.size)
            found += figures
    show_bars(found)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(figure) for figure in found], file, indent=1)


def measure(size: int, rows: int, threads: int, rounds: int) -> list[Figure]:
    steps, bytes_read = variants(torch.randn(rows, size), torch.randn(size, size))
    times = interleaved(steps, rounds, torch.device("cpu"), wall=threads > 1)
    fastest = bytes_read[READ] / times[READ]
    return [
        Figure(
            threads,
            rows,
            name,
            1e3 * spent,
            spent / times[FLOAT32],
            1e-6 * bytes_read[name] / spent,
            bytes_read[name] / spent / fastest,
        )
        for name, spent in times.items()
    ]


def variants(x: Tensor, weight: Tensor) -> tuple[dict[str, Step], dict[str, int]]:
    """Return the timed functions by name, and the bytes of weights and scales that they read."""
    half, half_weight = x.bfloat16(), weight.bfloat16()
    codes = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    scales = torch.rand(len(weight)).bfloat16()
    steps: dict[str, Step] = {
        READ: weight.sum,
        FLOAT32: lambda: F.linear(x, weight),
        "bfloat16, F.linear": lambda: F.linear(half, half_weight),
        "int8, _weight_int8pack_mm": lambda: torch.ops.aten._weight_int8pack_mm(
            half, codes, scales
        ),
    }
    bytes_read = dict(zip(steps, (weight.nbytes, weight.nbytes, half_weight.nbytes), strict=False))
    bytes_read["int8, _weight_int8pack_mm"] = codes.nbytes + scales.nbytes
    for coded in CODED:
        steps[str(coded)], bytes_read[str(coded)] = ours(x, weight, coded)
    return steps, bytes_read


def ours(x: Tensor, weight: Tensor, coded: Coded) -> tuple[Callable[[], object], int]:
    fmt = get(coded.format)
    packed = pack(encode(weight * (4 if fmt.is_integer else 1), fmt), fmt)
    if fmt.bits > 8:
        return lambda: coded_product(x, packed, fmt), packed.nbytes
    blocks = -(-weight.shape[1] // coded.block) if coded.block else 1
    scale = torch.rand(len(weight), blocks).add(0.5).to(coded.scale)
    shape = (weight.shape[0], weight.shape[1])

    def run() -> object:
        return coded_product(x, packed, fmt, scale, coded.block, shape=shape)

    return run, packed.nbytes + scale.nbytes


def show(figures: Sequence[Figure], size: int) -> None:
    first = figures[0]
    plural = "s" * (first.threads > 1)
    print(f"\n| {first.rows} x {size} x {size}, {first.threads} thread{plural} |", end="")
    print(" us | to float32 | GB/s | of the roofline |\n|---|---|---|---|---|")
    for f in figures:
        print(
            f"| {f.name} | {f.microseconds:.0f} | {f.to_float32:.2f} | {f.gigabytes:.1f} |"
            f" {f.of_roofline:.2f} |"
        )
    print(flush=True)


def show_bars(figures: Sequence[Figure]) -> None:
    for name, limit in BARS:
        for f in figures:
            if (f.name, f.rows, f.threads) == (name, 1, 1):
                met = "met" if f.to_float32 <= limit else "NOT met"
                print(f"{name} / float32, one row, one thread: {f.to_float32:.2f}", end="")
                print(f" <= {limit}: {met}")


if __name__ == "__main__":
    main()
