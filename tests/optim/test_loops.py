"""The C++ loop of a step gives the results of the operators of PyTorch that it replaces."""

import contextlib
import copy
import math

import pytest
import torch
from tensors import gaussian
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.errors import UnsupportedError
from scaledtensor.optim import buckets
from scaledtensor.tensors.coded import CodedTensor

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())

FORMATS = ("bf16", "fp16", "e4m3fn", "e5m2", "int8")
OPTIMIZERS = {
    "sgd": (sct.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (sct.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (sct.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (sct.optim.AdamW, {}),
    "lion": (sct.optim.Lion, {}),
}
#: Steps in the dtype of a parameter: one unit in the last place of numbers from 1 to 8.
ULPS = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}

HARD = torch.cat(
    [
        torch.zeros(128),
        torch.full((128,), 0.3),
        torch.logspace(-2.5, 2.5, 128),
        torch.logspace(-9, 9, 128),  # squares span 120 binades, as many as float32 quotients have
        torch.linspace(1e-20, 2e-20, 128),
        torch.linspace(1e-40, 2e-38, 128),  # subnormal float32 numbers
        torch.zeros(128).index_fill(0, torch.tensor([77]), -2e-9),
        gaussian(128).index_fill(0, torch.tensor([5]), 1e6),
        gaussian(77) * 1e-3,
    ]
)


def gradients(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Return gradients of two parameters, one of them no whole number of groups."""
    sizes = gaussian(30, 50, seed=seed + 100).abs() ** 6
    signs = 1 - 2 * (torch.arange(len(HARD)) % 3 == seed % 3).float()
    found = [gaussian(30, 50, seed=seed) * sizes, HARD * signs]
    return [g.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else g.to(dtype) for g in found]


def trained(name: str, dtype: torch.dtype, **options: object) -> tuple[list[nn.Parameter], list]:
    """Train by operators, and then make one step more by operators and by the loop.

    Returns:
        The parameters before that step, and the parameters and the states after both steps.
    """
    make, more = OPTIMIZERS[name]
    ps = [nn.Parameter(gaussian(30, 50, dtype=dtype)), nn.Parameter(gaussian(len(HARD)).to(dtype))]
    optimizer = make(ps, 1e-2, weight_decay=0.1, **more, **options)
    with native.left_out():
        for seed in range(3):
            for p, g in zip(ps, gradients(seed, dtype), strict=True):
                p.grad = g
            optimizer.step()
    ended = []
    for way in (native.left_out, contextlib.nullcontext):
        mine, own = copy.deepcopy((ps, optimizer))
        for p, g in zip(mine, gradients(3, dtype), strict=True):
            p.grad = g
        with way():
            own.step()
        ended.append((mine, own))
    return ps, ended


def assert_same_state(x: Tensor, y: Tensor) -> None:
    """Two states have the same numbers, except codes that lie on the boundary of two."""
    if not isinstance(x, CodedTensor):
        torch.testing.assert_close(x, y, rtol=2.0**-20, atol=0, equal_nan=True)
        return
    torch.testing.assert_close(x.scale, y.scale, rtol=2.0**-20, atol=0)
    assert int((x.power.int() - y.power.int()).abs().max()) <= 1
    alike = (x.power == y.power).repeat_interleave(128)[: x.numel()]
    a, b = (t.qdata.flatten()[alike] for t in (x, y))
    if x.format.bits > 8:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        return
    a, b = (t.view(torch.int8).int() for t in (a, b))
    assert float((a == b).float().mean()) > 0.99
    assert int((a - b).abs().max()) <= 1
    assert float(alike.float().mean()) > 0.8


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test__a_step__is_the_step_of_operators(name, fmt):
    before, ((ps, a), (qs, b)) = trained(name, torch.float32, state_format=fmt)
    for p, q, old in zip(ps, qs, before, strict=True):
        assert not torch.equal(q, old)
        torch.testing.assert_close(q, p, rtol=2.0**-20, atol=2.0**-21)
        for key, state in a.state[p].items():
            assert_same_state(state, b.state[q][key])


@pytest.mark.parametrize("master", [None, "fp32", "bf16+16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["fp32", "e4m3fn"])
def test__masters__are_those_of_operators(dtype, master, fmt):
    if (dtype == torch.float16 and master == "bf16+16") or (master is None and fmt == "fp32"):
        return
    options = {"state_format": fmt, "master_format": master}
    _, ((ps, a), (qs, b)) = trained("adamw", dtype, **options)
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=ULPS[dtype])
        assert float((p == q).float().mean()) > 0.99
        for key, state in a.state[p].items():
            if key == "remainder":
                whole = [
                    (x.detach().view(torch.int16).int() << 16) + s.state[x][key].view(x.shape)
                    for x, s in ((p, a), (q, b))
                ]
                torch.testing.assert_close(
                    *(t.view(torch.float32) for t in whole), rtol=2.0**-20, atol=2.0**-21
                )
            elif key == "master":
                torch.testing.assert_close(state, b.state[q][key], rtol=2.0**-20, atol=2.0**-21)
            else:
                assert_same_state(state, b.state[q][key])


def test__a_master__takes_over_what_was_written_into_its_parameter():
    found = []
    for way in (native.left_out, contextlib.nullcontext):
        p = nn.Parameter(gaussian(256, dtype=torch.bfloat16))
        optimizer = sct.optim.AdamW([p], 1e-3, state_format="e4m3fn", master_format="fp32")
        with way():
            for seed in range(3):
                p.grad = gaussian(256, seed=seed, dtype=torch.bfloat16)
                optimizer.step()
                with torch.no_grad():
                    p[:100] = 5.0
            optimizer.step()
        found.append(optimizer.state[p]["master"])
    torch.testing.assert_close(*found, rtol=2.0**-20, atol=2.0**-21)
    assert bool((found[1][:100] > 4.9).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test__nan_and_infinity__are_those_of_operators(fmt):
    found = []
    for way in (native.left_out, contextlib.nullcontext):
        p = nn.Parameter(torch.ones(256))
        optimizer = sct.optim.AdamW([p], 0.1, state_format=fmt)
        with way():
            for i in range(3):
                p.grad = torch.linspace(0.5, 1.5, 256)
                if i == 0:
                    p.grad[3], p.grad[4], p.grad[5], p.grad[200] = (
                        math.inf,
                        -math.inf,
                        math.nan,
                        1e30,
                    )
                optimizer.step()
        found.append((p, optimizer))
    (p, a), (q, b) = found
    torch.testing.assert_close(q, p, rtol=2.0**-6, atol=2.0**-6, equal_nan=True)
    assert int(q.isnan().sum()) == 3
    for key, state in a.state[p].items():
        assert_same_state(state, b.state[q][key])


def test__threads__change_no_bit():
    """A group belongs to one thread."""
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            p = nn.Parameter(gaussian(1 << 17))
            optimizer = sct.optim.AdamW([p], 1e-2, state_format="e4m3fn")
            for seed in range(2):
                p.grad = gaussian(1 << 17, seed=seed)
                optimizer.step()
            states = [
                optimizer.state[p][key].qdata.view(torch.uint8) for key in ("exp_avg", "exp_avg_sq")
            ]
            found.append((p.detach(), *states))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def spied(monkeypatch) -> list[object]:
    calls: list[object] = []
    real = buckets.run

    def run(*given):
        calls.append(given[0])
        real(*given)

    monkeypatch.setattr(buckets, "run", run)
    return calls


def test__parameters_and_gradients_that_are_not_contiguous__are_stepped(monkeypatch):
    calls, found = spied(monkeypatch), []
    for order in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(gaussian(4, 3, 8, 8).to(memory_format=order))
        optimizer = sct.optim.AdamW([p], 1e-2, state_format="e4m3fn")
        for seed in range(3):
            p.grad = gaussian(4, 3, 8, 8, seed=seed).to(memory_format=order)
            optimizer.step()
        assert p.is_contiguous(memory_format=order)
        found.append(p.detach())
    assert torch.equal(*found)
    assert not calls


def test__a_scaled_parameter_of_zeros__takes_the_scale_of_its_values(monkeypatch):
    calls = spied(monkeypatch)
    p = nn.Parameter(sct.scaled(torch.zeros(40)))
    optimizer = sct.optim.AdamW([p], 2.0**-10, state_format="e4m3fn")
    p.grad = sct.scaled(torch.ones(40))
    optimizer.step()
    torch.testing.assert_close(p.detach().dequantize(), torch.full((40,), -(2.0**-10)))
    assert float(p.scale) == 2.0**-10
    assert not calls


@pytest.mark.parametrize(
    "options",
    [{"state_rounding": "stochastic"}, {"master_format": "bf16"}, {"master_format": "fp16"}],
)
def test__stochastic_rounding__stays_with_operators(monkeypatch, options):
    calls = spied(monkeypatch)
    p = nn.Parameter(gaussian(300, dtype=torch.bfloat16))
    p.grad = gaussian(300, seed=1, dtype=torch.bfloat16)
    sct.optim.AdamW([p], 1e-2, state_format="e4m3fn", **options).step()
    assert len(calls) == 1


def test__a_mode_that_counts_operators__sees_them(monkeypatch):
    calls = spied(monkeypatch)
    p = nn.Parameter(gaussian(300))
    p.grad = gaussian(300, seed=1)
    optimizer = sct.optim.AdamW([p], 1e-2, state_format="e4m3fn")
    with FlopCounterMode(display=False):
        optimizer.step()
    assert len(calls) == 1
    optimizer.step()
    assert len(calls) == 1


def test__8_bit_parameters__stay_with_operators(monkeypatch):
    calls = spied(monkeypatch)
    p = nn.Parameter(sct.scaled(gaussian(300), "e4m3fn"))
    p.grad = sct.scaled(gaussian(300, seed=1))
    before = p.detach().dequantize()
    sct.optim.AdamW([p], 0.5, state_format="e4m3fn", master_format="fp32").step()
    assert len(calls) == 1
    assert not torch.equal(p.detach().dequantize(), before)


@pytest.mark.parametrize("way", [native.left_out, contextlib.nullcontext])
def test__a_negated_view__is_stepped_by_its_values(way):
    found = []
    for negated in (False, True):
        start, g = gaussian(300), gaussian(300, seed=1)
        p = nn.Parameter(torch._neg_view(-start) if negated else start)
        p.grad = torch._neg_view(-g) if negated else g
        with way():
            sct.optim.AdamW([p], 1e-2, state_format="e4m3fn").step()
        found.append(p.detach().clone())
    assert torch.equal(*found)


def test__a_parameter_whose_memory_was_freed__is_an_error():
    p = nn.Parameter(gaussian(300))
    optimizer = sct.optim.AdamW([p], 1e-2, state_format="e4m3fn")
    p.grad = gaussian(300, seed=1)
    optimizer.step()
    p.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"shape \(300,\).*has no memory"):
        optimizer.step()


def test__a_state_that_moves_into_shared_memory__is_stepped_there():
    p = nn.Parameter(gaussian(300))
    optimizer = sct.optim.AdamW([p], 1e-2, state_format="e4m3fn")
    for seed in range(3):
        p.grad = gaussian(300, seed=seed)
        optimizer.step()
        state = optimizer.state[p]["exp_avg"]
        before = state.dequantize()
        state.qdata.untyped_storage().share_memory_()
        assert torch.equal(state.dequantize(), before)
        assert float(state.dequantize().abs().max()) > 0
    other = nn.Parameter(gaussian(300))
    optimizer = sct.optim.AdamW([other], 1e-2, state_format="e4m3fn")
    for seed in range(3):
        other.grad = gaussian(300, seed=seed)
        optimizer.step()
    assert torch.equal(p, other)
