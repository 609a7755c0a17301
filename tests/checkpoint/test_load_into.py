"""Models take tensors by name, scaled or plain on either side."""

import copy

import pytest
import torch
from tensors import bits, parts, value_of
from torch import nn

import scaledtensor as sct
from scaledtensor import checkpoint
from scaledtensor.errors import CheckpointError
from scaledtensor.recipes import Current, Delayed, Unit


def net(seed=0, recipe=None, frozen=True):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    model[2].weight.requires_grad_(not frozen)
    return model if recipe is None else sct.scale_model(model, recipe)


def state_of(model):
    return copy.deepcopy(model.state_dict())


def contents(model):
    return {name: bits(x) for name, x in model.state_dict().items()}


STORED, WIDE, NARROW = Current(store_frozen=True), Unit(), Unit(master="bf16")


@pytest.mark.parametrize("recipe", [WIDE, NARROW, STORED, Delayed()], ids=lambda r: str(r)[:20])
@pytest.mark.parametrize("source", [None, "same"])
def test__into_a_scaled_model__goes_what_scale_model_makes(recipe, source):
    model, expected = net(1, recipe), net(0, recipe)
    parameters = dict(model.named_parameters())
    checkpoint.load_into(model, state_of(expected) if source else state_of(net(0)))
    if source is None and isinstance(recipe, Delayed):
        assert contents(model).keys() == contents(expected).keys()
    else:
        assert contents(model) == contents(expected)
    assert all(p is parameters[name] for name, p in model.named_parameters())


def test__into_a_plain_model__go_the_values():
    for recipe in (WIDE, STORED, Delayed()):
        scaled, plain = net(0, recipe), net(1)
        checkpoint.load_into(plain, state_of(scaled))
        for name, x in plain.state_dict().items():
            value = scaled.state_dict()[name]
            value = value_of(value)
            assert torch.equal(x, value), name


def test__another_format__is_cast_under_its_scale():
    wide, narrow = net(0, WIDE), net(1, NARROW)
    checkpoint.load_into(narrow, state_of(wide))
    for name, p in narrow.named_parameters():
        source = wide.get_parameter(name)
        narrowed = source.detach().to_format("bf16")
        assert [bits(x) for x in parts(p.detach())] == [bits(x) for x in parts(narrowed)]
    back = net(2, WIDE)
    checkpoint.load_into(back, state_of(narrow))
    assert all(
        torch.equal(p.dequantize(), narrow.get_parameter(name).dequantize())
        for name, p in back.named_parameters()
    )


def coded(seed, block=32):
    torch.manual_seed(seed)
    model = nn.Linear(64, 4, bias=False)
    x = sct.scaled(model.weight.detach(), "e2m1fn", granularity=sct.PerBlock((1, block)))
    model.weight = nn.Parameter(x, requires_grad=False)
    return model


def test__codes__go_into_codes_of_their_kind__and_nothing_else_does():
    model, source = coded(0), coded(1)
    checkpoint.load_into(model, state_of(source))
    assert contents(model) == contents(source)
    before = contents(model)
    for other in (coded(2, 16), sct.scale_model(nn.Linear(64, 4, bias=False))):
        with pytest.raises(
            CheckpointError, match=r"weight is .* there and a CodedTensor of e2m1fn"
        ):
            checkpoint.load_into(model, state_of(other))
    assert contents(model) == before
    plain = sct.scale_model(nn.Linear(64, 4, bias=False))
    checkpoint.load_into(plain, state_of(source))
    assert torch.equal(plain.weight.dequantize(), source.weight.dequantize())


def renamed(state, old, new):
    return {name.replace(old, new): x for name, x in state.items()}


@pytest.mark.parametrize("kind", [None, WIDE])
def test__what_does_not_fit__is_told_and_changes_nothing(kind):
    model = net(1, kind)
    before = contents(model)
    state = state_of(net(0))
    for wrong, message in (
        (renamed(state, "0.w", "9.w"), "it has no 0.weight; this model has no 9.weight"),
        ({}, "it has no 0.weight, 0.bias, 1.weight, 1.bias, 1.running_mean and 4 more"),
        (state | {"2.bias": torch.ones(9)}, r"2.bias is \(9,\) there and \(8,\) here"),
        (state | {"2.bias": torch.ones(8).int()}, "2.bias is torch.int32 there and torch.float32"),
        (state | {"2.weight": state["2.weight"].to_sparse()}, "2.weight is torch.sparse_coo there"),
        (state | {"1.num_batches_tracked": torch.ones(())}, "1.num_batches_tracked is torch.fl"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_into(model, wrong)
        assert contents(model) == before


def test__tied_names__need_one_of_theirs():
    def tied(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model["b"].weight = model["a"].weight
        return sct.scale_model(model)

    for absent in ("a.weight", "b.weight"):
        model, source = tied(0), tied(1)
        state = state_of(source)
        del state[absent]
        checkpoint.load_into(model, state)
        assert model["a"].weight is model["b"].weight
        assert contents(model) == contents(source)


def test__a_compiled_model__has_the_names_of_the_model_in_it():
    source, model = net(0, WIDE), net(1, WIDE)
    checkpoint.load_into(torch.compile(model, backend="eager"), state_of(source))
    assert contents(model) == contents(source)
