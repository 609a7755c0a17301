"""Measure casts in ns per element, and as a ratio to a copy that moves as many bytes.

    python -m benchmarks.casts [--formats NAME ...] [--device cuda] [--quick] [--json FILE]

The benchmark runs `encode`, `decode` and `fake_quantize` on 4096 x 4096 normal numbers, eager and
compiled, from (for `decode`: to) float32 and bfloat16, on one thread. It runs the casts of other
libraries for the same format beside them, and prints the names of libraries that are not installed.
Stochastic rounding is measured against nearest-even.

A figure is the median of CPU times (on a CUDA device: of event times). All variants of a format and
their copies run interleaved, so a busy machine slows all alike. If a cast reads r and writes w
bytes per element, its copy reads and writes (r + w) / 2 each, from and to existing buffers. The
casts allocate their results. Fresh pages cost the kernel several times the time of a cast. So the C
library is set to keep freed memory: after the warm-up rounds every result is written to existing
pages. `--fresh-pages` turns this off, and every large result pays for its pages.
"""

import argparse
import ctypes
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.timing import Step, device_name, interleaved
from scaledtensor.errors import FormatError
from scaledtensor.formats import FORMATS, Format, decode, encode, fake_quantize

OURS = "scaledtensor"
CASTS = ("encode", "decode", "fake_quantize")
PATHS = ("eager", "compiled")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEAREST, STOCHASTIC = "nearest_even", "stochastic"


@dataclass(frozen=True)
class Call:
    """One measured cast."""

    format: str
    cast: str
    path: str = "eager"
    dtype: str = "float32"
    library: str = OURS
    rounding: str = NEAREST


@dataclass(frozen=True)
class Figure:
    call: Call
    ns: float
    """Nanoseconds per element."""
    copies: float
    """The time, divided by the time of the copy with the same traffic."""


@dataclass(frozen=True)
class Bar:
    """`limit` holds for the worst of the ratios, each with the format that it belongs to.

    `on_avx2` replaces it on CPUs without AVX-512, where a conversion of bytes or of bfloat16 is
    several instructions and not one.
    """

    words: str
    limit: float
    ratios: Callable[[Sequence[Figure]], list[tuple[float, str]]]
    on_avx2: float | None = None

    def limit_here(self) -> float:
        narrow = torch.backends.cpu.get_cpu_capability() == "AVX2"
        return self.on_avx2 if narrow and self.on_avx2 is not None else self.limit


def to_copy(cast: str, path: str, dtype: str) -> Callable[[Sequence[Figure]], Any]:
    def ratios(figures: Sequence[Figure]) -> list[tuple[float, str]]:
        wanted = {Call(name, cast, path, dtype) for name in FORMATS}
        return [(f.copies, f.call.format) for f in figures if f.call in wanted]

    return ratios


def between(above: dict[str, str], below: dict[str, str]) -> Callable[[Sequence[Figure]], Any]:
    def ratios(figures: Sequence[Figure]) -> list[tuple[float, str]]:
        ns = {f.call: f.ns for f in figures}
        pairs = [(name, Call(name, **above), Call(name, **below)) for name in FORMATS]
        return [(ns[a] / ns[b], name) for name, a, b in pairs if a in ns and b in ns]

    return ratios


def _stochastic(cast: str) -> Callable[[Sequence[Figure]], Any]:
    compiled = {"cast": cast, "path": "compiled"}
    return between({**compiled, "rounding": STOCHASTIC}, compiled)


_ENCODE = to_copy("encode", "compiled", "float32")
_DECODE = to_copy("decode", "compiled", "float32")
_ROUND = to_copy("fake_quantize", "compiled", "float32")
_ROUND_EAGER = to_copy("fake_quantize", "eager", "float32")

BARS = (
    Bar("compiled encode of float32 / copy", 1.4, _ENCODE, on_avx2=2.0),
    Bar("compiled encode of bfloat16 / copy", 4.0, to_copy("encode", "compiled", "bfloat16")),
    Bar("compiled fake_quantize of float32 / copy", 1.25, _ROUND, on_avx2=2.0),
    Bar("compiled decode to float32 / copy", 1.25, _DECODE, on_avx2=1.6),
    Bar("eager fake_quantize of float32 / copy", 4.1, _ROUND_EAGER, on_avx2=6.0),
    Bar(
        "eager fake_quantize / unit_scaling's",
        1.0,
        between({"cast": "fake_quantize"}, {"cast": "fake_quantize", "library": "unit_scaling"}),
    ),
    Bar("compiled stochastic encode / nearest-even", 3.0, _stochastic("encode")),
    Bar("compiled stochastic fake_quantize / nearest-even", 3.0, _stochastic("fake_quantize")),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    warm = device.type == "cpu" and not options.fresh_pages and keep_freed_memory(options.size**2)
    pages = "kept and reused" if warm else "the device's" if device.type == "cuda" else "fresh"
    skipped = [library for library in peers.LIBRARIES if not peers.installed(library)]
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {device_name(device)}, {options.size}^2 elements,")
    print(f"vectors of the CPU: {capability}")
    print(f"medians of {options.rounds} rounds; pages of results: {pages}")
    print(f"not installed, skipped: {', '.join(skipped) or 'none'}\n")
    print(header())
    figures: list[Figure] = []
    for name in options.formats:
        figures += measure(FORMATS[name], options, device)
        show(figures, name)
    show_bars(figures)
    if device.type == "cpu":
        print("on a CUDA device: not measured")
    if options.json:
        report = {
            "machine": platform.machine(),
            "device": device_name(device),
            "cpu_capability": capability,
            "torch": torch.__version__,
            "elements": options.size**2,
            "pages": pages,
            "skipped": skipped,
            "figures": [{**asdict(f.call), "ns": f.ns, "copies": f.copies} for f in figures],
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, metavar="NAME")
    parser.add_argument("--casts", nargs="+", choices=CASTS, default=CASTS)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--size", type=int, help="rows and columns (4096)")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one small round of one format")
    parser.add_argument("--fresh-pages", action="store_true", help="let results pay for pages")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args(arguments)
    options.formats = options.formats or (["e4m3fn"] if options.quick else list(FORMATS))
    options.size = options.size or (64 if options.quick else 4096)
    options.rounds = options.rounds or (1 if options.quick else 7)
    return options


def keep_freed_memory(elements: int) -> bool:
    """Tell the C library to serve large blocks from its heap too, never to shrink it, and to hold
    pages for results of that many elements.

    A result does not reuse the memory of the result before it. For an aligned block, the C library
    skips a free block of exactly that size, and takes memory without pages.
    """
    mmap_max, trim_threshold = -4, -1  # the names in glibc's malloc.h, M_ before them
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # another C library
    kept = bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))
    if kept:
        torch.ones(16, elements)  # write, so that the pages exist, and free
    return kept


def measure(fmt: Format, options: argparse.Namespace, device: torch.device) -> list[Figure]:
    """Run all variants of one format and their copies, interleaved."""
    torch.compiler.reset()  # otherwise Dynamo counts a format as one more recompilation
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.size, options.size, generator=generator)
    x = (x if fmt.signed else x.abs() + 2.0**-60).to(device)
    steps: dict[Call, tuple[Step, int]] = {}
    for dtype in DTYPES:
        steps |= our_steps(fmt, x.to(DTYPES[dtype]), dtype, options)
    for library, cast, path, run, traffic in peers.steps(fmt, x, options.casts, options.paths):
        steps[Call(fmt.name, cast, path, library=library)] = run, traffic
    copies: dict[Call | int, Step] = {
        traffic: copy_step(traffic, x) for _, traffic in steps.values()
    }
    runs: dict[Call | int, Step] = {call: run for call, (run, _) in steps.items()}
    times = interleaved(runs | copies, options.rounds, device, 1 if options.quick else 3)
    per_element = 1e6 / x.numel()
    return [
        Figure(call, times[call] * per_element, times[call] / times[traffic])
        for call, (_, traffic) in steps.items()
    ]


def our_steps(
    fmt: Format, x: Tensor, dtype: str, options: argparse.Namespace
) -> dict[Call, tuple[Step, int]]:
    codes = encode(x, fmt)
    wide, narrow = x.element_size(), codes.element_size()
    traffic = {"encode": wide + narrow, "decode": wide + narrow, "fake_quantize": 2 * wide}

    def run_encode() -> Tensor:
        return encode(x, fmt)

    def run_decode() -> Tensor:
        return decode(codes, fmt, x.dtype)

    def run_fake_quantize() -> Tensor:
        return fake_quantize(x, fmt)

    runs = {"encode": run_encode, "decode": run_decode, "fake_quantize": run_fake_quantize}
    steps: dict[Call, tuple[Step, int]] = {}
    for cast in options.casts:
        for path in options.paths:
            call = Call(fmt.name, cast, path, dtype)
            steps[call] = on_path(runs[cast], path), traffic[cast]
            if cast != "decode" and rounds_stochastically(fmt):
                stochastic = Call(fmt.name, cast, path, dtype, rounding=STOCHASTIC)
                steps[stochastic] = on_path(at_random(cast, x, fmt), path), traffic[cast]
    return steps


def at_random(cast: str, x: Tensor, fmt: Format) -> Step:
    function: Any = encode if cast == "encode" else fake_quantize

    def run() -> object:
        return function(x, fmt, rounding=STOCHASTIC)

    return run


def rounds_stochastically(fmt: Format) -> bool:
    function: Any = encode
    try:
        function(torch.ones(1), fmt, rounding=STOCHASTIC)
    except FormatError:
        return False
    return True


def on_path(run: Step, path: str) -> Step:
    return run if path == "eager" else torch.compile(run, fullgraph=True, dynamic=False)


def copy_step(traffic: int, x: Tensor) -> Step:
    """Return a copy that reads and writes `traffic` bytes in all for each element of `x`."""
    # A copy as float32 is the fastest copy.
    source = torch.randn(x.numel() * traffic // 8, device=x.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


COLUMNS = [(path, dtype) for dtype in DTYPES for path in PATHS]


def header() -> str:
    top = "".join(f"{dtype + ' ' + path:>21}" for path, dtype in COLUMNS)
    return f"{'':42}{top}\n{'':42}" + f"{'ns':>13}{'copies':>8}" * len(COLUMNS)


def show(figures: Iterable[Figure], name: str) -> None:
    """The rows of one format: cast, library and rounding; columns by dtype and path."""
    rows: dict[tuple[str, str, str], dict[tuple[str, str], Figure]] = {}
    for f in figures:
        if f.call.format == name:
            row = rows.setdefault((f.call.cast, f.call.library, f.call.rounding), {})
            row[f.call.path, f.call.dtype] = f
    for cast, library, rounding in sorted(rows, key=lambda key: CASTS.index(key[0])):
        cells = (rows[cast, library, rounding].get(column) for column in COLUMNS)
        title = f"{name:12}{cast:14}{'stochastic' if rounding == STOCHASTIC else library}"
        print(
            f"{title:42}"
            + "".join(f"{f.ns:13.3f}{f.copies:8.2f}" if f else " " * 21 for f in cells)
        )
    print(flush=True)


def show_bars(figures: Sequence[Figure]) -> None:
    for bar in BARS:
        ratios, limit = sorted(bar.ratios(figures), reverse=True), bar.limit_here()
        if not ratios:
            print(f"{bar.words:50} <= {limit}: not measured")
            continue
        worst = ", ".join(f"{name} {ratio:.2f}" for ratio, name in ratios[:3])
        missed = sum(ratio > limit for ratio, _ in ratios)
        verdict = f"NOT met by {missed} of {len(ratios)}" if missed else f"met by all {len(ratios)}"
        print(f"{bar.words:50} <= {limit}: {verdict} (highest: {worst})")


if __name__ == "__main__":
    main()
