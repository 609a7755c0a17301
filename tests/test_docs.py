"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import pytest

import scaledtensor as sct

ROOT = Path(__file__).parent.parent


def test__the_ten_lines_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert "ScaledTensor(" in capsys.readouterr().out
    model = scope["model"]
    assert not any(isinstance(p, sct.ScaledTensor) for p in model.parameters())  # type: ignore[attr-defined]


def test__every_relative_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
