"""benchmarks.recipes at a small size: the order of the recipes on its data."""

import json

import pytest

from benchmarks import recipes


def test__the_table__has_every_recipe_in_a_plausible_order(tmp_path, capsys):
    path = tmp_path / "rows.json"
    recipes.main(["--size", "64", "--data", "gaussian", "outliers", "--json", str(path)])
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert set(recipes.RECIPES) <= set(rows)
    assert all(f"`{name}`" in printed for name in rows)
    y = {name: of["gaussian"][0] for name, of in rows.items()}
    assert 27 < y["Current()"] < 30
    assert 27 < y["Unit()"] < 30
    assert y["MXFP8()"] > y["NVFP4()"] + 8 > y["MXFP4()"] + 8
    dx = {name: of["gaussian"][1] for name, of in rows.items()}
    assert dx["Unit(gradient=e4m3fn)"] > dx["Unit()"] + 2  # a mantissa bit


def test__modes__put_rceil_first(capsys):
    recipes.main(["--modes"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for column in (1, 5):  # over the tensor; the mean over its blocks
        found = {words[0]: float(words[column]) for words in lines}
        assert found["floor"] < found["even"] < found["rceil"]
    assert found["floor"] == pytest.approx(31.1, abs=0.1)
    assert found["even"] == pytest.approx(31.45, abs=0.1)
    assert found["rceil"] == pytest.approx(31.74, abs=0.1)


def test__heads__saturate_in_e4m3_when_the_vocabulary_is_large():
    rows = [line.split(" | ") for line in recipes.heads((256, 131072), (0.0,)).splitlines()[2:]]
    small, large = ([float(cell.strip("| ").split(",")[1]) for cell in row[2:]] for row in rows)
    assert small[1] < 1.1 * small[0]
    assert large[1] > 3 * large[0]


def test__the_sweep__names_intervals_around_one(capsys):
    recipes.main(["--sweep", "--size", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["input", "weight", "gradient"]
    assert all("2^-" in line for line in lines)
