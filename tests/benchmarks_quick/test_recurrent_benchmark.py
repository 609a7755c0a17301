"""The benchmark of recurrent layers runs in a small form; no time is judged."""

import re


def test__recurrent__prints_a_line_for_each_layer(capsys):
    from benchmarks import recurrent

    recurrent.main(["--widths", "4", "8", "--kinds", "GRU", "RNN", "--rounds", "1", "--operators"])
    title, *lines = capsys.readouterr().out.splitlines()
    assert "ratio to float32" in title
    assert [line.partition(":")[0] for line in lines] == ["GRU 4", "GRU 8", "RNN 4", "RNN 8"]
    ratio = r"\d+\.\d \(\d+\.\d\)"
    for line in lines:
        names = ("fp32", "unit", "bf16", "unit, operators")
        expected = ", ".join(f"{name} {ratio}" for name in names)
        assert re.fullmatch(rf"\w+ \d: {expected}", line), line
