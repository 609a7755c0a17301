"""The options of `scaledtensor hardware`."""

from __future__ import annotations

import argparse
from typing import Any

#: What SCALEDTENSOR_PRODUCTS takes too.
PRODUCTS = ("auto", "bfloat16", "float32")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "hardware",
        help="what this machine multiplies fast, and what each recipe will run on",
        description="Print what was found of the CPU and of CUDA devices: the dtype of emulated "
        "products and what decided it, how casts run, and for each product of each recipe what it "
        "will run on. The environment variable SCALEDTENSOR_PRODUCTS overrides the dtype.",
    )
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="names of recipes (default: all)"
    )
    parser.add_argument(
        "--products", choices=PRODUCTS, help="as if SCALEDTENSOR_PRODUCTS had this value"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from scaledtensor.inspect.hardware import hardware
    from scaledtensor.ops import products_in

    if args.products is not None:
        with products_in(args.products):
            print(hardware(args.recipes or None))
    else:
        print(hardware(args.recipes or None))
    return 0
