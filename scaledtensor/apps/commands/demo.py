"""The options of `scaledtensor demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scaledtensor.apps.commands import options

#: Names of `scaledtensor.apps.demo.ROWS`.
ROWS = ("fp32", "bf16", "fp8", "unit", "fp8-small", "unit-small")


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
    from scaledtensor.apps import demo

    return demo.run(args)
