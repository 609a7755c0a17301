"""docs/formats.md says the facts of the records and casts."""

import re
import typing
from pathlib import Path

import pytest

from scaledtensor.__main__ import main
from scaledtensor.apps import formats
from scaledtensor.formats.rounding import Overflow, Rounding

FILE = Path(__file__).parent.parent / "docs" / "formats.md"


def test__the_page__is_up_to_date(capsys):
    assert main(["formats", "--markdown"]) == 0
    assert FILE.read_text(encoding="utf-8") == capsys.readouterr().out, (
        "docs/formats.md has drifted: python -m scaledtensor formats --markdown > docs/formats.md"
    )


def test__what_the_page_shows__prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", FILE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        assert len(said) == code.count("print(")
        exec(code, {})
        assert capsys.readouterr().out.splitlines() == said


def test__every_mode__is_explained():
    assert set(typing.get_args(Rounding)) <= set(formats.ROUNDINGS)
    assert set(typing.get_args(Overflow)) == set(formats.OVERFLOWS)
