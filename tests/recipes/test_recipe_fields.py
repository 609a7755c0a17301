"""Recipes are frozen, validated data."""

import copy
import dataclasses
import pickle
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor import formats, recipes
from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32
from scaledtensor.ops.products import by_gemm
from scaledtensor.recipes import Amax, Carried, Cast, Gemm, Gemms, Microscale, TwoLevel, Unit
from scaledtensor.recipes.base import RECIPES, register


def test__unit__has_the_formats_of_the_papers():
    r = Unit()
    assert (r.forward, r.gradient, r.activation, r.master) == (E4M3FN, E5M2, BF16, FP32)
    assert str(r) == "Unit()"
    assert str(Unit(gradient="e4m3fn", rebalance=0)) == "Unit(gradient=e4m3fn, rebalance=0)"
    assert str(r.gemms.forward) == "e4m3fn carried @ e4m3fn carried"
    assert str(r.gemms.dgrad) == "e5m2 carried @ e4m3fn carried"
    mixed = Gemms(
        Gemm(Cast("e4m3fn"), Cast("e2m3fn", Microscale(), (1, 32))),
        Gemm(Cast("e5m2", rounding="stochastic"), Cast("e4m3fn", Amax(), (1, 0))),
    )
    assert str(recipes.PerGemm(casts=mixed)) == (
        "PerGemm(casts={forward: e4m3fn carried @ e2m3fn microscale 1x32, dgrad: e5m2 carried "
        "stochastic @ e4m3fn amax 1xall, wgrad: - @ -})"
    )


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
        ({"forward": "int8"}, r"forward=int8: .* take Current\(forward='int8'\)"),
        ({"weight": "int4"}, r"take Current\(weight='int4'\)"),
        ({"gradient": "mxint8"}, r"take Current\(gradient='mxint8'\)"),
        ({"activation": "e4m3fn"}, "activation is one of bf16, fp16, fp32; got e4m3fn"),
        ({"saved": "fp5"}, "saved: unknown format 'fp5'"),
        ({"saved": "bf16"}, "saved is None or a signed format of 8 bits or fewer; got bf16"),
        ({"master": "e5m2"}, "master is one of bf16, fp16, fp32; got e5m2"),
        ({"forward": "bf16", "activation": "fp32"}, "activation=fp32: .* bf16 operands is bf16"),
        ({"weight": "fp16", "activation": "fp32"}, "activation=fp32: .* Give weight 8 bits, or"),
        ({"forward": "bf16", "activation": "fp16"}, "activation=fp16: .* bf16 operands is bf16"),
    ],
)
def test__a_format_that_cannot_play_its_role__is_refused(fields, words):
    with pytest.raises(RecipeError, match=words):
        Unit(**fields)


@pytest.mark.parametrize("name", ["nope", "", None, 3, int])
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

ROWS, SIZE = 4096, 19 / 64  # E5M2 has no 19 / 64: its neighbours are 16 / 64 and 20 / 64.


def of_one_size(rounding: str, compiled: bool, factor: float = 1.0) -> torch.Tensor:
    """Return the weight's gradient: sums of `ROWS` products of size `SIZE`."""
    torch.manual_seed(0)
    recipe = Unit(gradient_rounding=rounding)
    model = sct.scale_model(torch.nn.Linear(4, 4, bias=False), recipe)
    torch._dynamo.reset()  # Shapes of another test would make these dynamic.
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


# --- every recipe ----------------------------------------------------------------------------

EVERY = [recipes.get(name) for name in sorted(RECIPES)]
OTHERS = [
    Unit(overrides={"head": None, "blocks.*": recipes.MXFP8(mode="even")}, min_size=64),
    recipes.Current(granularity="row", keep=("wgrad",), weight="e5m2", saved="e5m2"),
    recipes.PerGemm(casts=Gemms(Gemm(Cast("e2m1fn", TwoLevel(), (16, 16))), Gemm(), Gemm())),
]


@pytest.mark.parametrize("recipe", EVERY + OTHERS, ids=str)
def test__json__gives_the_recipe_back(recipe):
    again = recipes.Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.gemms == recipe.gemms
    assert hash(again) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "written as JSON"),
        ("[]", 'has a "recipe", its name'),
        ('{"recipe": "nope"}', "unknown recipe 'nope'"),
        ('{"recipe": 3}', "unknown recipe 3"),
        ('{"recipe": "unit", "margin": 3}', "Unit has no margin; it has activation, "),
        ('{"recipe": "mxfp8", "mode": "up"}', "MXFP8.mode is one of 'floor'"),
        ('{"recipe": "per_gemm", "casts": {"forward": {}}}', "PerGemm.casts has forward, dgrad"),
        ('{"recipe": "unit", "overrides": 3}', "overrides is a mapping"),
    ],
)
def test__json_that_is_no_recipe__is_refused(text, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        recipes.Recipe.from_json(text)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Unit("e5m2"), "forward multiplies e5m2 by e5m2, which no FP8 unit does"),
        (lambda: Unit("e4m3fnuz"), "dgrad multiplies e5m2 by e4m3fnuz"),
        (lambda: Unit(keep=("backward",)), "keep is a tuple of 'forward', 'dgrad', 'wgrad'"),
        (lambda: Unit(keep="wgrad"), "keep is a tuple of"),
        (lambda: Unit(min_size=-1), "min_size is a number of elements, or 0; got -1"),
        (lambda: Unit(emulate=1), "emulate is True or False; got 1"),
        (lambda: Unit(overrides={3: None}), "an override is for a name"),
        (lambda: Unit(overrides={"a": "nope"}), "unknown recipe 'nope'"),
        (lambda: Unit(overrides={"a": Unit(overrides={"b": None})}), "overrides of its own"),
        (lambda: recipes.Current(granularity="rows"), "granularity is one of 'tensor', 'row'"),
        (lambda: recipes.Current(margin=-1), "margin is a whole number from 0 to 32; got -1"),
        (lambda: recipes.Current("bf16"), "bf16 is cast under the scale that it carries"),
        (lambda: recipes.Constant(input_exponent=0.5), "input_exponent is a whole number"),
        (lambda: recipes.Delayed(history=0), "history is a whole number from 1 to 1024; got 0"),
        (lambda: recipes.Delayed(choose="mean"), "choose is 'max' or 'recent'; got 'mean'"),
        (lambda: recipes.Delayed(guard=None), "guard is True or False; got None"),
        (lambda: recipes.Delayed(keep=("wgrad",)), "scales by history are one for a tensor"),
        (lambda: recipes.Delayed("e2m1fn"), "in a format that torch has a dtype for"),
        (lambda: recipes.MinMSE(below=0), "below is a whole number from 1 to 32; got 0"),
        (lambda: recipes.Blockwise(block=0), "block is a whole number from 1"),
        (lambda: recipes.MXFP8(mode="nearest"), "MXFP8.mode is one of 'floor', 'rceil'"),
        (lambda: recipes.MXFP8("e2m1fn"), "MXFP8.forward is one of e4m3fn, e5m2; got e2m1fn"),
        (lambda: recipes.MXFP4(gradient="e4m3fn"), "MXFP4.gradient is one of e2m1fn"),
        (lambda: recipes.NVFP4(random_hadamard="yes"), "random_hadamard is True or False"),
        (lambda: recipes.NVFP4("bf16"), "two-level scales are for elements of 8 bits or fewer"),
        (lambda: recipes.PerGemm(casts=Unit()), "casts is a Gemms"),
        (lambda: Unit(gradiant="e5m2"), "Unit has no gradiant; it has activation, emulate"),
        (lambda: recipes.Current(marign=1, row=2), "Current has no marign, row; it has activation"),
        (lambda: recipes.get(Unit), "got the class Unit: Unit()"),
        (lambda: sct.scale_model(nn.Linear(2, 2), Unit), "got the class Unit: Unit()"),
        (lambda: sct.scaled(torch.ones(2), recipe=Unit), "got the class Unit: Unit()"),
        (lambda: Unit(overrides={"head": Unit}), "got the class Unit: Unit()"),
        (lambda: Cast("fp5"), "unknown format 'fp5'"),
        (lambda: Cast("e8m0fnu"), "elements need a sign and a zero"),
        (lambda: Cast("e4m3fn", "amax"), "Cast.scale is one of Carried, Amax, Fixed"),
        (lambda: Cast("e4m3fn", Amax(), (1,)), "a block is (across, along)"),
        (lambda: Cast("e4m3fn", Amax(), (1, -32)), "a block is (across, along)"),
        (lambda: Cast("e4m3fn", Carried(), (1, 32)), "Carried is one scale for the tensor"),
        (lambda: Cast("e4m3fn", rounding="up"), "a rounding is one of 'nearest_even'"),
        (lambda: Cast("bf16", Amax()), "Amax is for formats of 8 bits or fewer"),
        (lambda: Gemm("e4m3fn"), "an operand has a Cast, or None; got 'e4m3fn'"),
        (lambda: Gemms(Cast("e4m3fn")), "forward is a Gemm"),
        (lambda: Amax(margin=33), "Amax.margin is a whole number from 0 to 32; got 33"),
        (lambda: Microscale("down"), "Microscale.mode is one of"),
    ],
)
def test__a_contradiction__is_refused_when_built(make, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        make()


def test__pairs_that_no_hardware_has__are_emulated_on_request():
    assert Unit("e5m2", emulate=True).gemms.forward.left.format is E5M2


def test__a_cast_of_one_scale__serves_all_products_and_others_do_not():
    shared = {name for name in RECIPES if recipes.get(name).gemms.once is not None}
    assert shared == {"constant", "current", "delayed", "min_mse", "per_gemm", "unit"}
    assert Unit("e2m1fn").gemms.once is None  # torch has no dtype for it.
    assert Unit(keep=("dgrad",)).gemms.once is None


# --- of models -------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 8)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test__overrides__choose_by_name(compiled):
    recipe = Unit(overrides={"1.*": recipes.MXFP8(), "2": None})
    model = sct.scale_model(network(), recipe)
    assert model[0].weight.recipe == Unit()
    assert model[1][0].weight.recipe == recipes.MXFP8()
    assert type(model[2].weight) is nn.Parameter
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    run(torch.randn(4, 32)).square().sum().backward()
    assert type(model[2].weight.grad) is torch.Tensor
    assert isinstance(model[1][0].weight.grad, sct.ScaledTensor)


def test__overrides__reach_the_products(monkeypatch):
    seen = []
    real = by_gemm.quantized
    monkeypatch.setattr(
        by_gemm,
        "quantized",
        lambda q, held, cast, dim: seen.append(cast) or real(q, held, cast, dim),
    )
    model = sct.scale_model(network(), Unit(overrides={"1.0": recipes.MXFP8()}))
    model(torch.randn(4, 32)).square().sum().backward()
    assert seen
    assert {c.format for c in seen} == {E4M3FN}
    assert all(c.block == (1, 32) for c in seen)


def test__a_pattern_without_a_module__is_refused_and_nothing_changed():
    model = network()
    with pytest.raises(RecipeError, match="overrides 'heads', and no module"):
        sct.scale_model(model, Unit(overrides={"heads": None}))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test__small_weights__stay_plain():
    model = sct.scale_model(network(), Unit(min_size=16))
    assert isinstance(model[0].weight, sct.ScaledTensor)
    assert type(model[2].weight) is nn.Parameter  # These are 8 rows.
    assert isinstance(model[2].bias, sct.ScaledTensor)


def test__without_padding__ragged_weights_are_refused():
    with pytest.raises(
        RecipeError, match=r"0.weight is of shape \(64, 33\), and 33 is no multiple"
    ):
        sct.scale_model(nn.Sequential(nn.Linear(33, 64)), recipes.MXFP8(padding=False))
    sct.scale_model(nn.Sequential(nn.Linear(32, 64)), recipes.MXFP8(padding=False))
    sct.scale_model(nn.Sequential(nn.Linear(33, 64)), recipes.MXFP8())


def test__print__shows_recipes_until_they_are_gone():
    plain = str(network())
    model = sct.scale_model(network(), Unit(overrides={"1.*": recipes.MXFP8(), "2": None}))
    told = str(model)
    assert "Linear(in_features=32, out_features=64, bias=True, Unit())" in told
    assert "Linear(in_features=64, out_features=32, bias=True, MXFP8())" in told
    assert "Linear(in_features=32, out_features=8, bias=True)" in told
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert str(again) == told
    assert again[0].extra_repr.args[0] is again[0]
    assert str(sct.unscale_model(model)) == plain
    assert str(sct.unscale_model(again)) == plain


@pytest.mark.parametrize("field", ["forward", "weight", "gradient", "saved"])
def test__a_custom_format__is_refused_when_a_recipe_is_made(field):
    mine = formats.custom(5, 1)
    with pytest.raises(RecipeError, match=rf"Unit\.{field} is one of e4m3fn.*simulate_format"):
        Unit(**{field: mine})
