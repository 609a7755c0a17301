"""The notebooks of examples/ run in a small setting, and their outputs contain nothing private."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PICTURE, NOTEBOOK = 60_000, 150_000  # bytes, as text
#: Paths of a home, temporary or system folder, on any of three systems.
ABSOLUTE = re.compile(r"(?<![\w/.])/(?:home|Users|root|work|tmp|usr|opt|var|mnt)/|[A-Z]:\\")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test__the_notebooks__are_three() -> None:
    assert [p.stem for p in NOTEBOOKS] == ["fp8_gpt", "lr_transfer", "new_op"]


@every_notebook
def test__a_notebook__runs_from_its_first_cell_to_its_last(path: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples" / "execute.py"), str(path)]
    small = {"SCALEDTENSOR_EXAMPLES": "small", "OMP_NUM_THREADS": "1"}
    before = path.read_bytes()
    run = subprocess.run(
        [*script, "--out", str(tmp_path)],
        env=os.environ | small,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    made = read(tmp_path / path.name)
    assert [cell.source for cell in made.cells] == [cell.source for cell in read(path).cells]
    assert path.read_bytes() == before


@every_notebook
def test__a_notebook__was_executed_in_order(path: Path) -> None:
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr"


@every_notebook
def test__a_notebook__names_no_folder_of_a_machine(path: Path) -> None:
    for cell in read(path).cells:
        texts = [cell.source]
        for output in cell.get("outputs", ()):
            texts += [output.get("text", ""), *_texts(output.get("data", {}))]
        for text in texts:
            assert not ABSOLUTE.search(text), text


def _texts(data: dict[str, str]) -> list[str]:
    return [text for kind, text in data.items() if not kind.startswith("image/")]


@every_notebook
def test__a_notebook__is_small(path: Path) -> None:
    assert path.stat().st_size < NOTEBOOK
    for cell in read(path).cells:
        for output in cell.get("outputs", ()):
            for kind, data in output.get("data", {}).items():
                assert not kind.startswith("image/") or len(data) < PICTURE
