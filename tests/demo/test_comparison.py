from dataclasses import replace

import torch

from scaledtensor.apps import precision
from scaledtensor.apps.demo import ROWS, as_json, shares_of_e5m2, table, verdict
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.text import Corpus
from scaledtensor.apps.training import Run, Settings


def run(name: str, loss: float, weight: float = 1.0) -> Run:
    row = ROWS[name]
    return Run(
        precision=precision.get(row.precision),
        settings=Settings(loss_multiplier=row.loss_multiplier),
        losses=[loss] * 30,
        held_out_loss=loss + 0.1,
        seconds=12.34,
        parameters={"weight": torch.tensor([weight])},
    )


RUNS = {
    "fp32": run("fp32", 2.0),
    "unit": run("unit", 2.001),
    "unit-small": run("unit-small", 2.001),
}


def test__table__lines_up_and_says_what_is_identical():
    assert table(RUNS).splitlines() == [
        "row                                loss  held-out  seconds  identical to the last bit",
        "-------------------------------------------------------------------------------------",
        "FP32                             2.0000    2.1000     12.3                           ",
        "FP8, ScaledTensor                2.0010    2.1010     12.3                           ",
        "FP8, ScaledTensor, loss x 2^-18  2.0010    2.1010     12.3                        yes",
    ]


def test__verdict__holds_when_the_figures_do():
    assert verdict(RUNS).startswith("Verdict: holds. FP8 with ScaledTensor ended +0.0010 nats")


def test__verdict__falls_short_when_a_figure_does():
    one_bit = {**RUNS, "unit-small": run("unit-small", 2.001, weight=1.0000001)}
    far = {**RUNS, "fp32": run("fp32", 1.9)}
    nan = {name: replace(r, losses=[float("nan")] * 30) for name, r in RUNS.items()}
    for runs in (one_bit, far, nan):
        assert verdict(runs).startswith("Verdict: falls short.")


def test__verdict__needs_its_rows():
    assert (
        verdict({"fp32": RUNS["fp32"]}) == "Verdict: none; it needs the rows unit, unit-small too."
    )


def test__shares__follow_the_borders_of_e5m2():
    exponents = torch.tensor([-30.0, -17, -16.9, -15, -14, 0, 15, 16])
    shares = shares_of_e5m2(torch.cat((exponents.exp2(), torch.zeros(5))))
    assert shares == {
        "rounds to zero": 2 / 8,  # 2^-17, half of the smallest subnormal, is a tie and goes to even
        "subnormal": 2 / 8,
        "normal": 3 / 8,
        "over the maximum": 1 / 8,
    }


def test__json__has_no_nan():
    corpus = Corpus.from_text("it", "ab" * 100, block_size=8)
    content = as_json({"fp32": run("fp32", float("nan"))}, GPTConfig(2), corpus)
    assert content["rows"]["fp32"]["loss"] is None
    assert content["rows"]["fp32"]["losses"] == [None] * 30
