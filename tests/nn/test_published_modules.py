"""The modules match the published ones to 1e-5, and differ in the listed points."""

import inspect

import pytest
import torch
from assertions import assert_each
from nn_cases import CASES
from torch import nn

import scaledtensor.nn as uu

published = pytest.importorskip("unit_scaling")
theirs = pytest.importorskip("unit_scaling._modules")

SAME = [name for name, case in CASES.items() if case.same]
NAMES = sorted({name.split("_")[0] for name in SAME} | {"TransformerStack", "TransformerDecoder"})


def as_published(module: nn.Module) -> nn.Module:
    """Return the published module with the same settings and weights."""
    kind = getattr(theirs, type(module).__name__)
    if isinstance(module, uu.MLP):
        made = kind(module.linear_1.in_features)
    elif isinstance(module, uu.TransformerLayer):
        causal = module.mhsa.is_causal
        made = kind(64, module.mhsa.heads, module.mhsa_tau, module.mlp_tau, causal)
    else:
        options = {}
        for name in inspect.signature(kind).parameters:
            if name == "hidden_size":
                options[name] = module.linear_o.in_features
            elif name == "bias":
                options[name] = module.bias is not None
            elif name == "weight_mup_type":
                options[name] = module.weight.mup_type
            elif not name.startswith("_") and hasattr(module, name):
                value = getattr(module, name)
                single = name != "normalized_shape" and isinstance(value, tuple)
                options[name] = value[0] if single else value
        if isinstance(module, uu.Embedding):
            options = {k: v for k, v in options.items() if k.endswith(("s", "dim"))}
        options.pop("weight", None)
        made = kind(**options)
    made.load_state_dict(module.state_dict())
    return made


def run(module, arguments, seed=0):
    inputs = [a.clone() for a in arguments]
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    torch.manual_seed(seed)
    out = module(*inputs)
    out.backward(torch.randn_like(out) if out.dim() else None)
    return out, inputs[0].grad, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", SAME)
def test__a_module__computes_what_the_published_one_does(name):
    torch.manual_seed(0)
    module, arguments = CASES[name].make(), CASES[name].arguments()
    reference = as_published(module)
    torch.testing.assert_close(
        run(module, arguments), run(reference, arguments), rtol=1e-5, atol=1e-5
    )
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert (p.mup_type, p.mup_scaling_depth) == (q.mup_type, q.mup_scaling_depth)


@pytest.mark.parametrize("layers", [1, 3])
def test__a_decoder__computes_what_the_published_one_does(layers):
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "vocab_size": 40, "layers": layers, "heads": 4}
    ours, reference = uu.TransformerDecoder(**settings), published.TransformerDecoder(**settings)
    ours.load_state_dict(reference.state_dict())
    tokens = torch.randint(0, 40, (4, 24))
    losses = [model.loss(tokens) for model in (ours, reference)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(tokens), reference(tokens), rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, p), (same, q) in zip(
        ours.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name == same
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=2e-5)
        assert (p.mup_type, p.mup_scaling_depth) == (q.mup_type, q.mup_scaling_depth)


def test__arguments__have_the_published_names_order_and_defaults():
    assert_each(NAMES, _has_the_published_arguments)


def _has_the_published_arguments(name):
    ours = inspect.signature(getattr(uu, name)).parameters
    reference = inspect.signature(getattr(theirs, name)).parameters
    positional = [n for n, p in reference.items() if p.kind is not p.VAR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is not p.VAR_KEYWORD][: len(positional)] == (
        positional
    )
    for argument in positional:
        if argument != "residual_scaling":  # Its default is a function.
            assert ours[argument].default == reference[argument].default


def test__every_published_module__is_public():
    assert [name for name in NAMES if name not in uu.__all__] == []
    assert all(issubclass(getattr(uu, name), nn.Module) for name in NAMES)


def test__every_published_name__has_a_counterpart():
    modules = {
        name
        for name in published.__all__
        if inspect.isclass(getattr(published, name))
        and issubclass(getattr(published, name), nn.Module)
    }
    assert len(modules) > 15
    assert modules <= set(uu.__all__)


def test__differences_from_the_published_modules__are_still_there():
    """If one of these fails, the published library has changed: remove its name from our list."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16)
    free = theirs.Conv1d(8, 16, 3, constraint="to_grad_input_scale")
    kept = theirs.Conv1d(8, 16, 3)
    kept.load_state_dict(free.state_dict())
    assert torch.equal(free(x), kept(x))
    assert not torch.equal(theirs.Dropout(0.5).eval()(x), x)
    attention = theirs.MHSA(16, 2, is_causal=True, dropout_p=0.5).eval()
    assert not torch.equal(attention(x), attention(x))
    assert theirs.Conv1d(8, 8, 3, padding=1, padding_mode="circular")(x).shape[-1] == 18
