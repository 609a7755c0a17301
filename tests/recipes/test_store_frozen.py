"""Frozen weights are stored as products cast them: with the same bits, in a quarter of the
bytes."""

import copy
import pickle
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from small_models import LoRA
from tensors import bits, gaussian, parts, saved_and_loaded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import RecipeError, UnsupportedError
from scaledtensor.formats import E4M3FN
from scaledtensor.models import delayed
from scaledtensor.recipes import (
    MXFP8,
    NVFP4,
    Blockwise,
    Cast,
    Constant,
    Current,
    Delayed,
    Gemm,
    Gemms,
    MinMSE,
    PerGemm,
    Recipe,
    Unit,
)

RECIPES = [
    Unit(),
    Unit(master="bf16", saved="e4m3fn"),
    Current(),
    Current(power_of_two=True, margin=1, weight="e5m2"),
    MinMSE(),
    Constant(),
    PerGemm(),
    Delayed(),
    Delayed(margin=2, choose="recent"),
]
EVERY = pytest.mark.parametrize("recipe", RECIPES, ids=str)
SOME = pytest.mark.parametrize("recipe", [Unit(), Current(), Delayed()], ids=str)


def plain(width: int = 32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        LoRA(nn.Linear(width, 2 * width)),
        nn.GELU(),
        LoRA(nn.Linear(2 * width, width)),
        nn.LayerNorm(width).requires_grad_(False),
    )


def stored(recipe: Recipe, model: nn.Module | None = None) -> nn.Module:
    return sct.scale_model(plain() if model is None else model, replace(recipe, store_frozen=True))


def both(recipe: Recipe, model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the model twice: with frozen weights in the master format, and stored."""
    return sct.scale_model(copy.deepcopy(model), recipe), stored(recipe, model)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert getattr(a, "format", None) == getattr(b, "format", None)
    assert [bits(x) for x in parts(a)] == [bits(x) for x in parts(b)]


def outcome(model: nn.Module, x: Tensor, run=None) -> list[Tensor]:
    """Return the result, and the gradients of the input and of the parameters that have one."""
    x = x.clone().requires_grad_()
    y = (run or model)(x)
    y.square().mean().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def assert_same_outcome(one: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert_same(a, b)


# --- the same bits ---------------------------------------------------------------------------


@EVERY
def test__products__are_bit_for_bit_those_of_the_master(recipe):
    found = [outcome(model, gaussian(8, 32, seed=1)) for model in both(recipe, plain())]
    assert len(found[0]) == 6
    assert_same_outcome(*found)


def compiled(model: nn.Module, backend: str) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize(
    "recipe", [Unit(), Current(), MinMSE(below=1), Constant(), PerGemm(), Delayed()], ids=str
)
def test__compiled__they_are_as_well(recipe):
    base = nn.Linear(32, 16).requires_grad_(False)
    master, codes = both(recipe, nn.Sequential(base, nn.Linear(16, 8, bias=False)))
    x = gaussian(8, 32, seed=1)
    found = outcome(codes, x, compiled(codes, "aot_eager"))
    assert_same_outcome(outcome(master, x), found)


def test__compiled_by_inductor__they_are_as_well_and_no_copy_is_kept():
    base = nn.Linear(64, 128, bias=False).requires_grad_(False)
    x, found = gaussian(4, 64, seed=1), []
    for model in both(Current(), nn.Sequential(base)):
        run = compiled(model, "inductor")
        found.append(outcome(model, x, run))
    assert_same_outcome(*found)
    assert kept(model, run, x.requires_grad_()) < 64 * 128


@EVERY
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test__without_gradients__they_are_as_well(recipe, context):
    master, codes = both(recipe, plain())
    with context():
        assert_same(master(gaussian(8, 32, seed=1)), codes(gaussian(8, 32, seed=1)))


@SOME
@pytest.mark.parametrize("reentrant", [None, False, True])
def test__under_autocast_and_checkpointed__they_are_as_well(recipe, reentrant):
    def run(x: Tensor) -> Tensor:
        if reentrant is None:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)
        return checkpoint(model, x, use_reentrant=reentrant)

    found = []
    for model in both(recipe, plain()):
        found.append(outcome(model, gaussian(8, 32, seed=1), run))
    assert_same_outcome(*found)


@EVERY
def test__a_training_of_adapters__has_the_same_losses(recipe):
    trained = []
    for model in both(recipe, plain()):
        # The optimizer gets all parameters, as in many scripts; frozen ones take no step.
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(12):
            loss = F.mse_loss(model(gaussian(16, 32, seed=step)), gaussian(16, 32, seed=99))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        adapters = [p for p in model.parameters() if p.requires_grad]
        trained.append((losses, adapters, sct.models.delayed.exceeded(model)))
    assert trained[0][0] == trained[1][0]
    assert trained[0][0][-1] < trained[0][0][0]
    assert_same_outcome(trained[0][1], trained[1][1])
    assert trained[0][2] == trained[1][2]


def test__under_delayed_scaling__inputs_and_gradients_keep_their_histories():
    """A frozen weight has the same amax at every step, so its scale never had a history."""
    model = stored(Delayed())
    outcome(model, gaussian(8, 32, seed=1))
    delayed.advance(model)
    seen = model[0].base.weight_amax[:, 1]
    assert seen[0] > 0
    assert seen[2] > 0
    assert seen[1] == 0


class Kinds(nn.Module):
    """Models have weights under these names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 8) / 8)
        self.position = nn.Parameter(torch.randn(36, 8) / 8)
        self.norm = nn.LayerNorm((36, 8))
        self.table = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.other = nn.Linear(8, 5, bias=False)
        self.head.weight = self.table.weight
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2).transpose(1, 2) + self.position
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = h.flatten(0, 1).unflatten(0, (2, -1)) @ self.gate_up_proj
        return self.head(h) + self.other(h) + self.table(torch.tensor([1])).sum()


@pytest.mark.parametrize("recipe", [Unit(), Current(), Constant()], ids=str)
def test__what_is_stored__are_the_weights_of_products(recipe):
    torch.manual_seed(0)
    master, codes = both(recipe, Kinds())
    narrow = {n for n, p in codes.named_parameters() if p.format is E4M3FN}
    assert narrow == {
        *("conv.weight", "attention.in_proj_weight", "attention.out_proj.weight"),
        *("gate_up_proj", "other.weight"),
    }
    assert codes.head.weight is codes.table.weight
    x = gaussian(2, 4, 8, 8, seed=1)
    assert_same_outcome(outcome(master, x), outcome(codes, x))


def test__what_requires_a_gradient_or_is_small__is_not_stored():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(32, 32))
    model[1:].requires_grad_(False)
    stored(Unit(min_size=16), model)
    assert model[0].weight.format.name == "fp32"
    assert type(model[1].weight) is nn.Parameter
    assert model[2].weight.format is E4M3FN


def test__overrides__decide_for_their_modules():
    recipe = MXFP8(overrides={"*.base": Current(store_frozen=True)})
    model = sct.scale_model(plain(), recipe)
    assert model[0].base.weight.format is E4M3FN
    assert model[0].down.weight.format.name == "fp32"
    assert "Current(store_frozen=True)" in str(model)
    other = sct.scale_model(plain(), Unit(store_frozen=True, overrides={"0.*": Unit()}))
    assert other[0].base.weight.format.name == "fp32"
    assert other[2].base.weight.format is E4M3FN


def test__a_part_of_a_weight__is_under_the_scale_of_the_whole():
    experts = nn.Module()
    experts.up_proj = nn.Parameter(gaussian(3, 16, 8, seed=1) / 4, requires_grad=False)
    for recipe in (Unit(), Current()):
        master, codes = both(recipe, copy.deepcopy(experts))
        x = gaussian(4, 8, seed=1)
        one, other = (F.linear(x, m.up_proj[1]) for m in (master, codes))
        assert not isinstance(recipe, Unit) or torch.equal(one.dequantize(), other.dequantize())
        off = (one.dequantize() - other.dequantize()).norm() / one.dequantize().norm()
        assert off < 0.05


# --- the bytes -------------------------------------------------------------------------------


def held(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage."""
    storages = [part.untyped_storage() for t in tensors for part in parts(t)]
    return {s.data_ptr(): s.nbytes() for s in storages}


def kept(model: nn.Module, run, x: Tensor) -> int:
    """Return the bytes that autograd keeps for the backward pass, without parameters and inputs."""
    own, found = held((*model.parameters(), x)), {}

    def pack(t: Tensor) -> Tensor:
        found.update(held([t]))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x).square().mean()
    return sum(n for at, n in found.items() if at not in own)


def test__a_base__takes_a_quarter_of_the_bytes():
    master, codes = both(Unit(), plain(256))
    wide, narrow = (
        sum(held(p for n, p in m.named_parameters() if n.endswith("base.weight")).values())
        for m in (master, codes)
    )
    assert wide == 4 * 2 * 256 * 512 + 2 * 8
    assert narrow == 2 * 256 * 512 + 2 * 8
    wide, narrow = (sum(held(m.parameters()).values()) for m in (master, codes))
    assert narrow < 0.3 * wide


@SOME
def test__autograd__keeps_the_parameter_itself(recipe):
    master, codes = both(recipe, nn.Sequential(nn.Linear(64, 128).requires_grad_(False)))
    x = gaussian(4, 64, seed=1).requires_grad_()
    assert kept(master, master, x) - kept(codes, codes, x) >= 64 * 128
    weight = codes[0].weight
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        codes(x)
    own = {weight.qdata.untyped_storage().data_ptr()}
    assert own & held(seen).keys()


# --- what a parameter goes through -----------------------------------------------------------


def weight(model: nn.Module) -> sct.ScaledTensor:
    return model[0].base.weight


@SOME
@pytest.mark.parametrize("assign", [False, True])
def test__a_checkpoint__brings_the_codes(recipe, assign):
    model, other = stored(recipe), stored(recipe, plain(seed=1))
    model.load_state_dict(saved_and_loaded(other.state_dict()), assign=assign)
    assert_same(weight(model), weight(other))
    assert not weight(model).requires_grad
    x = gaussian(8, 32, seed=1)
    assert_same_outcome(outcome(model, x), outcome(other, x))


@EVERY
def test__a_wide_checkpoint__is_cast_as_the_recipe_casts(recipe):
    source = plain(seed=1)
    master, codes = both(recipe, copy.deepcopy(source))
    for state in (source.state_dict(), master.state_dict()):
        model = stored(recipe)
        model.load_state_dict(state)
        assert_same(weight(model), weight(codes))
    model = stored(recipe)
    weight(model).data.copy_(source[0].base.weight)
    assert_same(weight(model), weight(codes))


def test__into_a_plain_model__goes_the_rounded_value():
    model, source = stored(Current()), plain()
    rounded = weight(model).dequantize()
    source.load_state_dict(model.state_dict())
    assert torch.equal(source[0].base.weight, rounded)
    sct.unscale_model(model)
    assert type(weight(model)) is nn.Parameter
    assert not weight(model).requires_grad
    assert torch.equal(weight(model), rounded)
    assert 0 < (rounded - plain()[0].base.weight).abs().max() < 2**-4 * rounded.abs().max()


@SOME
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test__a_copy__is_stored_too(recipe, again):
    model = stored(recipe)
    made = again(model)
    assert isinstance(weight(made), nn.Parameter)
    assert weight(made).recipe.store_frozen
    assert_same(weight(made), weight(model))
    assert weight(made).qdata.data_ptr() != weight(model).qdata.data_ptr()
    x = gaussian(8, 32, seed=1)
    assert_same_outcome(outcome(made, x), outcome(model, x))


@SOME
def test__module_to__changes_the_appearance_and_no_code(recipe):
    model = stored(recipe)
    before = copy.deepcopy(weight(model))
    model.to("cpu", torch.bfloat16)
    assert weight(model).dtype == torch.bfloat16
    assert_same(weight(model), before)
    y = model(gaussian(4, 32, seed=1).bfloat16())
    assert y.dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="float64"):
        model.double()
    assert_same(weight(model).to(torch.bfloat16), before)


def test__on_the_meta_device__it_is_stored_and_filled():
    want, source = stored(Current(), plain(seed=1)), plain(seed=1)
    model = stored(Current(), plain().to("meta"))
    assert weight(model).format is E4M3FN
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert_same(weight(model), weight(want))


def test__rebalancing__leaves_stored_weights_alone():
    model = stored(Current(rebalance=1))
    before = copy.deepcopy(weight(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sct.rebalance_every(optimizer, 1)
    for _ in range(2):
        model(gaussian(8, 32, seed=1)).square().mean().backward()
        optimizer.step()
    for by in ("rms", "amax"):
        sct.rebalance(model, by)
    assert_same(weight(model), before)


@SOME
def test__what_is_written_into_one__is_cast_anew(recipe):
    """Merging adapters writes like this: nothing saturates under the old scale."""
    model = stored(recipe)
    before = weight(model).dequantize()
    added = gaussian(64, 32, seed=1) * 4 * before.std()
    weight(model).data += sct.scaled(added)
    assert weight(model).format is E4M3FN
    off = (weight(model).dequantize() - (before + added)).abs()
    assert (off <= 2**-4 * (before + added).abs() + 2**-6 * before.std()).all()


# --- and one that is trained after all -------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
def test__a_step_of_a_stored_weight__is_refused_until_it_is_widened(foreach):
    model = stored(Current())
    p = weight(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
    before = copy.deepcopy(p)
    p.requires_grad_(True)
    model(gaussian(8, 32, seed=1)).square().mean().backward()
    assert p.grad.format.name == "fp32"
    adapter = copy.deepcopy(model[0].down.weight)
    with pytest.raises(UnsupportedError, match=r"weight of \(64, 32\) that is stored in e4m3fn"):
        optimizer.step()
    assert_same(p, before)
    assert_same(model[0].down.weight, adapter)
    p.data = p.detach().dequantize()
    assert p is weight(model)
    assert p.format.name == "fp32"
    wide = p.dequantize().detach()
    optimizer.step()
    moved = (p.dequantize() - wide).abs()
    assert 0.5e-4 < moved.median() < 2e-4


def test__gradients_of_a_stored_weight__are_those_of_the_master():
    master, codes = both(Unit(), plain())
    for model in (master, codes):
        weight(model).requires_grad_(True)
        model(gaussian(8, 32, seed=1)).square().mean().backward()
    one, other = weight(master).grad.dequantize(), weight(codes).grad.dequantize()
    assert ((one - other).norm() / one.norm()) < 2**-8


# --- the field -------------------------------------------------------------------------------


@EVERY
def test__the_field__is_told_and_saved(recipe):
    made = replace(recipe, store_frozen=True)
    assert "store_frozen=True" in str(made)
    assert Recipe.from_json(made.to_json()) == made != recipe
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Unit(store_frozen=1), "Unit.store_frozen is True or False; got 1"),
        (lambda: MXFP8(store_frozen=True), "MXFP8.store_frozen keeps a weight in the one cast"),
        (lambda: NVFP4(store_frozen=True), "casts for each product separately"),
        (lambda: Blockwise(store_frozen=True), "overrides={'\\*.base': Current"),
        (lambda: Current(granularity="row", store_frozen=True), "each product separately"),
        (lambda: Unit(keep=("forward",), store_frozen=True), "each product separately"),
        (lambda: Unit("bf16", "bf16", store_frozen=True), "in 8 bits.* casts them to bf16"),
        (lambda: PerGemm(casts=STOCHASTIC, store_frozen=True), "rounded stochastic"),
    ],
)
def test__what_cannot_be_stored__is_refused_when_built(make, words):
    with pytest.raises(RecipeError, match=words):
        make()


DRAWN = Cast("e4m3fn", rounding="stochastic")
STOCHASTIC = Gemms(
    Gemm(Cast("e4m3fn"), DRAWN), Gemm(Cast("e5m2"), DRAWN), Gemm(Cast("e4m3fn"), Cast("e5m2"))
)


def test__what_computes_on_values__reads_float32():
    """A scale that is no power of two takes a value out of bfloat16."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    weight = sct.scale_model(layer, Current(store_frozen=True)).weight
    assert bool((weight == weight.dequantize()).all())
