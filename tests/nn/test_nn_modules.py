"""Every module has unit scale at initialisation, keeps tags in copies, and shows itself."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from assertions import rms
from nn_cases import CASES
from tensors import gaussian, value_of
from torch import nn

import scaledtensor as sct
import scaledtensor.functional as U
import scaledtensor.nn as uu
from scaledtensor import mup
from scaledtensor.errors import MupError, UnsupportedError

every_module = pytest.mark.parametrize("name", CASES)


def backward(module, arguments):
    """Return the output, and gradients by name, for a Gaussian gradient of it (1 for a loss)."""
    inputs = [a.clone() for a in arguments]
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    out = module(*inputs)
    out.backward(torch.randn_like(out) if out.dim() else None)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return out, grads | ({"input": inputs[0].grad} if inputs[0].requires_grad else {})


@every_module
def test__a_module__has_unit_scale_forward_and_backward(name):
    torch.manual_seed(0)
    case, found = CASES[name], defaultdict(list)
    for _ in range(8):  # Biases and gains have few elements.
        out, grads = backward(case.make(), case.arguments())
        for what, x in {"output": out.detach(), **grads}.items():
            found[what].append(x)
    for what, samples in found.items():
        low, high = (1e-3, 1e3) if what in case.exempt else (0.8, 1.25)
        assert low < rms(*samples) < high, (what, rms(*samples))


@pytest.mark.parametrize("factor", [1, 2, 8 / 3, 4, 8])
def test__an_mlp__has_unit_scale_at_every_expansion(factor):
    torch.manual_seed(0)
    module = uu.MLP(96, factor)
    assert module.linear_2.in_features == round(96 * factor)
    out, grads = backward(module, (torch.randn(8, 64, 96),))
    for name, x in {"output": out.detach(), **grads}.items():
        wanted = 2**0.5 if name == "input" else 1.0
        assert 0.8 < rms(x) / wanted < 1.25, (name, rms(x))


@every_module
def test__a_module__is_copied_and_pickled_with_its_tags(name):
    module = CASES[name].make().eval()
    arguments = CASES[name].arguments()
    expected = module(*arguments)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(made) == repr(module)
        assert torch.equal(made(*arguments), expected)
        for p, q in zip(module.parameters(), made.parameters(), strict=True):
            assert mup.tags(p) == mup.tags(q)


@every_module
def test__a_module__is_materialised_from_the_meta_device(name):
    torch.manual_seed(0)
    with torch.device("meta"):
        module = CASES[name].make()
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    plain = CASES[name].make()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert mup.tags(p) == mup.tags(q)
        assert abs(rms(p.detach()) - rms(q.detach())) < 0.1


@every_module
def test__a_scaled_module__computes_what_the_plain_one_does(name):
    torch.manual_seed(0)
    module = CASES[name].make().eval()
    arguments = CASES[name].arguments()
    held = copy.deepcopy(module)
    if list(held.parameters()):
        sct.scale_model(held)
    elif arguments[0].is_floating_point():
        arguments = (sct.scaled(arguments[0]), *arguments[1:])
    plain = [value_of(a) for a in arguments]
    torch.manual_seed(1)
    out, want = held(*arguments), module(*plain)
    assert isinstance(out, sct.ScaledTensor) or "Loss" in name
    got = value_of(out)
    # Operands have 8 bits, three of them mantissa.
    assert rms((got - want).detach()) < 0.08 * rms(want.detach())


def test__weights__are_gaussian_of_unit_variance_and_biases_zero():
    for make in (uu.Linear, uu.LinearReadout):
        layer = make(256, 256, bias=True)
        assert 0.97 < float(layer.weight.detach().std()) < 1.03
        assert not layer.bias.any()
    assert 0.97 < float(uu.Conv2d(64, 64, 3).weight.detach().std()) < 1.03
    assert 0.97 < float(uu.Embedding(256, 256).weight.detach().std()) < 1.03


@pytest.mark.parametrize(
    ("module", "weight", "bias"),
    [
        (uu.Linear(4, 2, bias=True), mup.Tags("weight"), mup.Tags("bias")),
        (uu.Linear(4, 2, weight_mup_type="output"), mup.Tags("output"), None),
        (uu.LinearReadout(4, 2, bias=True), mup.Tags("output"), mup.Tags("bias")),
        (uu.Embedding(4, 2), mup.Tags("weight"), None),
        (uu.Conv1d(4, 2, 3, bias=True), mup.Tags("weight"), mup.Tags("bias")),
        (
            uu.ConvTranspose2d(8, 2, 4, 2, groups=2, bias=True),
            mup.Tags("weight", None, 16),
            mup.Tags("bias"),
        ),
        (uu.LayerNorm(4, elementwise_affine=True), mup.Tags("norm"), mup.Tags("bias")),
        (uu.RMSNorm(4, elementwise_affine=True), mup.Tags("norm"), None),
        (uu.GroupNorm(2, 4, affine=True), mup.Tags("norm"), mup.Tags("bias")),
        (uu.BatchNorm1d(4, affine=True), mup.Tags("norm"), mup.Tags("bias")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test__parameters__are_tagged_by_what_they_are(module, weight, bias):
    assert mup.tags(module.weight) == weight
    assert (mup.tags(module.bias) if bias else getattr(module, "bias", None)) == bias


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (uu.GELU(2.0), "GELU(approximate='none', mult=2.0, constraint='to_output_scale')"),
        (uu.Softmax(-1), "Softmax(dim=-1, mult=1.0, constraint='to_output_scale')"),
        (
            uu.LinearReadout(4, 2),
            "LinearReadout(in_features=4, out_features=2, bias=False, constraint=None, "
            "mup_type='output')",
        ),
        (uu.CrossEntropyLoss(0.5), "CrossEntropyLoss(mult=0.5, constraint=None)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test__a_module__shows_its_settings(module, shown):
    assert repr(module) == shown


@pytest.mark.parametrize("make", [uu.SiLU, uu.ReLU, uu.LeakyReLU, uu.Dropout])
def test__inplace__is_refused_by_name(make):
    with pytest.raises(UnsupportedError, match=rf"{make.__name__}\(inplace=True\)"):
        make(inplace=True)


def test__an_unknown_type_of_weight__is_an_error():
    with pytest.raises(MupError, match="mup_type is one of"):
        uu.Linear(2, 2, weight_mup_type="hidden")


def test__conv1d__honours_its_constraint():
    """The published module drops the constraint, and scales every convolution by its output."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 32, requires_grad=True)
    for constraint in ("to_output_scale", "to_grad_input_scale", "gmean", None):
        module = uu.Conv1d(8, 16, 3, constraint=constraint)
        want = U.conv1d(x, module.weight, constraint=constraint)
        torch.testing.assert_close(module(x), want)
        (got,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (module(x), want))
        torch.testing.assert_close(got, expected)
    scales = {
        c: float(uu.Conv1d(8, 16, 3, constraint=c)(x).detach().std())
        for c in ("to_output_scale", "to_grad_input_scale")
    }
    assert scales["to_output_scale"] / scales["to_grad_input_scale"] == pytest.approx(2**0.5, 0.2)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test__other_padding__is_applied_once(mode):
    """The published module pads by the mode and then by zeros again."""
    module = uu.Conv1d(8, 8, 3, padding=1, padding_mode=mode, constraint=None)
    plain = nn.Conv1d(8, 8, 3, padding=1, padding_mode=mode, bias=False)
    plain.weight = nn.Parameter(module.weight.detach() / 24**0.5)
    x = torch.randn(2, 8, 16)
    assert module(x).shape == (2, 8, 16)
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize("padding", ["same", "valid", 2])
def test__padding_by_name__is_taken(padding):
    module = uu.Conv2d(4, 4, 3, padding=padding)
    plain = nn.Conv2d(4, 4, 3, padding=padding, bias=False)
    plain.weight = nn.Parameter(module.weight.detach() / 6)
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(module(x), plain(x))


def test__a_transposed_convolution__takes_an_output_size():
    module = uu.ConvTranspose2d(4, 4, 3, stride=2)
    assert module(torch.randn(2, 4, 5, 5), output_size=(12, 12)).shape == (2, 4, 12, 12)


def test__dropout_in_evaluation__is_the_identity():
    """The published module multiplies by sqrt(1 - p)."""
    x = torch.randn(16, requires_grad=True)
    out = uu.Dropout(0.5).eval()(x)
    assert torch.equal(out, x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones(16))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("track", [True, False])
def test__batch_norm__keeps_the_statistics_of_torchs(momentum, track):
    options = {"momentum": momentum, "track_running_stats": track}
    ours, plain = uu.BatchNorm1d(8, **options), nn.BatchNorm1d(8, affine=False, **options)
    for seed in range(3):
        x = gaussian(16, 8, seed=seed) + 1
        torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test__exact__gives_the_true_gradient_of_gains_and_losses():
    torch.manual_seed(0)
    x, target = torch.randn(16, 8), torch.randint(0, 8, (16,))
    ours = nn.Sequential(uu.LayerNorm(8, elementwise_affine=True, constraint="exact"))
    plain = nn.Sequential(nn.LayerNorm(8))
    uu.CrossEntropyLoss(constraint="exact")(ours(x), target).backward()
    nn.CrossEntropyLoss()(plain(x), target).backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
