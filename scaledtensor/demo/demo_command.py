"""`scaledtensor demo`: six trainings that differ in their arithmetic only."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from scaledtensor.demo import comparison, precision, settings, text
from scaledtensor.demo.comparison import ROWS
from scaledtensor.demo.progress import Progress
from scaledtensor.demo.training import Run, train_run


def run(args: argparse.Namespace) -> int:
    settings.apply(args)
    corpus = text.load(args.text, args.context)
    config = settings.config(args, len(corpus.vocabulary))
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
                settings.settings(args, row.loss_multiplier),
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
