"""Pages of documentation whose code is executed, and whose printed results are compared.

A block of Python runs in the namespace of the page's earlier blocks. One that begins with a comment
that is a file name (`# train.py`) is written to that file instead, and a block of `sh` below it
runs the file. The output of either must equal the block of `text` below it.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledtensor as sct

BLOCK = re.compile(
    r"^( *)```(python|sh)\n(.*?)^\1```\n(?:\n\1```text\n(.*?)^\1```\n)?", re.MULTILINE | re.DOTALL
)
FILE = re.compile(r"# (\w+\.py)\n")
NEEDS = re.compile(r"<!-- needs: (.*?) -->")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
#: Sums of another processor round elsewhere, and a share in percent is of few elements.
RELATIVE, LAST_DIGITS = 0.05, 2
#: The programs of an environment whose folder need not be on the path.
PROGRAMS = {
    "python": (),
    "scaledtensor": ("-m", "scaledtensor"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),
}
PACKAGE = str(Path(sct.__file__).parents[1])


def assert_printed(got: str, expected: str) -> None:
    """The same words, and numbers that are near."""
    assert NUMBER.sub("#", got) == NUMBER.sub("#", expected)
    for a, b in zip(NUMBER.findall(got), NUMBER.findall(expected), strict=True):
        digits = len(b.partition(".")[2])
        slack = LAST_DIGITS * 10.0**-digits if digits else 0
        assert float(a) == pytest.approx(float(b), rel=RELATIVE, abs=slack), got


def sections(page: Path) -> dict[str, str]:
    """The text of each section with code, by its heading: the page with empty lines in place of all
    other sections but the first, on which all build."""
    parts = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
    coded = [i for i, part in enumerate(parts) if "```python" in part]
    return {
        parts[i].splitlines()[0].removeprefix("## "): "".join(
            part if j in (coded[0], i) else "\n" * part.count("\n") for j, part in enumerate(parts)
        )
        for i in coded
    }


def execute(
    page: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    text: str = "",
    compare: bool = True,
) -> dict[str, Any]:
    """Run every block of `page` in order in `folder`, the current one; returns the namespace.

    `text` is the page where only a part of it runs. `compare` is False where other libraries print
    what they like. Skips where a package that the text says it needs is missing:
    `<!-- needs: peft -->`.
    """
    text = text or page.read_text()
    for package in " ".join(NEEDS.findall(text)).split():
        pytest.importorskip(package)
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(re.findall(r"```(?:python|sh)\b", text)), "a block is not recognised"
    assert blocks, "nothing to run"
    scope: dict[str, Any] = {"__name__": page.stem}
    with torch.random.fork_rng(), sct.functional.global_batch(1):
        for block in blocks:
            _, language, code, printed = block.groups()
            code = textwrap.dedent(code)
            file = FILE.match(code)
            if language == "sh":
                got = "".join(_run(line, folder) for line in code.splitlines())
            elif file:
                (folder / file[1]).write_text(code)
                continue
            else:
                # Tracebacks then name the line of the page.
                lines = "\n" * text.count("\n", 0, block.start(3))
                exec(compile(lines + code, str(page), "exec"), scope)
                got = capsys.readouterr().out
            if compare:
                assert_printed(got, textwrap.dedent(printed or ""))
    return scope


def _run(line: str, folder: Path) -> str:
    program, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
