"""The code of docs/unit_scaling.md runs and prints the text below it."""

from pathlib import Path

import pytest
from pages import execute

GUIDE = Path(__file__).parents[2] / "docs" / "unit_scaling.md"


def test__every_block_of_the_guide__runs_and_prints_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(GUIDE, tmp_path, capsys)
