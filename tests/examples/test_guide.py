"""The code of docs/unit_scaling.md runs, and prints what stands below it."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledtensor as sct

GUIDE = Path(__file__).parents[2] / "docs" / "unit_scaling.md"
BLOCK = re.compile(
    r"^( *)```python\n(.*?)^\1```\n(?:\n\1```text\n(.*?)^\1```\n)?", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
#: Sums of another processor round elsewhere, and a share in percent is of few elements.
RELATIVE, LAST_DIGITS = 0.05, 2


def assert_printed(got: str, expected: str) -> None:
    """The same words, and numbers that are near."""
    assert NUMBER.sub("#", got) == NUMBER.sub("#", expected)
    for a, b in zip(NUMBER.findall(got), NUMBER.findall(expected), strict=True):
        digits = len(b.partition(".")[2])
        slack = LAST_DIGITS * 10.0**-digits if digits else 0
        assert float(a) == pytest.approx(float(b), rel=RELATIVE, abs=slack), got


def test__every_block_of_the_guide__runs_and_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = BLOCK.findall(GUIDE.read_text())
    assert len(blocks) > 10
    scope: dict[str, Any] = {}
    with torch.random.fork_rng(), sct.functional.global_batch(1):
        for _, code, printed in blocks:
            exec(textwrap.dedent(code), scope)
            assert_printed(capsys.readouterr().out, textwrap.dedent(printed))


def test__no_block_of_the_guide__is_left_out() -> None:
    assert len(BLOCK.findall(GUIDE.read_text())) == GUIDE.read_text().count("```python")
