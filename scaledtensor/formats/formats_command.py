"""`scaledtensor formats`: the table of all formats, or everything about one."""

from __future__ import annotations

import argparse
import textwrap
from importlib.util import find_spec
from pathlib import Path

from scaledtensor.errors import FormatError, UnsupportedError
from scaledtensor.formats import describe, page
from scaledtensor.formats.format import FORMATS, Format, get


def run(args: argparse.Namespace) -> int:
    if args.markdown and (args.name or args.plot):
        raise FormatError("--markdown prints the page of all formats; it goes with nothing else")
    if args.markdown:
        print(page.page(), end="")
    elif args.name:
        fmt = get(args.name)
        if args.plot:
            draw(fmt, args.plot)  # first, so that a file that cannot be written is all that is said
        print(one(fmt))
        if args.plot:
            print(f"\npicture: {args.plot}")
    elif args.plot:
        raise FormatError(f"--plot draws one format; name one of {', '.join(FORMATS)}")
    else:
        print(describe.columns([describe.facts(fmt) for fmt in FORMATS.values()]))
    return 0


def one(fmt: Format) -> str:
    record, policy = describe.facts(fmt), describe.policies(fmt)
    lines = [f"{key:24}{fact}" for key, fact in record.items()]
    lines += ["", "encode, to nearest even, makes of"]
    lines += [f"  {key:30}{made}" for key, made in policy.items() if key != "name"]
    lines += ["", *textwrap.wrap(fmt.policy, 96), "", "codes and values"]
    lines += [f"  {line}" for line in describe.values(fmt)]
    return "\n".join(lines)


def draw(fmt: Format, path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install scaledtensor[plot]")
    from scaledtensor.formats import figure  # matplotlib is an extra

    if path.suffix not in figure.SUFFIXES:
        raise FormatError(f"--plot writes {', '.join(figure.SUFFIXES)}; got {str(path)!r}")
    figure.draw(fmt, path)
