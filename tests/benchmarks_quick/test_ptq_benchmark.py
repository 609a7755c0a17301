"""benchmarks.ptq at a small size: models are kept, all rows are measured, and bars are judged."""

import json
import random

import pytest
import torch


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcd \n", k=4000)))
    return path


def run(text, folder, *more):
    from benchmarks import ptq

    sizes = ["--quick", "--seeds", "1", "--windows", "4", "--text", str(text)]
    figures = folder / "figures.json"
    ptq.main([*sizes, "--models", str(folder / "models"), "--json", str(figures), *more])
    return json.loads(figures.read_text())


def test__every_row__is_measured_on_a_model_that_is_trained_once(text, tmp_path, capsys):
    from benchmarks import ptq

    found = run(text, tmp_path, "--only", "gpt")["gpt"][0]
    printed = capsys.readouterr().out
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "models").iterdir()}
    assert len(kept) == 1
    assert list(found) == [r for r in ptq.ROWS if r in found]
    assert {r for r, row in ptq.ROWS.items() if row.library == "torch"} <= set(found)
    whole = found["FP32"]["bytes"]
    assert found["BF16"]["bytes"] == whole / 2
    assert 0.25 < found["WeightOnly(e4m3fn)"]["bytes"] / whole < 0.3
    assert 0.14 < found["WeightOnly(nvfp4)"]["bytes"] / whole < 0.16
    assert found["WeightOnly(e5m2)"]["loss"] != found["FP32"]["loss"]
    judged = [line for line in printed.splitlines() if "(bar: at most" in line]
    assert len(judged) == sum(bar.model == "gpt" for bar in ptq.BARS)
    # The second run trains nothing, and measures the same.
    again = run(text, tmp_path, "--only", "gpt", "--rows", "WeightOnly(e4m3fn)")["gpt"][0]
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert again == {r: found[r] for r in ("FP32", "WeightOnly(e4m3fn)")}


def test__the_bert__reads_functions_of_twenty_packages(text, tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from benchmarks import ptq, ptq_models

    data = ptq_models.functions(ptq_models.QUICK)
    assert len(data.packages) == 20
    assert not {tuple(f) for f in data.train} & {tuple(f) for f in data.held_out}
    rows = [bar.row for bar in ptq.BARS if bar.model == "bert" and "feedback" not in bar.row]
    found = run(text, tmp_path, "--only", "bert", "--rows", *rows)["bert"][0]
    assert list(found) == ["FP32", *rows]
    assert all(0 <= f["accuracy"] <= 100 and f["loss"] > 0 for f in found.values())
    assert len(list((tmp_path / "models").iterdir())) == 2  # before and after fine-tuning
    printed = capsys.readouterr().out
    assert printed.count("(bar: at most") == len(rows)


def test__static_inference__measures_nothing_and_the_count_is_not_blind(text, tmp_path, capsys):
    from benchmarks import ptq

    run(text, tmp_path, "--only", "gpt", "--rows", *ptq.COUNTED)
    lines = [line for line in capsys.readouterr().out.splitlines() if "measure a range" in line]
    static, dynamic = (int(line.split(": ")[1].split()[0]) for line in lines)
    assert static == 0
    assert dynamic >= 5  # one for each of the linear layers


def test__without_a_text__the_gpt_is_left_out(capsys):
    from benchmarks import ptq

    assert ptq.main(["--quick", "--only", "gpt", "--rows", "FP32"]) == 0
    assert "the GPT is left out: --text FILE" in capsys.readouterr().out


def test__bars__count_points_lost_and_nats_gained():
    from benchmarks import ptq

    static = "Static(e4m3fn), per tensor, amax"
    runs = [
        {"FP32": {"accuracy": 80.0, "loss": 1.0}, static: {"accuracy": 80.0 - a, "loss": 1.0}}
        for a in (0.2, 0.3)
    ]
    assert [met for _, met in ptq.verdicts({"bert": runs})] == [True]
    runs[1][static]["accuracy"] = 79.0
    assert [met for _, met in ptq.verdicts({"bert": runs})] == [False]


def test__masked__hides_tokens_as_bert_does():
    from benchmarks.ptq_models import MASK, masked

    tokens = torch.full((64, 1024), 50)
    inputs, targets = masked(tokens, 100, torch.Generator().manual_seed(0))
    chosen = targets != -100
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (inputs == MASK)[chosen].float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (inputs == 50)[chosen].float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(inputs[~chosen], tokens[~chosen])
