"""The table of formats, and the page that shows it."""

import runpy
from pathlib import Path

import pytest

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError
from scaledtensor.exchange import FORMATS
from scaledtensor.exchange.layouts import SHAPES
from scaledtensor.exchange.table import layout_for

ROOT = Path(__file__).parents[2]


def test__the_page__shows_the_table() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "write_exchange.py"))
    page = script["PAGE"].read_text()
    assert page == script["written"](page), "python docs/write_exchange.py"


def test__every_layout__is_the_first_that_fits_its_config() -> None:
    for family in FORMATS.values():
        assert len({layout.name for layout in family.layouts}) == len(family.layouts)
        for layout in family.layouts:
            assert layout_for(family, layout.config, "w") is layout
            assert layout.shape in SHAPES
            assert layout.readers


def test__another_choice_of_scales__has_the_same_layout() -> None:
    family = FORMATS["compressed-tensors"]
    for scale in ("amax", "power_of_two"):
        config = sct.WeightOnly("int4", 32, scale)
        assert layout_for(family, config, "w").name == "W4A16"
    with pytest.raises(UnsupportedError, match=r"w is WeightOnly.*gguf can hold it"):
        layout_for(FORMATS["fine-grained-fp8"], sct.WeightOnly("int8", 32), "w")
