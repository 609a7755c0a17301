"""Pages of the site: their code runs, and their drawings come from the scripts that they name."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pages import execute

import scaledtensor as sct

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["index", "quickstart", "concepts", "from_nothing"])
def test__the_blocks_of_a_page__run_in_order_and_print_what_they_say(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(DOCS / f"{page}.md", tmp_path, capsys)


def test__fp8_from_nothing__uses_torch_alone_in_about_300_lines() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "from_nothing.md").read_text(), re.DOTALL)
    imported = set(re.findall(r"^(?:import|from) (\w+)", "".join(blocks), re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"torch"}
    assert 250 <= sum(len(block.splitlines()) for block in blocks) <= 350


def test__the_drawings__are_what_their_script_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = script("draw")
    monkeypatch.setattr(draw, "FOLDER", tmp_path)
    for name in ("scale", "step", "casts", "granularity"):
        getattr(draw, name)()
        drawn, kept = tmp_path / f"{name}.svg", DOCS / "pictures" / f"{name}.svg"
        assert drawn.read_text() == kept.read_text(), "python docs/draw.py"


def test__the_navigation_of_the_site__has_every_page_once() -> None:
    site = script("build_site")
    named = sorted(page for entries in site.NAVIGATION.values() for page in entries)
    pages = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")} - {*site.PARTS, "index.md"}
    assert named == sorted(page.removesuffix(".md") for page in {*pages, *site.OUTSIDE})


def test__the_reference__has_an_entry_for_every_public_name(tmp_path: Path) -> None:
    site = script("build_site")
    site.assemble(tmp_path)
    own = {f"scaledtensor.{m}" for m in site.MODULES}
    for module in ("scaledtensor", *site.MODULES):
        page = (tmp_path / "reference" / f"{module}.md").read_text()
        for name in site.public_names(module):
            parent = site.full_name(module)
            entry = (
                rf"^\.\. auto\w+:: {parent}::{name}$|^\.\. py:\w+:: {name}\n   :module: {parent}$"
            )
            alone = f"{parent}.{name}" in own or f"automodule:: {parent}.{name}\n" in page
            assert alone or re.search(entry, page, re.MULTILINE), f"{parent}.{name}"


def test__docstrings__become_restructured_text() -> None:
    site = script("build_site")
    got = site.restructured("Cast `x`s by 2 * k_.\n\nAs in\n\n    y = a * b  # `c`\n\nand on.")
    assert got == [
        *(r"Cast ``x``\ s by 2 \* k\_.", "", "As in", "", "::", ""),
        *("    y = a * b  # `c`", "", "and on."),
    ]


def test__a_module_that_is_public__has_a_page() -> None:
    site = script("build_site")
    modules = {n for n in sct.__all__ if isinstance(getattr(sct, n), ModuleType)}
    assert modules <= set(site.MODULES)
