"""The formulas of the scaling model match the counts at small scale."""

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parent.parent.parent)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def benchmark(function, name):
    """Call a function of the benchmark on this rank."""
    sys.path.insert(0, ROOT)
    try:
        from benchmarks import traffic
    finally:
        sys.path.remove(ROOT)
    return list(getattr(traffic, function)(name))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("row", "way"),
    [
        ("DDP, float32", "DDP, float32"),
        ("DDP, bfloat16", "DDP, bfloat16"),
        ("DDP, FP8 by blocks", "DDP, FP8"),
        ("FSDP2, bfloat16", "FSDP2, bfloat16"),
        ("FSDP2, gradients in FP8", "FSDP2, gradients in FP8"),
        ("FSDP2, weights in FP8", "FSDP2, weights in FP8"),
        ("FSDP2, both in FP8", "FSDP2, both in FP8"),
    ],
)
def test__each_formula__gives_what_is_counted(world, row, way, ranks):
    from benchmarks import traffic

    found = traffic.Count(*world(ranks, benchmark, "count", row)[0])
    shape = traffic.shape_of(traffic.GPT(traffic.CONFIG))
    ((_, sharded, product, rest, gradient),) = [w for w in traffic.WAYS if w[0] == way]
    # Blocks end with a rank's part, so there are a few more scales than one for each 128 elements.
    exactly = {"rel": 1e-4 if gradient == traffic.FP8 else 1e-12}
    assert found.parameters == shape.parameters
    if sharded:
        weights, gradients = traffic.fsdp_sent(shape, ranks, product, rest, gradient)
        assert found.weights == pytest.approx(weights, rel=1e-12)
        assert found.gradients == pytest.approx(gradients, **exactly)
    else:
        assert found.weights == 0
        sent = traffic.ddp_sent(shape, ranks, gradient)
        assert found.gradients == pytest.approx(sent, **exactly)
    assert found.held == traffic.held(ranks, 8, sharded) * shape.parameters


def test__errors__are_least_by_blocks__where_tails_are_heavy(world):
    from benchmarks import traffic

    names = ("bfloat16", "E4M3FN by blocks", "E4M3FN auto")
    found = {name: world(4, benchmark, "errors", name)[0] for name in names}
    for tail, (half, block, auto) in enumerate(zip(*found.values(), strict=True)):
        assert half[0] < block[0] < 0.04
        assert block[0] <= auto[0] * 1.001
        assert half[1] < 0.002
        assert tail < 3 or auto[1] > 0.2 > 10 * block[1]  # elements that became zero
    table = traffic.table_of_errors(found).splitlines()
    assert table[0] == "| wire | Gaussian | t = 1 | t = 2 | t = 3 |"
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in names]


def test__the_tables__say_what_they_are_given(capsys):
    from benchmarks import traffic

    assert [f"{shape.parameters / 1e9:.2f}" for shape in traffic.LLAMAS] == [
        "6.74",  # as published
        "70.55",
        "405.85",
    ]
    assert traffic.main(["--model", "--states", "2.19"]) == 0
    sent, held = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    assert len(sent) == 2 + 3 * len(traffic.WAYS)
    (ddp,) = [line for line in sent if "7B | DDP, FP8" in line]
    assert f"| {2 * 7 / 8 * 6.738 * (129 / 128):.1f} |" in ddp
    assert held[2] == "| bytes a parameter | 10.2 | 1.27 | 0.159 | 0.0199 | 0.00249 |"
    page = (Path(ROOT) / "docs" / "distributed.md").read_text()
    assert traffic.table_of_sent() in page  # python -m benchmarks.traffic --model
    assert traffic.table_of_held(8) in page
    one = traffic.Count([("all-reduce", "uint8", 2, 10.0)], 0, 10.0, 0, 5)
    two = one._replace(gradients=20.0)
    rows = {"DDP, FP8 auto": one, "DDP, bfloat16": two}
    table = traffic.table_of_counts({2: rows}).splitlines()
    assert table[2] == "| 2 | DDP, FP8 auto |  | 2.000 | 0.500 | 2 all-reduce uint8 |"
