"""`scaledtensor demo`: six trainings that differ only in their arithmetic, and their comparison.

The comparison is a table, a verdict and a JSON file. Every sentence of it is computed from the
runs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaledtensor._version import __version__
from scaledtensor.apps import precision, text, training
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.text import Corpus
from scaledtensor.apps.training import FINAL_STEPS, Progress, Run, train_run
from scaledtensor.formats import E5M2
from scaledtensor.scales.measure import rounds_to_zero

SMALL = 2.0**-18  # multiplies the loss: Adam divides it out again, but gradients may underflow
CLOSE = 0.02  # nats; within this of FP32, the verdict calls a loss as good


@dataclass(frozen=True)
class Row:
    """One training of the demo."""

    precision: str
    loss_multiplier: float = 1.0
    twin: str | None = None  # the row without the multiplier
    gradients_at: tuple[float, ...] = ()  # the picture's histograms, by loss multiplier

    @property
    def title(self) -> str:
        plain = precision.get(self.precision).title
        if self.loss_multiplier == 1.0:
            return plain
        return f"{plain}, loss x 2^{math.log2(self.loss_multiplier):.0f}"


ROWS = {
    "fp32": Row("fp32", gradients_at=(1.0, SMALL)),
    "bf16": Row("bf16"),
    "fp8": Row("fp8"),
    "unit": Row("unit", gradients_at=(1.0,)),
    "fp8-small": Row("fp8", SMALL, twin="fp8"),
    "unit-small": Row("unit", SMALL, twin="unit"),
}


Runs = Mapping[str, Run]  # by name of the row


def identical(runs: Runs, name: str) -> bool | None:
    """Whether the row equals its twin to the last bit; None if its twin has not run."""
    twin = ROWS[name].twin
    return runs[name].identical_to(runs[twin]) if twin and twin in runs else None


def table(runs: Runs) -> str:
    word = {True: "yes", False: "no", None: ""}
    lines = [("row", "loss", "held-out", "seconds", "identical to the last bit")]
    lines += [
        (
            ROWS[name].title,
            f"{run.final_loss():.4f}",
            f"{run.held_out_loss:.4f}",
            f"{run.seconds:.1f}",
            word[identical(runs, name)],
        )
        for name, run in runs.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    body = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join((body[0], rule, *body[1:]))


def measured(runs: Runs, corpus: Corpus) -> str:
    run = next(iter(runs.values()))
    count = sum(parameter.numel() for parameter in run.parameters.values())
    return (
        f"Measured: one GPT of {count:,} parameters, trained from one seed on the same batches of "
        f"{corpus.name} for {len(run.losses)} AdamW steps a row; only the arithmetic differs.\n"
        f"loss: mean of the last {min(FINAL_STEPS, len(run.losses))} steps. identical: every loss "
        "and every final parameter equal those of the row without the multiplier."
    )


def verdict(runs: Runs) -> str:
    needed = {"fp32", "unit", "unit-small"}
    if missing := sorted(needed - runs.keys()):
        return f"Verdict: none; it needs the rows {', '.join(missing)} too."
    gap = runs["unit"].final_loss() - runs["fp32"].final_loss()
    same = identical(runs, "unit-small")
    holds = abs(gap) <= CLOSE and same
    return (
        f"Verdict: {'holds' if holds else 'falls short'}. FP8 with ScaledTensor ended {gap:+.4f} "
        f"nats from FP32 (as good means within {CLOSE}), and multiplying its loss by 2^-18 "
        f"changed {'no bit of it' if same else 'its bits'}."
    )


def shares_of_e5m2(values: Tensor) -> dict[str, float]:
    """The shares of the elements, except zeros, that E5M2 rounds to zero, holds as subnormal or
    normal values, and saturates."""
    size = values[values != 0].abs()
    lost = rounds_to_zero(E5M2)
    masks = {
        "rounds to zero": size <= lost,
        "subnormal": (size > lost) & (size < E5M2.min_normal),
        "normal": (size >= E5M2.min_normal) & (size <= E5M2.max),
        "over the maximum": size > E5M2.max,
    }
    return {name: mask.float().mean().item() for name, mask in masks.items()}


def as_json(runs: Runs, config: GPTConfig, corpus: Corpus) -> dict[str, Any]:
    return {
        "versions": {
            "scaledtensor": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "text": {
            "name": corpus.name,
            "sha256": corpus.digest,
            "train": len(corpus.train),
            "held_out": len(corpus.held_out),
        },
        "model": asdict(config),
        "rows": {name: _row_as_json(runs, name) for name in runs},
        "verdict": verdict(runs),
    }


def _row_as_json(runs: Runs, name: str) -> dict[str, Any]:
    run = runs[name]
    return {
        "title": ROWS[name].title,
        "settings": asdict(run.settings),
        "loss": _number(run.final_loss()),
        "held_out_loss": _number(run.held_out_loss),
        "seconds": run.seconds,
        "identical_to": {ROWS[name].twin: identical(runs, name)} if ROWS[name].twin else None,
        "gradients_in_e5m2": {
            f"loss x {multiplier:g}": shares_of_e5m2(values)
            for multiplier, values in run.gradients.items()
        },
        "losses": [_number(loss) for loss in run.losses],
    }


def _number(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def run(args: argparse.Namespace) -> int:
    training.apply(args)
    corpus = text.load(args.text, args.context)
    config = training.config(args, len(corpus.vocabulary))
    runs: dict[str, Run] = {}
    for name, row in ROWS.items():
        if args.rows is not None and name not in args.rows:
            continue
        slow = precision.get(row.precision).slow(args.device)
        if slow and args.rows is None and not args.all:
            print(f"{row.title}: left out, because {slow}; --all runs it", flush=True)
            continue
        with Progress(row.title, args.steps) as progress:
            runs[name] = train_run(
                config,
                precision.get(row.precision),
                corpus,
                training.settings(args, row.loss_multiplier),
                steps=args.steps,
                device=args.device,
                on_step=progress,
                gradients_at=row.gradients_at,
            )

    print(table(runs), measured(runs, corpus), sep="\n\n")
    print(verdict(runs))

    figures: Path = args.out.with_suffix(".json")
    content = json.dumps(as_json(runs, config, corpus), indent=1, allow_nan=False)
    figures.write_text(content + "\n", encoding="utf-8")
    print(f"figures: {figures}")
    if find_spec("matplotlib") is None:
        print("picture: none, because matplotlib is missing; pip install scaledtensor[demo]")
    else:
        from scaledtensor.apps import demo_figure  # matplotlib is an extra

        demo_figure.draw(runs, args.out)
        print(f"picture: {args.out}")
    return 0
