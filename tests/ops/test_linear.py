"""`linear` is one node of autograd with the bits of torch's own operators, which a mode sees."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from tensors import Looking, bits

import scaledtensor as sct
from scaledtensor import native as loops
from scaledtensor.formats import E4M3FN
from scaledtensor.ops.products import linear

RECIPES = {
    "Unit": sct.recipes.Unit(),
    "Unit stochastic": sct.recipes.Unit(gradient_rounding="stochastic"),
    "Current": sct.recipes.Current(),
}


def operands(recipe, *shapes, fmt="fp32"):
    rng = torch.Generator().manual_seed(7)
    plain = [torch.randn(s, generator=rng) for s in shapes]
    return [sct.scaled(x, fmt, recipe=recipe).requires_grad_() for x in plain]


def facts(x):
    return float(x.scale), float(x.rms), x.format, x.dtype, x.recipe


def trained(*layer):
    """Return the output and gradients of a layer: input, weight and perhaps bias."""
    torch.manual_seed(0)  # Stochastic rounding draws from it.
    y = F.linear(*layer)
    gradient = sct.scaled(torch.linspace(-3, 2, y.numel()).view(y.shape), "bf16")
    return [y, *torch.autograd.grad(y, [x for x in layer if x.requires_grad], gradient)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
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
        assert bits(got) == bits(want)


@pytest.mark.parametrize("native", [True, False], ids=["loops", "operators"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("power", [-30, 0, 30])
def test__with_a_bias__the_bits_are_those_of_operators(recipe, power, native, monkeypatch):
    """The bias is much smaller or much larger than the product, and some elements are infinite or
    NaN."""
    x, w, b = operands(recipe, (3, 70, 64), (48, 64), (48,))
    with torch.no_grad():
        b.mul_(2.0**power)
        x[0, 0, 0], x[1, 0, 0] = torch.inf, torch.nan
    with contextlib.nullcontext() if native else loops.left_out():
        alone = trained(x, w, b)
        with Looking():
            watched = trained(x, w, b)
    assert alone[0].dequantize()[2].isfinite().all()
    assert not alone[0].dequantize()[0, 0].isfinite().any()
    for got, want in zip(alone, watched, strict=True):
        bits_of = torch.where(got.dequantize().isnan(), 0.0, got.dequantize())
        bits_to = torch.where(want.dequantize().isnan(), 0.0, want.dequantize())
        assert torch.equal(bits_of, bits_to)
        assert torch.equal(got.isnan(), want.isnan())
        assert facts(got) == facts(want)


@pytest.mark.parametrize("kind", ["turned", "expanded", "of 8 bits"])
def test__any_gradient__has_the_bits_of_operators(kind):
    x, w, b = operands(RECIPES["Unit"], (6, 16), (6, 16), (6,))
    gradient = sct.scaled(torch.linspace(-3, 2, 36).view(6, 6), "bf16")
    if kind == "turned":
        gradient = gradient.t()
    elif kind == "expanded":
        gradient = gradient[:1].expand(6, 6)
    else:
        gradient = gradient.to_format("e5m2")

    def gradients():
        return torch.autograd.grad(F.linear(x, w, b), (x, w, b), gradient)

    alone = gradients()
    with Looking():
        watched = gradients()
    for got, want in zip(alone, watched, strict=True):
        assert bits(got) == bits(want)


@pytest.mark.parametrize("trains", ["100", "010", "001", "011", "101"])
def test__with_a_bias__each_gradient_is_made_where_it_is_asked(trains):
    layer = operands(RECIPES["Unit"], (5, 16), (8, 16), (8,))
    for x, one in zip(layer, trains, strict=True):
        x.requires_grad_(one == "1")
    alone = trained(*layer)
    with Looking():
        watched = trained(*layer)
    assert len(alone) == 1 + trains.count("1")
    for got, want in zip(alone, watched, strict=True):
        assert bits(got) == bits(want)


def test__a_bias_that_was_stepped_in_its_hook__is_no_stale_operand():
    """An optimizer may step a parameter as soon as its gradient exists."""
    x, w, b = operands(RECIPES["Unit"], (5, 16), (8, 16), (8,))

    def step(p):
        with torch.no_grad():
            p.mul_(0.5)

    b.register_post_accumulate_grad_hook(step)
    y = F.linear(F.linear(x, w, b), w.detach().t().contiguous(), None)
    F.linear(y, w, b).sum().backward()
    assert b.grad is not None


@pytest.mark.parametrize("shift", [-20, 20])
def test__a_loss_scale__moves_only_scales_of_the_gradients(shift):
    layer = operands(RECIPES["Unit"], (3, 70, 64), (48, 64), (48,))
    y = F.linear(*layer)
    gradient = sct.scaled(torch.linspace(-3, 2, y.numel()).view(y.shape), "bf16")
    plain = torch.autograd.grad(y, layer, gradient, retain_graph=True)
    moved = torch.autograd.grad(y, layer, gradient * 2.0**shift)
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a.qdata, b.qdata)
        assert float(b.scale) == float(a.scale) * 2.0**shift


def test__what_is_cast_already__stays():
    x, w = operands(RECIPES["Unit"], (5, 16), (8, 16))
    cast = x.to_format("e4m3fn")
    y = F.linear(cast, w)
    assert bits(y) == bits(F.linear(x, w))
    with Looking():
        assert bits(y) == bits(F.linear(cast, w))


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
    assert all(t.memo.decoded is None for t in kept)


def test__a_write_into_the_weight__leaves_the_codes_alone():
    x, w = operands(RECIPES["Unit"], (5, 16), (8, 16))
    want = trained(x, w)
    y = F.linear(x, w)
    gradient = sct.scaled(torch.linspace(-3, 2, y.numel()).view(y.shape), "bf16")
    with torch.no_grad():
        w.mul_(3.0)
    for got, expected in zip(torch.autograd.grad(y, (x, w), gradient), want[1:], strict=True):
        assert bits(got) == bits(expected)


def test__a_batch_of_gradients__gives_the_gradient_of_each():
    layer = sct.scale_model(torch.nn.Linear(8, 6))
    x = torch.randn(3, 8, requires_grad=True)
    given = torch.randn(5, 3, 6)
    (found,) = torch.autograd.grad(layer(x), x, given, is_grads_batched=True)
    each = [torch.autograd.grad(layer(x), x, g)[0] for g in given]
    assert (found - torch.stack(each)).norm() <= 0.1 * found.norm()
    jacobian = torch.autograd.functional.jacobian(layer, x.detach(), vectorize=True)
    assert jacobian.shape == (3, 6, 3, 8)
