"""The small modules of the published library: scales, constraints, parameters, optimizers, core."""

import copy
import pickle

import pytest
import torch
from torch import nn

import scaledtensor
from scaledtensor import errors
from scaledtensor.compat import unit_scaling as uu
from scaledtensor.compat.unit_scaling import constraints, functional, optim, parameter, scale
from scaledtensor.compat.unit_scaling.core import functional as core


def test__a_scale__is_of_one_direction():
    x, seed = torch.randn(64, requires_grad=True), torch.randn(64)
    forward, backward = scale.scale_fwd(x, scale=3.5), scale.scale_bwd(x, scale=3.5)
    assert torch.equal(forward, x * 3.5)
    assert torch.equal(backward, x)
    assert torch.equal(torch.autograd.grad(forward, x, seed)[0], seed)
    assert torch.equal(torch.autograd.grad(backward, x, seed)[0], seed * 3.5)
    with pytest.raises(errors.ScaleError, match="positive"):
        scale.scale_fwd(x, -1.0)


def test__constraints__are_means_and_choices():
    assert constraints.gmean(8.0, 2.0) == 4
    assert constraints.hmean(8.0, 2.0) == pytest.approx(3.2)
    assert constraints.amean(8.0, 2.0) == 5
    assert constraints.to_output_scale(2, 3, 4) == 2
    assert constraints.to_grad_input_scale(2, 3) == 3
    assert constraints.to_left_grad_scale(2, 3, 4) == 3
    assert constraints.to_right_grad_scale(2, 3, 4) == 4
    assert constraints.apply_constraint("gmean", 1.0, 4.0, 2.0) == pytest.approx((2, 2, 2))
    assert constraints.apply_constraint(None, 1.0, 4.0) == (1, 4)
    with pytest.raises(ValueError, match="unknown constraint 'invalid'"):
        constraints.apply_constraint("invalid", 8.0, 2.0)


@pytest.mark.parametrize(
    ("constraint", "forward", "backward"),
    [(None, 2.5, 0.5), ("to_output_scale", 2.5, 2.5), ("to_grad_input_scale", 0.5, 0.5)],
)
def test__an_elementwise_function__is_scaled(constraint, forward, backward):
    x, seed = torch.randn(64, requires_grad=True), torch.randn(64)
    scaled = core.scale_elementwise(
        lambda x, plus, times=1: x * times + plus,
        output_scale=2.5,
        grad_input_scale=0.5,
        constraint=constraint,
    )
    y = scaled(x, 1, times=2)
    torch.testing.assert_close(y, (2 * x + 1) * forward)
    torch.testing.assert_close(torch.autograd.grad(y, x, seed)[0], 2 * seed * backward)


def test__an_interpolation__is_of_constant_ratio():
    found = [core.logarithmic_interpolation(a, lower=1 / 1000, upper=1 / 10) for a in (0, 0.5, 1)]
    assert found == pytest.approx([1 / 1000, 1 / 100, 1 / 10])
    with pytest.raises(errors.ScaleError, match="positive"):
        core.logarithmic_interpolation(0.5, 0.0, 1.0)


def test__rms__is_over_some_dimensions_or_all():
    x = torch.tensor([[2.0, -2, -2, -2], [0, 2, 0, 0]])
    assert core.rms(x, dims=(1,)).tolist() == [2, 1]
    assert core.rms(x, dims=(1,), keepdim=True).shape == (2, 1)
    assert core.rms(torch.zeros(3), eps=1 / 16).item() == 0.25
    assert core.rms(x.bfloat16()).dtype == torch.bfloat16
    assert core.rms(-4 + 3 * torch.randn(2**14)).item() == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize(("mult", "ratio"), [(1.0, 1.0), (0.5, 2.0)])
def test__the_residual_rule__is_the_published_one(mult, ratio):
    published = pytest.importorskip("unit_scaling.core.functional")
    theirs = published.transformer_residual_scaling_rule(mult, ratio)
    for ours in (core.transformer_residual_scaling_rule, uu.transformer_residual_scaling_rule):
        tau = ours(residual_mult=mult, residual_attn_ratio=ratio)
        assert [tau(i, 6) for i in range(6)] == pytest.approx([theirs(i, 6) for i in range(6)])


def test__a_parameter__has_tags_that_its_module_keeps():
    """A copy of the bare parameter has none; there it has."""
    p = uu.Parameter(torch.zeros(10), mup_type="weight")
    assert (p.mup_type, p.mup_scaling_depth) == ("weight", None)
    assert parameter.has_parameter_data(p)
    assert parameter.has_parameter_data(pickle.loads(pickle.dumps(p)))
    assert not parameter.has_parameter_data(copy.deepcopy(p))
    assert parameter.has_parameter_data(copy.deepcopy(uu.Linear(2, 2)).weight)
    assert not parameter.has_parameter_data(nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="mup_type"):
        uu.Parameter(torch.zeros(10), "unknown")


def test__the_functions_of_torch__have_counterparts():
    published = pytest.importorskip("unit_scaling.functional")
    x = torch.randn(8, 16)
    assert {f for f in published.torch_map if f.__name__ != "conv1d"} <= {*functional.torch_map}
    gelu = functional.torch_map[torch.nn.functional.gelu]
    torch.testing.assert_close(gelu(x), functional.gelu(x))


def test__a_model_of_the_guide__trains():
    """A model written with the published names, its loss and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        uu.Embedding(16, 32),
        uu.DepthSequential(
            *(uu.TransformerLayer(32, 4, 0.5, 0.5, is_causal=True) for _ in range(2))
        ),
        uu.LayerNorm(32),
        uu.LinearReadout(32, 16),
    )
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=1e-3)
    tokens = torch.arange(64).view(4, 16) % 16
    losses = []
    for _ in range(30):
        loss = functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test__any_optimizer__takes_scaled_parameters():
    model = uu.Linear(16, 4, bias=True)
    groups = optim.scaled_parameters(model.parameters(), optim.lr_scale_func_adam, lr=1.0)
    optimizer = torch.optim.RAdam(groups)
    assert [g["lr"] for g in optimizer.param_groups] == [1 / 4, 1.0]


def test__a_function_written_by_hand__is_like_its_module():
    x = torch.randn(64, 32)
    layer = uu.Linear(32, 16)
    assert torch.equal(layer(x), functional.linear(x, layer.weight, None))
    residual, skip = functional.residual_split(x, tau=0.5)
    by_hand = functional.residual_add(functional.gelu(residual), skip, tau=0.5)
    assert torch.equal(by_hand, functional.residual_apply(functional.gelu, x, tau=0.5))


def test__the_version__is_this_librarys():
    assert uu.__version__ == scaledtensor.__version__
