"""docs/formats.md is what the records and the casts say."""

import typing
from pathlib import Path

from scaledtensor.__main__ import main
from scaledtensor.formats import page
from scaledtensor.formats.rounding import Overflow, Rounding

FILE = Path(__file__).parent.parent / "docs" / "formats.md"


def test__the_page__is_up_to_date(capsys):
    assert main(["formats", "--markdown"]) == 0
    assert FILE.read_text(encoding="utf-8") == capsys.readouterr().out, (
        "docs/formats.md has drifted: python -m scaledtensor formats --markdown > docs/formats.md"
    )


def test__every_mode__is_explained():
    assert set(typing.get_args(Rounding)) <= set(page.ROUNDINGS)
    assert set(typing.get_args(Overflow)) == set(page.OVERFLOWS)
