"""Search the best learning rate by width, under u-muP and under the standard parametrisation.

    python -m benchmarks.lr_transfer --text FILE [--widths 64 128 256 512] [--steps 200] [--seeds 1]
        [--processes 1] [--json FILE] [--plot FILE.png]

The model is a causal character model of 2 layers (RMSNorm, attention in heads of 32, SwiGLU; no
biases, no positions) with context 32, batch 16 and no weight decay. The learning rate is constant
after a tenth of the steps. Every run of a seed sees the same batches. Parametrisations:

  u-mup     scaledtensor.nn.TransformerDecoder and scaledtensor.optim.AdamW
  standard  the same architecture of torch.nn, with the initialisation that torch.nn gives each
            module: linear layers uniform in +-fan_in^-1/2, embeddings N(0, 1); torch.optim.AdamW

The loss of a run is the mean of its last 50 steps, infinite if a loss is not finite. Learning rates
are powers of two. A width is searched from the best learning rate of the width before, both ways,
until two in a row on either side are worse than the best. "Fitted" is the minimum of the parabola
in log2 of the learning rate through the best and its two neighbours. With `--json` an interrupted
sweep continues. The whole sweep takes 20 minutes of one core.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledtensor.functional as U
import scaledtensor.nn as uu
from scaledtensor import optim
from scaledtensor.apps.text import Corpus, draw_batch, load

LAYERS, HEAD, CONTEXT, BATCH = 2, 32, 32, 16
LAST, BEYOND = 50, 2

Run = dict[str, Any]
Losses = dict[int, float]
"""Results by exponent, log2 of the learning rate."""


@dataclass(frozen=True)
class Task:
    """One training."""

    parametrisation: str
    width: int
    exponent: int
    seed: int
    steps: int
    text: str
    """Digest of the text."""


class Layer(nn.Module):
    """The counterpart of `scaledtensor.nn.TransformerLayer` in torch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mhsa_norm = nn.RMSNorm(width, elementwise_affine=False)
        self.linear_qkv = nn.Linear(width, 3 * width, bias=False)
        self.linear_o = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, elementwise_affine=False)
        self.linear_1 = nn.Linear(width, 4 * width, bias=False)
        self.linear_gate = nn.Linear(width, 4 * width, bias=False)
        self.linear_2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear_qkv(self.mhsa_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear_o(mixed.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        out: Tensor = x + self.linear_2(self.linear_1(y) * F.silu(self.linear_gate(y)))
        return out


def standard(width: int, vocabulary: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(Layer(width, width // HEAD) for _ in range(LAYERS)),
        nn.RMSNorm(width, elementwise_affine=False),
        nn.Linear(width, vocabulary, bias=False),
    )


def u_mup(width: int, vocabulary: int) -> nn.Module:
    return uu.TransformerDecoder(width, vocabulary, LAYERS, width // HEAD)


@dataclass(frozen=True)
class Parametrisation:
    model: Callable[[int, int], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    start: int
    """Exponent where the search of the first width begins; the search may move away from it."""
    bar: Callable[[float], bool]
    promise: str


PARAMETRISATIONS = {
    "u-mup": Parametrisation(u_mup, optim.AdamW, U.cross_entropy, 0, lambda r: r <= 2, "at most 2"),
    "standard": Parametrisation(
        standard, torch.optim.AdamW, F.cross_entropy, -7, lambda r: r > 4, "more than 4"
    ),
}


def train(task: Task, corpus: Corpus) -> list[float]:
    """Return the losses of all steps, or of the steps before the first one that is not finite."""
    chosen = PARAMETRISATIONS[task.parametrisation]
    torch.manual_seed(task.seed)
    model = chosen.model(task.width, len(corpus.vocabulary))
    optimizer = chosen.optimizer(model.parameters(), lr=2.0**task.exponent, weight_decay=0)
    ramp = max(task.steps // 10, 1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / ramp, 1))
    generator = torch.Generator().manual_seed(task.seed)
    losses: list[float] = []
    for _ in range(task.steps):
        x, y = draw_batch(corpus.train, CONTEXT, BATCH, generator)
        loss = chosen.cross_entropy(model(x).flatten(0, 1), y.flatten())
        if not math.isfinite(loss.item()):
            break
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
    return losses


def run(task: Task, text: Path) -> Run:
    """Run one training, in its own process."""
    torch.set_num_threads(1)
    losses = train(task, load(text, CONTEXT))
    last = statistics.mean(losses[-LAST:]) if len(losses) == task.steps else math.inf
    return asdict(task) | {"last": last, "losses": losses}


def best(losses: Losses) -> int:
    """The best exponent: the largest among equals, and the smallest if all diverged, so that the
    search continues there."""
    return min(losses, key=lambda e: (losses[e], -e if math.isfinite(losses[e]) else e))


def missing(losses: Losses, start: int) -> list[int]:
    """Return the exponents to run next; none if two in a row on either side are worse."""
    center = best(losses) if losses else start
    wanted = range(center - BEYOND, center + BEYOND + 1)
    return [e for e in wanted if e not in losses]


def fitted(losses: Losses) -> float | None:
    """Return the minimum of the parabola through the best and its neighbours, if they are
    finite."""
    e = best(losses)
    around = [losses.get(e + i, math.inf) for i in (-1, 0, 1)]
    if not all(map(math.isfinite, around)):
        return None
    low, middle, high = around
    bend = low - 2 * middle + high
    return e + (low - high) / (2 * bend) if bend > 0 else float(e)


class Sweep:
    """Finished runs, the file that keeps them, and the runs to do next."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.digest = load(options.text, CONTEXT).digest
        self.file: Path | None = options.json
        self.runs: list[Run] = []
        if self.file is not None and self.file.exists():
            self.runs = json.loads(self.file.read_text())
        self.done = {self.key(r): r["last"] for r in self.runs}

    @staticmethod
    def key(r: Run) -> Task:
        return Task(**{name: r[name] for name in Task.__dataclass_fields__})

    def task(self, name: str, width: int, exponent: int, seed: int) -> Task:
        return Task(name, width, exponent, seed, self.options.steps, self.digest)

    def losses(self, name: str, width: int) -> Losses:
        """Return means over the seeds, of exponents that all seeds have."""
        seeds = range(self.options.seeds)
        exponents = {t.exponent for t in self.done if (t.parametrisation, t.width) == (name, width)}
        found: Losses = {}
        for e in sorted(exponents):
            of_seeds = [self.done.get(self.task(name, width, e, seed)) for seed in seeds]
            finished = [loss for loss in of_seeds if loss is not None]
            if len(finished) == len(seeds):
                found[e] = statistics.mean(finished)
        return found

    def tasks(self, name: str) -> Iterator[list[Task]]:
        """Yield lists of trainings that do not depend on each other."""
        start = PARAMETRISATIONS[name].start
        for width in self.options.widths:
            while exponents := missing(self.losses(name, width), start):
                every = (
                    self.task(name, width, e, seed)
                    for e in exponents
                    for seed in range(self.options.seeds)
                )
                yield [t for t in every if t not in self.done]
            start = best(self.losses(name, width))

    def keep(self, r: Run) -> None:
        self.runs.append(r)
        self.done[self.key(r)] = r["last"]
        print(
            "{parametrisation}, width {width}, 2^{exponent}, seed {seed}: {last:.4f}".format(**r),
            flush=True,
        )
        if self.file is not None:
            self.file.write_text(json.dumps(self.runs))

    def __call__(self) -> None:
        with ProcessPoolExecutor(self.options.processes, get_context("spawn")) as pool:
            for name in self.options.parametrisations:
                for tasks in self.tasks(name):
                    submitted = [pool.submit(run, task, self.options.text) for task in tasks]
                    for future in as_completed(submitted):
                        self.keep(future.result())


def ratio(exponents: list[float]) -> float:
    """Return the largest learning rate over the smallest."""
    return float(2.0 ** (max(exponents) - min(exponents)))


def show(sweep: Sweep) -> None:
    options = sweep.options
    print(f"\ntorch {torch.__version__}, {options.steps} steps, {options.seeds} seeds")
    for name in options.parametrisations:
        found = {width: sweep.losses(name, width) for width in options.widths}
        print(f"\n{name:10}" + "".join(f"{f'd = {width}':>12}" for width in found))
        for e in sorted({e for losses in found.values() for e in losses}):
            cells = (
                (f"{losses[e]:.4f}" if e in losses else "") + ("*" if best(losses) == e else " ")
                for losses in found.values()
            )
            print(f"{f'2^{e}':10}" + "".join(f"{cell:>12}" for cell in cells))
        fits = [fitted(losses) for losses in found.values()]
        words = ("none" if f is None else f"2^{f:.2f}" for f in fits)
        print(f"{'fitted':10}" + "".join(f"{word + ' ':>12}" for word in words))
        moved = ratio([best(losses) for losses in found.values()])
        chosen = PARAMETRISATIONS[name]
        met = "met" if chosen.bar(moved) else "NOT met"
        print(f"largest best learning rate / smallest: {moved:g} (bar: {chosen.promise}: {met})")
        if None not in fits:
            print(f"the same, fitted: {ratio([f for f in fits if f is not None]):.2f}")


def plot(sweep: Sweep, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    options = sweep.options
    names = options.parametrisations
    figure = Figure(figsize=(5.5 * len(names), 4.2), layout="constrained")
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    shades = colormaps["viridis"]
    every: list[float] = []
    for axis, name in zip(axes, names, strict=True):
        for i, width in enumerate(options.widths):
            color = shades(0.9 * i / max(len(options.widths) - 1, 1))
            losses = sweep.losses(name, width)
            finite = {e: loss for e, loss in losses.items() if math.isfinite(loss)}
            every += finite.values()
            x = [2.0**e for e in finite]
            axis.plot(x, list(finite.values()), color=color, marker=".", label=f"d = {width}")
            e = best(losses)
            axis.plot(2.0**e, losses[e], color=color, marker="*", markersize=15, mec="white")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("learning rate")
        axis.set_title({"u-mup": "u-μP", "standard": "standard parametrisation"}[name])
        axis.spines[["top", "right"]].set_visible(False)
    low, high = min(every), max(every)
    axes[0].set_ylim(low - 0.02 * (high - low), min(high + 0.02, low + 0.6))
    axes[0].set_ylabel(f"loss, mean of the last {LAST} of {options.steps} steps")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--parametrisations", nargs="+", choices=PARAMETRISATIONS, default=list(PARAMETRISATIONS)
    )
    parser.add_argument(
        "--json", type=Path, help="write every loss there; runs that it has are not run"
    )
    parser.add_argument("--plot", type=Path, help="draw loss against learning rate there")
    options = parser.parse_args(arguments)
    for width in options.widths:
        if width < HEAD or width % HEAD:
            parser.error(f"--widths are multiples of {HEAD}, the width of a head; got {width}")
    sweep = Sweep(options)
    sweep()
    show(sweep)
    if options.plot:
        plot(sweep, options.plot)


if __name__ == "__main__":
    main()
