"""Compare the losses of `scaledtensor train --parallel` on one process and on several.

    python -m benchmarks.parallel [--text FILE] [--steps 50] [--ranks 2 4] [--reduce fp8]
        [--recipes unit unit-fp32 fp32]

The model is the demo's GPT (4 layers, d = 128, context 64, batch 16, AdamW at 1e-3). Each row is a
way to divide the work. It is compared with two trainings on one process: one on whole batches, and
one on the same parts of batches in turn, whose arithmetic differs from data parallelism only in the
order of sums. The rows of one process are the yardstick: they show the effect of dividing the
batch, and the effect of moving each weight one ulp up, or down. A cast rounds some of these weights
to the other side, and the runs diverge. This is the distance between two equally good trainings in
FP8. `unit-fp32` is `unit` with the same scales on float32 elements, which no cast rounds. Its
differences come from the division and not from the format.

`x 2^-18` compares with the same training whose loss is multiplied by 2^-18: the cell is
"identical", or the number of steps in which the loss differs.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import scaledtensor as sct
from benchmarks.recipe_training import prepared
from scaledtensor import recipes
from scaledtensor.apps import parallel, precision, text
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.training import Settings, Trainer
from scaledtensor.formats import FP32

BATCH, CONTEXT = 16, 64
RECIPES = {"unit-fp32": recipes.Unit(forward=FP32, gradient=FP32, activation=FP32)}


def nudge(model: torch.nn.Module, towards: float) -> None:
    """Move each weight by one ulp."""
    with torch.no_grad():
        for p in model.parameters():
            elements = p.qdata if isinstance(p, sct.ScaledTensor) else p
            elements.copy_(torch.nextafter(elements, torch.tensor(towards)))


class Accumulating(Trainer):
    """A trainer on one process that takes the parts of a batch in turn."""

    parts = 1

    def step(self) -> float:
        batch = text.draw_batch(self.corpus.train, CONTEXT, BATCH, self.batches)
        self.optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(t.chunk(self.parts) for t in batch), strict=True):
            with self.precision.context(self.device):
                _, loss = self.model(x, y)
            (loss / self.parts).backward()
            total += loss.item() / self.parts
        self.optimizer.step()
        self.steps_done += 1
        return total


def losses(
    options: argparse.Namespace,
    recipe: str,
    kind: str = "none",
    reduce: str = "fp32",
    multiplier: float = 1.0,
    parts: int = 0,
    towards: float | None = None,
) -> list[float]:
    """Return the loss of each step, on this process."""
    torch.set_num_threads(1)
    corpus = text.load(options.text, CONTEXT)
    config = GPTConfig(len(corpus.vocabulary), CONTEXT)
    processes = None
    if kind != "none":
        given = argparse.Namespace(
            parallel=kind, reduce=reduce, backend=None, device=torch.device("cpu"), batch=BATCH
        )
        processes = parallel.start(given, config)
    settings = Settings(BATCH, loss_multiplier=multiplier)
    device = torch.device("cpu")
    make = Accumulating if parts else Trainer
    trainer = make(config, prepared(recipe, RECIPES), corpus, settings, device, processes)
    if isinstance(trainer, Accumulating):
        trainer.parts = parts
    if towards is not None:
        nudge(trainer.model, towards)
    return [trainer.step() for _ in range(options.steps)]


def rank(index: int, ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(index), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(arguments[0].port)
    found = losses(*arguments)
    if index == 0:
        torch.save(found, Path(folder) / "losses.pt")
    dist.destroy_process_group()


def divided(ranks: int, *arguments: Any) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (ranks, folder, arguments), nprocs=ranks)
        found: list[float] = torch.load(Path(folder) / "losses.pt")
        return found


def apart(a: list[float], b: list[float]) -> str:
    found = [abs(x - y) for x, y in zip(a, b, strict=True)]
    of_it = max(x / y for x, y in zip(found, b, strict=True))
    return "0" if not any(found) else f"{max(found):.1e}, {of_it:.1e} ({a[-1] - b[-1]:+.4f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="default: the standard library's sources")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--recipes", nargs="+", default=["unit", "unit-fp32", "fp32"])
    parser.add_argument("--reduce", choices=parallel.REDUCTIONS, default="fp32")
    parser.add_argument("--port", type=int, default=29541)
    options = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {options.steps} steps: largest difference, the largest as a")
    print("part of the loss (and the last step's)\n")
    print("| ranks | recipe | way | from whole batches | from the same parts | x 2^-18 |")
    print("|---|---|---|---|---|---|")
    in_turn = cache(lambda recipe, parts: losses(options, recipe, parts=parts))
    for recipe in options.recipes:
        alone = losses(options, recipe)
        for ranks in options.ranks:
            for kind in parallel.KINDS[1:]:
                tensor = {"tp": ranks, "fsdp2+tp": 2}.get(kind, 1)
                if recipe in precision.PLAIN_NAMES and tensor > 1:
                    continue  # torch's own styles are for plain linears
                if kind == "fsdp2+tp" and ranks < 4:
                    continue
                how = "fp32" if kind == "tp" else options.reduce
                found = divided(ranks, options, recipe, kind, how)
                scaled = divided(ranks, options, recipe, kind, how, 2.0**-18)
                data = ranks // tensor
                in_parts = in_turn(recipe, data) if data > 1 else alone
                same = sum(a != b for a, b in zip(found, scaled, strict=True))
                told = "identical" if not same else f"{same} steps differ"
                print(
                    f"| {ranks} | {recipe} | {kind} | {apart(found, alone)} | "
                    f"{apart(found, in_parts)} | {told} |",
                    flush=True,
                )
        for way, told in {
            "two parts in turn": in_turn(recipe, 2),
            "weights one ulp up": losses(options, recipe, towards=math.inf),
            "weights one ulp down": losses(options, recipe, towards=-math.inf),
        }.items():
            print(f"| 1 | {recipe} | {way} | {apart(told, alone)} | | |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
