"""The benchmark of the guard in its quick form."""

import sys


def test__guard__prints_errors_and_a_cost(monkeypatch, capsys):
    from benchmarks import guard

    monkeypatch.setattr(sys, "argv", ["guard", "--steps", "1", "--width", "64"])
    monkeypatch.setattr(guard, "CASES", {"one sign, 6 layers": guard.one_sign})
    guard.main()
    first, names, errors, features, cost = capsys.readouterr().out.splitlines()
    assert first.startswith("torch ")
    assert names.split()[3:] == [*guard.RECIPES, "calibrated"]
    cells = dict(
        zip(
            names.split()[3:],
            errors.removeprefix("one sign, 6 layers").split("nan")[0].replace(" / ", "/").split(),
            strict=True,
        )
    )
    assert float(cells["unguarded"].split("/")[0]) > 2 * float(cells["unit"].split("/")[0])
    assert features.count(",") == 4
    assert float(cost.rpartition(" ")[2]) > 0
