"""`linear` as one node of autograd: the bits of torch's own operators, which a mode sees."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import scaledtensor as sct
from scaledtensor.formats import E4M3FN
from scaledtensor.ops import linear

RECIPES = {
    "Unit": sct.recipes.Unit(),
    "Unit stochastic": sct.recipes.Unit(gradient_rounding="stochastic"),
    "Current": sct.recipes.Current(),
}


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def operands(recipe, *shapes, fmt="fp32"):
    rng = torch.Generator().manual_seed(7)
    plain = [torch.randn(s, generator=rng) for s in shapes]
    return [sct.scaled(x, fmt, recipe=recipe).requires_grad_() for x in plain]


def bits(x):
    return x.qdata.view(torch.uint8), float(x.scale), float(x.rms), x.format, x.dtype, x.recipe


def assert_same_bits(got, want):
    assert type(got) is type(want)
    q, *facts = bits(got)
    other, *expected = bits(want)
    assert facts == expected
    assert torch.equal(q, other)


def trained(x, w):
    """Output and gradients of a layer."""
    torch.manual_seed(0)  # stochastic rounding draws from it
    y = F.linear(x, w)
    gradient = sct.scaled(torch.linspace(-3, 2, y.numel()).view(y.shape), "bf16")
    return [y, *torch.autograd.grad(y, (x, w), gradient)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(33, 16), (2, 17, 16), (1, 1, 16), (3, 2, 9, 16)], ids=str)
def test__alone__the_bits_are_those_of_operators(recipe, fmt, shape, monkeypatch):
    x, w = operands(recipe, shape, (24, 16), fmt=fmt)
    ran = []
    run = linear.linear
    monkeypatch.setattr(linear, "linear", lambda *a: ran.append(True) or run(*a))
    alone = trained(x, w)
    assert ran
    ran.clear()
    with Looking():
        watched = trained(x, w)
    assert not ran
    for got, want in zip(alone, watched, strict=True):
        assert_same_bits(got, want)


def test__what_is_cast_already__stays():
    x, w = operands(RECIPES["Unit"], (5, 16), (8, 16))
    cast = x.to_format("e4m3fn")
    y = F.linear(cast, w)
    assert_same_bits(y, F.linear(x, w))
    with Looking():
        assert_same_bits(y, F.linear(cast, w))


@pytest.mark.parametrize("frozen", [0, 1])
def test__beside_a_frozen_operand__one_gradient_is_made_and_one_operand_kept(frozen):
    pair, kept = operands(RECIPES["Unit"], (5, 16), (8, 16)), []
    pair[frozen].requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = F.linear(*pair)
    assert [t.shape for t in kept] == [pair[frozen].shape]
    y.sum().backward()
    assert pair[frozen].grad is None
    assert pair[1 - frozen].grad is not None


def test__a_second_derivative__is_that_of_operators():
    def second(x, w):
        (dx,) = torch.autograd.grad(F.linear(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, w))

    pair = operands(RECIPES["Unit"], (5, 16), (8, 16))
    alone = second(*pair)
    with Looking():
        watched = second(*pair)
    for got, want in zip(alone, watched, strict=True):
        assert torch.equal(got.dequantize(), want.dequantize())


def test__what_is_kept__is_codes():
    x, w = operands(RECIPES["Unit"], (5, 16), (8, 16))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.linear(x, w)
    assert [t.format for t in kept] == [E4M3FN, E4M3FN]
    assert all(t.decoded is None for t in kept)


def test__a_write_into_the_weight__leaves_the_codes_alone():
    x, w = operands(RECIPES["Unit"], (5, 16), (8, 16))
    want = trained(x, w)
    y = F.linear(x, w)
    gradient = sct.scaled(torch.linspace(-3, 2, y.numel()).view(y.shape), "bf16")
    with torch.no_grad():
        w.mul_(3.0)
    for got, expected in zip(torch.autograd.grad(y, (x, w), gradient), want[1:], strict=True):
        assert_same_bits(got, expected)
