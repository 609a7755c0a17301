"""The command line: `scaledtensor` or `python -m scaledtensor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import scaledtensor
from scaledtensor._version import __version__
from scaledtensor.apps.commands import demo, formats, hardware, sample, train
from scaledtensor.errors import ScaledTensorError

# A command is a module with `register(subparsers)`, which adds its parser and sets its `run`.
COMMANDS = (demo, train, sample, formats, hardware)

BAD_INPUT = 2  # what argparse exits with too
INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scaledtensor",
        description="Low-precision training in PyTorch with tensors that carry their own scale.",
    )
    top.add_argument("--version", action="version", version=f"scaledtensor {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    scaledtensor._load()  # as any other program has had it done
    try:
        code: int = args.run(args)
    except BrokenPipeError:
        raise  # an OSError that is no mistake: `process` ends quietly
    except (ScaledTensorError, OSError) as error:
        print(f"scaledtensor: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("scaledtensor: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def process() -> NoReturn:
    """`main`, as a process of its own."""
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has read enough, as `| head` does
        # The interpreter flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    import torch.distributed as dist  # which the command has loaded; --help does without

    if dist.is_available() and dist.is_torchelastic_launched():
        # gloo's threads outlive its groups, and one that lets go of a tensor while the interpreter
        # ends aborts the process, whose work is done (pytorch pull request 179291).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    process()
