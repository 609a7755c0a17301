"""Transformers of these modules have unit scale, train in 8 bits, compile, and become deep."""

import copy

import pytest
import torch
from assertions import assert_in_range, rms
from torch import nn

import scaledtensor as sct
import scaledtensor.nn as uu
from scaledtensor import mup
from scaledtensor.errors import MupError, ShapeError
from scaledtensor.optim import AdamW, Muon


def decoder(**options):
    torch.manual_seed(0)
    return uu.TransformerDecoder(
        **{"hidden_size": 64, "vocab_size": 48, "layers": 3, "heads": 4} | options
    )


def tokens(batch=4, length=32, vocabulary=48):
    rng = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (batch, length), generator=rng)


def outputs_and_gradients(model, x):
    """Return the output of each module and its gradient, by name."""
    found = {}

    def keep(name):
        def hook(module, arguments, out):
            found[name] = out.detach()
            out.register_hook(lambda grad: found.__setitem__(f"{name}.grad", grad))

        return hook

    handles = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if n]
    model.loss(x).backward()
    for handle in handles:
        handle.remove()
    return found | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("layers", "low", "high"),
    # In deep stacks positions become alike, and their average is larger than an average of
    # independent positions.
    [(1, 0.5, 2.0), (4, 0.25, 4.0)],
)
@pytest.mark.parametrize("scaled", [False, True])
def test__a_decoder__has_unit_scale_forward_and_backward(layers, low, high, scaled):
    """Every module's output and its gradient, and the weights' gradients, have unit scale at
    initialisation."""
    model = decoder(hidden_size=128, vocab_size=512, layers=layers)
    if scaled:
        sct.scale_model(model)
    found = outputs_and_gradients(model, tokens(8, 64, 512))
    assert len(found) > 25
    for name, x in found.items():
        if scaled:
            assert_in_range([x], low, high, name)
        elif name == "projection":  # It is 1 / sqrt(fan_in) by design.
            assert rms(x) * 128**0.5 == pytest.approx(1, rel=0.2)
        else:
            assert low < rms(x) < high, (name, rms(x))


@pytest.mark.parametrize("layers", [1, 2, 8])
def test__residual_branches__contribute_alike_at_every_depth(layers):
    """By the rule for tau, the last hidden state has as much of the embedding as of all branches of
    each kind. Its standard deviation therefore stays 1."""
    model = decoder(hidden_size=128, vocab_size=512, layers=layers, post_norm=True)
    assert rms(model[:2](tokens(8, 64, 512)).detach()) == pytest.approx(1, rel=0.15)
    assert model.layers[0].mhsa_tau == pytest.approx(layers**-0.5)


def train(model, steps=3, compiled=False, lr=0.5):
    loss_of = (
        torch.compile(model.loss, fullgraph=True, backend="aot_eager") if compiled else (model.loss)
    )
    optimizer = AdamW(model.parameters(), lr=lr, weight_decay=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(tokens())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test__a_scaled_decoder__trains_like_the_plain_one():
    model = decoder()
    held = sct.scale_model(copy.deepcopy(model))
    assert all(mup.has_parameter_data(p) for p in held.parameters())
    plain, scaled = train(model, 8), train(held, 8)
    assert scaled == pytest.approx(plain, rel=0.02)
    assert scaled[-1] < scaled[0] - 0.3


@pytest.mark.parametrize("scaled", [False, True])
def test__a_compiled_decoder__trains_like_the_eager_one(scaled):
    model = decoder(layers=1)
    if scaled:
        sct.scale_model(model)
    other = copy.deepcopy(model)
    assert train(model, compiled=True) == pytest.approx(train(other), rel=0.01 if scaled else 1e-5)


def test__attention_in_evaluation__drops_nothing():
    """In the published library, dropout of the attention weights continues."""
    torch.manual_seed(0)
    module, x = uu.MHSA(32, 4, is_causal=True, dropout_p=0.5), torch.randn(2, 8, 32)
    plain = uu.MHSA(32, 4, is_causal=True)
    plain.load_state_dict(module.state_dict())
    assert not torch.allclose(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), plain(x))


def test__dropout__keeps_unit_scale_in_training():
    model = decoder(hidden_size=128, vocab_size=512, dropout_p=0.2, post_norm=True)
    assert rms(model[:2](tokens(8, 64, 512)).detach()) == pytest.approx(1, rel=0.15)
    assert not torch.allclose(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize("heads", [0, 3, 128])
def test__heads_that_do_not_divide_the_width__are_an_error(heads):
    with pytest.raises(ShapeError, match=f"{heads} heads do not divide hidden_size = 64"):
        uu.MHSA(64, heads, is_causal=True)


def test__an_mlp_without_a_feature__is_an_error():
    with pytest.raises(ShapeError, match="leaves no feature"):
        uu.MLP(4, 0.1)


def test__depth_containers__tag_every_parameter_in_them():
    layers = [uu.Linear(4, 4, bias=True), nn.ReLU(), uu.LayerNorm(4, elementwise_affine=True)]
    for container in (
        uu.DepthSequential(*copy.deepcopy(layers)),
        uu.DepthModuleList(copy.deepcopy(layers)),
    ):
        assert all(mup.tags(p).mup_scaling_depth == 3 for p in container.parameters())
        assert mup.tags(container[2].weight) == mup.Tags("norm", 3)
        made = copy.deepcopy(container)
        made.load_state_dict(container.state_dict(), assign=True)
        assert mup.tags(made[0].bias) == mup.Tags("bias", 3)


def test__a_transposed_convolution__keeps_its_fan_in_under_depth():
    stack = uu.DepthSequential(uu.ConvTranspose1d(4, 4, 4, 2))
    assert mup.tags(stack[0].weight) == mup.Tags("weight", 1, 8)


def test__a_slice_of_a_stack__is_a_plain_one_of_the_same_modules():
    model = decoder()
    part = model.layers[1:]
    assert type(part) is nn.Sequential
    assert list(part.children()) == [model.layers[1], model.layers[2]]
    assert all(p.mup_scaling_depth == 3 for p in part.parameters())
    assert type(uu.DepthModuleList(model[:1])[:1]) is nn.ModuleList


@pytest.mark.parametrize("make", [lambda *m: uu.DepthModuleList(m), uu.DepthSequential])
def test__depth_of_untagged_or_twice_nested_parameters__is_an_error(make):
    made = uu.Linear(2, 2)
    with pytest.raises(MupError, match=r"1\.weight has no u-muP tags"):
        make(made, nn.Linear(2, 2))
    assert mup.tags(made.weight).mup_scaling_depth is None
    with pytest.raises(MupError, match=r"0\.0\.weight is in a container of depth 2 already"):
        make(make(uu.Linear(2, 2), uu.Linear(2, 2)))


@pytest.mark.parametrize("scaled", [False, True])
def test__muon__trains_the_hidden_matrices_beside_adam(scaled):
    model = decoder()
    if scaled:
        sct.scale_model(model)
    hidden = list(model.layers.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    pair = [Muon(hidden, lr=0.1), AdamW(rest, lr=0.3)]
    losses = []
    for _ in range(8):
        loss = model.loss(tokens())
        loss.backward()
        losses.append(loss.item())
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.3


def test__the_optimizer__sees_depth_and_type_of_a_decoder():
    model = decoder()
    groups = AdamW(model.parameters(), lr=1.0).param_groups
    rates = {round(g["lr"], 6): len(g["params"]) for g in groups}
    # The parameters are the embedding; qkv, o, linear_1 and gate of three layers; linear_2 of three
    # layers; and the readout.
    assert rates == {
        0.125: 1,
        round(0.125 / 3**0.5, 6): 12,
        round(0.0625 / 3**0.5, 6): 3,
        1.0: 1,
    }
