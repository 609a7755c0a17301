"""The benchmark beside the published library runs in a small form; no time is judged."""

import json

import pytest

SMALL = ["--rounds", "1", "--layers", "1", "--width", "64", "--context", "16", "--batch", "1"]


@pytest.mark.parametrize("has_peer", [True, False])
def test__unit_scaling__prints_every_transform_and_bar(has_peer, tmp_path, capsys, monkeypatch):
    from benchmarks import unit_scaling

    if has_peer:
        pytest.importorskip("unit_scaling")
    else:
        monkeypatch.setattr(unit_scaling, "installed", lambda: False)
    figures = tmp_path / "times.json"
    unit_scaling.main([*SMALL, "--paths", "eager", "--json", str(figures)])
    printed = capsys.readouterr().out
    times = json.loads(figures.read_text())["milliseconds"]
    eager = [name for name, *_ in unit_scaling.BARS if "compiled" not in name]
    libraries = ["ours", "published"] if has_peer else ["ours"]
    assert {f"{library} {name}" for library in libraries for name in eager} < times.keys()
    for name in eager:
        (row,) = (line for line in printed.splitlines() if line.startswith(f"{name}  "))
        assert "bar" in row
        assert "target" in row
    assert ("not installed" in printed) is not has_peer


def test__unit_scaling__profiles_one_variant_and_names_them_all(capsys):
    from benchmarks.unit_scaling import main

    main([*SMALL, "--paths", "eager", "--profile", "ours both", "--lines", "5"])
    assert "Self CPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*SMALL, "--paths", "eager", "--profile", "theirs"])
    assert "ours both" in capsys.readouterr().err
