"""Recipes are frozen, validated data."""

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest

import scaledtensor as sct
from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32
from scaledtensor.recipes import Unit
from scaledtensor.recipes.base import RECIPES, register


def test__unit__has_the_formats_of_the_papers():
    r = Unit()
    assert (r.forward, r.gradient, r.activation, r.master) == (E4M3FN, E5M2, BF16, FP32)
    assert str(r) == (
        "Unit(forward=e4m3fn, gradient=e5m2, activation=bf16, master=fp32, rebalance=10)"
    )


def test__recipes__are_frozen_hashable_values():
    r = Unit(gradient="e4m3fn")
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.gradient = E5M2
    assert r == Unit(gradient=E4M3FN) != Unit()
    assert len({r, Unit(gradient="E4M3FN"), Unit()}) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
@pytest.mark.parametrize("recipe", [Unit(), Unit("e5m2", "bf16", "fp16", "bf16")], ids=str)
def test__a_copy__is_equal(recipe, again):
    assert again(recipe) == recipe
    assert again(recipe).forward is recipe.forward


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"forward": "fp5"}, "forward: unknown format 'fp5'"),
        ({"master": 8}, "master: unknown format 8"),
        ({"forward": "e2m1fn"}, "forward=e2m1fn"),
        ({"gradient": "e8m0fnu"}, "gradient=e8m0fnu"),
        ({"forward": "e8m0fnu"}, "forward=e8m0fnu"),
        ({"activation": "e4m3fn"}, "activation is one of bf16, fp16, fp32; got e4m3fn"),
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
    with pytest.raises(RecipeError, match="known recipes: unit"):
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
