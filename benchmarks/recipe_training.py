"""Train the demo's GPT under every recipe, for the training table of docs/recipes.md.

    python -m benchmarks.recipe_training --text FILE [--steps 500] [--seeds 3] [--processes 2]
        [--rows fp32 unit mxfp8 ...] [--json FILE]

The model has d = 128, 4 layers, context 64 and batch 16; AdamW runs at 1e-3. No hyperparameter
differs between rows, and forward and backward are compiled. "loss" is the mean of the last 50
steps. "held out" is the loss of the whole last tenth of the text after the last step. Each is the
mean over seeds, with the difference from float32 seed by seed and its spread (largest less
smallest). "ms" is the median CPU time of a step after the first ten, on one thread, with runs side
by side, so it is a coarse figure. "saved" is the memory that autograd keeps between forward and
backward of the uncompiled model, without the parameters.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import scaledtensor as sct
from benchmarks.convergence import CompiledTrainer, Loss, finished, held_out
from benchmarks.step import saved_bytes
from scaledtensor.apps import precision
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.precision import Precision
from scaledtensor.apps.text import draw_batch, load
from scaledtensor.apps.training import Settings
from scaledtensor.recipes import (
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Blockwise,
    Current,
    Delayed,
    MinMSE,
    Recipe,
    Unit,
)

LAST, WARM_UP = 50, 10

RECIPES: dict[str, Recipe] = {
    "unit": Unit(),
    "unit-e4m3": Unit(gradient="e4m3fn"),
    "unit-saved": Unit(saved="e4m3fn"),
    "unit-fp6": Unit("e2m3fn", "e3m2fn"),
    "current": Current(),
    "delayed": Delayed(),
    "current-row": Current(granularity="row"),
    "min-mse": MinMSE(),
    "blockwise": Blockwise(),
    "mxfp8": MXFP8(),
    "mxfp6": MXFP6(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
}
ROWS = ("fp32", "bf16", *RECIPES)


def prepared(row: str, named: Mapping[str, Recipe] = RECIPES) -> Precision:
    if row not in named:
        return precision.get(row)
    return Precision(row, row, prepare=lambda model: sct.scale_model(model, named[row]))


def run(task: tuple[str, int, int, str]) -> dict[str, Any]:
    """Run one training, in its own process."""
    row, seed, steps, text = task
    torch.set_num_threads(1)
    corpus = load(Path(text), 64)
    config = GPTConfig(len(corpus.vocabulary), 64, 4, 4, 128)
    how = prepared(row)
    trainer = CompiledTrainer(config, how, corpus, Settings(seed=seed), torch.device("cpu"))
    losses, times = [], []
    for _ in range(steps):
        start = time.process_time()
        losses.append(trainer.step())
        times.append(time.process_time() - start)
    return {
        "row": row,
        "seed": seed,
        "steps": steps,
        "last": statistics.mean(losses[-LAST:]),
        "held_out": held_out(trainer),
        "ms": 1e3 * statistics.median(times[WARM_UP:] or times),
        "saved": saved(how, config, corpus.train),
    }


def saved(how: Precision, config: GPTConfig, text: torch.Tensor) -> int:
    model = GPT(config)
    how.prepare(model)
    batch = draw_batch(text, 64, 16, torch.Generator().manual_seed(0))
    with how.context(torch.device("cpu")):
        return saved_bytes(Loss(model), *batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path, help="keeps the runs; those that it has are not run")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        runs = json.loads(options.json.read_text())
    done = {(r["row"], r["seed"], r["steps"]) for r in runs}
    tasks = [
        (row, seed, options.steps, str(options.text))
        for seed in range(options.seeds)
        for row in options.rows
        if (row, seed, options.steps) not in done
    ]
    for found in finished(run, tasks, options.processes):
        runs.append(found)
        if options.json is not None:
            options.json.write_text(json.dumps(runs))
    wanted = [r for r in runs if r["steps"] == options.steps and r["seed"] < options.seeds]
    print(f"\ntorch {torch.__version__}, {options.steps} steps, {options.seeds} seeds\n")
    print(table(wanted, options.rows))


def table(runs: list[dict[str, Any]], rows: list[str]) -> str:
    found = {(r["row"], r["seed"]): r for r in runs}
    lines = [
        "| | loss | - fp32 | spread | held out | - fp32 | spread | ms | saved, MB |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        own = [r for (name, _), r in sorted(found.items()) if name == row]
        cells = [f"`{row}`"]
        for figure in ("last", "held_out"):
            gaps = [
                r[figure] - found["fp32", r["seed"]][figure]
                for r in own
                if ("fp32", r["seed"]) in found
            ]
            cells.append(f"{statistics.mean(r[figure] for r in own):.4f}")
            if gaps:
                cells += [f"{statistics.mean(gaps):+.4f}", f"{max(gaps) - min(gaps):.4f}"]
            else:
                cells += ["", ""]
        cells.append(f"{statistics.median(r['ms'] for r in own):.0f}")
        cells.append(f"{own[0]['saved'] / 1e6:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
