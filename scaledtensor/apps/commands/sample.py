"""The options of `scaledtensor sample`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scaledtensor.apps.commands import options


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sample",
        help="write text with a model that `train` saved",
        description="Write text with a model that `scaledtensor train` saved. The checkpoint says "
        "how large the model is, how it computes and which characters it knows.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="what `train --checkpoint` was given, or one folder in it",
    )
    parser.add_argument(
        "--count",
        type=options.not_negative,
        default=200,
        metavar="N",
        help="characters to write (default %(default)s)",
    )
    parser.add_argument("--prompt", help="how the text begins (default: with a new line)")
    options.add_temperature(parser)
    parser.add_argument(
        "--seed", type=options.not_negative, metavar="N", help="default: that of the training"
    )
    options.add_machine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from scaledtensor.apps import sample

    return sample.run(args)
