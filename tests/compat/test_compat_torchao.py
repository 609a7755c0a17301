"""Programs written to torchao's FP8 training run here by a change of the import."""

import copy
import inspect
import math
import warnings
from dataclasses import fields

import pytest
import torch
from tensors import value_of
from torch import nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor.compat.torchao import float8
from scaledtensor.compat.torchao.float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
    linear_requires_sync,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)
from scaledtensor.compat.torchao.float8.recipe import recipe_of
from scaledtensor.errors import ModelError, RecipeError, UnsupportedError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32
from scaledtensor.recipes import Amax, Cast, Constant, Current, Delayed, Fixed, PerGemm

NAMES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]

DELAYED = CastConfig(scaling_type=ScalingType.DELAYED)
DISABLED = CastConfig(scaling_type=ScalingType.DISABLED)
ALL_DELAYED = {
    "cast_config_input": DELAYED,
    "cast_config_weight": DELAYED,
    "cast_config_grad_output": DELAYED,
}


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).to(dtype)


def plain(x: torch.Tensor) -> torch.Tensor:
    return value_of(x).detach().double()


def decibels(a: torch.Tensor, b: torch.Tensor) -> float:
    return 20 * math.log10(a.norm() / max((a - b).norm(), 1e-30))


def static(scale: object) -> CastConfig:
    return CastConfig(scaling_type=ScalingType.STATIC, static_scale=scale)


def scaled_names(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if isinstance(p, sct.ScaledTensor)]


# --- the documented programs -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test__the_program_of_the_current_readme__trains(name):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 16), nn.Linear(16, 1)).bfloat16()
    x = torch.randn(256, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)  # before the conversion, as it stands

    def module_filter_fn(mod: nn.Module, fqn: str) -> bool:
        if fqn == "1":
            return False
        if isinstance(mod, nn.Linear):
            return mod.in_features % 16 == 0 and mod.out_features % 16 == 0
        return True

    config = Float8LinearConfig.from_recipe_name(name)
    convert_to_float8_training(m, config=config, module_filter_fn=module_filter_fn)
    assert scaled_names(m) == ["0.weight", "0.bias"]
    m = torch.compile(m, backend="aot_eager")
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        output = m(x)
        loss = F.mse_loss(output, torch.ones_like(output))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test__the_program_of_the_early_readme__trains_under_delayed_scaling():
    m, x = mlp(), torch.randn(48, 64)
    config = Float8LinearConfig(enable_amax_init=True, **ALL_DELAYED)
    assert linear_requires_sync(config)
    convert_to_float8_training(m, config=config)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    losses = []
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        sync_float8_amax_and_scale_history(m)
        optimizer.step()
        losses.append(float(loss.detach()))
        for layer in (m[0], m[2]):
            filled = (layer.weight_amax[:, 1:-1] > 0).sum(1)
            assert filled.tolist() == [step] * 3  # once a step, though it was ended twice
    assert losses == sorted(losses, reverse=True)


def test__the_program_for_fsdp__runs_on_one_device():
    m = convert_to_float8_training(mlp())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    before = {k: plain(v) for k, v in m.state_dict().items()}
    precompute_float8_dynamic_scale_for_fsdp(m)
    assert all(torch.equal(before[k], plain(v)) for k, v in m.state_dict().items())


# --- beside the published library ------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test__outputs_and_gradients__agree_with_torchao(name, dtype, layers):
    """Bit for bit where scales are powers of two and all is bfloat16. Else two bfloat16 roundings
    apart after one layer, 48 dB (20 seeds: 49.6); from there on the hidden amax has another last
    bit, and some codes are the next ones: 28 dB (20 seeds: 28.6), where the casts themselves err by
    21 to 29."""
    theirs = pytest.importorskip("torchao.float8")
    config = theirs.Float8LinearConfig.from_recipe_name(name)
    object.__setattr__(config, "emulate", True)
    own = Float8LinearConfig.from_recipe_name(name)
    high = mlp(dtype) if layers == 2 else mlp(dtype)[:1]
    other = theirs.convert_to_float8_training(copy.deepcopy(high), config=config)
    ours = convert_to_float8_training(copy.deepcopy(high), config=own)
    x = torch.randn(48, 64, dtype=dtype)
    t = torch.randn(48, high[-1].out_features, dtype=dtype)

    def results(model: nn.Module) -> list[torch.Tensor]:
        own = x.clone().requires_grad_()
        y = model(own)
        assert y.dtype == dtype
        (y * t).sum().backward()
        return [plain(z) for z in (y, own.grad, model[0].weight.grad, model[-1].weight.grad)]

    for a, b, c in zip(results(ours), results(other), results(high), strict=True):
        if name != "tensorwise" and dtype == torch.bfloat16:
            assert torch.equal(a, b)
        assert decibels(a, b) > (48 if layers == 1 else 28)
        assert decibels(a, c) > decibels(b, c) - 0.5


def test__public_names_and_options_of_torchao__are_here():
    theirs = pytest.importorskip("torchao.float8")
    assert set(theirs.__all__) - set(float8.__all__) == {"FP8Granularity"}
    for name in ("CastConfig", "Float8GemmConfig", "Float8LinearConfig"):
        options = [f.name for f in fields(getattr(theirs, name))]
        first = [f.name for f in fields(getattr(float8, name))][: len(options)]
        assert options == first  # they may be given by position
    for name in ("ScalingType", "ScalingGranularity", "Float8LinearRecipeName"):
        values = {m.name: m.value for m in getattr(theirs, name)}
        assert values.items() <= {m.name: m.value for m in getattr(float8, name)}.items()
    called = inspect.signature(theirs.convert_to_float8_training).parameters
    assert list(called) == list(inspect.signature(convert_to_float8_training).parameters)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test__the_automatic_filter__is_torchao_s(name):
    theirs = pytest.importorskip("torchao.float8")
    pays = float8._auto_filter_for_recipe(name, ["head"])
    other = theirs._auto_filter_for_recipe(name, ["head"])
    sizes = [15, 16, 1024, 1040, 2048, 2064, 4096, 4112]
    for n in sizes:
        for k in sizes:
            layer = nn.Linear(k, n, device="meta")
            assert pays(layer, "mlp.up") == other(layer, "mlp.up")
            assert not pays(layer, "lm_head")
    assert not pays(nn.GELU(), "act")


def test__the_automatic_filter__needs_measurements():
    with pytest.raises(UnsupportedError, match="module_filter_fn"):
        float8._auto_filter_for_recipe("rowwise_with_gw_hp", [])


# --- what is converted -----------------------------------------------------------------------


def test__the_filter__sees_each_linear_layer_once_with_its_name():
    m = nn.Sequential(nn.Embedding(8, 64), nn.LayerNorm(64), mlp())
    seen = []
    convert_to_float8_training(m, module_filter_fn=lambda mod, fqn: bool(seen.append((mod, fqn))))
    assert seen == [(m[2][0], "2.0"), (m[2][2], "2.2")]
    assert not scaled_names(m)


def test__other_modules__stay_plain():
    m = nn.Sequential(nn.Embedding(8, 64), nn.LayerNorm(64), mlp())
    assert convert_to_float8_training(m) is m
    assert scaled_names(m) == ["2.0.weight", "2.0.bias", "2.2.weight", "2.2.bias"]
    y = m(torch.arange(8))
    assert isinstance(y, sct.ScaledTensor)
    y.sum().backward()
    assert all(p.grad is not None for p in m.parameters())


def test__a_root_that_is_a_linear_layer__is_converted():
    layer = nn.Linear(32, 16)
    assert convert_to_float8_training(layer) is layer
    assert isinstance(layer.weight, sct.ScaledTensor)


def test__converted_layers__are_of_the_class_that_programs_ask_for():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    m = nn.Sequential(nn.Linear(32, 32), Own(32, 32), nn.Linear(32, 3))
    calls = []
    m[0].register_forward_hook(lambda *_: calls.append(1))
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(m, config=config, module_filter_fn=lambda mod, fqn: fqn != "2")
    assert [type(layer) for layer in m] == [Float8Linear, Own, nn.Linear]
    assert isinstance(m[1].weight, sct.ScaledTensor)
    assert "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2" in repr(m[0])
    assert m[0].config is config
    products = m[0].linear_mm_config
    assert (products.output.emulate, products.output.use_fast_accum) == (True, True)
    assert not products.grad_weight.use_fast_accum
    twin = copy.deepcopy(m)
    assert type(twin[0]) is Float8Linear
    x = torch.randn(4, 32)
    assert torch.equal(plain(m(x)), plain(twin(x)))
    assert calls == [1, 1]
    one = Float8Linear.from_float(nn.Linear(16, 16, bias=False), config)
    assert type(one) is Float8Linear
    assert isinstance(one.weight, sct.ScaledTensor)
    assert (float8.e4m3_dtype, float8.e5m2_dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test__under_autocast__the_result_is_in_its_dtype(name, dtype):
    config = Float8LinearConfig.from_recipe_name(name)
    m = convert_to_float8_training(mlp(dtype), config=config)
    x = torch.randn(16, 64, dtype=dtype)
    assert m(x).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert m[0].bias.grad.dtype == dtype


def test__each_layer__keeps_the_dtype_of_its_weight():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.bfloat16))
    convert_to_float8_training(m)
    assert [m[0].weight.format, m[1].weight.format] == [FP32, BF16]
    assert m[0](torch.randn(4, 32)).dtype == torch.float32


def test__parameters__stay_the_objects_that_an_optimizer_has():
    m = nn.Sequential(nn.Embedding(32, 64), mlp(), nn.Linear(64, 32, bias=False))
    m[2].weight = m[0].weight  # tied
    parameters = list(m.parameters())
    convert_to_float8_training(m)
    assert all(p is q for p, q in zip(parameters, m.parameters(), strict=True))
    assert m[2].weight is m[0].weight
    assert isinstance(m[0].weight, sct.ScaledTensor)
    assert isinstance(m[0].weight, nn.Parameter)


def test__a_parameter_in_a_graph__is_refused():
    m = mlp()
    loss = m(torch.randn(4, 64)).sum()
    with pytest.raises(ModelError, match="whose backward pass has not run"):
        convert_to_float8_training(m)
    assert not scaled_names(m)
    loss.backward()
    assert m[0].weight.grad is not None


def test__a_model_converted_twice__has_the_later_config():
    m = convert_to_float8_training(mlp())
    weight = m[0].weight
    convert_to_float8_training(m, config=Float8LinearConfig.from_recipe_name("rowwise"))
    assert m[0].weight is weight
    assert weight.recipe.granularity == "row"


def test__the_way_back__is_exact():
    m = mlp()
    before = copy.deepcopy(m.state_dict())
    sct.unscale_model(convert_to_float8_training(m))
    assert all(torch.equal(before[k], v) for k, v in m.state_dict().items())


# --- configs and their recipes ---------------------------------------------------------------


def test__configs_by_name__are_recipes():
    by_name = {n: recipe_of(Float8LinearConfig.from_recipe_name(n), BF16) for n in NAMES}
    assert by_name["tensorwise"] == Current(gradient=E5M2, master=BF16)
    assert by_name["rowwise"] == Current(granularity="row", power_of_two=True, master=BF16)
    row, whole = (Cast(E4M3FN, Amax(True), block) for block in ((1, 0), (0, 0)))
    gemms = by_name["rowwise_with_gw_hp"].gemms
    assert (gemms.forward.left, gemms.forward.right) == (row, row)
    assert (gemms.dgrad.left, gemms.dgrad.right) == (row, whole)
    assert gemms.wgrad.left is gemms.wgrad.right is None
    assert Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE) == (
        Float8LinearConfig.from_recipe_name("rowwise")
    )


def test__a_delayed_config__is_the_recipe_of_that_name():
    config = Float8LinearConfig(
        delayed_scaling_config=DelayedScalingConfig(history_len=4), **ALL_DELAYED
    )
    assert recipe_of(config, FP32) == Delayed(history=4, activation=FP32)
    assert not linear_requires_sync(Float8LinearConfig())


@pytest.mark.parametrize("weight", ["dynamic", "delayed"])
@pytest.mark.parametrize("given", ["dynamic", "delayed"])
@pytest.mark.parametrize("gradient", ["dynamic", "delayed"])
def test__each_operand__is_delayed_or_dynamic_as_it_says(given, weight, gradient):
    kinds = [given, weight, gradient]
    config = Float8LinearConfig(
        **{
            f"cast_config_{name}": CastConfig(scaling_type=ScalingType(kind))
            for name, kind in zip(("input", "weight", "grad_output"), kinds, strict=True)
        }
    )
    assert linear_requires_sync(config) == ("delayed" in kinds)
    layer = convert_to_float8_training(nn.Linear(32, 16), config=config)
    x = torch.randn(8, 32)
    error = []
    for _ in range(2):
        x.mul_(3)  # which a history has not seen: its guard scales by the amax of this step
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        wanted = x.double().T @ (2 * plain(y))
        error.append(decibels(plain(layer.weight.grad).T, wanted))
        sync_float8_amax_and_scale_history(layer)
    assert min(error) > 18
    if "delayed" in kinds:
        seen = (layer.weight_amax[:, 1] > 0).tolist()
        assert seen == [kind == "delayed" for kind in kinds]


def test__target_dtypes_and_emulate__reach_the_recipe():
    wide = CastConfig(target_dtype=torch.float8_e5m2)
    config = Float8LinearConfig(cast_config_weight=wide, emulate=True)
    recipe = recipe_of(config, FP32)
    assert (recipe.forward, recipe.weight, recipe.gradient) == (E4M3FN, E5M2, E5M2)
    with pytest.raises(RecipeError, match="emulate"):
        recipe_of(Float8LinearConfig(cast_config_weight=wide), FP32)


def test__all_disabled__multiplies_as_it_is():
    config = Float8LinearConfig(
        cast_config_input=DISABLED, cast_config_weight=DISABLED, cast_config_grad_output=DISABLED
    )
    layer = nn.Linear(32, 16)
    x = torch.randn(4, 32)
    expected = layer(x).detach()
    y = convert_to_float8_training(layer, config=config)(x)
    torch.testing.assert_close(plain(y).float(), expected)


@pytest.mark.parametrize("scale", [16.0, 2.0**-3, torch.tensor([64.0])], ids=str)
def test__a_static_scale__multiplies_before_the_cast(scale):
    config = Float8LinearConfig(cast_config_input=static(scale))
    recipe = recipe_of(config, FP32)
    assert isinstance(recipe, PerGemm)
    assert recipe.gemms.forward.left.scale == Fixed(-int(math.log2(float(scale))))
    layer = nn.Linear(32, 32, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.randn(64, 32)
    y = plain(convert_to_float8_training(layer, config=config)(x)).float()
    factor = float(scale)
    codes = (x * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    # The weight is 1 or 0, and 1/(1/448) is 448 to the last bit of the scale.
    torch.testing.assert_close(y, codes.float() / factor, rtol=2.0**-8, atol=0)


def test__static_scales_of_all_operands__are_exact_constants():
    config = Float8LinearConfig(
        cast_config_input=static(8),
        cast_config_weight=static(32),
        cast_config_grad_output=static(2.0**10),
    )
    expected = Constant(
        input_exponent=-3, weight_exponent=-5, gradient_exponent=-10, activation=FP32
    )
    assert recipe_of(config, FP32) == expected
    layer = nn.Linear(32, 32, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.randn(64, 32)
    y = plain(convert_to_float8_training(layer, config=config)(x)).float()
    assert torch.equal(y, (x * 8).to(torch.float8_e4m3fn).float() / 8)


def test__delayed_histories__are_saved_and_loaded():
    config = Float8LinearConfig(**ALL_DELAYED)
    m = convert_to_float8_training(mlp(), config=config)
    m(torch.randn(8, 64)).sum().backward()
    sync_float8_amax_and_scale_history(m)
    fresh = convert_to_float8_training(mlp(seed=1), config=config)
    fresh.load_state_dict(m.state_dict())
    assert torch.equal(fresh[0].weight_amax, m[0].weight_amax)
    assert (m[0].weight_amax[:, 1] > 0).all()


def test__layers_listed_before__end_a_step_alone():
    m = convert_to_float8_training(mlp(), config=Float8LinearConfig(**ALL_DELAYED))
    m(torch.randn(8, 64)).sum().backward()
    sync_float8_amax_and_scale_history(m, fp8_layers=[m[0]])
    assert (m[0].weight_amax[:, 1] > 0).all()
    assert not m[2].weight_amax[:, 1].any()


# --- what is refused -------------------------------------------------------------------------


ROW = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: CastConfig(ScalingType.DELAYED, ScalingGranularity.AXISWISE), RecipeError, "DYN"),
        (lambda: CastConfig(ScalingType.STATIC), RecipeError, "static_scale"),
        (lambda: CastConfig(static_scale=1.0), RecipeError, "static_scale"),
        (lambda: static(torch.ones(2)), RecipeError, "one positive"),
        (lambda: static(-1.0), RecipeError, "one positive"),
        (lambda: static(3.0), UnsupportedError, r"2\*\*1"),
        (lambda: CastConfig(target_dtype=torch.bfloat16), RecipeError, "FP8 dtype"),
        (lambda: CastConfig("dynamic"), RecipeError, "ScalingType"),
        (lambda: DelayedScalingConfig(scale_fn_name="min"), UnsupportedError, "recent"),
        (lambda: Float8GemmConfig(use_fast_accum=1), RecipeError, "bool"),
        (lambda: Float8LinearConfig(cast_config_input=None), RecipeError, "CastConfig"),
        (lambda: Float8LinearConfig(emulate=None), RecipeError, "bool"),
        (lambda: Float8LinearConfig(cast_config_weight=DISABLED), RecipeError, "output"),
        (
            lambda: Float8LinearConfig(
                cast_config_input_for_grad_weight=CastConfig(target_dtype=torch.float8_e5m2)
            ),
            RecipeError,
            "PerGemm",
        ),
        (lambda: Float8LinearConfig.from_recipe_name("blockwise"), RecipeError, "tensorwise"),
        (
            lambda: convert_to_float8_training(
                mlp(),
                config=Float8LinearConfig(cast_config_input=DELAYED, cast_config_weight=static(2)),
            ),
            UnsupportedError,
            "DELAYED TENSORWISE, STATIC TENSORWISE",
        ),
        (
            lambda: convert_to_float8_training(
                mlp(), config=Float8LinearConfig(cast_config_input_for_grad_weight=DELAYED)
            ),
            UnsupportedError,
            "both products",
        ),
        (
            lambda: Float8LinearConfig(cast_config_weight=ROW, enable_fsdp_float8_all_gather=True),
            RecipeError,
            "TENSORWISE",
        ),
        (lambda: Float8Linear.from_float(nn.Sequential()), ModelError, "nn.Linear"),
        (
            lambda: convert_to_float8_training(
                mlp(), config=Float8LinearConfig(round_scales_to_power_of_2=True, **ALL_DELAYED)
            ),
            UnsupportedError,
            "round_scales_to_power_of_2",
        ),
        (lambda: convert_to_float8_training(mlp(), config="rowwise"), RecipeError, "Float8Lin"),
        (lambda: convert_to_float8_training(torch.ones(2)), ModelError, "nn.Module"),
    ],
)
def test__what_cannot_be__is_refused_by_name(make, error, told):
    with pytest.raises(error, match=told):
        make()


@pytest.mark.parametrize(
    "option",
    [
        {"force_recompute_fp8_weight_in_bwd": True},
        {"enable_amax_init": False},
        {"enable_pre_and_post_forward": False},
    ],
    ids=str,
)
def test__retired_options__are_warned_of(option):
    with pytest.warns(DeprecationWarning, match=next(iter(option))):
        Float8LinearConfig(**option)


def test__options_that_change_no_value__are_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Float8LinearConfig(pad_inner_dim=True)
    layer = nn.Linear(17, 5)
    x = torch.randn(3, 17)
    a = convert_to_float8_training(copy.deepcopy(layer), config=config)(x)
    b = convert_to_float8_training(layer)(x)
    assert torch.equal(plain(a), plain(b))


@pytest.mark.parametrize("granularity", ScalingGranularity)
def test__use_fast_accum__is_the_recipes(granularity):
    by = CastConfig(scaling_granularity=granularity)
    config = Float8LinearConfig(
        cast_config_input=by,
        cast_config_weight=by,
        cast_config_grad_output=by,
        gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=True),
    )
    layer = convert_to_float8_training(nn.Linear(16, 16), config=config)
    assert layer.weight.recipe.fast_accumulation == ("forward", "wgrad")
