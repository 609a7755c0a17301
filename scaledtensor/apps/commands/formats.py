"""The options of `scaledtensor formats`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

#: Names of `scaledtensor.formats.FORMATS`.
FORMATS = (
    *("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3", "e3m4", "e4m3b11fnuz", "e8m0fnu"),
    *("e3m2fn", "e2m3fn", "e2m1fn", "mxint8", "int8", "int4", "bf16", "fp16", "fp32"),
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "formats",
        help="the number formats: all in a table, or every value of one",
        description="Print the table of all number formats, or of one its record and every value. "
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from scaledtensor.apps import formats

    return formats.run(args)
