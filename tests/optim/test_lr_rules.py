"""Learning-rate rules have their closed forms, and one step changes the function as they
promise."""

import math

import pytest
import torch
from torch import nn

import scaledtensor.nn as uu
from scaledtensor import mup
from scaledtensor.errors import MupError
from scaledtensor.optim import (
    AdamW,
    Muon,
    lr_scale_for_depth,
    lr_scale_func_adam,
    lr_scale_func_muon,
    lr_scale_func_sgd,
    lr_scale_func_soap,
    lr_scale_func_spectral,
)


def parameter(mup_type, *shape, depth=None):
    return mup.Parameter(torch.randn(shape), mup_type, depth)


@pytest.mark.parametrize("depth", [None, 1, 4])
@pytest.mark.parametrize(
    ("mup_type", "shape", "adam", "sgd"),
    [
        ("weight", (8, 16), 1 / 4, 4),
        ("weight", (8, 4, 4), 1 / 4, 4),
        ("weight", (8, 4, 2, 2), 1 / 4, 4),
        ("weight", (9,), 1 / 3, 3),
        ("bias", (8,), 1, 8),
        ("norm", (8,), 1, 8),
        ("output", (8, 16), 1, 1),
    ],
)
def test__the_rules__are_the_published_ones(mup_type, shape, adam, sgd, depth):
    p = parameter(mup_type, *shape, depth=depth)
    by_depth = 1 if depth is None else depth**-0.5
    assert lr_scale_for_depth(p) == by_depth
    assert lr_scale_func_adam(p) == pytest.approx(by_depth * adam)
    assert lr_scale_func_sgd(None)(p) == pytest.approx(by_depth * adam)
    assert lr_scale_func_sgd("to_output_scale")(p) == pytest.approx(by_depth * sgd)


SIZES = [(16, 16), (64, 16), (16, 64), (256, 64)]


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SIZES)
def test__a_muon_step__changes_a_hidden_layer_by_the_spectral_condition(shape, adjust):
    """The change is lr |change of W| / sqrt(in) = lr sqrt(out / in), for every factor of torch."""
    p = parameter("weight", *shape)
    before, p.grad = p.detach().clone(), torch.randn(shape)
    Muon([p], lr=0.125, adjust_lr_fn=adjust).step()
    change = torch.linalg.matrix_norm((p - before).detach() / shape[1] ** 0.5, ord=2)
    # Five steps of Newton-Schulz in bfloat16 leave singular values between 0.7 and 1.2.
    assert 0.7 < float(change) / (0.125 * math.sqrt(shape[0] / shape[1])) < 1.3


@pytest.mark.parametrize("mup_type", ["weight", "output"])
@pytest.mark.parametrize("shape", SIZES)
def test__adams_rule__is_the_spectral_one_of_aligned_signs(shape, mup_type):
    p = parameter(mup_type, *shape, depth=3)
    rule = lr_scale_func_spectral(lambda outputs, inputs: math.sqrt(outputs * inputs))
    assert rule(p) == pytest.approx(lr_scale_func_adam(p))


@pytest.mark.parametrize("mup_type", ["bias", "norm"])
@pytest.mark.parametrize("rule", [lr_scale_func_spectral(max), lr_scale_func_soap])
def test__vectors__have_adams_rule_under_the_spectral_one(mup_type, rule):
    p = parameter(mup_type, 8, depth=4)
    assert rule(p) == lr_scale_func_adam(p)


def soap_update(grads):
    """Return Adam's update in the eigenbasis of the gradients' second moments, after these
    gradients."""
    left = torch.stack([g @ g.T for g in grads]).mean(0)
    right = torch.stack([g.T @ g for g in grads]).mean(0)
    (_, ql), (_, qr) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    turned = torch.stack([ql.T @ g @ qr for g in grads])
    update = turned.mean(0) / turned.square().mean(0).sqrt()
    return ql @ update @ qr.T


def spectral_norms(width, seed):
    """Measure Adam's and SOAP's updates of a hidden layer, in a network that fits a teacher."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    hidden = uu.Linear(width, width)
    model = nn.Sequential(
        uu.Linear(16, width), uu.GELU(), hidden, uu.GELU(), uu.LinearReadout(width, 4)
    )
    grads = []
    for _ in range(12):
        x = torch.randn(128, 16)
        loss = uu.MSELoss()(model(x), teacher(x).detach())
        grads += torch.autograd.grad(loss, hidden.weight)
    adam = torch.stack(grads).mean(0) / torch.stack(grads).square().mean(0).sqrt()
    return torch.stack([torch.linalg.matrix_norm(u, 2) for u in (adam, soap_update(grads))])


def test__spectral_norms_of_updates__grow_with_the_width_as_the_rules_say():
    """Adam's update grows like the width, and SOAP's like its root."""
    narrow, wide = (
        torch.stack([spectral_norms(width, seed) for seed in range(4)]).log2().mean(0)
        for width in (32, 256)
    )
    adam, soap = ((wide - narrow) / 3).tolist()
    assert adam == pytest.approx(1, abs=0.2)
    assert soap == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("shape", SIZES)
def test__soaps_rule__allows_for_gaussian_updates(shape):
    p = parameter("weight", *shape)
    update = torch.linalg.matrix_norm(torch.randn(shape), 2) * lr_scale_func_soap(p)
    assert float(update) / shape[1] ** 0.5 == pytest.approx(math.sqrt(shape[0] / shape[1]), rel=0.2)


@pytest.mark.parametrize("width", [16, 64, 256])
def test__an_adam_step__changes_the_function_alike_at_every_width(width):
    """One step on one example changes hidden and readout outputs by lr, at any width."""
    torch.manual_seed(0)
    x = torch.randn(width)
    for mup_type, factor in (("weight", width**-0.5), ("output", 1 / width)):
        p = parameter(mup_type, 32, width)
        before = p.detach().clone()
        p.grad = torch.outer(torch.randn(32), x)
        AdamW([p], lr=0.01, eps=0).step()
        change = ((p - before).detach() @ x * factor).square().mean().sqrt()
        # This is the mean of |x| over Gaussian x.
        assert float(change) == pytest.approx(0.01 * math.sqrt(2 / math.pi), rel=0.2)


@pytest.mark.parametrize("constraint", ["gmean", "to_grad_input_scale", ""])
def test__an_unknown_readout_constraint__is_an_error(constraint):
    with pytest.raises(MupError, match='readout_constraint=None and "to_output_scale"'):
        lr_scale_func_sgd(constraint)


def test__an_unknown_adjustment_of_muon__is_an_error():
    with pytest.raises(MupError, match="match_rms_adamw"):
        lr_scale_func_muon("spectral")


@pytest.mark.parametrize(("mup_type", "shape"), [("bias", (3,)), ("weight", (3, 4, 5))])
def test__muon_on_what_is_no_matrix__is_an_error(mup_type, shape):
    with pytest.raises(MupError, match="Muon is for matrices"):
        Muon([parameter(mup_type, *shape)])


@pytest.mark.parametrize(
    "rule",
    [
        lr_scale_for_depth,
        lr_scale_func_adam,
        lr_scale_func_sgd("to_output_scale"),
        lr_scale_func_muon(),
        lr_scale_func_spectral(max),
        lr_scale_func_soap,
    ],
)
def test__a_parameter_without_tags__is_an_error(rule):
    with pytest.raises(MupError, match="no u-muP tags"):
        rule(nn.Parameter(torch.ones(2, 2)))
