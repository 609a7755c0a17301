"""u-muP tags stay with a parameter through all that PyTorch does to the object."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor import mup
from scaledtensor.errors import MupError

WEIGHT = mup.Tags("weight", 3, None)
BIAS = mup.Tags("bias", 3, mup_lr_mult=0.25)


def tagged_linear() -> nn.Linear:
    layer = nn.Linear(4, 6)
    layer.weight = mup.Parameter(layer.weight.data, "weight", 3)
    mup.tag(layer.bias, "bias", 3, mup_lr_mult=0.25)
    return layer


def tagged_model() -> nn.Sequential:
    return mup.keep_tags(nn.Sequential(tagged_linear(), nn.ReLU(), nn.Linear(6, 2)))


def assert_tagged(model: nn.Module) -> None:
    assert mup.tags(model[0].weight) == WEIGHT
    assert mup.tags(model[0].bias) == BIAS
    assert not any(mup.has_parameter_data(p) for p in model[2].parameters())


def reload(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def assign(model: nn.Module) -> nn.Module:
    state = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).state_dict()
    model.load_state_dict(state, assign=True)
    assert torch.equal(model[0].weight, state["0.weight"])
    return model


def materialize(model: nn.Module) -> nn.Module:
    return model.to("meta").to_empty(device="cpu")


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model).state_dict())
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    return model


def replace(model: nn.Module) -> nn.Module:
    model[0].weight = nn.Parameter(torch.zeros(6, 4))
    return model


def swap_on_conversion(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(model.to(torch.bfloat16).state_dict())
        return model
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def overwrite_on_conversion(model: nn.Module) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.to(torch.bfloat16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": reload,
    "load_state_dict": loaded,
    "load_state_dict_assign": assign,
    "to_empty": materialize,
    "to_dtype": lambda m: m.to(torch.bfloat16),
    "new_parameters_on_conversion": overwrite_on_conversion,
    "swapped_on_conversion": swap_on_conversion,
    "replaced": replace,
    "scale_model": sct.scale_model,
    "scaled_and_back": lambda m: sct.unscale_model(sct.scale_model(m)),
    "scaled_to_dtype": lambda m: sct.scale_model(m).to(torch.bfloat16),
    "scaled_load": lambda m: loaded(sct.scale_model(m)),
    "scaled_to_empty": lambda m: materialize(sct.scale_model(m)),
    "scaled_deepcopy": lambda m: copy.deepcopy(sct.scale_model(m)),
    "scaled_pickle": lambda m: pickle.loads(pickle.dumps(sct.scale_model(m))),
    "frozen": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test__tags__survive(change):
    assert_tagged(change(tagged_model()))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test__tags__survive_twice(change):
    model = change(tagged_model())
    assert_tagged(copy.deepcopy(assign(model)) if change is not assign else replace(model))


def test__a_changed_tag__is_the_one_that_survives():
    model = tagged_model()
    mup.tag(model[0].weight, "output", 5)
    assert mup.tags(copy.deepcopy(model)[0].weight) == mup.Tags("output", 5)
    assert mup.tags(assign(model)[0].weight) == mup.Tags("output", 5)


def test__a_parameter_with_tags_of_its_own__keeps_them():
    """The readout shares the embedding's parameter and its tags, if weights are tied."""
    model = tagged_model()
    shared = mup.Parameter(torch.zeros(6, 4), "output")
    model[0].weight = shared
    assert model[0].weight is shared
    assert mup.tags(model[0].weight) == mup.Tags("output")


def test__tied_parameters__stay_tied_in_a_copy():
    model = mup.keep_tags(nn.ModuleList([tagged_linear(), nn.Linear(4, 6)]))
    model[1].weight = model[0].weight
    made = copy.deepcopy(model)
    assert made[0].weight is made[1].weight
    assert mup.tags(made[1].weight) == WEIGHT


def test__a_model_that_keeps_tags__compiles_and_sees_new_parameters():
    model, x = tagged_model(), torch.randn(3, 4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    replace(model)
    torch.testing.assert_close(compiled(x), model(x))
    assert torch.export.export(model, (x,)).module()(x).shape == (3, 2)


def test__a_tagged_parameter__is_saved_and_loaded_safely():
    stream = io.BytesIO()
    torch.save(mup.Parameter(torch.ones(2), "norm", 4, 2), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert type(loaded) is nn.Parameter
    assert mup.tags(loaded) == mup.Tags("norm", 4, 2)


def test__a_copied_parameter_without_a_module__gets_its_tags_by_copy_tags():
    p = mup.Parameter(torch.ones(2), "norm", 4)
    assert mup.tags(mup.copy_tags(p, copy.deepcopy(p))) == mup.Tags("norm", 4)
    plain = nn.Parameter(torch.ones(2))
    assert not mup.has_parameter_data(mup.copy_tags(plain, nn.Parameter(torch.ones(2))))


def test__a_parameter__is_an_ordinary_one_with_the_published_attributes():
    p = mup.Parameter(torch.ones(2, 3), mup_type="weight")
    assert type(p) is nn.Parameter
    assert p.requires_grad
    assert (p.mup_type, p.mup_scaling_depth, p.mup_fan_in) == ("weight", None, None)
    assert mup.has_parameter_data(p)
    assert not mup.has_parameter_data(nn.Parameter(torch.ones(1)))


def test__a_scaled_tensor__makes_a_tagged_parameter():
    p = mup.Parameter(sct.scaled(torch.randn(2, 3)), "weight", 2)
    assert isinstance(p, sct.ScaledTensor)
    assert isinstance(p, nn.Parameter)
    assert mup.tags(p) == mup.Tags("weight", 2)


@pytest.mark.parametrize(
    ("shape", "explicit", "expected"),
    [
        ((7, 5), None, 5),
        ((7, 5, 3), None, 15),
        ((7, 5, 3, 2), None, 30),
        ((7, 5, 3, 2, 2), None, 60),
        ((7,), None, 7),
        ((), None, 1),
        ((7, 5), 7, 7),
    ],
)
def test__fan_in__is_read_off_the_shape_unless_given(shape, explicit, expected):
    assert mup.fan_in(mup.Parameter(torch.zeros(shape), "weight", None, explicit)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gain",), "weight, bias, norm, output"),
        ((None,), "weight, bias, norm, output"),
        (("weight", 0), "mup_scaling_depth is a positive int"),
        (("weight", 1.5), "mup_scaling_depth is a positive int"),
        (("weight", True), "mup_scaling_depth is a positive int"),
        (("weight", 2, -1), "mup_fan_in is a positive int"),
        (("weight", 2, None, 0.0), "mup_lr_mult is a positive, finite number"),
        (("weight", 2, None, True), "mup_lr_mult is a positive, finite number"),
        (("weight", 2, None, math.inf), "mup_lr_mult is a positive, finite number"),
        (("weight", 2, None, math.nan), "mup_lr_mult is a positive, finite number"),
        (("weight", 2, None, None), "mup_lr_mult is a positive, finite number"),
    ],
)
def test__a_tag_that_cannot_be__is_an_error(arguments, message):
    with pytest.raises(MupError, match=message):
        mup.Parameter(torch.ones(2), *arguments)


def test__tags_of_an_untagged_parameter__are_an_error_that_says_what_to_do():
    with pytest.raises(MupError, match=r"\(2, 3\) has no u-muP tags; make it with"):
        mup.tags(nn.Parameter(torch.ones(2, 3)))
