"""The benchmark that counts a compiled step runs in its quick form."""

import json
import sys

import pytest


@pytest.mark.slow
def test__launches__count_what_the_graphs_and_the_code_have(monkeypatch, capsys, tmp_path):
    from benchmarks import launches

    given = ["--layers", "2", "--width", "64", "--only", "fp32", "bf16", "unit"]
    monkeypatch.setattr(sys, "argv", ["launches", *given, "--json", str(tmp_path / "x.json")])
    launches.main()
    _, names, *rows = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "x.json").read_text())
    assert [row.split()[0] for row in rows] == list(report) == ["fp32", "bf16", "unit"]
    plain, bf16, ours = report.values()
    assert names.split()[1:4] == ["nodes", "0-dim", "opaque"]
    assert plain["opaque"] == ours["opaque"] == 0
    # The graph of two layers has nine weights. Each looks at its inputs and at its gradients.
    assert (plain["looks"], ours["looks"]) == (0, 18)
    assert ours["nodes"] <= min(1.85 * plain["nodes"], 1.6 * bf16["nodes"])
    assert plain["0-dim"] < ours["0-dim"] <= 40
    assert 10 < plain["extern"] <= ours["extern"]
    assert plain["kernels"] > 5
    # torch's layer norm is a call, and each call ends a kernel.
    assert ours["kernels"] <= 1.3 * bf16["kernels"]
