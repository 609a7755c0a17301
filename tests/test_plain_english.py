"""Docstrings, comments and pages have no phrases that a reader has to decode."""

from pathlib import Path

import plain_english
import pytest
from plain_english import ROOT, files, find


def test__no_file_has_a_riddle() -> None:
    hits = [str(hit) for path in files([]) for hit in find(path)]
    assert not hits, "\n".join(hits)


def test__each_intended_phrase_is_still_there() -> None:
    texts = {p: " ".join((ROOT / p).read_text().split()) for p, _ in plain_english.INTENDED}
    assert [key for key in plain_english.INTENDED if key[1] not in texts[key[0]]] == []


@pytest.mark.parametrize(
    "text",
    [
        "Of weights, where it is not that of forward",
        "Of its operands an activation is kept, as that pass will read it.",
        "A tensor of zeros, whose scale is that of what comes.",
        "It, or this rank's shard of it.",
        "The library; None where there is none.",
        "Changes a call. What is not said stays as it is.",
        "Users who comes from another library change an import.",
        "Costs a state, for the price of one.",
        "Which elements of a tensor share a scale.",
        "As add.",
        "As `add`, of two\noperands.",
        "By value.",
        "In float32, whose range is larger.",
        "Args:\n  x: What the operator was given.",
        "- Of weights.",
        "Multiplies what the operand holds.",
        "| `a` | Of weights. |",
    ],
)
def test__a_riddle__is_found(text: str, tmp_path: Path) -> None:
    for name, whole in (
        ("a.md", text),
        ("a.py", f'def f():\n    """{text}"""\n'),
        ("b.py", "".join(f"# {line}\n" for line in text.splitlines())),
    ):
        (tmp_path / name).write_text(whole)
        assert find(tmp_path / name, tmp_path), name


@pytest.mark.parametrize(
    "text",
    [
        "Format of weights; defaults to `forward`.",
        "In float32, the sum is exact.",
        "On a CPU the sum runs in float32.",
        "By default, the format is `of what is not`.",
        "As a graph is traced once, its sizes are symbolic.",
        "Where a scale is shared, the cast reads it once.",
        "Three layers, none of which has a bias, and all of which train.",
        "What does it cost?",
        "The error says what was given.",
        "## What the layers do",
        "Example:\n\n>>> of = 'As add.'\n",
    ],
)
def test__a_plain_sentence__is_not_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(text)
    assert find(tmp_path / "a.md", tmp_path) == []


def test__code_blocks_and_strings__are_not_searched(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("Text.\n\n```text\nAs add.\n```\n\n    By value.\n")
    (tmp_path / "a.py").write_text('message = "None where there is none."\n')
    assert find(tmp_path / "a.md", tmp_path) == find(tmp_path / "a.py", tmp_path) == []
