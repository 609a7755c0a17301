"""Masters keep the value of a parameter in more than its own elements."""

import copy

import pytest
import torch
from assertions import dequantized
from tensors import gaussian, saved_and_loaded, value_of
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import FormatError
from scaledtensor.tensors.expanded import ExpandedTensor

MASTERS = ("fp32", "fp16", "bf16", "bf16+16")
every_kind = pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])


def start() -> Tensor:
    return gaussian(30, 20) * 0.1


def parameter(scaled: bool, fmt: str = "bf16") -> nn.Parameter:
    if scaled:
        return nn.Parameter(sct.scaled(start(), fmt))
    return nn.Parameter(start().to({"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]))


def train(p: nn.Parameter, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        g = gaussian(*p.shape, seed=seed).bfloat16()
        p.grad = sct.scaled(g.float()) if isinstance(p, sct.ScaledTensor) else g.to(p.dtype)
        optimizer.step()


def in_float32(steps: range, lr: float) -> Tensor:
    p = nn.Parameter(start().bfloat16().float())
    train(p, torch.optim.AdamW([p], lr), steps)
    return p.detach()


def value(p: nn.Parameter) -> Tensor:
    return dequantized(p).float()


@every_kind
def test__a_float32_master__is_the_training_in_float32(scaled):
    p = parameter(scaled)
    optimizer = sct.optim.AdamW([p], 1e-4, master_format="fp32")
    train(p, optimizer, range(5))
    want = in_float32(range(5), 1e-4)
    master = optimizer.state[p]["master"]
    master = value_of(master)
    torch.testing.assert_close(master, want, rtol=2.0**-21, atol=2.0**-28)
    assert torch.equal(value(p), master.bfloat16().float())


@pytest.mark.parametrize("fmt", ["fp32", "e4m3fn"])
@every_kind
def test__sixteen_more_bits__are_the_float32_master_to_the_bit(scaled, fmt):
    found = []
    for name in ("fp32", "bf16+16"):
        p = parameter(scaled)
        optimizer = sct.optim.AdamW([p], 1e-4, master_format=name, state_format=fmt)
        train(p, optimizer, range(6))
        found.append((p, optimizer.state[p]))
    (p, exact), (q, split) = found
    assert split["remainder"].dtype == torch.int16
    bits = dequantized(q).float().view(torch.int32) + split["remainder"].int()
    scale = q.scale if scaled else 1.0
    held = (q.detach().qdata if scaled else q.detach()).view(torch.int16).int() << 16
    whole = (held + split["remainder"].int()).view(torch.float32) * scale
    master = exact["master"]
    assert torch.equal(whole, master.dequantize() if scaled else master)
    assert torch.equal(value(p), value(q))
    assert bits.shape == p.shape


@every_kind
@pytest.mark.parametrize("master", MASTERS)
def test__steps_too_small_for_a_bfloat16__add_up(master, scaled):
    """The test takes 400 steps of 2^-12 of an ulp of the parameter's largest element. Rounding to
    nearest loses them all."""

    def moved(name: str | None) -> float:
        p = parameter(scaled)
        before = value(p)
        optimizer = sct.optim.SGD([p], 2.0**-16, master_format=name, state_format="fp16")
        for _ in range(400):
            g = torch.ones(p.shape)
            p.grad = sct.scaled(g) if scaled else g.bfloat16()
            optimizer.step()
        return float((before - value(p)).mean())

    wanted = 400 * 2.0**-16
    assert moved(master) == pytest.approx(wanted, rel=0.05)
    assert moved(None) < 0.6 * wanted


@every_kind
@pytest.mark.parametrize("master", MASTERS)
def test__a_run_from_a_file__goes_on_bit_for_bit(master, scaled):
    options = {"master_format": master, "state_format": "e4m3fn"}
    p = parameter(scaled)
    optimizer = sct.optim.AdamW([p], 1e-4, **options)
    train(p, optimizer, range(3))
    held, states = saved_and_loaded((p.detach(), optimizer.state_dict()))
    train(p, optimizer, range(3, 6))
    q = nn.Parameter(held)
    again = sct.optim.AdamW([q], 1e-4, **options)
    again.load_state_dict(states)
    train(q, again, range(3, 6))
    assert torch.equal(value(p), value(q))
    for name in ("master", "remainder"):
        x, y = (o.state[t].get(name) for o, t in ((optimizer, p), (again, q)))
        if isinstance(x, ExpandedTensor):
            x, y = x.qdata, y.qdata
        assert (x is None) == (y is None)
        assert x is None or torch.equal(dequantized(x), dequantized(y))


@pytest.mark.parametrize("master", ["fp32", "fp16"])
def test__what_is_written_into_a_parameter__is_not_undone_by_its_master(master):
    """Loaded weights, or a moving average, replace the values."""
    p = parameter(False)
    optimizer = sct.optim.SGD([p], 2.0**-20, master_format=master)
    train(p, optimizer, range(2))
    with torch.no_grad():
        p[:10] = 3.0
    kept = p.detach()[10:].clone()
    train(p, optimizer, range(2, 3))
    assert torch.equal(p.detach()[:10], torch.full((10, 20), 3.0).bfloat16())
    torch.testing.assert_close(p.detach()[10:], kept, rtol=2.0**-7, atol=2.0**-18)


def test__a_scale_that_is_moved__moves_no_master():
    """Rebalancing does this every few steps."""
    found = []
    for moved in (False, True):
        p = parameter(True)
        optimizer = sct.optim.AdamW([p], 1e-4, master_format="fp32")
        train(p, optimizer, range(2))
        if moved:
            p.data = p.detach().rescale(float(p.scale) * 4)
        train(p, optimizer, range(2, 4))
        found.append((value(p), dequantized(optimizer.state[p]["master"])))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test__an_8_bit_parameter__has_a_16_bit_master():
    """A model with weights in E4M3 takes 3 bytes where float32 and E4M3 take 5."""
    p = nn.Parameter(sct.scaled(start(), "e4m3fn"))
    before = value(p)
    optimizer = sct.optim.AdamW([p], 1e-3, master_format="fp16", state_format="e4m3fn")
    wanted = nn.Parameter(before.clone())
    exact = torch.optim.AdamW([wanted], 1e-3)
    train(p, optimizer, range(8))
    train(wanted, exact, range(8))
    assert p.format.name == "e4m3fn"
    master = optimizer.state[p]["master"].dequantize()
    assert float((master - wanted.detach()).norm() / (wanted.detach() - before).norm()) < 0.05
    torch.testing.assert_close(value(p), master, rtol=2.0**-4, atol=2.0**-9)


def test__a_nan__stays_one():
    for master in MASTERS:
        p = parameter(False)
        optimizer = sct.optim.SGD([p], 0.1, master_format=master)
        p.grad = torch.zeros_like(p)
        p.grad[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        for _ in range(2):
            optimizer.step()
        assert not p.detach()[0, :3].isfinite().any()
        assert bool(p.detach().isfinite().sum() == p.numel() - 3)


@pytest.mark.slow
def test__compiled__is_eager():
    torch._dynamo.reset()
    for master in ("fp32", "bf16+16"):
        found = []
        for compiled in (False, True):
            p = parameter(False)
            optimizer = sct.optim.SGD(
                [p], 2.0**-10, momentum=0.5, master_format=master, compiled=compiled
            )
            train(p, optimizer, range(3))
            found.append((p.detach(), next(iter(reversed(optimizer.state[p].values())))))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("held", "master", "says"),
    [
        (torch.zeros(3), "fp32", "a float32 parameter is its own master; .*in fp32; .* None"),
        (torch.zeros(3), "bf16", "rounded stochastically; got one of shape"),
        (torch.zeros(3).half(), "bf16+16", "upper half .* in fp16; for it there is None, 'fp32'"),
        (torch.zeros(3).half(), "fp16", "more digits than its parameter"),
    ],
)
def test__masters_that_make_no_sense__are_refused_by_name(held, master, says):
    p = nn.Parameter(held)
    p.grad = torch.zeros_like(p)
    with pytest.raises(FormatError, match=says):
        sct.optim.AdamW([p], master_format=master).step()


def test__muon__has_none():
    with pytest.raises(FormatError, match="Muon has no masters"):
        sct.optim.Muon([{"params": [parameter(False)], "master_format": "fp32"}])


def test__a_master_of_another_kind__is_not_loaded():
    p = parameter(False)
    first = sct.optim.AdamW([p], master_format="bf16+16")
    train(p, first, range(1))
    held = copy.deepcopy(first.state_dict())
    with pytest.raises(FormatError, match=r"a remainder was saved .* master_format=None"):
        sct.optim.AdamW([p]).load_state_dict(held)
