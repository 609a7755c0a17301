"""The parsers of the command line: the options of each command, and the text that `--help` prints.

Nothing here imports torch, which takes longer to load than a reader waits for help. A command's
module is imported when the command runs.
"""

from __future__ import annotations

import argparse
import math
from importlib import import_module
from pathlib import Path
from typing import Any

#: Names of `scaledtensor.apps.demo.ROWS`.
ROWS = ("fp32", "bf16", "fp8", "unit", "fp8-small", "unit-small")
#: Names of `scaledtensor.apps.precision.PLAIN_NAMES`.
WITHOUT_SCALES = ("fp32", "bf16", "fp8")
#: Names of `scaledtensor.recipes.base.RECIPES`.
RECIPES = (
    *("blockwise", "constant", "current", "delayed", "min_mse", "mxfp4", "mxfp6", "mxfp8"),
    *("nvfp4", "per_gemm", "unit"),
)
#: Names of `scaledtensor.formats.FORMATS`.
FORMATS = (
    *("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3", "e3m4", "e4m3b11fnuz", "e8m0fnu"),
    *("e3m2fn", "e2m3fn", "e2m1fn", "mxint8", "int8", "int4", "bf16", "fp16", "fp32"),
)
#: Values of the environment variable SCALEDTENSOR_PRODUCTS.
PRODUCTS = ("auto", "bfloat16", "float32")
#: Ways in which several processes share a training.
KINDS = ("none", "ddp", "fsdp2", "tp", "fsdp2+tp")
#: Formats in which they send gradients.
REDUCTIONS = ("fp32", "bf16", "fp8")


def add(subparsers: Any) -> None:
    """Add the parsers of all commands. Each sets `run`, a function of the parsed arguments that
    returns the exit code."""
    _add_demo(subparsers)
    _add_train(subparsers)
    _add_generate(subparsers)
    _add_formats(subparsers)
    _add_hardware(subparsers)


# --- the commands ----------------------------------------------------------------------------


def _add_demo(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train FP32, BF16, FP8 without and FP8 with scales side by side",
        description="Train the same small GPT six times, from one seed and on the same batches: "
        "FP32, BF16, FP8 cast without scales, FP8 as ScaledTensors, and both FP8 rows again with "
        "the loss multiplied by 2^-18. Print a table, draw a picture, and write every figure as "
        "JSON beside it.",
    )
    _add_text(parser, required=False)
    parser.add_argument(
        "--out",
        type=picture,
        default=Path("demo.png"),
        metavar="FILE",
        help="file for the picture; the JSON file goes beside it (default %(default)s)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        metavar="ROW",
        help=f"rows to train, out of {', '.join(ROWS)} (default: all that torch computes fast on "
        "this device)",
    )
    parser.add_argument(
        "--all", action="store_true", help="train every row, even if torch takes ten times as long"
    )
    # One thread: neither the figures nor, at this size, the time should depend on free cores.
    _add_training(parser, steps=250, threads=1)
    parser.set_defaults(run=_run_module("demo"))


def _add_train(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on your text, with checkpoints",
        description="Train a small character-level GPT on a text. Ctrl-C finishes the step, saves, "
        "and exits with 130. --resume then continues with the same bits as a training that was not "
        "interrupted (on the same machine, with as many threads).",
    )
    _add_text(parser, required=True)
    parser.add_argument(
        "--recipe",
        default="unit",
        metavar="NAME",
        help=f"without scales: {', '.join(WITHOUT_SCALES)}; scaledtensor recipes: "
        f"{', '.join(RECIPES)} (default %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        required=True,
        help="file for the state of the training",
    )
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument(
        "--save-every",
        type=positive,
        default=100,
        metavar="N",
        help="steps between checkpoints (default %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=not_negative,
        default=200,
        metavar="N",
        help="characters to write at the end (default %(default)s)",
    )
    parser.add_argument(
        "--prompt", help="beginning of the sample (default: the first character of the text)"
    )
    _add_temperature(parser)
    parser.add_argument(
        "--losses", type=Path, metavar="FILE", help="file for the losses, a line for each step"
    )
    _add_training(parser, steps=1000)
    group = parser.add_argument_group(
        "several processes",
        "start them with: torchrun --nproc-per-node N -m scaledtensor train ...",
    )
    group.add_argument(
        "--parallel",
        choices=KINDS,
        default="none",
        help="way of sharing the work (default %(default)s); --checkpoint is then a folder",
    )
    group.add_argument(
        "--reduce",
        choices=REDUCTIONS,
        default="fp32",
        help="format in which gradients are sent (default %(default)s)",
    )
    group.add_argument(
        "--backend",
        metavar="NAME",
        help="backend of torch.distributed (default: gloo; nccl for CUDA)",
    )
    parser.add_argument(
        "--dropout",
        type=float,
        metavar="X",
        default=0.0,
        help="dropout probability (default %(default)s)",
    )
    parser.set_defaults(run=_run_module("train"))


def _add_generate(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        aliases=["sample"],
        help="write text with a model that `train` saved, or a model of transformers",
        description="Write text with a model. The text goes to stdout. Tokens per second, and the "
        "bytes of weights and cache, go to stderr. A checkpoint of `scaledtensor train` contains "
        "the model's size, its recipe and its characters. `sample` is another name of this "
        "command.",
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a file or folder of `train --checkpoint`, one folder in it, or a folder of "
        "transformers with a model and its tokenizer",
    )
    parser.add_argument("--prompt", help="beginning of the text (default: a new line)")
    parser.add_argument(
        "--tokens",
        "--count",
        type=not_negative,
        default=200,
        metavar="N",
        help="tokens to write; a model of `train` has a token for each character (default "
        "%(default)s)",
    )
    _add_temperature(parser, greedy=True)
    parser.add_argument(
        "--top-k",
        type=positive,
        metavar="N",
        help="choose among the N likeliest tokens (default: all)",
    )
    parser.add_argument(
        "--seed",
        type=not_negative,
        metavar="N",
        help="seed of the random choices (default: the seed of the training, or 0)",
    )
    parser.add_argument(
        "--cache",
        default="none",
        metavar="FORMAT",
        help="format of the keys and values of past tokens, such as e4m3fn, int8 or e2m1fn. none: "
        "a model of `train` computes them again for each token, and a model of transformers keeps "
        "them in its own dtype (default %(default)s)",
    )
    parser.add_argument(
        "--weights",
        default="none",
        metavar="FORMAT",
        help="format of the weights of matrix products, such as e4m3fn, int8, nvfp4 or mxfp4. "
        "none: as they are in the files (default %(default)s)",
    )
    _add_machine(parser)
    parser.set_defaults(run=_run_module("generate"))


def _add_formats(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "formats",
        help="show a table of the number formats, or every value of one",
        description="Print a table of all number formats, or the record and every value of one. "
        "Numbers are exact: a short decimal, 2^k, or an odd integer times 2^k.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the values of NAME, and its relative rounding error, as .png, .svg or .pdf",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the reference page, docs/formats.md"
    )
    parser.set_defaults(run=_run_module("formats"))


def _add_hardware(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "hardware",
        help="show which dtype this machine multiplies fast, and what each recipe runs on",
        description="Print the findings about the CPU and the CUDA devices: the dtype of emulated "
        "products with the reason for it, how casts run, and the units on which each product of "
        "each recipe runs. The environment variable SCALEDTENSOR_PRODUCTS overrides the dtype.",
    )
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="names of recipes (default: all)"
    )
    parser.add_argument(
        "--products", choices=PRODUCTS, help="print as if SCALEDTENSOR_PRODUCTS had this value"
    )
    parser.set_defaults(run=_run_hardware)


def _run_module(name: str) -> Any:
    """A function that imports a module of `scaledtensor.apps` and calls the module's `run`."""

    def run(args: argparse.Namespace) -> int:
        code: int = import_module(f"scaledtensor.apps.{name}").run(args)
        return code

    return run


def _run_hardware(args: argparse.Namespace) -> int:
    from scaledtensor.inspect.hardware import hardware
    from scaledtensor.ops import products_in

    if args.products is not None:
        with products_in(args.products):
            print(hardware(args.recipes or None))
    else:
        print(hardware(args.recipes or None))
    return 0


# --- options of several commands -------------------------------------------------------------


def _add_text(parser: argparse.ArgumentParser, *, required: bool) -> None:
    help = "text to train on, UTF-8"
    if not required:
        help += " (default: the sources of Python's standard library)"
    parser.add_argument("--text", type=Path, metavar="FILE", required=required, help=help)


def _add_temperature(parser: argparse.ArgumentParser, greedy: bool = False) -> None:
    more = "; 0 takes the likeliest token" if greedy else ""
    parser.add_argument(
        "--temperature",
        type=not_negative_float if greedy else positive_float,
        metavar="X",
        default=0.8,
        help=f"temperature of the random choices{more} (default %(default)s)",
    )


def _add_training(
    parser: argparse.ArgumentParser, *, steps: int, threads: int | None = None
) -> None:
    """The options of a training, and of its model."""
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
        help="windows of text for each step (default %(default)s)",
    )
    training.add_argument(
        "--lr",
        type=positive_float,
        metavar="X",
        default=1e-3,
        help="learning rate (default %(default)s)",
    )
    training.add_argument(
        "--seed",
        type=not_negative,
        metavar="N",
        default=0,
        help="seed of the weights and the batches (default %(default)s)",
    )
    _add_machine(parser, training, threads)
    model = parser.add_argument_group("model")
    for name, default, help in (
        ("--layers", 4, "layers"),
        ("--width", 128, "features of a token"),
        ("--heads", 4, "heads of attention"),
        ("--context", 64, "characters that the model sees"),
    ):
        model.add_argument(
            name, type=positive, metavar="N", default=default, help=f"{help} (default %(default)s)"
        )


def _add_machine(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup | None = None,
    threads: int | None = None,
) -> None:
    """The options that `scaledtensor.apps.training.apply` reads."""
    into = group or parser
    # A name: only torch, once it is loaded, knows whether there is such a device.
    into.add_argument(
        "--device", default="cpu", help="device of torch, such as cuda (default %(default)s)"
    )
    into.add_argument(
        "--threads",
        type=positive,
        default=threads,
        metavar="N",
        help=f"CPU threads (default {threads or 'as many as torch chooses'})",
    )
    parser.set_defaults(usage=parser)


# --- types of arguments ----------------------------------------------------------------------


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


def not_negative_float(text: str) -> float:
    number = float(text)
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def picture(text: str) -> Path:
    """The path of a picture that can be written. This is checked before minutes of training."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a directory")
    return path
