"""The command line: `scaledtensor` or `python -m scaledtensor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import scaledtensor
from scaledtensor._version import __version__
from scaledtensor.apps import commands
from scaledtensor.errors import ScaledTensorError

BAD_INPUT = 2  # argparse exits with it too
INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scaledtensor",
        description="Low-precision training in PyTorch with tensors that carry their own scale.",
    )
    top.add_argument("--version", action="version", version=f"scaledtensor {__version__}")
    commands.add(top.add_subparsers(title="commands", metavar="COMMAND", required=True))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code of the process."""
    args = parser().parse_args(argv)
    scaledtensor._load()  # the import does this in any other program
    try:
        code: int = args.run(args)
    except BrokenPipeError:
        raise  # no mistake of the user: `process` ends quietly
    except (ScaledTensorError, OSError) as error:
        print(f"scaledtensor: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("scaledtensor: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def process() -> NoReturn:
    """Run `main`, and end the process with its exit code."""
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has stopped, as `| head` does
        # The interpreter flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    import torch.distributed as dist  # the command has loaded it; --help has not

    if dist.is_available() and dist.is_torchelastic_launched():
        # gloo's threads outlive its groups. If one of them releases a tensor while the interpreter
        # ends, it aborts a process that has done its work (pytorch pull request 179291).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    process()
