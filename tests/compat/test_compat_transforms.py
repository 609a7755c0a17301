"""Transforms of the published library return copies with other arithmetic, and they nest."""

import copy
import importlib
import pickle

import pytest
import torch
import torch.nn.functional as F
from tensors import gaussian
from torch import nn

import scaledtensor as sct
from scaledtensor import errors
from scaledtensor.compat import unit_scaling as uu
from scaledtensor.compat.unit_scaling import functional as U
from scaledtensor.compat.unit_scaling.formats import FPFormat
from scaledtensor.compat.unit_scaling.transforms import (
    compile,
    simulate_format,
    simulate_fp8,
    track_scales,
    unit_scale,
)


class MLPLayer(nn.Module):
    """Model of the published library's tests."""

    def __init__(self, size):
        super().__init__()
        self.layer_norm = nn.LayerNorm(size)
        self.l1 = nn.Linear(size, 4 * size)
        self.l2 = nn.Linear(4 * size, size)

    def forward(self, x):
        x = F.gelu(self.l1(self.layer_norm(x)))
        x = F.dropout(self.l2(x), 0.2, self.training)
        return x, x.sum()


class Residual(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.l1 = nn.Linear(size, size)
        self.l2 = nn.Linear(size, size)

    def forward(self, x):
        x = self.l1(x + 1) + x
        return self.l2(F.relu(x)) + x


def leaky(x, inplace=False):
    return F.leaky_relu(x)


def rms(x):
    return float(x.detach().square().mean().sqrt())


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


TRANSFORMS = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "compile": compile,
    "track_scales": track_scales,
    "unit_scale with replace": lambda m: unit_scale(m, replace={F.gelu: U.gelu}),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=[*TRANSFORMS])
def test__a_transform__returns_an_independent_copy(transform):
    torch.manual_seed(0)
    model, x = MLPLayer(16).eval(), torch.randn(8, 16)
    before, expected = state(model), model(x)[0]
    other = transform(model)
    assert other is not model
    for parameter in other.parameters():
        parameter.data.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x)[0], expected)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    assert "forward" not in vars(model)


def test__unit_scale__has_unit_scale_forward_and_backward():
    torch.manual_seed(0)
    model = unit_scale(nn.Sequential(MLPLayer(256)))
    x = torch.randn(128, 256, requires_grad=True)
    out, _ = model(x)
    out.backward(torch.randn_like(out))
    layer = model[0]
    tensors = [
        out,
        x.grad,
        layer.l1.weight.grad,
        layer.l2.weight.grad,
        layer.layer_norm.weight.grad,
    ]
    for tensor in [*tensors, layer.l1.weight, layer.l2.weight]:
        assert 0.5 < rms(tensor) < 2
    assert not layer.l1.bias.any()


class Formula(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(64, 64)

    def forward(self, x):
        y = torch.tanh(self.l1(x))
        y = y * y
        return y, y.sum()


def test__formulas__are_of_unit_scale():
    """The published library does not convert them. Here even a single number is converted."""
    torch.manual_seed(0)
    published = pytest.importorskip("unit_scaling.transforms")
    model, x = Formula(), torch.randn(256, 64)
    (ours, loss), (theirs, sum_of_theirs) = (
        f(model)(x) for f in (unit_scale, published.unit_scale)
    )
    assert 0.8 < rms(ours) < 1.25
    torch.testing.assert_close(loss, ours.sum())
    assert rms(theirs) < 0.6
    torch.testing.assert_close(sum_of_theirs, theirs.sum())


def test__a_unit_scaled_models_parameters__have_learning_rates():
    """The published transform tags no parameter, and its optimizers refuse them."""
    torch.manual_seed(0)
    published = pytest.importorskip("unit_scaling")
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 4))
    optimizer = uu.optim.AdamW(unit_scale(model).parameters(), lr=1.0)
    assert {g["lr"] for g in optimizer.param_groups} == {64**-0.5, 16**-0.5, 2.0**-5}
    theirs = importlib.import_module("unit_scaling.transforms").unit_scale(model)
    with pytest.raises(ValueError, match="mup_type"):
        published.optim.AdamW(theirs.parameters(), lr=1.0)


def test__unit_scale__is_that_of_scaledtensor():
    torch.manual_seed(0)
    model, x = Residual(32), torch.randn(8, 32)
    assert torch.equal(unit_scale(model)(x), sct.unit_scale(copy.deepcopy(model))(x))


def test__a_unit_scaled_model__can_be_scaled_as_part_of_others():
    torch.manual_seed(0)
    model = simulate_fp8(nn.Sequential(uu.Linear(32, 32), uu.GELU(), uu.LinearReadout(32, 8)))
    assert 0.03 < rms(model(torch.randn(256, 32))) < 1.5


PRODUCTS = {
    "linear": (lambda x, w: F.linear(x, w), 1),
    "U.linear": (lambda x, w: U.linear(x, w, None), 1),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, x, w), 2),
    "U.attention": (lambda x, w: U.scaled_dot_product_attention(x, x, w), 2),
    "@": (lambda x, w: x @ w.mT, 1),
}


class Product(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return self.function(x, self.weight).sum()


@pytest.mark.parametrize("name", PRODUCTS)
def test__simulate_fp8__changes_products_forward_and_backward(name):
    torch.manual_seed(0)
    model = Product(PRODUCTS[name][0])
    low = simulate_fp8(model)
    found = []
    for m in (model, low):
        x = gaussian(32, 32, seed=1).requires_grad_()
        out = m(x)
        out.backward()
        found.append((out, x.grad, m.weight.grad))
    for exact, rounded in zip(*found, strict=True):
        assert not torch.equal(exact, rounded)
        assert float((exact - rounded).detach().norm() / exact.detach().norm()) < 0.3


def test__simulate_format__rounds_as_the_formats_say():
    """The published transform always rounds stochastically."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4, bias=False), torch.randn(6, 8)
    forward, backward = FPFormat(3, 2, "nearest"), FPFormat(5, 2, "nearest")
    low, seed = simulate_format(model, forward, backward), torch.randn(6, 4)
    y = low(x)
    y.backward(seed)
    assert torch.equal(y, forward.quantise(x) @ forward.quantise(model.weight).mT)
    assert torch.equal(low.weight.grad, backward.quantise(seed).mT @ forward.quantise(x))
    assert torch.equal(low(x), y)
    noisy = simulate_format(model, FPFormat(3, 2), FPFormat(5, 2))
    assert not torch.equal(noisy(x), noisy(x))


def test__simulate_format__uses_so_many_random_bits():
    torch.manual_seed(0)
    low = simulate_format(nn.Linear(1, 1, bias=False), FPFormat(2, 1, srbits=1), FPFormat(5, 2))
    with torch.no_grad():
        low.weight.fill_(1)
    y = low(torch.full((10_000, 1), 1.35))
    assert float((y == 1.5).float().mean()) == pytest.approx(0.5, abs=0.02)


def test__simulated_formats__compile():
    torch.manual_seed(0)
    fmt = FPFormat(3, 2, "nearest")
    low, x = simulate_format(Residual(16), fmt, fmt), torch.randn(4, 16, requires_grad=True)
    expected = low(x)
    y = torch.compile(low, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, expected)
    seed = torch.randn(4, 16)
    ours, theirs = (torch.autograd.grad(out, x, seed)[0] for out in (y, expected))
    torch.testing.assert_close(ours, theirs)


NESTED = {
    "compile": lambda m: compile(m),
    "compile(unit_scale)": lambda m: compile(unit_scale(m)),
    "compile(simulate_fp8(unit_scale))": lambda m: compile(simulate_fp8(unit_scale(m))),
    "track_scales(unit_scale(simulate_fp8))": lambda m: track_scales(unit_scale(simulate_fp8(m))),
}


@pytest.mark.parametrize("nested", NESTED.values(), ids=[*NESTED])
def test__transforms__nest(nested, monkeypatch):
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: made(m, backend="aot_eager"))
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nested(MLPLayer(64))
    x = torch.randn(32, 64, requires_grad=True)
    out, loss = model(x)
    loss.backward()
    assert out.shape == x.shape
    assert x.grad is not None
    assert all(p.grad is not None for p in model.parameters())


def test__the_order_of_unit_scale_and_simulate_format__does_not_matter():
    torch.manual_seed(0)
    fmt = FPFormat(4, 3, "nearest")
    model, x = Residual(32), torch.randn(8, 32)
    one = unit_scale(simulate_format(model, fmt, fmt))(x)
    other = simulate_format(unit_scale(model), fmt, fmt)(x)
    assert torch.equal(one, other)
    assert not torch.equal(one, unit_scale(model)(x))


def test__compile_of_unit_scale__is_the_eager_model_and_plans_each_mode(monkeypatch):
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: made(m, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    torch.manual_seed(0)
    scaled = unit_scale(MLPLayer(16)).eval()
    compiled, x = compile(scaled), torch.randn(8, 16)
    torch.testing.assert_close(compiled(x)[0], scaled(x)[0])
    compiled.train()
    assert not torch.equal(compiled(x)[0], compiled(x)[0])  # dropout


def test__torch_compile__takes_a_unit_scaled_model():
    """The published transform recurses without end."""
    torch.manual_seed(0)
    model, x = unit_scale(Residual(16)), torch.randn(8, 16)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)


def test__copies_and_pickles__compute_alike():
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    fmt = FPFormat(3, 2, "nearest")
    model = simulate_format(unit_scale(Residual(16), replace={F.relu: leaky}), fmt, fmt)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)


def test__scales__are_tracked_of_a_copy():
    torch.manual_seed(0)
    model, x = MLPLayer(64), torch.randn(128, 64)
    tracked = track_scales(unit_scale(model))
    tracked(x)[0].backward(torch.randn(128, 64))
    nodes = {
        n.meta["clean_name"]: n.meta["metrics"]
        for n in tracked.scales_graph().nodes
        if "metrics" in n.meta
    }
    assert nodes["x"].fwd.std == pytest.approx(1, abs=0.1)
    assert nodes["x"].bwd is not None  # The input asked for no gradient.
    assert not x.requires_grad
    assert nodes["l1_weight"].fwd.numel == 64 * 256
    assert all(p.grad is None for p in model.parameters())


def test__bad_arguments__are_named():
    with pytest.raises(errors.ModelError, match=r"nn\.Module"):
        unit_scale(torch.relu)
    with pytest.raises(errors.ModelError, match="compiled"):
        unit_scale(compile(nn.Linear(2, 2)))
    with pytest.raises(errors.ModelError, match="already"):
        simulate_fp8(simulate_fp8(nn.Linear(2, 2)))
    with pytest.raises(errors.FormatError, match="FPFormat"):
        simulate_format(nn.Linear(2, 2), "e4m3fn", "e5m2")


def test__a_model_transformed_by_either_library__is_not_transformed_again():
    model = nn.Linear(4, 4)
    once = unit_scale(model, replace={F.linear: U.linear})
    with pytest.raises(errors.ModelError, match="already"):
        sct.unit_scale(once)
    with pytest.raises(errors.ModelError, match="already"):
        sct.simulate_fp8(simulate_fp8(model))
