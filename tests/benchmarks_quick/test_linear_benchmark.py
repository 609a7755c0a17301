"""The benchmark of one linear layer runs in a small form; no time is judged."""

import json
import math

import pytest

import scaledtensor as sct


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((16, 64), ["--paths", "eager"]), ((64,), ["--bias"])],
    ids=["eager", "bias, compiled too"],
)
@pytest.mark.parametrize("has_peer", [True, False])
def test__linear__prints_every_row_with_its_ratios(
    has_peer, sizes, options, tmp_path, capsys, monkeypatch
):
    from benchmarks import linear

    if has_peer:
        pytest.importorskip("torchao")
    else:
        monkeypatch.setattr(linear, "installed", lambda name: name != "torchao")
    figures = tmp_path / "times.json"
    given = ["--sizes", *map(str, sizes), "--rounds", "1", *options, "--all"]
    given += ["--json", str(figures)]
    linear.main(given)
    printed = capsys.readouterr().out
    paths = ["eager"] if "--paths" in options else ["eager", "compiled"]
    rows = ["fp32", "bf16", "unit", "unit, plain input", *["torchao float8"] * has_peer]
    wanted = {f"{row} {path}" for row in rows for path in paths}
    found = json.loads(figures.read_text())
    assert found["versions"].keys() == {"torch", "scaledtensor", *["torchao"] * has_peer}
    assert ("not installed" in printed) is not has_peer
    for n in sizes:
        assert found["milliseconds"][str(n)].keys() == wanted
        table = printed.partition(f"| {n} x {n} x {n} |")[2].partition("\n\n")[0]
        cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        assert {f"{row} {path}" for row, path, *_ in cells} == wanted
        for row, path, milliseconds, *ratios, bar in cells:
            assert all(0 < float(x) < math.inf for x in (milliseconds, *ratios))
            assert bar.endswith("met") is (row == "unit"), path


def test__linear__takes_any_recipe_and_no_unknown_one(capsys):
    from benchmarks import linear
    from scaledtensor.errors import RecipeError

    small = ["--sizes", "16", "--rounds", "1", "--paths", "eager"]
    linear.main([*small, "--recipes", "unit", "unit"])
    assert capsys.readouterr().out.count("\n| unit | eager |") == 1
    with pytest.raises(RecipeError, match="unknown recipe"):
        linear.main([*small, "--recipes", "none"])


def test__linear__profiles_one_variant_and_names_them_all(capsys):
    from benchmarks.linear import main

    small = ["--sizes", "16", "--paths", "eager"]
    main([*small, "--profile", "unit eager", "--lines", "5"])
    assert "Self CPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*small, "--profile", "theirs"])
    assert "unit, plain input eager" in capsys.readouterr().err


@pytest.mark.parametrize(("products", "rows"), [("float32", 3), ("bfloat16", 4)])
def test__linear__compares_with_what_the_machine_multiplies_fast(products, rows, capsys):
    from benchmarks import linear

    with sct.products_in(products):
        linear.main(["--sizes", "16", "--rounds", "1", "--paths", "eager"])
    printed = capsys.readouterr().out
    assert f"products in {products}" in printed
    assert printed.count("\n| ") - 1 - ("torchao float8" in printed) == rows
    (unit,) = (line for line in printed.splitlines() if line.startswith("| unit | eager"))
    bar = linear.BARS[products == "bfloat16"][1]["unit"]["eager"]
    assert f"| {bar}: " in unit
