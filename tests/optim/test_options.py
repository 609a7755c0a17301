"""Impossible options are refused by name, and changed options are followed."""

from typing import Any

import pytest
import torch
from tensors import value_of
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import FormatError, MupError, UnsupportedError
from scaledtensor.formats import PerBlock
from scaledtensor.tensors.expanded import ExpandedTensor

INFINITE = {"SGD": ("lr", "momentum", "dampening"), "AdamW": ("lr", "eps"), "Lion": ("lr",)}


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize(("name", "option"), [(n, o) for n, all_ in INFINITE.items() for o in all_])
def test__a_number_that_is_not_finite__is_refused(name: str, option: str, number: float) -> None:
    with pytest.raises(ValueError, match=option.replace("lr", "l.*r")):
        getattr(sct.optim, name)([nn.Parameter(torch.ones(3))], **{option: number})
    group = {"params": [nn.Parameter(torch.ones(3))], option: number}
    optimizer = getattr(sct.optim, name)([nn.Parameter(torch.ones(3))])
    with pytest.raises(MupError, match=f"{option} is a finite number"):
        optimizer.add_param_group(group)


def problem(scaled: bool, **options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer, Any]:
    start = torch.linspace(-1, 1, 64)
    p = nn.Parameter(sct.scaled(start) if scaled else start.clone())
    optimizer = sct.optim.AdamW([p], lr=1e-2, **options)

    def step() -> None:
        optimizer.zero_grad()
        (p * torch.linspace(1, 3, 64)).sum().backward()
        optimizer.step()

    return p, optimizer, step


def value(p: Tensor) -> Tensor:
    return value_of(p.detach())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("change", [("e4m3fn", "fp32"), ("fp32", "e4m3fn"), ("int8", "bf16")])
def test__a_format_that_changes__is_followed(scaled: bool, change: tuple[str, str]) -> None:
    """The next step has the states of the last, rounded to the new format."""
    before, after = change
    p, optimizer, step = problem(scaled, state_format=before)
    want, _, other = problem(scaled, state_format="fp32")
    for go in (step, other):
        go()
        go()
    optimizer.param_groups[0]["state_format"] = after
    step()
    other()
    held = optimizer.state[p]["exp_avg"]
    assert isinstance(held, ExpandedTensor) == (after != "fp32")
    if after != "fp32":
        assert held.format.name == after
    assert optimizer.state[p]["step"] == 3
    torch.testing.assert_close(value(p), value(want), rtol=0, atol=3e-3)


def test__a_format_that_there_is_not__is_refused_at_the_step() -> None:
    p, optimizer, step = problem(False, state_format="e4m3fn")
    step()
    before = p.detach().clone()
    optimizer.param_groups[0]["state_format"] = "e9m9"
    with pytest.raises(FormatError, match="state_format is one of"):
        step()
    assert torch.equal(p, before)


def test__a_master_that_would_be_lost__is_refused_at_the_step() -> None:
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = sct.optim.AdamW([p], master_format="fp32")
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["master_format"] = None
    before = p.detach().clone()
    with pytest.raises(FormatError, match="master"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("scaled", [False, True])
def test__states_in_few_bits_in_an_optimizer_of_torch__are_refused_by_name(scaled: bool) -> None:
    p, optimizer, step = problem(scaled, state_format="e4m3fn")
    step()
    plain = torch.optim.AdamW([p], lr=1e-2)
    plain.load_state_dict(optimizer.state_dict())
    with pytest.raises(UnsupportedError, match="plain_state_dict"):
        plain.step()
    plain.load_state_dict(optimizer.plain_state_dict())
    plain.step()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion"])
@pytest.mark.parametrize("state_format", ["fp32", "e4m3fn"])
def test__a_parameter_of_codes__is_refused_at_construction(name: str, state_format: str) -> None:
    for scale, granularity in (("nvfp4", PerBlock((1, 16))), ("rceil", PerBlock((1, 32)))):
        codes = sct.scaled(torch.randn(4, 64), "e2m1fn", scale, granularity)
        make = getattr(sct.optim, name)
        with pytest.raises(UnsupportedError, match=r"a parameter of shape \(4, 64\).*widened"):
            make([nn.Parameter(codes)], state_format=state_format)
        frozen = nn.Parameter(codes, requires_grad=False)
        make([frozen, nn.Parameter(torch.ones(2))], state_format=state_format)
