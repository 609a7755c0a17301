"""benchmarks.decode at a small size: its processes, its table, its bars and its picture."""

import json

import pytest

pytest.importorskip("transformers")

CHOSEN = ["FP32", "ours e4m3fn", "ours nvfp4"]


def test__each_variant__decodes_in_its_process_and_has_its_bytes(tmp_path, capsys):
    from benchmarks import decode

    figures, picture = tmp_path / "rows.json", tmp_path / "roofline.png"
    sizes = ["--quick", "--threads", "1", "--paths", "eager", "--rounds", "2", "--tokens", "4"]
    files = ["--json", str(figures), "--picture", str(picture)]
    assert decode.main([*sizes, "--variants", *CHOSEN, *files]) == 0
    printed = capsys.readouterr().out
    rows = {r["name"]: r for r in json.loads(figures.read_text())["rows"]}
    assert list(rows) == [*CHOSEN, decode.OVERHEAD]
    for name, row in rows.items():
        assert f"| {name if name == decode.OVERHEAD else f'`{name}`'} | eager |" in printed
        assert len(row["seconds"]) == 2 * (4 - 1)  # the first token includes the prompt
        assert all(wall > 0 and cpu > 0 for wall, cpu in row["seconds"])
        assert row["peak"] > row["facts"]["bytes"]
    whole = rows["FP32"]["facts"]["bytes"]
    assert 0.25 <= rows["ours e4m3fn"]["facts"]["bytes"] / whole <= 0.27
    assert 0.14 <= rows["ours nvfp4"]["facts"]["bytes"] / whole <= 0.16
    assert printed.count("(bar: at most") == 2
    assert printed.count("(bar: at least") == 2
    assert printed.count("limited by") == len(CHOSEN)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test__an_error__leaves_out_the_row_of_another_library_and_no_row_of_ours(capsys):
    from benchmarks import decode

    decode.told("peer", "torchao", "ValueError: no CPU")
    assert "peer is left out: ValueError: no CPU" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="FP32 fails: ValueError"):
        decode.told("FP32", "torch", "ValueError: no CPU")
