"""A model is converted in place, computes the same, and converts back bit for bit."""

import copy

import pytest
import torch
from assertions import assert_holds
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations

import scaledtensor as sct
from scaledtensor.errors import ModelError, RecipeError, UnsupportedError
from scaledtensor.models.operands import is_operand
from scaledtensor.recipes import Unit

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4), nn.Embedding(5, 3)
    ).to(dtype)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def assert_equal(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Parameters and buffers are plain, and equal `before` bit for bit."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, x in before.items():
        assert type(after[name]) is torch.Tensor
        assert after[name].dtype == x.dtype
        assert torch.equal(after[name], x)


@DTYPES
def test__scaling_and_unscaling__gives_the_exact_model_back(dtype):
    model = mlp(dtype)
    modules, before = list(model.modules()), state(model)
    assert sct.scale_model(model) is model
    assert list(model.modules()) == modules
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert (p.dtype, p.format.name, p.requires_grad) == (dtype, "fp32", True)
        assert_holds(p, before[name], 0)
    assert sct.unscale_model(model) is model
    assert_equal(model, before)
    assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())


@DTYPES
def test__checkpoints__go_both_ways_bit_for_bit(dtype):
    model, other, third = sct.scale_model(mlp(dtype)), mlp(dtype, 1), mlp(dtype, 2)
    before = state(other)
    model.load_state_dict(other.state_dict())
    for name, p in model.named_parameters():
        assert_holds(p, before[name], 0)
        assert float(p.scale) == float(sct.scaled(before[name], "fp32").scale)
    third.load_state_dict(model.state_dict())
    assert_equal(third, before)


def test__assigning_a_scaled_checkpoint__keeps_parameters_scaled():
    model, source = sct.scale_model(mlp()), sct.scale_model(mlp(seed=1))
    model.load_state_dict(source.state_dict(), assign=True)
    for p, q in zip(model.parameters(), source.parameters(), strict=True):
        assert isinstance(p, nn.Parameter)
        assert (p.recipe, p.requires_grad) == (q.recipe, True)
        assert_holds(p, q.dequantize(), 0)


@pytest.mark.parametrize("change", ["shape", "missing", "unexpected"])
def test__strict_loading__says_what_plain_models_say_and_keeps_the_parameter(change):
    def bad(model):
        given = state(mlp(seed=1))
        if change == "shape":
            given["0.weight"] = given["0.weight"][:2]
        elif change == "missing":
            del given["0.weight"]
        else:
            given["extra"] = torch.ones(1)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(given)
        return str(caught.value)

    model = sct.scale_model(mlp())
    assert bad(model) == bad(mlp())
    if change != "unexpected":
        assert_holds(model[0].weight, state(mlp())["0.weight"], 0)


def test__ties_tags_modes_hooks_and_buffers__stay():
    called = []
    model = nn.ModuleDict({"a": mlp(), "norm": nn.BatchNorm1d(4), "b": nn.Linear(8, 16)}).eval()
    model["b"].weight = model["a"][0].weight
    model["a"][0].weight.tag = "sharded"
    model["a"][3].bias.requires_grad_(False)
    model["b"].register_forward_hook(lambda *_: called.append("hook"))
    buffers = list(model.buffers())
    for convert, kind in ((sct.scale_model, sct.ScaledTensor), (sct.unscale_model, nn.Parameter)):
        convert(model)
        assert all(isinstance(p, kind) for p in model.parameters())
        assert model["b"].weight is model["a"][0].weight
        assert model["b"].weight.tag == "sharded"
        assert not model["a"][3].bias.requires_grad
        assert not any(m.training for m in model.modules())
        assert all(x is y for x, y in zip(buffers, model.buffers(), strict=True))
        model["b"](torch.ones(1, 8))
    assert called == ["hook", "hook"]


def test__gradients__are_scaled_and_unscaled_with_their_parameters():
    model = mlp()
    model[:4](torch.randn(3, 8)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    sct.scale_model(model)
    assert [type(p.grad) for p in model.parameters()] == [
        type(None) if g is None else sct.ScaledTensor for g in before
    ]
    sct.unscale_model(model)
    for p, g in zip(model.parameters(), before, strict=True):
        assert (p.grad is None) == (g is None)
        assert g is None or torch.equal(p.grad, g)


def test__filter__leaves_modules_plain_and_sees_owner_and_name():
    seen = {}
    model = mlp()

    def keep(module, fqn):
        seen[fqn] = module
        return isinstance(module, nn.Linear)

    sct.scale_model(model, filter_fn=keep)
    assert seen == {n: m for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    kinds = {n: type(p).__name__ for n, p in model.named_parameters()}
    assert {n for n, kind in kinds.items() if kind == "ScaledTensor"} == {
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
    }
    sct.unscale_model(model)
    assert_equal(model, state(mlp()))


def test__a_tied_parameter__is_scaled_where_one_of_its_owners_passes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    sct.scale_model(model, filter_fn=lambda module, fqn: fqn == "1")
    assert model[1].weight is model[0].weight
    assert isinstance(model[0].weight, sct.ScaledTensor)


class Twice(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.first, self.second = mlp(), nn.ModuleList(modules)


def with_graph():
    """torch's older function computes the weight at once, and keeps the graph."""
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(2, 2))


def fake():
    """Programs that estimate memory build their models so."""
    with FakeTensorMode():
        return nn.Linear(2, 2)


def hooked(register):
    layer = nn.Linear(2, 2)
    getattr(layer.weight, register)(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda: nn.Linear(2, 2).double(), "float64"),
        (lambda: nn.LazyLinear(2), "run one batch"),
        (lambda: hooked("register_hook"), "hooks"),
        (lambda: hooked("register_post_accumulate_grad_hook"), "hooks"),
        (with_graph, "parametrizations.weight_norm"),
        (fake, "FakeTensor.*torch.device\\('meta'\\)"),
    ],
    ids=["float64", "lazy", "hook", "post-hook", "weight-norm", "fake"],
)
def test__a_model_that_cannot_be_converted__is_named_and_unchanged(broken, words):
    model = Twice(broken())
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ModelError, match=words) as caught:
        sct.scale_model(model)
    assert "second.0.weight" in str(caught.value)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is p for name, p in before.items())


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        y = self.layer(x)
        self.mean = self.mean * 0.5 + 0.5 * y.mean(0).detach()
        return y - self.mean


def test__unscaling__makes_buffers_plain_that_the_model_has_set():
    model = sct.scale_model(RunningMean())
    model(torch.ones(3, 2))
    want = model.mean.dequantize()
    sct.unscale_model(model)
    assert type(model.mean) is torch.Tensor
    assert torch.equal(model.mean, want)
    assert type(model(torch.ones(3, 2))) is torch.Tensor


def test__unscaling_a_plain_model__is_an_error():
    with pytest.raises(ModelError, match="no parameter"):
        sct.unscale_model(mlp())


def test__recipes__come_by_name_or_value():
    for recipe in ("unit", "UNIT", sct.recipes.Unit()):
        assert sct.scale_model(mlp(), recipe)[0].weight.recipe == sct.recipes.Unit()
    model = mlp()
    for recipe in ("nope", None, 3):
        with pytest.raises(RecipeError, match="unit"):
            sct.scale_model(model, recipe)
    assert_equal(model, state(mlp()))


def test__a_bfloat16_master__rounds_once_and_trains():
    model = sct.scale_model(mlp(), sct.recipes.Unit(master="bf16"))
    for name, p in model.named_parameters():
        assert (p.format.name, p.dtype) == ("bf16", torch.float32)
        assert_holds(p, state(mlp())[name].bfloat16(), 0)
    model[:4](torch.randn(3, 8)).square().sum().backward()
    assert model[0].weight.grad.format.name == "bf16"


@pytest.mark.parametrize("trained", [False, True])
def test__module_to__converts_parameters_and_keeps_them_scaled(trained):
    model = sct.scale_model(mlp())
    weight, before = model[0].weight, state(mlp())
    if trained:
        model[:4](torch.randn(3, 8)).square().sum().backward()
    model.to(torch.bfloat16)
    assert model[0].weight is weight
    assert (weight.dtype, weight.format.name) == (torch.bfloat16, "bf16")
    assert (weight.recipe, weight.requires_grad) == (sct.recipes.Unit(), True)
    assert_holds(weight, before["0.weight"].bfloat16(), 0)
    out = model[:4](torch.randn(3, 8).bfloat16())
    assert out.dtype == torch.bfloat16
    out.square().sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "recipe", ["unit", Unit(forward="fp32", gradient="fp32", activation="fp32")]
)
@pytest.mark.parametrize("convert", [nn.Module.double, lambda model: model.to(torch.float64)])
def test__a_scaled_model__is_no_double_and_says_so(recipe, convert):
    model, x = sct.scale_model(mlp(), recipe), torch.randn(3, 8)
    with torch.no_grad():  # A graph would hold the parameters.
        want = model[:4](x)
    with pytest.raises(UnsupportedError, match=r"float64.*unscale_model\(model\)\.double\(\)"):
        convert(model)
    with pytest.raises(UnsupportedError, match="float64"):
        model[0].weight.data = torch.zeros(model[0].weight.shape, dtype=torch.float64)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        assert_holds(model[:4](x), want.dequantize(), 0)
    plain = sct.unscale_model(model)[:4].double()
    assert torch.autograd.gradcheck(plain, (x.double().requires_grad_(),))


def test__meta_models__can_be_scaled_and_filled():
    model = sct.scale_model(mlp().to("meta"))
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    for name, p in model.named_parameters():
        assert isinstance(p, sct.ScaledTensor)
        assert_holds(p, state(mlp())[name], 0)


@pytest.mark.filterwarnings("ignore::scaledtensor.errors.MissingRuleWarning")
def test__a_parametrized_module__converts_and_computes_the_same():
    torch.manual_seed(0)
    plain = parametrizations.weight_norm(nn.Linear(8, 8))
    model, x = sct.scale_model(copy.deepcopy(plain)), torch.randn(3, 8)
    assert all(isinstance(p, sct.ScaledTensor) for p in model.parameters())
    with sct.on_missing("warn"):
        got, want = model(x), plain(x)
        got.square().sum().backward()
    want.square().sum().backward()
    assert_holds(got, want, 0.1)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_holds(p.grad, q.grad, 0.3)
    sct.unscale_model(model)
    assert_equal(model, state(plain))


@pytest.mark.parametrize(
    ("module", "operands"),
    [
        (nn.Linear(4, 4), {"weight"}),
        (nn.Bilinear(4, 4, 4), {"weight"}),
        (nn.Conv2d(4, 4, 3), {"weight"}),
        (nn.ConvTranspose1d(4, 4, 3), {"weight"}),
        (nn.MultiheadAttention(4, 2), {"in_proj_weight"}),
        (
            nn.MultiheadAttention(4, 2, kdim=2),
            {"q_proj_weight", "k_proj_weight", "v_proj_weight"},
        ),
        (nn.Embedding(4, 4), set()),
        (nn.LayerNorm((4, 4)), set()),
        (nn.RMSNorm((4, 4)), set()),
        (nn.LSTM(4, 4, proj_size=2), set()),
        (nn.GRUCell(4, 4), set()),
        (sct.nn.LinearReadout(4, 4), {"weight"}),
        (sct.nn.Embedding(4, 4), set()),
        # Other classes follow a convention of names; a vector is never an operand.
        (
            nn.ParameterDict({"up_proj": torch.ones(2, 4, 4), "position": torch.ones(4, 4)}),
            {"up_proj"},
        ),
        (
            nn.ParameterDict({"weight": torch.ones(4, 1), "rel_weight": torch.ones(4, 4)}),
            {"rel_weight"},
        ),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "-".join(sorted(x)) or "none",
)
def test__operands_of_products__follow_from_the_class_of_a_layer(module, operands):
    own = module.named_parameters(recurse=False)
    assert {name for name, p in own if is_operand(module, name, p)} == operands


def test__what_is_no_module__is_refused_by_name():
    with pytest.raises(ModelError, match=r"takes an nn\.Module; got Tensor.*scaledtensor\.scaled"):
        sct.scale_model(torch.ones(2, 2))
