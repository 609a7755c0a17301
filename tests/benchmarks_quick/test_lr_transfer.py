"""The learning-rate benchmark searches in its documented places, keeps its runs, and shows all of
them."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcd", k=2000)))
    return path


def searched(loss, start):
    from benchmarks.lr_transfer import missing

    found = {}
    while exponents := missing(found, start):
        found |= {e: loss(e) for e in exponents}
    return found


@pytest.mark.parametrize("start", [-12, -3, 0, 9])
def test__search__reaches_the_minimum_from_anywhere_with_two_worse_on_each_side(start):
    from benchmarks.lr_transfer import best

    def loss(e):
        return math.inf if e > 4 else (e + 3) ** 2

    found = searched(loss, start)
    assert best(found) == -3
    assert {-5, -4, -3, -2, -1} <= found.keys()
    assert max(abs(e + 3) for e in found) <= max(abs(start + 3) + 2, 2)


def test__search__leaves_a_plateau_of_learning_rates_that_do_nothing():
    from benchmarks.lr_transfer import best

    assert best(searched(lambda e: max(e, -20), -30)) == -20


def test__fit__is_the_minimum_of_a_parabola_and_none_beside_a_divergence():
    from benchmarks.lr_transfer import fitted

    assert fitted({e: (e + 1.25) ** 2 for e in range(-4, 3)}) == pytest.approx(-1.25)
    assert fitted({-1: 2.0, 0: 1.0, 1: math.inf}) is None


def test__sweep__prints_and_draws_every_run_and_repeats_none(text, tmp_path, capsys, monkeypatch):
    from benchmarks import lr_transfer

    figures, picture = tmp_path / "runs.json", tmp_path / "lr.png"
    sizes = ["--widths", "32", "--steps", "2", "--parametrisations", "u-mup"]
    arguments = ["--text", str(text), *sizes, "--json", str(figures)]
    lr_transfer.main(arguments)
    first = capsys.readouterr().out
    runs = json.loads(figures.read_text())
    assert len(runs) >= 5
    for r in runs:
        assert f"2^{r['exponent']}, seed 0: {r['last']:.4f}" in first
        assert len(r["losses"]) == 2

    def refused(*_):
        raise AssertionError("a run that the file has was run again")

    monkeypatch.setattr(lr_transfer, "run", refused)
    lr_transfer.main([*arguments, "--plot", str(picture)])
    table = first[first.index("torch ") :]
    assert table.strip() in capsys.readouterr().out
    assert table.count("*") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test__sweep__goes_on_where_it_was_cut(text, tmp_path, capsys, monkeypatch):
    from benchmarks import lr_transfer

    def trained(task, text):
        last = (task.exponent + 7) ** 2 + 2.0
        return asdict(task) | {"last": last, "losses": [last] * task.steps}

    def pool(processes, context):
        return ThreadPoolExecutor(processes)  # processes would not have `trained`

    monkeypatch.setattr(lr_transfer, "run", trained)
    monkeypatch.setattr(lr_transfer, "ProcessPoolExecutor", pool)
    figures = tmp_path / "runs.json"
    sizes = ["--widths", "32", "--steps", "2", "--parametrisations", "standard"]
    arguments = ["--text", str(text), *sizes, "--json", str(figures)]
    lr_transfer.main(arguments)
    whole = capsys.readouterr().out
    runs = json.loads(figures.read_text())
    runs.sort(key=lambda r: r["last"])  # a search from the best of all needs no other runs
    figures.write_text(json.dumps(runs[:3]))
    lr_transfer.main(arguments)
    rest = capsys.readouterr().out
    assert rest.count("seed 0:") == len(runs) - 3
    assert whole[whole.index("\ntorch ") :] == rest[rest.index("\ntorch ") :]


def test__a_learning_rate_that_diverges__has_an_infinite_loss(text):
    from benchmarks.lr_transfer import PARAMETRISATIONS, Task, run

    assert set(PARAMETRISATIONS) == {"u-mup", "standard"}
    r = run(Task("standard", 32, 120, 0, 3, "of no text"), text)
    assert r["last"] == math.inf
    assert len(r["losses"]) < 3


def test__widths__are_whole_heads(text, capsys):
    from benchmarks.lr_transfer import main

    with pytest.raises(SystemExit):
        main(["--text", str(text), "--widths", "48"])
    assert "multiples of 32" in capsys.readouterr().err
