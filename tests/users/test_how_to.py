"""The programs of docs/how_to/transformers.md run as printed, section by section.

`test_docs.py` runs the other pages, which need no other library.
"""

from pathlib import Path

import pytest
from pages import execute, sections

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "transformers.md"
SECTIONS = sections(PAGE)


@pytest.mark.parametrize("heading", SECTIONS)
def test__a_section__runs(heading, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    execute(PAGE, tmp_path, capsys, SECTIONS[heading], compare=False)
    assert any(tmp_path.iterdir())
