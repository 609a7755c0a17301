"""Train a GPT for thousands of steps: FP8 through ScaledTensor against float32 and torchao.

    python -m benchmarks.convergence --text FILE [--steps 3000] [--seeds 3] [--processes 2]
        [--rows fp32 unit ...] [--json FILE] [--plot FILE.png]

The model has d = 128, 4 layers, context 64 and batch 16; AdamW runs at 1e-3. No hyperparameter
differs between rows:

  fp32            float32
  fp32-ulp        float32, with one parameter changed in its last bit. It shows how far two runs of
                  the same arithmetic diverge, and so the meaning of a difference between rows
  unit            recipe Unit: E4M3 operands, E5M2 gradients
  unit-unguarded  the same without the guard
  unit-stochastic unit with gradients rounded stochastically
  unit-e4m3       E4M3 gradients, to nearest
  unit-fixed, unit-e4m3-fixed   these with rebalance=0: parameters keep their first scales
  tensorwise, rowwise   torchao.float8, emulated, float32 between the products; skipped with a
                  message if torchao is not installed

Forward and backward are compiled in all rows. The loss of a run is the mean of its last 100 steps.
"Held out" is the loss over all of the last tenth of the text, which no step sees. It is the mean of
ten measurements in those 100 steps, since one alone varies by as much as the rows differ. Every 100
steps `sct.report` measures the RMS of the elements of each operand of each product, and the shares
that saturated or underflowed in the cast. The picture shows them over the steps.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.precision import Precision
from scaledtensor.apps.text import draw_batch, load
from scaledtensor.apps.training import Settings, Trainer

LAST, EVERY, HELD_OUT_EVERY = 100, 100, 10

#: (row, the most that its loss may be above float32's)
BARS = {"unit": 0.012, "unit-stochastic": 0.012, "unit-e4m3": 0.007}


Runs = list[dict[str, Any]]


class Loss(nn.Module):
    """Model and loss in one graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, y)[1]
        return loss


class CompiledTrainer(Trainer):
    def loss(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        if not hasattr(self, "compiled"):
            self.compiled = torch.compile(Loss(self.model), fullgraph=True, dynamic=False)
        size = self.model.config.block_size
        batch = draw_batch(tokens, size, self.settings.batch_size, generator)
        with self.precision.context(self.device):
            loss: Tensor = self.compiled(*batch)
        return loss


def _torchao(recipe: str) -> Callable[[nn.Module], object]:
    def convert(model: nn.Module) -> None:
        from dataclasses import replace

        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(model, config=config)

    return convert


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    first = next(model.parameters()).view(-1)
    first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))


ROWS: dict[str, Callable[[nn.Module], object]] = {
    "fp32": lambda model: None,
    "fp32-ulp": _nudge,
    "unit": sct.scale_model,
    "unit-unguarded": lambda model: sct.scale_model(model, sct.recipes.Unit(guard=False)),
    "unit-stochastic": lambda model: sct.scale_model(
        model, sct.recipes.Unit(gradient_rounding="stochastic")
    ),
    "unit-e4m3": lambda model: sct.scale_model(model, sct.recipes.Unit(gradient="e4m3fn")),
    "unit-fixed": lambda model: sct.scale_model(model, sct.recipes.Unit(rebalance=0)),
    "unit-e4m3-fixed": lambda model: sct.scale_model(
        model, sct.recipes.Unit(gradient="e4m3fn", rebalance=0)
    ),
    "tensorwise": _torchao("tensorwise"),
    "rowwise": _torchao("rowwise"),
}


def run(task: tuple[str, int, int, str]) -> dict[str, Any]:
    """Run one training, in its own process."""
    row, seed, steps, text = task
    torch.set_num_threads(1)
    corpus = load(Path(text), 64)
    config = GPTConfig(len(corpus.vocabulary), 64, 4, 4, 128)
    trainer = CompiledTrainer(
        config, Precision(row, row, ROWS[row]), corpus, Settings(seed=seed), torch.device("cpu")
    )
    losses, held, operands = [], [], []
    for step in range(steps):
        if row.startswith("unit") and step % EVERY == 0:
            operands += measured(trainer, step)
        losses.append(trainer.step())
        if step >= steps - LAST and (steps - step) % HELD_OUT_EVERY == 1:
            held.append(held_out(trainer))
    return {
        "row": row,
        "seed": seed,
        "losses": losses,
        "last": statistics.mean(losses[-LAST:]),
        "held_out": statistics.mean(held),
        "held_outs": held,
        "operands": operands,
    }


@torch.no_grad()
def held_out(trainer: Trainer) -> float:
    """Mean loss over the held-out text in windows that do not overlap."""
    size, batch = trainer.model.config.block_size, trainer.settings.batch_size
    text = trainer.corpus.held_out
    windows = (len(text) - 1) // size
    x, y = (t[: windows * size].view(windows, size) for t in (text, text[1:]))
    trainer.model.eval()
    parts = [
        (trainer.model(*xy)[1].item(), len(xy[0]))
        for xy in zip(x.split(batch), y.split(batch), strict=True)
    ]
    trainer.model.train()
    return sum(loss * n for loss, n in parts) / windows


def measured(trainer: Trainer, step: int) -> list[dict[str, Any]]:
    """Measure every cast of an operand, on one batch that is the same at every step."""
    generator = torch.Generator().manual_seed(1)
    batch = draw_batch(trainer.corpus.held_out, 64, trainer.settings.batch_size, generator)
    casts: dict[tuple[str, bool], list[Any]] = defaultdict(list)
    for r in sct.report(trainer.model, *batch).rows():
        if r.elements and r.low is not None:
            casts[r.module, r.backward].append(r)
    return [
        {
            "step": step,
            "module": module,
            "gradient": backward,
            "low": min(r.low for r in rows),
            "high": max(r.high for r in rows),
            **{
                share: sum(getattr(r, share) * r.elements for r in rows)
                / sum(r.elements for r in rows)
                for share in ("saturated", "underflowed")
            },
        }
        for (module, backward), rows in casts.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--json", type=Path, help="write every loss and operand there; runs that it has are not run"
    )
    parser.add_argument("--plot", type=Path, help="draw the operands of the first seed there")
    options = parser.parse_args()
    rows = list(options.rows)
    if find_spec("torchao") is None:
        for name in {"tensorwise", "rowwise"} & set(rows):
            rows.remove(name)
            print(f"{name}: skipped, torchao is not installed")
    runs, others = kept(options.json, rows, options.seeds, options.steps)
    done = {(r["row"], r["seed"]) for r in runs}
    tasks = [
        (row, seed, options.steps, str(options.text))
        for seed in range(options.seeds)
        for row in rows
        if (row, seed) not in done
    ]
    for found in finished(run, tasks, options.processes):
        runs.append(found)
        if options.json:  # finished runs are kept: they take hours
            options.json.write_text(json.dumps(others + runs))
    runs.sort(key=lambda r: (r["seed"], rows.index(r["row"])))
    show(runs, rows)
    if options.plot:
        plot([r for r in runs if r["seed"] == 0 and r["operands"]], options.plot)


def finished(
    run: Callable[[Any], dict[str, Any]], tasks: Iterable[Any], processes: int
) -> Iterator[dict[str, Any]]:
    """Yield the result of `run` for each task when it is done, and print a line for it."""
    # Each has its own process: one process would exceed torch.compile's limit of recompilations.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1)
    with pool:
        for future in as_completed(pool.submit(run, task) for task in tasks):
            found = future.result()
            line = "{row}, seed {seed}: {last:.4f}, held out {held_out:.4f}".format(**found)
            print(line, flush=True)
            yield found


def kept(file: Path | None, rows: list[str], seeds: int, steps: int) -> tuple[Runs, Runs]:
    """Return the runs of earlier calls: those that are wanted again, and the others."""
    found: tuple[Runs, Runs] = [], []
    if file is not None and file.exists():
        for r in json.loads(file.read_text()):
            wanted = r["row"] in rows and r["seed"] < seeds and len(r["losses"]) == steps
            found[not wanted].append(r)
    return found


def show(runs: Runs, rows: list[str]) -> None:
    def mean(row: str, figure: str) -> float:
        return statistics.mean(r[figure] for r in runs if r["row"] == row)

    steps, seeds = len(runs[0]["losses"]), len({r["seed"] for r in runs})
    print(f"torch {torch.__version__}, {steps} steps, mean over {seeds} seeds\n")
    print(f"{'':16}{'last 100':>10}{'- fp32':>9}{'held out':>10}{'- fp32':>9}")
    for row in rows:
        cells = ""
        for figure in ("last", "held_out"):
            gap = f"{mean(row, figure) - mean('fp32', figure):+9.4f}" if "fp32" in rows else ""
            cells += f"{mean(row, figure):10.4f}{gap:>9}"
        bar = BARS.get(row)
        if bar is not None and "fp32" in rows:
            met = all(mean(row, f) - mean("fp32", f) <= bar for f in ("last", "held_out"))
            cells += f"   (bar {bar}: {'met' if met else 'NOT met'})"
        print(f"{row:16}{cells}")
    for r in runs:
        if r["operands"]:
            low, high = min(o["low"] for o in r["operands"]), max(o["high"] for o in r["operands"])
            lost = (max(o[k] for o in r["operands"]) for k in ("saturated", "underflowed"))
            print(
                f"{r['row']}, seed {r['seed']}: RMS(qdata) of operands {low:.2f} to {high:.2f}, "
                "at most {:.3%} saturated, {:.3%} underflowed".format(*lost)
            )


def plot(runs: Runs, path: Path) -> None:
    from matplotlib.figure import Figure

    figures = ("RMS(qdata)", "saturated", "underflowed")
    figure = Figure(figsize=(12, 3.4 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), len(figures), squeeze=False)
    for line, r in zip(axes, runs, strict=True):
        for name, a in zip(figures, line, strict=True):
            for gradient, color in ((False, "#0072b2"), (True, "#d55e00")):
                for module in sorted({o["module"] for o in r["operands"]}):
                    own = [
                        o
                        for o in r["operands"]
                        if o["module"] == module and o["gradient"] == gradient
                    ]
                    x = [o["step"] for o in own]
                    label = ("gradients" if gradient else "operands") if module == "head" else None
                    if name == "RMS(qdata)":
                        low, high = ([o[k] for o in own] for k in ("low", "high"))
                        a.fill_between(x, low, high, color=color, alpha=0.12, lw=0)
                        a.plot(x, high, color=color, lw=0.8, label=label)
                    else:
                        a.plot(x, [100 * o[name] for o in own], color=color, lw=0.8, label=label)
            a.set_title(f"{r['row']}: {name}" + ("" if name == "RMS(qdata)" else ", %"))
            a.set_xlabel("step")
            a.spines[["top", "right"]].set_visible(False)
        line[0].set_yscale("log", base=2)
        line[0].axhspan(0.5, 2, color="#009e73", alpha=0.1, lw=0)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
