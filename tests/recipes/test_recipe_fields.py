"""Recipes are frozen, validated data."""

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import scaledtensor as sct
from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32
from scaledtensor.recipes import Unit
from scaledtensor.recipes.base import RECIPES, register


def test__unit__has_the_formats_of_the_papers():
    r = Unit()
    assert (r.forward, r.gradient, r.activation, r.master) == (E4M3FN, E5M2, BF16, FP32)
    assert str(r) == "Unit()"
    assert str(Unit(gradient="e4m3fn", rebalance=0)) == "Unit(gradient=e4m3fn, rebalance=0)"
    assert str(r.gemms.forward) == "e4m3fn carried @ e4m3fn carried"
    assert str(r.gemms.dgrad) == "e5m2 carried @ e4m3fn carried"


def test__recipes__are_frozen_hashable_values():
    r = Unit(gradient="e4m3fn")
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.gradient = E5M2
    assert r == Unit(gradient=E4M3FN) != Unit()
    assert len({r, Unit(gradient="E4M3FN"), Unit()}) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
@pytest.mark.parametrize(
    "recipe", [Unit(), Unit("e5m2", "bf16", "fp16", "bf16", emulate=True)], ids=str
)
def test__a_copy__is_equal(recipe, again):
    assert again(recipe) == recipe
    assert again(recipe).forward is recipe.forward


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"forward": "fp5"}, "forward: unknown format 'fp5'"),
        ({"master": 8}, "master: unknown format 8"),
        ({"weight": "e8m0fnu"}, "weight=e8m0fnu"),
        ({"gradient": "e8m0fnu"}, "gradient=e8m0fnu"),
        ({"forward": "e8m0fnu"}, "forward=e8m0fnu"),
        ({"activation": "e4m3fn"}, "activation is one of bf16, fp16, fp32; got e4m3fn"),
        ({"saved": "fp5"}, "saved: unknown format 'fp5'"),
        ({"saved": "bf16"}, "saved is None or a signed format of 8 bits or fewer; got bf16"),
        ({"master": "e5m2"}, "master is one of bf16, fp16, fp32; got e5m2"),
    ],
)
def test__a_format_that_cannot_play_its_role__is_refused(fields, words):
    with pytest.raises(RecipeError, match=words):
        Unit(**fields)


@pytest.mark.parametrize("name", ["nope", "", None, 3, Unit])
def test__get__names_the_known_recipes(name):
    assert sct.recipes.get("Unit") == Unit()
    r = Unit(master="bf16")
    assert sct.recipes.get(r) is r
    with pytest.raises(RecipeError, match="known recipes: blockwise, constant, current"):
        sct.recipes.get(name)


def test__a_recipe_of_ones_own__registers_once_and_carries_other_fields():
    @dataclass(frozen=True)
    class Headroom(Unit):
        name: ClassVar[str] = "headroom"
        shift: int = 3

    with pytest.raises(RecipeError, match="not registered"):
        pickle.dumps(Headroom())
    try:
        register(Headroom)
        assert sct.recipes.get("headroom") == Headroom()
        assert pickle.loads(pickle.dumps(Headroom(shift=4))) == Headroom(shift=4)
        with pytest.raises(RecipeError, match="taken"):
            register(Headroom)
    finally:
        del RECIPES["headroom"]


def test__a_recipe_name__is_lower_case():
    class Loud(Unit):
        name: ClassVar[str] = "Loud"

    with pytest.raises(RecipeError, match="lower case"):
        register(Loud)


# --- gradients rounded stochastically --------------------------------------------------------

ROWS, SIZE = 4096, 19 / 64  # which E5M2 has not: 16 / 64 and 20 / 64 are next to it


def of_one_size(rounding: str, compiled: bool, factor: float = 1.0) -> torch.Tensor:
    """The weight's gradient, of `ROWS` times `SIZE` each."""
    torch.manual_seed(0)
    recipe = Unit(gradient_rounding=rounding)
    model = sct.scale_model(torch.nn.Linear(4, 4, bias=False), recipe)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    y = run(torch.ones(ROWS, 4))
    y.backward(sct.scaled(torch.full((ROWS, 4), SIZE * factor)))
    return model.weight.grad


@pytest.mark.parametrize("compiled", [False, True])
def test__stochastic_gradients__are_right_on_average_where_nearest_is_off(compiled):
    exact = torch.full((4, 4), ROWS * SIZE)
    nearest = of_one_size("nearest_even", compiled).dequantize() / exact - 1
    assert nearest.abs().min() > 0.03
    stochastic = of_one_size("stochastic", compiled).dequantize() / exact - 1
    assert stochastic.abs().max() < 0.01
    assert stochastic.unique().numel() > 1


def test__stochastic_gradients__are_moved_by_no_power_of_two():
    one, tiny = (of_one_size("stochastic", False, factor) for factor in (1.0, 2.0**-40))
    assert torch.equal(one.qdata, tiny.qdata)
    assert torch.equal(one.scale, tiny.scale * 2.0**40)


def test__a_rounding_that_gradients_have_not__is_refused():
    with pytest.raises(RecipeError, match="gradient_rounding is one of 'nearest_even', 'stoch"):
        Unit(gradient_rounding="up")
