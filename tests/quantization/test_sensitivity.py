"""`inspect.sensitivity` measures each module alone, and plans configs under a budget of bytes."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from assertions import assert_each
from small_models import GPT
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor.errors import ModelError, QuantizationError
from scaledtensor.inspect import Sensitivity, sensitivity
from scaledtensor.inspect.sensitivity import Effect
from scaledtensor.quantization import quantize_

FP8, NVFP4 = sct.WeightOnly("e4m3fn"), sct.WeightOnly("nvfp4")


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, context=16, layers=2, heads=2, width=32, dropout=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(32, (3, 4, 17), generator=torch.Generator().manual_seed(1))
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def mlp() -> nn.Sequential:
    """Quantising the last layer costs more: the others pass through a small factor."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 16))


def inputs() -> list[Tensor]:
    return [torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def only(name: str) -> Any:
    return lambda module, fqn: fqn == name


def test__the_effect_of_a_module__is_the_loss_with_it_alone_in_few_bits() -> None:
    model = gpt().train()
    before = copy.deepcopy(model.state_dict())
    params = dict(model.named_parameters())
    found = sensitivity(model, [NVFP4, FP8], batches())
    assert model.training
    assert all(p is params[name] for name, p in model.named_parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return math.fsum(float(model.eval()(*b)[1]) for b in batches()) / 3

    plain = loss(copy.deepcopy(model))
    assert found.loss == plain
    assert len(found.effects) == 2 * 9
    for e in found.effects:
        (name,) = e.modules
        alone = quantize_(copy.deepcopy(model), e.config, only(name))
        assert e.rise == loss(alone) - plain
        weight = alone.get_submodule(name).weight
        assert e.bytes == weight.nbytes < e.plain_bytes == 4 * e.elements == 4 * weight.numel()
    bits = {
        e.config: {x.bits for x in found.effects if x.config == e.config} for e in found.effects
    }
    # NVFP4: 4 bits, 8 for 16 elements, and 32. FP8: 8 bits, 32 for a row of 32 or 128, and 32.
    assert all(4.5 < b < 4.6 for b in bits[NVFP4])
    assert all(8.2 < b < 9.1 for b in bits[FP8])
    text = str(found)
    assert f"rise of the loss from {plain:.6g}" in text
    assert "blocks.0.attention.qkv" in text
    assert text.count("WeightOnly(e2m1fn two_level 1x16)") == 9
    assert found.rows()[0]["modules"] == list(found.effects[0].modules)


def test__without_a_loss__effects_are_relative_errors() -> None:
    model, data = mlp(), inputs()
    found = sensitivity(model, FP8, iter(data))
    assert found.loss is None
    (last,) = (e for e in found.effects if e.modules == ("3",))
    alone = quantize_(copy.deepcopy(model), FP8, only("3"))
    with torch.no_grad():
        y = torch.cat([model(x) for x in data]).double()
        z = torch.cat([alone(x) for x in data]).double()
    assert last.rise == pytest.approx(float((z - y).norm() / y.norm()), rel=1e-6)
    labelled = [{"input": x} for x in data]
    given = sensitivity(model, FP8, labelled, lambda y, b: F.mse_loss(y, b["input"][:, :16]))
    assert given.loss is not None
    # Configs that need data are calibrated with the batches.
    static = sensitivity(model, [sct.Static("e4m3fn")], data)
    assert all(0 < e.rise < 0.2 for e in static.effects)


def test__modules_that_share_a_weight__are_one() -> None:
    model = gpt()
    model.head.weight = model.token_embedding.weight
    roles = ("linear", "head", "embedding")
    config = sct.WeightOnly("nvfp4", roles=roles)
    found = sensitivity(model, [FP8, config], batches())
    tied = [e for e in found.effects if "head" in e.modules]
    assert [e.modules for e in tied] == [("token_embedding", "head")]
    plan = found.plan(bits=5)
    assert plan["head"] == plan["token_embedding"] == config
    quantize_(model, plan)
    assert model.head.weight is model.token_embedding.weight
    assert model.head.weight.config == config


def test__a_plan__has_the_least_sum_of_rises_under_its_budget() -> None:
    """Compared with every plan there is."""
    generator = torch.Generator().manual_seed(0)
    configs = [FP8, NVFP4, sct.WeightOnly("int4", 32)]
    sizes = [1000, 1300, 700, 2000]
    effects = []
    for i, n in enumerate(sizes):
        for config, byte in zip(configs, (1.1, 0.6, 0.5), strict=True):
            rise = float(torch.rand((), generator=generator)) / byte
            effects.append(Effect((f"m.{i}",), config, rise, int(n * byte), 4 * n, n))
    found = Sensitivity(tuple(effects), 1.0)

    def check(budget: int) -> None:
        plan = found.plan(budget)
        own = {(e.modules[0], e.config): (e.bytes, e.rise) for e in effects}
        own |= {(f"m.{i}", None): (4 * n, 0.0) for i, n in enumerate(sizes)}
        costs = [own[name, config] for name, config in plan.items()]
        assert sum(c[0] for c in costs) <= budget
        every = itertools.product(*([own[f"m.{i}", c] for c in (None, *configs)] for i in range(4)))
        best = min(sum(c[1] for c in p) for p in every if sum(c[0] for c in p) <= budget)
        assert sum(c[1] for c in costs) == pytest.approx(best)

    assert_each((2500, 2501, 3000, 4321, 5000, 9999, 20_000, 10**9), check)
    assert set(found.plan(20_000).values()) == {None}
    assert found.plan(bits=4.5) == found.plan(5000 * 45 // 80)
    broken = Sensitivity((Effect(("m",), NVFP4, math.nan, 50, 400, 100),), 1.0)
    assert broken.plan(400) == {"m": None}
    with pytest.raises(QuantizationError, match="finite"):
        broken.plan(100)


def test__a_plan__is_a_config_of_quantize_() -> None:
    model, data = mlp(), inputs()
    found = sensitivity(model, [FP8, NVFP4], data)
    sums = {
        e.config: sum(x.bytes for x in found.effects if x.config == e.config) for e in found.effects
    }
    budget = (sums[FP8] + sums[NVFP4]) // 2
    plan = found.plan(budget_bytes=budget)
    assert list(plan) == ["0", "2", "3"]
    assert set(plan.values()) == {FP8, NVFP4}
    quantize_(model, plan)
    held = {name: m.weight for name, m in model.named_children() if isinstance(m, nn.Linear)}
    assert {name: w.config for name, w in held.items()} == plan
    assert sum(w.nbytes for w in held.values()) <= budget
    assert all(found.plan(budget_bytes=10**9)[name] is None for name in held)


def test__what_cannot_be_measured__is_refused_by_name() -> None:
    found = sensitivity(mlp(), NVFP4, inputs())
    trains = quantize_(mlp(), FP8, train=True)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).argmax(-1)

    cases: dict[str, tuple[Any, type[Exception], str]] = {
        "no batch": (lambda: sensitivity(mlp(), FP8, []), QuantizationError, "no batch"),
        "no config": (lambda: sensitivity(mlp(), [], inputs()), QuantizationError, "a config"),
        "no weight": (
            lambda: sensitivity(nn.LayerNorm(32), FP8, inputs()),
            QuantizationError,
            "no config chooses a weight",
        ),
        "no config at all": (
            lambda: sensitivity(mlp(), ["fp8"], inputs()),
            QuantizationError,
            "fp8",
        ),
        "trains": (lambda: sensitivity(trains, FP8, inputs()), ModelError, "trains"),
        "quantised": (
            lambda: sensitivity(quantize_(mlp(), FP8), FP8, inputs()),
            ModelError,
            "quantised already",
        ),
        "no floats": (lambda: sensitivity(Counts(), FP8, inputs()), ModelError, "floats"),
        "a small budget": (lambda: found.plan(100), QuantizationError, "smallest possible, 1"),
        "no budget": (found.plan, QuantizationError, "one budget"),
        "two budgets": (lambda: found.plan(9999, bits=4), QuantizationError, "one budget"),
    }

    def check(name: str) -> None:
        call, kind, text = cases[name]
        with pytest.raises(kind, match=text):
            call()

    assert_each(cases, check)
    # An error in the middle leaves the model as it was.
    model, calls = mlp(), []

    def loss(y: Tensor, batch: Tensor) -> Tensor:
        calls.append(y)
        if len(calls) > 3:
            raise ZeroDivisionError
        return y.sum()

    with pytest.raises(ZeroDivisionError):
        sensitivity(model, FP8, inputs(), loss)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.training


def test__a_loader_of_pairs__is_named():
    model = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(QuantizationError, match="a tuple, does not fit"):
        sct.inspect.sensitivity(model, [sct.WeightOnly()], [(torch.randn(2, 8), torch.zeros(2))])
