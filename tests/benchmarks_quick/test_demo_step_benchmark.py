"""The benchmark of the demo's step in its quick form."""

import json
import sys


def test__demo_step__prints_each_row_and_writes_what_it_printed(monkeypatch, capsys, tmp_path):
    from benchmarks import demo_step

    words = tmp_path / "words.txt"
    words.write_text("to be or not to be, that is the question\n" * 40)
    given = ["--rounds", "1", "--threads", "1", "--text", str(words)]
    monkeypatch.setattr(demo_step, "WARM_UP", 1)
    monkeypatch.setattr(sys, "argv", ["demo_step", *given, "--json", str(tmp_path / "x.json")])
    demo_step.main()
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert "1 thread, torch" in first
    report = json.loads((tmp_path / "x.json").read_text())
    assert [row.split()[0] for row in rows] == list(report["rows"]) == list(demo_step.ROWS)
    for row, figures in zip(rows, report["rows"].values(), strict=True):
        assert row.split()[3] == f"{figures['cpu']:.2f}"
        assert figures["cpu_ms"] > 0
    assert report["rows"]["fp32"]["cpu"] == 1
