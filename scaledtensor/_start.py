"""How this process was started."""

import sys
from itertools import pairwise
from pathlib import Path

__all__ = ["is_command"]

_NAME = "scaledtensor"


def is_command() -> bool:
    """Whether this process is the command line of this package: `scaledtensor`, or
    `python -m scaledtensor`. It answers `--help` and wrong options before torch is loaded, which
    takes longer than a reader waits; a program that imports the package gets its tensors at once.
    """
    if sys.argv[:1] == ["-m"]:  # what stands there while Python looks for the module to run
        given = ["", *sys.orig_argv]
        return any(
            b == f"-m{_NAME}" or (b == _NAME and a.startswith("-") and a.endswith("m"))
            for a, b in pairwise(given)
        )
    return bool(sys.argv) and Path(sys.argv[0]).name in (_NAME, f"{_NAME}.exe")
