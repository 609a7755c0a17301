"""The benchmark of the guard in its quick form."""

import sys
from functools import partial

import torch


def test__guard__prints_errors_and_a_cost(monkeypatch, capsys):
    from benchmarks import guard

    monkeypatch.setattr(sys, "argv", ["guard", "--steps", "1", "--width", "64"])
    monkeypatch.setattr(guard, "CASES", {"one sign, 6 layers": guard.one_sign})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    guard.main()
    first, names, errors, features, *costs = capsys.readouterr().out.splitlines()
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
    assert [cost.split()[-2] for cost in costs] == ["eager:", "compiled:"]
    assert all(float(cost.split()[-1]) > 0 for cost in costs)
