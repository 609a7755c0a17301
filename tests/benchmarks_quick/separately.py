"""Programs that stand in for a CUDA device, each in a process of its own."""

import shutil
import subprocess
import sys
import textwrap

import pytest


def printed(program: str) -> str:
    """Return the output of a program. The test is skipped where its device cannot be simulated."""
    if shutil.which("c++") is None:
        pytest.skip("stand-ins for a device are compiled by c++")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    if "CUDA build of torch" in done.stderr:
        pytest.skip("a CUDA build of torch asks its driver")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
