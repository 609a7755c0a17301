"""Decode with a Llama at batch 1: tokens per second, memory, and the roofline.

    python -m benchmarks.decode [--threads 2] [--variants NAME ...] [--paths eager compiled]
        [--rounds 5] [--tokens 12] [--folder FOLDER] [--json FILE] [--picture FILE.png] [--quick]

The model is transformers' `LlamaForCausalLM` with random weights, 374 M parameters: 24 layers of
width 1024, 32,000 tokens. Each variant loads it in a process of its own, converts it, and decodes
greedily with `model.generate` after a prompt of 8 tokens. The processes take turns, so that a busy
machine slows all of them alike. Figures are medians over all tokens after the first:

  tokens/s   one over the wall time of a token
  CPU ms     CPU time of a token, of all threads; a busy machine changes it less
  peak MB    the largest resident memory while it decodes; on Linux loading and converting are not
             part of it
  bytes      bytes of all parameters with their scales, over FP32's
  GB/s       bytes that a token reads (weights of products, and the cache) over its time; the share
             is of the machine's read bandwidth, which is measured before

"compiled" calls `torch.compile(model.forward)` for all tokens but the prompt, with a static cache.
Compiling takes minutes for each variant. The last row has as many layers, of width 64: its time is
Python's. Rows of torchao (`pip install --no-deps torchao`) and of llama.cpp (`pip install xllamacpp
gguf`) are left out with a message if the package is not installed or refuses this machine.
llama.cpp decodes in its own loop, not in `generate`.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.decode_processes import PROMPT, Worker, variants
from benchmarks.peers import installed
from benchmarks.timing import Moment, device_name
from scaledtensor.formats.describe import markdown

PATHS = ("eager", "compiled")

SIZE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000} | {
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
QUICK = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
OVERHEAD = "the same layers, width 64"


def llama(size: dict[str, int]) -> Any:
    """Return the config of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(**size, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False)


def read_size(folder: Path, size: dict[str, int]) -> dict[str, int] | None:
    """Return the size of the model in a folder, or None if there is none."""
    path = folder / "config.json"
    if not path.exists():
        return None
    held = json.loads(path.read_text())
    return {name: held[name] for name in size}


def save(folder: Path, size: dict[str, int]) -> int:
    """Save a Llama with random weights, unless the folder has it, and return its parameters."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        count = sum(p.numel() for p in LlamaForCausalLM(llama(size)).parameters())
    if read_size(folder, size) != size:
        torch.manual_seed(0)
        LlamaForCausalLM(llama(size)).save_pretrained(folder)
    return count


# --- the machine -----------------------------------------------------------------------------


def machine(threads: int, size: int) -> dict[str, float]:
    """Return the read bandwidth in bytes/s, by sums of `size` float32 elements, and the float32
    operations/s, by products of 1024 x 1024 matrices. Each is the best of several."""
    torch.set_num_threads(threads)
    x, a = torch.ones(size), torch.randn(1024, 1024)

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    read = min(best(x.sum), best(x.amax))
    return {"bandwidth": 4 * size / read, "operations": 2 * 1024**3 / best(lambda: a @ a)}


# --- the run ---------------------------------------------------------------------------------


@dataclass
class Row:
    """The figures of a variant on one path."""

    name: str
    path: str
    facts: dict[str, float]
    seconds: list[Moment] = field(default_factory=list)
    peak: float = 0.0

    @property
    def token(self) -> float:
        """The median seconds of a token."""
        return statistics.median(wall for wall, _ in self.seconds)

    @property
    def processor(self) -> float:
        """The median CPU seconds of a token, of all threads."""
        return statistics.median(cpu for _, cpu in self.seconds)


def run(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Return the rows of all variants that run here. Their processes take turns."""
    context = multiprocessing.get_context("forkserver")
    # The server imports once, and runs no thread before it forks.
    modules = ["transformers.models.llama.modeling_llama", "benchmarks.decode_processes"]
    context.set_forkserver_preload(modules)
    known, workers, rows = variants(), {}, []
    for name in [*options.variants, OVERHEAD]:
        plain = name == OVERHEAD
        library = "torch" if plain else known[name].library
        if not installed(library):
            print(f"{name} is left out: {library} is not installed")
            continue
        held = folder / ("small" if plain else "model")
        worker = Worker(context, "FP32" if plain else name, held, options.threads)
        facts = worker.ask()
        if isinstance(facts, str):
            told(name, library, facts)
            continue
        for path in ["llama.cpp"] if library == "xllamacpp" else options.paths:
            answer = worker.ask((path, 3))  # compiles and warms up
            if isinstance(answer, str):
                told(f"{name}, {path},", library, answer)
            else:
                rows.append(Row(name, path, dict(facts)))
        workers[name] = worker
    try:
        for _ in range(options.rounds):
            for row in rows:
                seconds, peak = workers[row.name].ask((row.path, options.tokens))
                row.seconds += seconds
                row.peak = max(row.peak, peak)
    finally:
        for worker in workers.values():
            worker.end()
    return rows


def told(name: str, library: str, error: str) -> None:
    """Say that another library's row is left out; an error of torch or of ours ends the program."""
    if library == "torch":
        raise RuntimeError(f"{name} fails: {error}")
    print(f"{name} is left out: {error}")


def cache_bytes(size: dict[str, int], variant: str, tokens: int) -> float:
    """Return the mean bytes of keys and values that a token reads."""
    element = 2 if "BF16" in variant else 4
    each = 2 * size["num_hidden_layers"] * size["hidden_size"] * element
    return each * (PROMPT + tokens / 2)


def table(rows: list[Row], bandwidth: float) -> str:
    """Return the Markdown table. Ratios are to the faster path of FP32."""
    base = fastest(rows, "FP32")
    lines = []
    for row in rows:
        speed = row.facts["read"] / row.token
        lines.append(
            {
                "": row.name if row.name == OVERHEAD else f"`{row.name}`",
                "path": row.path,
                "tokens/s": f"{1 / row.token:.1f}",
                "ms": f"{1e3 * row.token:.2f}",
                "CPU ms": f"{1e3 * row.processor:.2f}",
                "x FP32": f"{base.token / row.token:.2f}",
                "peak MB": f"{row.peak / 1e6:.0f}",
                "bytes": "" if row.name == OVERHEAD else f"{share(rows, row):.3f}",
                "GB/s": f"{speed / 1e9:.1f}",
                "of the bandwidth": f"{speed / bandwidth:.0%}",
            }
        )
    return markdown(lines)


def fastest(rows: Iterable[Row], name: str) -> Row:
    return min((r for r in rows if r.name == name), key=lambda r: r.token)


def share(rows: list[Row], row: Row) -> float:
    """Return the bytes of a row's parameters over FP32's."""
    return row.facts["bytes"] / fastest(rows, "FP32").facts["bytes"]


def verdicts(rows: list[Row]) -> list[tuple[str, bool]]:
    """Return a line for each bar, and whether it is met. A variant counts with its faster path."""
    lines = []

    def bar(text: str, value: float, limit: float, most: bool = False) -> None:
        met = value <= limit if most else value >= limit
        word = "at most" if most else "at least"
        lines.append(
            (f"{text}: {value:.3f} (bar: {word} {limit}: {'met' if met else 'NOT met'})", met)
        )

    names = list(dict.fromkeys(r.name for r in rows))
    base, known = fastest(rows, "FP32"), variants()
    for name in (n for n in names if n.startswith("ours")):
        row, bits = fastest(rows, name), known[name].bits
        speed = base.token / row.token
        if bits == 4:
            bar(f"{name}, speed over FP32's", speed, 2)
        elif name == "ours e4m3fn":
            bar(f"{name}, speed over FP32's", speed, 1.5)
            peers = [fastest(rows, n) for n in names if n.startswith("torchao int8")]
            if peers:
                peer = min(peers, key=lambda r: r.token)
                bar(f"{name}, speed over {peer.name}'s", peer.token / row.token, 1)
        bar(f"{name}, bytes over FP32's", share(rows, row), 0.16 if bits == 4 else 0.27, True)
    return lines


def limits(rows: list[Row], found: dict[str, float]) -> Iterable[str]:
    """Divide the time of each row into reading at the measured bandwidth, Python (the time of the
    small model), and the rest, which is arithmetic. The largest part limits the row."""
    for row in rows:
        small = (r.token for r in rows if r.name == OVERHEAD and r.path == row.path)
        python = next(small, 0.0)  # llama.cpp runs none
        if row.name == OVERHEAD:
            continue
        reading = row.facts["read"] / found["bandwidth"]
        rest = max(row.token - reading - python, 0)
        limit = max((reading, "memory"), (python, "Python"), (rest, "arithmetic"))[1]
        yield (
            f"{row.name}, {row.path}: {1e3 * row.token:.2f} ms, of which reading takes "
            f"{1e3 * reading:.2f} and Python {1e3 * python:.2f}: limited by {limit}"
        )


def draw(rows: list[Row], found: dict[str, float], path: Path) -> None:
    """Draw the roofline: operations a second over operations a byte."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    knee = found["operations"] / found["bandwidth"]
    x = [0.25, knee, 4 * max(knee, 4)]
    roof = [min(v * found["bandwidth"], found["operations"]) / 1e9 for v in x]
    axis.plot(x, roof, color="#555555", label="roof: read bandwidth, float32 products")
    operations = fastest(rows, "FP32").facts["read"] / 2  # two for each float32 weight
    shown = [r for r in rows if r.name != OVERHEAD]
    colors = {"FP32": "#000000", "BF16": "#888888", "torchao": "#d55e00", "llama.cpp": "#009e73"}
    for row in shown:
        color = next((c for n, c in colors.items() if row.name.startswith(n)), "#0072b2")
        at = operations / row.facts["read"], operations / row.token / 1e9
        marker = {"eager": "o", "compiled": "^"}.get(row.path, "s")
        axis.plot(*at, marker, color=color)
        if row is fastest(shown, row.name):
            axis.annotate(row.name, at, textcoords="offset points", xytext=(6, -3), fontsize=7)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("operations for each byte that a token reads")
    axis.set_ylabel("10^9 operations a second")
    axis.set_title(
        "Decoding at batch 1 (circles: eager, triangles: compiled, squares: llama.cpp)", fontsize=10
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(variants())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12, help="tokens of a turn")
    parser.add_argument("--layers", type=int, help="layers of the model (default: 24)")
    parser.add_argument("--folder", type=Path, help="keep the random model there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the roofline there")
    parser.add_argument("--quick", action="store_true", help="a model of 2 small layers")
    options = parser.parse_args(arguments)
    if not installed("transformers"):
        print("transformers is not installed; this benchmark decodes its Llama")
        return 0
    if "FP32" not in options.variants:
        options.variants = ["FP32", *options.variants]
    size = dict(QUICK if options.quick else SIZE)
    size["num_hidden_layers"] = options.layers or size["num_hidden_layers"]
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        count = save(folder / "model", size)
        save(
            folder / "small", size | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
        )
        found = machine(options.threads, 2**20 if options.quick else 2**27)
        rows = run(options, folder)
    for row in rows:
        row.facts["read"] += cache_bytes(size, row.name, options.tokens)
    packages = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "torchao", "xllamacpp")
        if installed(name)
    )
    print(f"{count:,} parameters; {packages}; {device_name(torch.device('cpu'))}; reads ", end="")
    print(f"{found['bandwidth'] / 1e9:.1f} GB/s, {found['operations'] / 1e9:.0f} GFLOP/s\n")
    print(table(rows, found["bandwidth"]) + "\n")
    for line in limits(rows, found):
        print(line)
    print()
    judged = verdicts(rows)
    for line, _ in judged:
        print(line)
    if options.json:
        figures = [asdict(row) for row in rows]
        options.json.write_text(json.dumps({"machine": found, "rows": figures}, indent=1))
    if options.picture:
        draw(rows, found, options.picture)
    return 0 if options.quick or all(met for _, met in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
