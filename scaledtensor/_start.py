"""Whether this process is the command line of the package."""

import sys
from itertools import pairwise
from pathlib import Path

__all__ = ["is_command"]

_NAME = "scaledtensor"


def is_command() -> bool:
    """Whether this process is the command line of this package: `scaledtensor`, or
    `python -m scaledtensor`.

    The command line answers `--help` and wrong options before it loads torch, which takes long. A
    program that imports the package gets its tensors at once.
    """
    if sys.argv[:1] == ["-m"]:  # Python is still looking for the module to run
        given = ["", *sys.orig_argv]
        return any(
            b == f"-m{_NAME}" or (b == _NAME and a.startswith("-") and a.endswith("m"))
            for a, b in pairwise(given)
        )
    return bool(sys.argv) and Path(sys.argv[0]).name in (_NAME, f"{_NAME}.exe")
