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


def test__a_parameter_that_is_a_part_of_another__is_changed_as_well():
    """A part has the scale of the whole, which the general form handles."""
    whole = sct.scaled(torch.ones(4, 4), "fp32")
    part = whole[:2].detach().requires_grad_()
    rest = whole[2:].dequantize().clone()
    chosen = torch.optim.AdamW([part], lr=0.1, fused=True)
    part.grad = sct.scaled(torch.ones(2, 4), "bf16")
    chosen.step()
    torch.testing.assert_close(part.dequantize(), torch.full((2, 4), 0.899), rtol=1e-4, atol=0)
    assert torch.equal(whole[2:].dequantize(), rest)
