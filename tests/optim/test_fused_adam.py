"""Adam's fused step on the CPU calculates on elements and gives the loop's result under every
scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.ops.rules import optimizer

STEPS = 4


def trained(gradients: list[Tensor], factor: float = 1.0, **options: object) -> list[Tensor]:
    """Return a parameter and its two states after a step along each gradient times `factor`."""
    torch.manual_seed(0)
    module = sct.scale_model(nn.Linear(8, 6, bias=False))
    kind = torch.optim.AdamW if options.pop("decoupled", True) else torch.optim.Adam
    chosen = kind(module.parameters(), lr=0.05, **options)
    for g in gradients:
        module.weight.grad = sct.scaled(g * factor, "fp32")
        chosen.step()
    state = chosen.state[module.weight]
    held = [module.weight, state["exp_avg"], state["exp_avg_sq"]]
    return [x.detach().dequantize() for x in held]


def gradients() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) * 0.3 for _ in range(STEPS)]


OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"maximize": True},
    {"betas": (0.0, 0.5)},
    {"eps": 1e-2},
    {"amsgrad": True},
    {"decoupled": False, "weight_decay": 0.1},
    {"decoupled": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test__the_fused_step__is_the_loops(options):
    for fused, looped in zip(
        trained(gradients(), fused=True, **options),
        trained(gradients(), foreach=False, **options),
        strict=True,
    ):
        torch.testing.assert_close(fused, looped, rtol=2e-5, atol=1e-7)


def test__a_decay_in_the_gradient__reaches_the_moments_under_every_scale():
    made = []
    for size in (1.0, 2.0**-40):
        torch.manual_seed(0)
        module = sct.scale_model(nn.Linear(8, 6, bias=False))
        chosen = torch.optim.Adam(module.parameters(), lr=0.05, weight_decay=0.1, fused=True)
        plain = nn.Parameter(module.weight.detach().dequantize())
        same = torch.optim.Adam([plain], lr=0.05, weight_decay=0.1, fused=True)
        for g in gradients():
            module.weight.grad, plain.grad = sct.scaled(g * size, "fp32"), g * size
            chosen.step(), same.step()
        found = chosen.state[module.weight]["exp_avg_sq"].dequantize()
        torch.testing.assert_close(found, same.state[plain]["exp_avg_sq"], rtol=1e-5, atol=0)
        made.append((module.weight.detach().dequantize(), plain.detach()))
    for found, expected in made:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)


def test__it_is_float32s(monkeypatch):
    """The numbers equal a plain float32 parameter's, up to the rounding of float32."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 6, bias=False)
    chosen = torch.optim.AdamW(plain.parameters(), lr=0.05, fused=True)
    for g in gradients():
        plain.weight.grad = g.clone()
        chosen.step()
    ran = []
    elements = optimizer._adam_together
    monkeypatch.setattr(optimizer, "_adam_together", lambda *a: ran.append(elements(*a)))
    weight = trained(gradients(), fused=True)[0]
    assert len(ran) == STEPS  # The operators of the general form do not run.
    torch.testing.assert_close(weight, plain.weight.detach(), rtol=2e-5, atol=1e-7)


@given(st.integers(-50, 50))
def test__gradients_times_a_power_of_two__give_the_same_bits(k):
    weight, first, second = trained(gradients(), fused=True, eps=0.0)
    other, other_first, other_second = trained(gradients(), 2.0**k, fused=True, eps=0.0)
    assert torch.equal(weight, other)
    assert torch.equal(first, other_first * 2.0**-k)
    assert torch.equal(second, other_second * 2.0 ** (-2 * k))


@pytest.mark.parametrize("native", [True, False], ids=["C++", "operators"])
def test__the_bits__do_not_depend_on_what_is_expected_of_a_gradient(native, monkeypatch):
    """Ranks and one process alone have the same gradients, and expect another RMS of them."""
    if native and optimizer.native.library() is None:
        pytest.skip(optimizer.native.status())
    monkeypatch.setattr(optimizer.native, "ready", lambda count: native)
    made = {}
    for name, of in {
        "measured": lambda g: sct.scaled(g, "fp32"),
        "a sum": lambda g: sct.scaled(g / 2, "fp32") + sct.scaled(g / 2, "fp32"),
        "plain": lambda g: g.clone(),
    }.items():
        torch.manual_seed(0)
        module = sct.scale_model(nn.Linear(8, 6, bias=False))
        chosen = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)
        for g in gradients():
            module.weight.grad = of(g)
            chosen.step()
        state = chosen.state[module.weight]
        held = [module.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
        made[name] = held[2].scale, [x.dequantize() for x in held]
    scale, values = made.pop("measured")
    assert made["a sum"][0] == scale / 2
    for _, others in made.values():
        assert all(map(torch.equal, others, values))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
def test__parts_of_a_tensor_of_zeros__take_one_scale(fused):
    whole = sct.scaled(torch.zeros(8), "fp32")
    parts = [whole[:4].detach().requires_grad_(), whole[4:].detach().requires_grad_()]
    chosen = torch.optim.AdamW(parts, lr=0.1, eps=1.0, fused=fused)
    for part, size in zip(parts, (1.0, 1e-3), strict=True):
        part.grad = sct.scaled(torch.full((4,), size), "fp32")
    chosen.step()
    expected = [-0.1 * size / (size + 1.0) for size in (1.0, 1e-3)]
    found = whole.dequantize()
    torch.testing.assert_close(found, torch.tensor(expected).repeat_interleave(4))
    assert torch.equal(torch.cat([part.detach().dequantize() for part in parts]), found)


def test__a_parameter_that_is_a_part_of_another__is_changed_as_well():
    """A part keeps the scale of the whole."""
    whole = sct.scaled(torch.ones(4, 4), "fp32")
    part = whole[:2].detach().requires_grad_()
    rest = whole[2:].dequantize().clone()
    chosen = torch.optim.AdamW([part], lr=0.1, fused=True)
    part.grad = sct.scaled(torch.ones(2, 4), "bf16")
    chosen.step()
    torch.testing.assert_close(part.dequantize(), torch.full((2, 4), 0.899), rtol=1e-4, atol=0)
    assert torch.equal(whole[2:].dequantize(), rest)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test__left_to_choose__a_step_is_the_fused_one(kind):
    """torch's choice for subclasses of Tensor is the loop, which takes ten times as long."""
    made = {}
    for name, options in {"chosen": {}, "fused": {"fused": True}, "loop": {"fused": False}}.items():
        torch.manual_seed(0)
        module = sct.scale_model(nn.Linear(8, 6))
        maker = torch.optim.AdamW if kind == "torch" else sct.optim.AdamW
        chosen = maker(module.parameters(), lr=0.05, **options)
        for g in gradients():
            module.weight.grad, module.bias.grad = sct.scaled(g, "fp32"), sct.scaled(g[:, 0])
            chosen.step()
        made[name] = [module.weight.detach().dequantize(), module.bias.detach().dequantize()]
        assert chosen.param_groups[0]["fused"] is options.get("fused")
        assert chosen.state_dict()["param_groups"][0]["fused"] is options.get("fused")
    assert all(map(torch.equal, made["chosen"], made["fused"]))
    assert not all(map(torch.equal, made["chosen"], made["loop"]))


class Subclass(torch.optim.AdamW):
    """Other libraries derive optimizers from torch's."""

    def step(self, closure=None):
        self.seen = self.param_groups[0]["fused"]
        return super().step(closure)


@pytest.mark.parametrize(
    ("maker", "options"),
    [
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (Subclass, {}),
    ],
    ids=["foreach", "amsgrad", "subclass"],
)
def test__another_step__stays_the_loop(maker, options):
    module = sct.scale_model(nn.Linear(8, 6))
    chosen = maker(module.parameters(), lr=0.05, **options)
    module(torch.randn(4, 8)).square().mean().backward()
    with torch.autograd.profiler.profile() as seen:
        chosen.step()
    names = {event.name for event in seen.function_events}
    assert not any("fused" in name for name in names)
    assert any("addcdiv_" in name for name in names)
    assert getattr(chosen, "seen", None) is None


def test__a_step_that_fails__leaves_the_choice_to_the_next(monkeypatch):
    module = sct.scale_model(nn.Linear(8, 6))
    chosen = torch.optim.AdamW(module.parameters(), lr=0.05)
    module(torch.randn(4, 8)).square().mean().backward()

    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen.step(fails)
    before = module.weight.detach().dequantize().clone()
    chosen.step()
    assert chosen.param_groups[0]["fused"] is None
    assert not torch.equal(before, module.weight.detach().dequantize())
