"""A slice of the fuzzer, which differs each day, and every program that has ever failed.

`python tests/fuzz` runs as many programs as asked (`make fuzz`: 20,000).
"""

import time
from pathlib import Path

import pytest
import torch
from programs import OPERATORS, Program, Step, differences, drawn, smaller, sound, without

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


def first() -> int:
    """Return the first seed of the day's slice."""
    return int(time.time() // 86_400) * 1000


@pytest.mark.parametrize("part", range(4))
def test__random_programs__are_those_of_float64(part):
    for seed in range(first() + part * 10, first() + part * 10 + 10):
        found = differences(drawn(seed))
        assert not found, f"python tests/fuzz --seed {seed} --programs 1: {found}"


def test__random_programs__compiled():
    for seed in range(first(), first() + 2):
        found = differences(drawn(seed), "aot_eager")
        assert not found, (
            f"python tests/fuzz --seed {seed} --programs 1 --compile aot_eager: {found}"
        )


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test__programs_that_failed_once__pass(path, backend):
    assert not differences(Program.load(path.read_text()), backend)


def test__a_program__round_trips_and_can_lose_any_step():
    program = drawn(3)
    assert Program.load(program.dump()) == program
    for n in range(len(program.steps)):
        assert len(without(program, n).steps) == len(program.steps) - 1
        sound(without(program, n))


@pytest.mark.parametrize("fault", [lambda x: x * 1.01, lambda x: -x, lambda x: x * float("nan")])
def test__a_planted_fault__is_found_and_made_small(fault, monkeypatch):
    """Faults of 1 percent in float32, of a sign, and of a NaN, each in one operator and for
    ScaledTensors alone."""
    true = OPERATORS["sub"]

    def wrong(x, y, n):
        out = true(x, y, n)
        return out if out.dtype is torch.float64 else fault(out)

    monkeypatch.setitem(OPERATORS, "sub", wrong)
    program = next(
        p
        for p in map(drawn, range(2000))
        if any(s.op == "sub" for s in p.steps)
        and all(i.format == "fp32" for i in p.inputs)
        and differences(p)
    )
    found = smaller(sound(program), lambda p: bool(differences(p)))
    assert len(found.steps) <= 4
    assert any(s.op == "sub" for s in found.steps)
    assert isinstance(found.steps[0], Step)
