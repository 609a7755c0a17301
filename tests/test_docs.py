"""The code in the README and in the pages runs as printed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import execute
from torch import nn

import scaledtensor as sct

ROOT = Path(__file__).parent.parent


def test__the_ten_lines_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert "ScaledTensor(" in capsys.readouterr().out
    assert not any(isinstance(p, sct.ScaledTensor) for p in scope["model"].parameters())


#: `transformers.md` needs other libraries: tests/users runs it.
HOW_TO = sorted(p for p in ROOT.glob("docs/how_to/*.md") if p.stem != "transformers")


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test__the_programs_of_how_to__run_and_print_what_they_say(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(page, tmp_path, capsys)


def test__every_relative_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test__the_page_of_recipes__is_what_its_script_writes() -> None:
    page = ROOT / "docs" / "recipes.md"
    written = subprocess.run(
        [sys.executable, page.with_name("write_recipes.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert page.read_text() == written, "python docs/write_recipes.py > docs/recipes.md"


def test__what_the_page_of_recipes_shows__runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, lora = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL
    )
    one, other = 'sct.scale_model(model, "current")', "sct.scale_model(model, MXFP8("
    for lines in (code[: code.index(other)], code.replace(one, "")):
        model = nn.ModuleDict({"head": nn.Linear(4, 4), "blocks": nn.ModuleList([nn.Linear(4, 4)])})
        exec(lines, {"model": model})
        assert any(isinstance(p, sct.ScaledTensor) for p in model.parameters())
    capsys.readouterr()
    exec(lora, {"__name__": "lora"})
    assert capsys.readouterr().out == "e4m3fn fp32\n"
