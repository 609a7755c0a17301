"""benchmarks.gpu on a CPU at a small size: every row runs, compiled, and the table is whole."""

import json
from functools import partial

import pytest
import torch

from benchmarks import gpu


def test__every_row_and_shape__has_a_line(tmp_path, capsys, monkeypatch):
    # The times mean nothing here. Tests of recipes cover Inductor's code for such layers.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    path = tmp_path / "found.json"
    sizes = {"tokens": 64, "layers": 1, "width": 64, "shrink": 64, "rounds": 1, "device": "cpu"}
    small = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    gpu.main([*small, "--rows", "unit", "--json", str(path)])
    found = json.loads(path.read_text())
    assert [r["row"] for r in found] == ["unit"] * 4
    assert all(r["ms"] > 0 and r["peak"] is None for r in found)
    printed = capsys.readouterr().out
    assert printed.count("not measured") == 4
    assert "| up 64x172 | unit |" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test__without_a_device__it_says_so(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no CUDA device is at hand" in capsys.readouterr().err
