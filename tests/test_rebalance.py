"""`rebalance` and `statistics` choose new scales for the same values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import gaussian
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import DTypeError, ScaleError, UnsupportedError
from scaledtensor.scales.powers import is_power_of_two


def drifted(power: float, fmt: str = "fp32", seed: int = 0) -> sct.ScaledTensor:
    """Return a tensor with values that grew by 2**power after it was scaled."""
    plain = gaussian(64, 32, seed=seed)
    x = sct.scaled(plain, fmt, recipe="unit")
    with torch.no_grad():
        x.mul_(2.0**power)
    return x


@settings(max_examples=40)
@given(st.integers(-40, 40), st.sampled_from(["fp32", "bf16"]), st.sampled_from(["rms", "amax"]))
def test__values__stay_and_elements_fit(power, fmt, by):
    x = drifted(power, fmt)
    before = x.dequantize()
    view = x[3]
    sct.rebalance(x, by)
    assert torch.equal(x.dequantize(), before)
    assert torch.equal(view.dequantize(), before[3])
    assert is_power_of_two(x.scale)
    found = sct.statistics(x)
    assert abs(found.drift) < 1e-3
    if by == "rms":
        assert 2**-0.51 < found.rms < 2**0.51
    else:
        assert 224 < found.amax <= 448


def test__statistics__say_when_it_is_needed():
    assert abs(sct.statistics(drifted(0)).drift) < 1e-3
    x = drifted(3)
    x.rms.copy_(torch.tensor(1.0))
    assert sct.statistics(x).drift == pytest.approx(3, abs=0.1)
    assert sct.statistics(x).rms == pytest.approx(8, rel=0.1)


def test__statistics__count_what_the_forward_format_would_lose():
    q = torch.tensor([1.0, 448.0, 500.0, 2.0**-10, 2.0**-11, 0.0, float("inf"), -1.0])
    found = sct.statistics(sct.ScaledTensor(q, 1.0, "fp32", recipe="unit"))
    assert found.amax == 500
    assert found.saturated == 2 / 7
    assert found.underflowed == 2 / 7


def test__a_model_and_its_optimizer__train_on_as_before():
    """Scales move, and FP32 elements keep the values of the training."""

    def train(every: int | None) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        fp32 = sct.recipes.Unit("fp32", "fp32", "fp32")
        model = sct.scale_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), fp32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
        if every:
            sct.rebalance_every(optimizer, every)
        x = torch.randn(32, 8)
        losses = []
        for _ in range(12):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    (plain, without), (balanced, with_) = train(None), train(3)
    assert balanced == pytest.approx(plain, rel=1e-4)
    ratio = [
        float(a.scale / b.scale)
        for a, b in zip(without.parameters(), with_.parameters(), strict=True)
    ]
    assert any(r != 1 for r in ratio)
    assert sct.rebalance(with_) == 0


def test__zeros_and_infinities__do_no_harm():
    zeros = sct.scaled(torch.zeros(4))
    assert sct.rebalance(zeros) == 0
    assert sct.statistics(zeros).drift == 0
    x = sct.scaled(torch.tensor([1.0, float("inf"), -3.0]))
    sct.rebalance(x)
    assert x.tolist() == [1.0, float("inf"), -3.0]


def test__eight_bits__round_only_what_their_format_cannot_hold():
    x = sct.scaled(torch.randn(256), "e4m3fn", 2.0**3)
    before = x.dequantize()
    assert sct.rebalance(x) == 1
    assert torch.equal(x.dequantize(), before)
    assert math.log2(float(x.scale)) == pytest.approx(0, abs=1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sct.rebalance(torch.ones(2)), DTypeError, "Tensor"),
        (lambda: sct.rebalance(drifted(0), "max"), ScaleError, "'amax'"),
        (lambda: sct.rebalance(drifted(0)[0]), UnsupportedError, "view"),
        (lambda: sct.rebalance(sct.scaled(torch.ones(2), "e2m1fn")), UnsupportedError, "codes"),
        (lambda: sct.rebalance(sct.scaled(torch.ones(2)), "amax"), UnsupportedError, "8-bit"),
        (lambda: sct.statistics(torch.ones(2)), DTypeError, "ScaledTensor"),
        (
            lambda: sct.rebalance_every(torch.optim.SGD([torch.ones(2, requires_grad=True)]), 0),
            ScaleError,
            "0",
        ),
        (
            lambda: sct.rebalance_every(
                torch.optim.SGD([torch.ones(2, requires_grad=True)]), 1, "x"
            ),
            ScaleError,
            "'x'",
        ),
    ],
)
def test__bad_input__says_what_is_allowed(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test__rebalance_every__ends_with_its_handle():
    p = nn.Parameter(drifted(6))
    p.rms.fill_(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    handle = sct.rebalance_every(optimizer, 1)
    handle.remove()
    p.grad = sct.scaled(torch.ones(64, 32))
    scale = float(p.scale)
    optimizer.step()
    assert float(p.scale) == scale
    sct.rebalance_every(optimizer, 1)
    optimizer.step()
    assert float(p.scale) == pytest.approx(64, rel=0.5)


def grown(every: int, **adam: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A layer with a weight that outgrows its scale by its steps."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.Linear(8, 8), sct.recipes.Unit(rebalance=every))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5, **adam)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(torch.ones(4, 8)) - 100).square().mean().backward()
    optimizer.step()


def test__a_recipe__rebalances_parameters_every_few_steps():
    (never, a), (third, b) = grown(0), grown(3)
    for count in range(1, 8):
        step(never, a)
        step(third, b)
        drift = sct.statistics(third.weight).drift
        assert abs(drift) < 1e-3 if count % 3 == 0 else abs(drift) > 0.1
    assert sct.statistics(never.weight).drift > 2
    assert float(third.weight.scale) > float(never.weight.scale)
    assert torch.allclose(third.weight.dequantize(), never.weight.dequantize(), rtol=0.05)


def test__a_recipe__counts_on_where_a_checkpoint_ended():
    def finish(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        for _ in range(steps):
            step(model, optimizer)
        return [float(model.weight.scale), float(model.weight.rms), *model.weight.tolist()[0]]

    straight = finish(*grown(3), 8)
    model, optimizer = grown(3)
    finish(model, optimizer, 4)
    saved, states = model.state_dict(), optimizer.state_dict()
    again, other = grown(3)
    again.load_state_dict(saved)
    other.load_state_dict(states)
    again.weight.scale.copy_(model.weight.scale)
    assert finish(again, other, 4) == straight


def test__a_recipe__works_beside_a_compiled_step():
    models = [grown(2)[0] for _ in range(2)]
    eager, compiled = (torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in models)
    compiled.step = torch.compile(compiled.step, backend="aot_eager")
    before = float(models[0].weight.scale)
    for _ in range(4):
        step(models[0], eager)
        step(models[1], compiled)
    assert torch.equal(models[0].weight.scale, models[1].weight.scale)
    assert float(models[0].weight.scale) != before


def test__plain_parameters__are_none_of_its_business():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    before = set(optimizer.param_groups[0])
    p.grad = torch.ones(2)
    optimizer.step()
    assert set(optimizer.param_groups[0]) == before
