"""Convolutions multiply 8-bit operands in every spelling, and batch norm works under all its
names."""

import pytest
import torch
import torch.nn.functional as F
from assertions import TOLERANCE, assert_holds, assert_in_range, dequantized
from tensors import gaussian
from torch import Tensor

import scaledtensor as sct
from scaledtensor.ops.rules.convolution import terms

aten = torch.ops.aten
UNIT = sct.recipes.Unit()


# --- convolution -----------------------------------------------------------------------------

SPELLINGS = {
    "conv1d": (F.conv1d, (2, 4, 9), (6, 4, 3), (6,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), (2, 4, 6, 6), (6, 4, 3, 3), (6,)),
    "conv2d keywords": (
        lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, padding="same", groups=2),
        (2, 4, 6, 6),
        (6, 2, 3, 3),
        (6,),
    ),
    "conv2d unbatched": (F.conv2d, (4, 6, 6), (6, 4, 3, 3), (6,)),
    "conv3d": (F.conv3d, (1, 2, 4, 4, 4), (3, 2, 3, 3, 3), (3,)),
    "conv_transpose1d": (F.conv_transpose1d, (2, 4, 6), (4, 3, 3), (3,)),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, output_padding=1),
        (2, 4, 4, 4),
        (4, 3, 3, 3),
        (3,),
    ),
    "conv_transpose3d": (F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), (3,)),
    "convolution": (
        lambda x, w, b: torch.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (2, 4, 6, 6),
        (6, 4, 3, 3),
        (6,),
    ),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), (7, 2, 4), (3, 4, 6), (6,)),
}
every_spelling = pytest.mark.parametrize("name", SPELLINGS)


@every_spelling
def test__every_spelling__saves_8_bit_operands_and_has_the_right_gradients(name):
    run, *shapes = SPELLINGS[name]
    inputs = [sct.scaled(gaussian(*s), recipe=UNIT).requires_grad_() for s in shapes]
    saved = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run(*inputs)
    formats = [t.format.name for t in saved if isinstance(t, sct.ScaledTensor)]
    assert formats == ["e4m3fn", "e4m3fn"]
    grad = sct.scaled(gaussian(*out.shape, seed=1))
    plain = [dequantized(x).requires_grad_() for x in inputs]
    want = run(*plain)
    assert (dequantized(out) - want).norm() < 0.06 * want.norm()
    found = torch.autograd.grad(out, inputs, grad)
    for got, true in zip(found, torch.autograd.grad(want, plain, dequantized(grad)), strict=True):
        assert (dequantized(got) - true).norm() < 0.12 * true.norm()


@every_spelling
def test__gradient__is_cast_once(name, monkeypatch):
    run, *shapes = SPELLINGS[name]
    inputs = [sct.scaled(gaussian(*s), recipe=UNIT).requires_grad_() for s in shapes]
    out = run(*inputs)
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.scaledtensor.to_format.default:
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    with Spy():
        out.backward(sct.scaled(gaussian(*out.shape, seed=1)))
    assert seen.count("e5m2") == 1


def test__terms__are_those_that_a_convolution_of_ones_counts():
    for shape, kernel, options in (
        ((2, 4, 7, 5), (6, 2, 3, 3), {"stride": 2, "padding": 1, "groups": 2}),
        ((1, 1, 9, 4), (1, 1, 5, 2), {"padding": (4, 1), "dilation": (2, 1)}),
    ):
        x, w = torch.ones(shape, requires_grad=True), torch.ones(kernel, requires_grad=True)
        out = F.conv2d(x, w, **options)
        dx, dw = torch.autograd.grad(out, (x, w), torch.ones_like(out))
        given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
        groups = given.pop("groups")
        n = terms(x.shape, w.shape, out.shape, *given.values(), False, groups)
        assert [t.detach().mean().item() for t in (out, dx, dw)] == pytest.approx(list(n))


def test__terms_of_a_transposed_convolution__are_those_that_one_of_ones_counts():
    x, w = torch.ones(2, 4, 5, 3, requires_grad=True), torch.ones(4, 3, 2, 3, requires_grad=True)
    out = F.conv_transpose2d(x, w, stride=3, padding=1, output_padding=1, groups=2)
    dx, dw = torch.autograd.grad(out, (x, w), torch.ones_like(out))
    n = terms(x.shape, w.shape, out.shape, [3], [1], [1], True, 2)
    assert [t.detach().mean().item() for t in (out, dx, dw)] == pytest.approx(list(n))


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format], ids=str)
def test__memory_format__stays_that_of_the_input(format):
    x = sct.scaled(gaussian(2, 8, 6, 6).to(memory_format=format), recipe=UNIT)
    w = sct.scaled(gaussian(8, 8, 3, 3).to(memory_format=format), recipe=UNIT)
    y = F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2)
    assert y.is_contiguous(memory_format=format)
    assert y.qdata.stride() == y.stride()


# --- batch norm ------------------------------------------------------------------------------

MOMENTUM, EPS = 0.1, 1e-5
TRAINING = {
    "native": lambda x, w, b, m, v: aten.native_batch_norm(x, w, b, m, v, True, MOMENTUM, EPS),
    "legit": lambda x, w, b, m, v: aten._native_batch_norm_legit(
        x, w, b, m, v, True, MOMENTUM, EPS
    ),
    "with_update": lambda x, w, b, m, v: aten._batch_norm_with_update(x, w, b, m, v, MOMENTUM, EPS),
    "cudnn": lambda x, w, b, m, v: aten.cudnn_batch_norm(x, w, b, m, v, True, MOMENTUM, EPS),
    "miopen": lambda x, w, b, m, v: aten.miopen_batch_norm(x, w, b, m, v, True, MOMENTUM, EPS),
}
EVALUATION = {
    "native": lambda x, w, b, m, v: aten.native_batch_norm(x, w, b, m, v, False, MOMENTUM, EPS),
    "no_training": lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(
        x, w, b, m, v, MOMENTUM, EPS
    ),
    "no_update": lambda x, w, b, m, v: aten._batch_norm_no_update(x, w, b, m, v, MOMENTUM, EPS),
}
FUNCTIONAL = {
    "legit": lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(
        x, w, b, m, v, True, MOMENTUM, EPS
    ),
    "with_update": lambda x, w, b, m, v: aten._batch_norm_with_update_functional(
        x, w, b, m, v, MOMENTUM, EPS
    ),
}
WRAPS = {"plain": torch.clone, "scaled": sct.scaled, "bfloat16": Tensor.bfloat16}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))


def problem() -> tuple[Tensor, ...]:
    """Return data, weight, bias, running mean and variance."""
    x = gaussian(8, 3, 5, 5) * 2 + gaussian(3, 1, 1, seed=1)
    return (x, *(gaussian(3, seed=s) for s in (2, 3, 4)), gaussian(3, seed=5).square() + 0.5)


@every_wrap
@pytest.mark.parametrize("name", TRAINING)
def test__training__normalises_and_moves_the_running_statistics(name, wrap):
    x, w, b, mean, var = problem()
    moved = [wrap(mean), wrap(var)]
    out, _, rstd, *_ = TRAINING[name](*map(sct.scaled, (x, w, b)), *moved)
    want = F.batch_norm(x, mean, var, w, b, True, MOMENTUM, EPS)
    assert_holds(out, want, 2.0**-16)
    torch.testing.assert_close(rstd, (x.transpose(0, 1).flatten(1).var(1, False) + EPS).rsqrt())
    for got, now in zip(moved, (mean, var), strict=True):
        assert_holds(got, now, 2.0**-16 if got.dtype == torch.float32 else 2.0**-7)


@every_wrap
@pytest.mark.parametrize("name", EVALUATION)
def test__evaluation__uses_the_running_statistics_and_leaves_them(name, wrap):
    x, w, b, *running = problem()
    held = [wrap(t) for t in running]
    before = [dequantized(t).clone() for t in held]
    out = EVALUATION[name](*map(sct.scaled, (x, w, b)), *held)[0]
    assert_holds(out, F.batch_norm(x, *(t.float() for t in before), w, b, eps=EPS), 2.0**-16)
    for got, was in zip(held, before, strict=True):
        assert torch.equal(dequantized(got), was)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test__functional_form__returns_the_running_statistics(name):
    x, w, b, *running = problem()
    out, *_, mean, var = FUNCTIONAL[name](*map(sct.scaled, (x, w, b)), *running)
    assert torch.equal(running[0], problem()[3])
    want = F.batch_norm(x, *running, w, b, True, MOMENTUM, EPS)
    assert_holds(out, want, 2.0**-16)
    assert_holds(mean, running[0], 2.0**-16)
    assert_holds(var, running[1], 2.0**-16)


@pytest.mark.parametrize("name", ["native", "reserve", "cudnn", "miopen"])
def test__backward__is_the_same_under_every_name(name):
    x, w, _, mean, var = problem()
    g = gaussian(*x.shape, seed=6)
    saved = (
        x.transpose(0, 1).flatten(1).mean(1),
        (x.transpose(0, 1).flatten(1).var(1, False) + EPS).rsqrt(),
    )
    want = aten.native_batch_norm_backward(g, x, w, mean, var, *saved, True, EPS, [True] * 3)
    gs, xs, ws = map(sct.scaled, (g, x, w))
    state = (ws, mean, var, *saved)
    reserve = torch.empty(0, dtype=torch.uint8)
    got = {
        "native": lambda: aten.native_batch_norm_backward(gs, xs, *state, True, EPS, [True] * 3),
        "reserve": lambda: aten.batch_norm_backward(gs, xs, *state, True, EPS, [True] * 3, reserve),
        "cudnn": lambda: aten.cudnn_batch_norm_backward(xs, gs, *state, EPS, reserve),
        "miopen": lambda: aten.miopen_batch_norm_backward(xs, gs, *state, EPS),
    }[name]()
    for a, b in zip(got, want, strict=True):
        assert_holds(a, b, 2.0**-14)


def test__evaluation_of_a_deep_network__does_not_drift():
    """Each batch norm ends the errors of the rules about trained convolutions, also in
    evaluation."""
    torch.manual_seed(0)
    layers = [
        m
        for _ in range(12)
        for m in (
            torch.nn.Conv2d(16, 16, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
        )
    ]
    for conv in layers[::3]:
        # The terms are correlated, so sums are larger than sums of independent terms.
        conv.weight.data += 0.02
    net = torch.nn.Sequential(*layers)
    x = gaussian(8, 16, 8, 8)
    for _ in range(30):
        net(x)
    model = sct.scale_model(net.eval())
    h = x
    for layer in model:
        h = layer(h)
        if isinstance(layer, torch.nn.BatchNorm2d):
            assert_in_range([h], 0.4, 2.5)


def test__grid__keeps_its_float32_coordinates_beside_a_bfloat16_image():
    x = sct.scaled(gaussian(1, 2, 512, 512).bfloat16())
    grid = torch.rand(1, 8, 8, 2, generator=torch.Generator().manual_seed(0)) * 1.9 - 0.95
    want = F.grid_sample(dequantized(x), grid.double(), align_corners=False)
    assert_holds(F.grid_sample(x, grid, align_corners=False), want, TOLERANCE[torch.bfloat16])


def test__interpolate__refuses_what_torch_refuses():
    x = sct.scaled(gaussian(1, 2, 4, 4))
    for options in ({}, {"size": 3, "scale_factor": 2}, {"size": [3], "mode": "bilinear"}):
        with pytest.raises(ValueError, match=r"size|scale_factor|spatial"):
            F.interpolate(x, **options)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test__an_interpolation__takes_a_plain_gradient(mode):
    """The gradient of a sum is plain, and so is the gradient of a tensor of weights."""
    x = gaussian(1, 3, 6, 6)
    weights = gaussian(1, 3, 12, 12, seed=1)
    plain, scaled = x.clone().requires_grad_(), sct.scaled(x).requires_grad_()
    for t in (plain, scaled):
        (F.interpolate(t, scale_factor=2, mode=mode) * weights).sum().backward()
    torch.testing.assert_close(dequantized(scaled.grad).float(), plain.grad)
    made = F.interpolate(sct.scaled(x).requires_grad_(), scale_factor=2, mode=mode)
    made.sum().backward()


def test__a_compiled_interpolation__takes_a_second_size():
    def enlarged(x):
        return F.interpolate(x, scale_factor=2) * 1.0

    torch.compiler.reset()
    compiled = torch.compile(enlarged)
    for size in (6, 7):
        x = gaussian(1, 2, size, size)
        plain, scaled = x.clone().requires_grad_(), sct.scaled(x).requires_grad_()
        enlarged(plain).square().sum().backward()
        compiled(scaled).square().sum().backward()
        torch.testing.assert_close(dequantized(scaled.grad).float(), plain.grad)
