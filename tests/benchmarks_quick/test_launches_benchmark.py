"""The benchmark that counts a compiled step runs in its quick form."""

import json
import sys

import pytest


@pytest.mark.slow
def test__launches__count_what_the_graphs_and_the_code_have(monkeypatch, capsys, tmp_path):
    from benchmarks import launches

    given = ["--layers", "1", "--width", "16", "--only", "fp32", "unit"]
    monkeypatch.setattr(sys, "argv", ["launches", *given, "--json", str(tmp_path / "x.json")])
    launches.main()
    _, names, *rows = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "x.json").read_text())
    assert [row.split()[0] for row in rows] == list(report) == ["fp32", "unit"]
    plain, ours = report.values()
    assert names.split()[1:4] == ["nodes", "0-dim", "opaque"]
    assert plain["opaque"] == ours["opaque"] == 0
    # The graph of one layer has five weights. Each looks at its inputs and at its gradients.
    assert (plain["looks"], ours["looks"]) == (0, 10)
    assert ours["nodes"] <= 1.85 * plain["nodes"]
    assert plain["0-dim"] < ours["0-dim"] <= 25
    assert 10 < plain["extern"] <= ours["extern"]
    assert plain["kernels"] > 5
    assert ours["kernels"] <= 1.4 * plain["kernels"]
