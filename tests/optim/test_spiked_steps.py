"""One spike in one gradient barely affects the other parameters of its group."""

import copy
import math

import pytest
import torch
from tensors import gaussian
from torch import nn

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.optim.states import GroupedState

OPTIMIZERS = {
    "sgd": (sct.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (sct.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (sct.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
}
FORMATS = ("e4m3fn", "e5m2", "int8", "fp16", "bf16")

#: Largest distance of neighbours from float32's, in units of their longest way: SGD, Adam.
FAR = {
    "e4m3fn": (0.06, 0.05),
    "e5m2": (0.06, 0.06),
    "int8": (0.03, 0.05),
    "fp16": (1e-3, 1e-3),
    "bf16": (8e-3, 8e-3),
}


def gradient(step: int, spike: float | None) -> torch.Tensor:
    g = gaussian(2, 128, seed=step)
    if spike is not None and step == 3:
        g[0, 0] = spike
    return g


def trained(name: str, fmt: str, spike: float | None = 1e6, **options):
    make, usual = OPTIMIZERS[name]
    p = nn.Parameter(torch.zeros(2, 128))
    optimizer = make([p], **usual, state_format=fmt, **options)
    for step in range(12):
        p.grad = gradient(step, spike)
        optimizer.step()
    return p.detach(), optimizer


def distance(name: str, fmt: str, **options) -> float:
    found, wanted = (trained(name, f, **options)[0].flatten()[1:] for f in (fmt, "fp32"))
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("spike", [1e4, -1e6])
def test__a_spike__leaves_its_neighbours_alone(name, fmt, spike):
    assert distance(name, fmt, spike=spike) < FAR[fmt][name != "sgd"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fmt", FORMATS)
def test__the_element_itself__goes_its_way(name, fmt):
    found, wanted = (trained(name, f)[0][0, 0] for f in (fmt, "fp32"))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.01)


@pytest.mark.parametrize("fmt", ["e4m3fn", "int8", "fp16"])
def test__a_spike__is_held_apart_when_rounding_is_stochastic(fmt):
    assert distance("adamw", fmt, state_rounding="stochastic") < 0.1


def test__compiled__a_spike_leaves_its_neighbours_alone():
    assert distance("adamw", "e4m3fn", compiled=True) < FAR["e4m3fn"][1]


def test__a_training_without_a_spike__has_no_group_that_is_written_again(monkeypatch):
    again = []
    true = GroupedState.write_spikes

    def counted(fmt, kept, rows, found, key, start):
        again.append(int(found.sum()))
        true(fmt, kept, rows, found, key, start)

    monkeypatch.setattr(GroupedState, "write_spikes", counted)
    with native.left_out():
        _, optimizer = trained("adamw", "e4m3fn", spike=None)
    assert again[:2] == [2, 2]  # All of these were zeros.
    assert not any(again[2:])
    assert all((x.scale > 0).all() for x in states(optimizer))


def states(optimizer):
    return [x for x in next(iter(optimizer.state.values())).values() if hasattr(x, "power")]


def test__a_group__goes_back_when_its_spike_is_forgotten():
    p = nn.Parameter(torch.zeros(128))
    optimizer = sct.optim.SGD([p], 0.1, momentum=0.5, state_format="e4m3fn")
    signs = []
    for step in range(30):
        p.grad = gradient(step, 1e6)[0]
        optimizer.step()
        signs.append(float(states(optimizer)[0].scale[0]) < 0)
    assert signs.index(True) == 3
    assert not signs[-1]
    assert signs == sorted(signs[:4]) + sorted(signs[4:], reverse=True)


@pytest.mark.parametrize("fmt", ["e4m3fn", "fp16"])
def test__a_spike__goes_to_a_file_and_back(fmt, tmp_path):
    p, optimizer = trained("adamw", fmt)
    model = nn.ParameterList([nn.Parameter(p.clone())])
    other = sct.optim.AdamW(model.parameters(), 1e-2, state_format=fmt)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sct.checkpoint.save(tmp_path / "run", model, other)
    again = nn.ParameterList([nn.Parameter(torch.zeros(2, 128))])
    third = sct.optim.AdamW(again.parameters(), 1e-2, state_format=fmt)
    sct.checkpoint.load(tmp_path / "run", again, third)
    for a, b in zip(states(optimizer), states(third), strict=True):
        assert torch.equal(a.scale, b.scale)
        assert torch.equal(a.dequantize(), b.dequantize())
        assert float(a.scale.min()) < 0
    spiked = optimizer.plain_state_dict()["state"][0]["exp_avg"][0, 0]
    assert math.isclose(float(spiked), 1e5 * 0.9**8, rel_tol=0.01)
