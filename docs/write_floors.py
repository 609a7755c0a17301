"""Writes the list of tests/floors.py into docs/architecture.md.

    python docs/write_floors.py

The list is the fenced block of the section "Floors". The highest floor comes first there, and an
empty line separates two floors.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
sys.path.insert(0, str(ROOT / "tests"))

from floors import FLOORS  # noqa: E402


def block() -> str:
    """Return the floors as aligned lines, one for each module or package."""
    width = max(len(part) for floor in FLOORS for part in floor) + len(".py  ")
    return "\n\n".join(
        "\n".join(f"{_name(part):{width}}{about}" for part, about in floor.items())
        for floor in reversed(FLOORS)
    )


def _name(part: str) -> str:
    is_package = (ROOT / "scaledtensor" / part).is_dir()
    return f"{part}/" if is_package else f"{part}.py"


def written(page: str) -> str:
    """Return the text of the page with the block of today's list."""
    found, count = re.subn(
        r"(?<=\n## Floors\n\n```\n).*?(?=\n```\n)", lambda _: block(), page, flags=re.DOTALL
    )
    assert count == 1, "docs/architecture.md has no fenced block below '## Floors'"
    return found


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
