"""`scaledtensor demo`: six trainings that differ in their arithmetic only."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scaledtensor.demo import comparison, options, precision, text
from scaledtensor.demo.comparison import ROWS
from scaledtensor.demo.progress import Progress
from scaledtensor.demo.training import Run, train_run


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train FP32, BF16, FP8 without and FP8 with scales side by side",
        description="Train the same small GPT six times, from one seed and on the same batches: "
        "FP32, BF16, FP8 cast without scales, FP8 as ScaledTensors, and both FP8 rows again with "
        "the loss multiplied by 2^-18. Prints a table, draws a picture, and writes every figure "
        "as JSON beside it.",
    )
    options.text_path(parser, required=False)
    parser.add_argument(
        "--out",
        type=options.picture,
        default=Path("demo.png"),
        metavar="FILE",
        help="the picture; the JSON file goes beside it (default %(default)s)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        metavar="ROW",
        help=f"some of {', '.join(ROWS)} (default: all that torch computes fast on this device)",
    )
    parser.add_argument(
        "--all", action="store_true", help="every row, also one that takes torch ten times as long"
    )
    # One thread: neither the figures nor, at this size, the time should depend on free cores.
    options.add_shared(parser, steps=250, threads=1)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options.apply_threads(args)
    corpus = text.load(args.text, args.context)
    config = options.config(args, len(corpus.vocabulary))
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
                options.settings(args, row.loss_multiplier),
                steps=args.steps,
                device=args.device,
                on_step=progress,
                gradients_at=row.gradients_at,
            )

    print(comparison.table(runs), comparison.measured(runs, corpus), sep="\n\n")
    print(comparison.verdict(runs))

    figures: Path = args.out.with_suffix(".json")
    content = json.dumps(comparison.as_json(runs, config, corpus), indent=1, allow_nan=False)
    figures.write_text(content + "\n", encoding="utf-8")
    print(f"figures: {figures}")
    if find_spec("matplotlib") is None:
        print("picture: none, because matplotlib is missing; pip install scaledtensor[demo]")
    else:
        from scaledtensor.demo import figure  # matplotlib is an extra

        figure.draw(runs, args.out)
        print(f"picture: {args.out}")
    return 0
