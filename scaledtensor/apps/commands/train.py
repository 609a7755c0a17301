"""The options of `scaledtensor train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scaledtensor.apps.commands import options

#: Names of `scaledtensor.apps.precision.PLAIN_NAMES`.
WITHOUT_SCALES = ("fp32", "bf16", "fp8")
#: Names of `scaledtensor.recipes.base.RECIPES`.
RECIPES = (
    *("blockwise", "constant", "current", "delayed", "min_mse", "mxfp4", "mxfp6", "mxfp8"),
    *("nvfp4", "per_gemm", "unit"),
)
KINDS = ("none", "ddp", "fsdp2", "tp", "fsdp2+tp")
REDUCTIONS = ("fp32", "bf16", "fp8")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on your text, with checkpoints",
        description="Train a small character-level GPT on a text. Ctrl-C finishes the step, saves, "
        "and exits with 130; --resume then continues to the last bit as if nothing had happened "
        "(on the same machine and thread count).",
    )
    options.text_path(parser, required=True)
    parser.add_argument(
        "--recipe",
        default="unit",
        metavar="NAME",
        help=f"without scales: {', '.join(WITHOUT_SCALES)}; scaledtensor recipes: "
        f"{', '.join(RECIPES)} (default %(default)s)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", required=True, help="where the training is kept"
    )
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument(
        "--save-every",
        type=options.positive,
        default=100,
        metavar="N",
        help="steps between checkpoints (default %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=options.not_negative,
        default=200,
        metavar="N",
        help="characters to write at the end (default %(default)s)",
    )
    parser.add_argument("--prompt", help="how the sample begins (default: as the text does)")
    options.add_temperature(parser)
    parser.add_argument(
        "--losses", type=Path, metavar="FILE", help="write the loss of each step there, a line each"
    )
    options.add_shared(parser, steps=1000)
    _add_parallel(parser)
    parser.add_argument(
        "--dropout", type=float, metavar="X", default=0.0, help="default %(default)s"
    )
    parser.set_defaults(run=run)


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes",
        "start them with: torchrun --nproc-per-node N -m scaledtensor train ...",
    )
    group.add_argument(
        "--parallel",
        choices=KINDS,
        default="none",
        help="how they share the work (default %(default)s); --checkpoint is then a folder",
    )
    group.add_argument(
        "--reduce",
        choices=REDUCTIONS,
        default="fp32",
        help="what gradients are sent as (default %(default)s)",
    )
    group.add_argument(
        "--backend", metavar="NAME", help="of torch.distributed (default gloo; nccl for CUDA)"
    )


def run(args: argparse.Namespace) -> int:
    from scaledtensor.apps import train

    return train.run(args)
