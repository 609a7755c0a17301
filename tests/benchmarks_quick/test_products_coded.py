"""The benchmark of products with codes runs in a small form; no time is judged."""

import json
import math

import pytest

from scaledtensor import native

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())


def test__products_coded__prints_every_variant_with_its_ratios(tmp_path, capsys):
    from benchmarks import products_coded

    figures = tmp_path / "figures.json"
    small = ["--size", "64", "--rows", "1", "5", "--threads", "1", "--rounds", "1"]
    products_coded.main([*small, "--json", str(figures)])
    printed = capsys.readouterr().out
    found = json.loads(figures.read_text())
    names = {str(coded) for coded in products_coded.CODED}
    assert len(names) == len(products_coded.CODED)
    for rows in (1, 5):
        made = {f["name"]: f for f in found if f["rows"] == rows}
        assert made.keys() > {*names, products_coded.FLOAT32, products_coded.READ}
        for f in made.values():
            ratios = f["microseconds"], f["to_float32"], f["gigabytes"], f["of_roofline"]
            assert all(0 < ratio < math.inf for ratio in ratios)
            assert f"| {f['name']} | " in printed
    assert printed.count("one row, one thread") == len(products_coded.BARS)


def test__products_coded__needs_the_library(capsys):
    from benchmarks import products_coded

    with native.left_out(), pytest.raises(SystemExit):
        products_coded.main([])
    assert "there is no C++ library to time" in capsys.readouterr().err
