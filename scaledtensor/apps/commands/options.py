"""The options that `demo` and `train` share, and the types of arguments."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def picture(text: str) -> Path:
    """Where a picture can be written; found out before the minutes that lead up to it."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a directory")
    return path


def add_shared(parser: argparse.ArgumentParser, *, steps: int, threads: int | None = None) -> None:
    training = parser.add_argument_group("training")
    training.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        default=steps,
        help="AdamW steps (default %(default)s)",
    )
    training.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        default=16,
        help="windows a step (default %(default)s)",
    )
    training.add_argument(
        "--lr",
        type=positive_float,
        metavar="X",
        default=1e-3,
        help="learning rate (default %(default)s)",
    )
    training.add_argument(
        "--seed", type=not_negative, metavar="N", default=0, help="of the weights and the batches"
    )
    add_machine(parser, training, threads)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--layers", type=positive, metavar="N", default=4, help="default %(default)s"
    )
    model.add_argument(
        "--width", type=positive, metavar="N", default=128, help="default %(default)s"
    )
    model.add_argument("--heads", type=positive, metavar="N", default=4, help="default %(default)s")
    model.add_argument(
        "--context",
        type=positive,
        metavar="N",
        default=64,
        help="characters seen (default %(default)s)",
    )


def add_machine(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup | None = None,
    threads: int | None = None,
) -> None:
    """The options of `scaledtensor.apps.training.apply`."""
    into = group or parser
    # A name, until torch is loaded to say whether there is such a device.
    into.add_argument("--device", default="cpu", help="default %(default)s")
    into.add_argument(
        "--threads",
        type=positive,
        default=threads,
        metavar="N",
        help=f"CPU threads (default {threads or 'as many as torch chooses'})",
    )
    parser.set_defaults(usage=parser)


def add_temperature(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=positive_float,
        metavar="X",
        default=0.8,
        help="default %(default)s",
    )


def text_path(parser: argparse.ArgumentParser, *, required: bool) -> None:
    help = "the text to learn, UTF-8"
    if not required:
        help += " (default: the sources of Python's standard library)"
    parser.add_argument("--text", type=Path, metavar="FILE", required=required, help=help)
