"""What docs/how_to/transformers.md shows runs as it stands there, section by section.

`test_docs.py` runs the other pages, which need no other library.
"""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "transformers.md"
PACKAGES = ("transformers", "accelerate", "peft", "lightning", "timm", "diffusers", "einops")


def sections() -> list[tuple[str, list[str]]]:
    """The heading and the blocks of each section; the first section goes before each."""
    found = []
    first: list[str] = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
        if blocks:
            found.append((part.partition("\n")[0], first + blocks))
            first = first or blocks
    return found


@pytest.mark.parametrize(("heading", "blocks"), sections(), ids=lambda x: str(x)[:40])
def test__a_section__runs(heading, blocks, tmp_path, monkeypatch):
    code = "\n".join(blocks)
    needed = {name for name in PACKAGES if re.search(rf"^(from|import) {name}\b", code, re.M)}
    if "import Trainer" in code:
        needed.add("accelerate")
    for name in needed:
        pytest.importorskip(name)
    assert needed
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": heading}
    for block in blocks:
        exec(block, scope)
    assert any(tmp_path.iterdir())
