"""A conversion keeps every parameter object, so optimizers and hooks made before continue."""

import copy
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from assertions import assert_holds, assert_in_range
from tensors import gaussian
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import swa_utils

import scaledtensor as sct
from scaledtensor.errors import ModelError
from scaledtensor.formats import FP32
from scaledtensor.models import scale_model as scaling
from scaledtensor.ops.results import dequantized
from scaledtensor.recipes import MXFP8, Delayed, Unit
from scaledtensor.tensors import steps as step_hooks

#: Scales and rules of Unit without its rounding, so a training has the losses of the plain one.
WIDE = Unit(forward=FP32, gradient=FP32, activation=FP32)

RECIPES = ["unit", "current", "delayed", "mxfp8", "blockwise", "per_gemm", "min_mse", "nvfp4"]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(32, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        return self.lm_head(self.norm(self.hidden(self.wte(tokens))))


def batch():
    x = gaussian(64, 8, seed=1)
    return x, torch.sin(x[:, :4] * 2)


def train(model, optimizer, steps):
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    return [float(optimizer.step(closure)) for _ in range(steps)]


def state_of(optimizer):
    """Return the states of the elements of parameters."""
    return [
        x
        for p, state in optimizer.state.items()
        for x in state.values()
        if isinstance(x, torch.Tensor) and x.shape == p.shape
    ]


# --- optimizers ------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "Adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=5e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2),
    "ours": lambda ps: sct.optim.AdamW(ps, lr=1e-2),
    "ours, 8 bits": lambda ps: sct.optim.AdamW(ps, lr=1e-2, state_format="e4m3fn"),
    "Lion": lambda ps: sct.optim.Lion(ps, lr=1e-2),
}


@pytest.mark.parametrize("before", [0, 4], ids=["no states", "states"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test__an_optimizer_made_before__goes_on_through_conversions(make, before):
    plain, model = mlp(), mlp()
    own = make(plain.parameters())
    want = train(plain, own, before + 9)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    got = train(model, optimizer, before)
    for convert in (
        lambda: sct.scale_model(model, WIDE),
        lambda: sct.scale_model(model, replace(WIDE, rebalance=1)),
        lambda: sct.unscale_model(model),
    ):
        convert()
        got += train(model, optimizer, 3)
    assert got == pytest.approx(want, rel=2e-6)
    assert want[-1] < 0.9 * want[0]
    scheduler.step()
    for a, b in zip(state_of(optimizer), state_of(own), strict=True):
        torch.testing.assert_close(dequantized(a), dequantized(b), rtol=1e-4, atol=1e-6)


def test__states__are_of_the_class_that_a_fresh_optimizer_would_make():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    sct.scale_model(model)
    before = [x.clone() for x in state_of(optimizer)]
    step_hooks.adopt_states(optimizer, model.parameters())
    for x, y in zip(state_of(optimizer), before, strict=True):
        assert isinstance(x, sct.ScaledTensor)
        assert x.recipe == Unit()
        assert torch.equal(x.dequantize(), y)
    train(model, optimizer, 1)
    assert all(isinstance(x, sct.ScaledTensor) for x in state_of(optimizer))
    before = [x.dequantize() for x in state_of(optimizer)]
    sct.unscale_model(model)
    for x, y in zip(state_of(optimizer), before, strict=True):
        assert type(x) is torch.Tensor
        assert torch.equal(x, y)


def test__loaded_states__become_those_of_scaled_parameters():
    plain, model = mlp(), sct.scale_model(mlp(), WIDE)
    own, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    train(plain, own, 3)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    assert train(model, optimizer, 3) == pytest.approx(train(plain, own, 3), rel=2e-6)
    assert all(isinstance(x, sct.ScaledTensor) for x in state_of(optimizer))


def test__the_loop_variable_of_a_training__is_in_nobody_s_way():
    """`loss` keeps the graph of the last step, as in any training loop."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch()
    weight, losses = model[0].weight, []
    for step in range(8):
        if step == 2:
            sct.scale_model(model)
        if step == 4:
            sct.scale_model(model, "mxfp8")
        if step == 6:
            sct.unscale_model(model)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert model[0].weight is weight
    assert losses == sorted(losses, reverse=True)


def test__averages_of_weights__go_on():
    model = mlp()
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema.update_parameters(model)
    sct.scale_model(model)
    train(model, optimizer, 1)
    before = ema.module[0].weight.detach().clone()
    ema.update_parameters(model)
    want = before.lerp(model[0].weight.detach().dequantize(), 0.5)
    torch.testing.assert_close(ema.module[0].weight.detach(), want)


# --- identity --------------------------------------------------------------------------------


def test__everything_about_a_parameter__stays():
    model = Tied()
    model.hidden.bias.requires_grad_(False)
    model.hidden.weight.tag = "sharded"
    tokens = torch.arange(8)
    model(tokens).sum().backward()
    held, named = list(model.parameters()), dict(model.named_parameters())
    grads = [None if p.grad is None else p.grad.clone() for p in held]
    for convert in (sct.scale_model, lambda m: sct.scale_model(m, "current"), sct.unscale_model):
        convert(model)
        for p, q, g in zip(held, model.parameters(), grads, strict=True):
            assert p is q
            assert isinstance(p, nn.Parameter)
            assert (p.grad is None) == (g is None)
            assert g is None or torch.equal(dequantized(p.grad), g)
        assert model.lm_head.weight is model.wte.weight is named["wte.weight"]
        assert not model.hidden.bias.requires_grad
        assert model.hidden.weight.tag == "sharded"
    assert type(model.wte.weight) is nn.Parameter


def test__copies_and_pickles__hold_together():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    sct.scale_model(model)
    for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        made, own = again((model, optimizer))
        assert isinstance(made.wte.weight, sct.ScaledTensor)
        assert own.param_groups[0]["params"][0] is made.wte.weight is made.lm_head.weight
        assert made.wte.weight is not model.wte.weight


def test__recurrent_layers__keep_their_list_of_parameters():
    layer, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    flat = list(layer._flat_weights)
    sct.scale_model(layer, WIDE)
    assert all(p is q for p, q in zip(flat, layer._flat_weights, strict=True))
    assert all(p is ref() for p, ref in zip(flat, layer._flat_weight_refs, strict=True))
    assert isinstance(layer(x)[0], sct.ScaledTensor)


def test__no_more_than_one_parameter__is_there_twice(monkeypatch):
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    old = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    seen = []

    def held(x, *args):
        seen.append(sum(not storage.expired() for storage in old))
        return original(x, *args)

    original = scaling.kept
    monkeypatch.setattr(scaling, "kept", held)
    sct.scale_model(model)
    assert seen == [4, 3, 2, 1]
    assert all(storage.expired() for storage in old)


# --- another recipe --------------------------------------------------------------------------


def forgotten(model):
    """Return a model with the same values that was never scaled."""
    fresh = Tied()
    with torch.no_grad():
        for p, q in zip(fresh.parameters(), model.parameters(), strict=True):
            p.copy_(dequantized(q.detach()))
    return fresh


@pytest.mark.parametrize("second", RECIPES)
def test__another_recipe__makes_what_it_would_make_of_a_fresh_model(second):
    model, tokens = Tied(), torch.arange(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in ("unit", Unit(master="bf16"), "mxfp8"):
        sct.scale_model(model, first)
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = sct.scale_model(forgotten(model), second)
        assert sct.scale_model(model, second) is model
        for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
            assert (p.recipe, p.format, float(p.scale)) == (q.recipe, q.format, float(q.scale)), (
                name
            )
            assert torch.equal(p.qdata, q.qdata)
        assert list(model.state_dict()) == list(fresh.state_dict())
        assert repr(model) == repr(fresh)
        a, b = model(tokens), fresh(tokens)
        assert torch.equal(a.dequantize(), b.dequantize())


def test__what_the_other_recipe_leaves_plain__is_plain_again():
    model = mlp()
    parameters = list(model.parameters())
    sct.scale_model(model, "current")
    sct.scale_model(model, MXFP8(overrides={"3": None, "0": Unit()}))
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert model[0].weight.recipe == Unit()
    assert type(model[3].weight) is nn.Parameter
    assert isinstance(model[1].weight.recipe, MXFP8)
    sct.scale_model(model, "unit", filter_fn=lambda module, fqn: fqn == "3")
    assert isinstance(model[1].weight.recipe, MXFP8), "the filter leaves it as it is"
    assert model[3].weight.recipe == Unit()


def test__values_of_masters__survive_though_the_model_appears_as_bfloat16():
    model = sct.scale_model(nn.Linear(8, 8).bfloat16())
    with torch.no_grad():
        model.weight.mul_(1 + 2.0**-12)
    before = model.weight.detach().to(torch.float64).dequantize()
    sct.scale_model(model, "current")
    assert torch.equal(model.weight.detach().to(torch.float64).dequantize(), before)
    assert model.weight.dtype == torch.bfloat16


def test__stored_frozen_weights__are_widened_and_stored_again():
    model = mlp()
    model[0].weight.requires_grad_(False)
    sct.scale_model(model, Unit(store_frozen=True))
    weight = model[0].weight
    codes = weight.qdata
    assert weight.format.name == "e4m3fn"
    sct.scale_model(model, Unit(store_frozen=True, rebalance=3))
    assert weight.qdata is codes
    sct.scale_model(model, "unit")
    assert (weight.format.name, weight.recipe) == ("fp32", Unit())
    weight.requires_grad_()
    sct.scale_model(model, Unit(store_frozen=True))
    assert weight.format.name == "fp32"


def test__histories__are_of_the_recipe_s_length():
    model = sct.scale_model(mlp(), Delayed(history=4))
    model(batch()[0])
    history = model[0].weight_amax
    sct.scale_model(model, Delayed(history=4, guard=True))
    assert model[0].weight_amax is history
    sct.scale_model(model, Delayed(history=8))
    assert model[0].weight_amax.shape[1] == history.shape[1] + 4
    sct.scale_model(model, "unit")
    assert not list(model.buffers())


def test__a_compiled_model__sees_the_recipe_that_it_has_now():
    model, x = mlp(), batch()[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for convert in (
        lambda: None,
        lambda: sct.scale_model(model),
        lambda: sct.scale_model(model, "mxfp8"),
        lambda: sct.unscale_model(model),
    ):
        convert()
        assert torch.equal(dequantized(compiled(x)), dequantized(model(x)))


# --- where it cannot be ----------------------------------------------------------------------


def pending(layer):
    # The second layer's product keeps its weight for the gradient of its input.
    return nn.Sequential(nn.Linear(2, 2), layer)(torch.ones(1, 2)).sum()


def hooked(layer):
    node = layer.weight.view(-1).grad_fn.next_functions[0][0]
    return node, node.register_hook(lambda *_: None)


HOLDERS = {
    "a graph": (pending, "whose backward pass has not run"),
    "a view": (lambda layer: layer.weight.view(-1), "a view"),
    "a weak reference": (lambda layer: weakref.ref(layer.weight), "weak reference"),
    "a hook": (hooked, "would not be called again"),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("hold", "words"), HOLDERS.values(), ids=HOLDERS)
def test__a_parameter_that_something_holds__is_named_and_the_model_unchanged(hold, words, scaled):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    convert = sct.scale_model
    if scaled:
        sct.scale_model(model, WIDE)
        convert = sct.unscale_model
    kinds = [type(p) for p in model.parameters()]
    holder = hold(model[1])
    if hold is pending and scaled:
        holder = model[1].weight * 2 * model[1].weight
    with pytest.raises(ModelError, match=f"1.weight.*{words}"):
        convert(model)
    assert [type(p) for p in model.parameters()] == kinds
    # An unreachable cycle, such as a compilation leaves behind, holds nothing.
    cycle = [holder]
    cycle.append(cycle)
    del holder, cycle
    convert(model)
    assert [type(p) for p in model.parameters()] != kinds


def test__a_held_parameter__takes_another_recipe():
    model = sct.scale_model(mlp())
    watcher, y = weakref.ref(model[0].weight), model(batch()[0])
    sct.scale_model(model, "current")
    y.sum().backward()
    assert watcher().grad is not None


@pytest.mark.parametrize("convert", [sct.scale_model, lambda m: sct.unscale_model(m)])
def test__the_graph_of_before__says_so_and_loses_no_gradient_in_silence(convert):
    model = nn.Linear(4, 4)
    if convert is not sct.scale_model:
        sct.scale_model(model)
    loss = model(torch.ones(2, 4)).sum()
    convert(model)
    with pytest.raises(ModelError, match=r"recorded before (weight|bias) was converted"):
        loss.backward()
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None


def _averaged(m, other):
    """Federated averaging: a state dict of means of copies."""
    states = [copy.deepcopy(m).state_dict() for _ in range(3)]
    m.load_state_dict({n: sum(s[n] for s in states) / 3 for n in states[0]})


def _looked_ahead(m, slow):
    """Lookahead: slow weights go half of the way to the parameters, which are then set to them."""
    for p, s in zip(m.parameters(), slow.parameters(), strict=True):
        s.data += (p.data - s.data) * 0.5
        p.data.copy_(s.data)


def _overshot(m, old):
    """Nesterov's momentum by hand, without a gradient."""
    with torch.no_grad():
        for p, o in zip(m.parameters(), old.parameters(), strict=True):
            p.copy_(p + 0.8 * (p - o))


@pytest.mark.parametrize("step", [_averaged, _looked_ahead, _overshot])
def test__a_mean_of_copies__leaves_the_scale_near_the_elements(step):
    """The copies depend on each other, and the rule of a sum takes them for independent. A scale
    was off by 2^50 after 60 rounds, and a cast of the parameter then gave zeros."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(16, 16)
    models = [sct.scale_model(copy.deepcopy(plain)) for _ in range(2)]
    for _ in range(60):
        step(*models)
    for p, want in zip(models[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().dequantize(), want.detach(), rtol=1e-5, atol=1e-6)
        rms = float(p.detach().dequantize().square().mean().sqrt())
        assert 2.0**-4 < rms / float(p.scale) < 2.0**4
        assert 2.0**-4 < rms / float(p.rms) < 2.0**4


# --- parameters that no optimizer of torch steps ---------------------------------------------


def classified(recipe, std):
    """The loss of a classifier after 100 steps of SGD that are written by hand."""
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    y = (x @ torch.randn(16, 4)).argmax(-1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    nn.init.normal_(model[2].weight, std=std)
    if recipe is not None:
        sct.scale_model(model, recipe)
    for i in range(100):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(g * (0.5 * min(1, i / 50) + 1e-6))
    return float(loss)


@pytest.mark.parametrize("std", [0.0, 1e-5, 1e-3])
def test__steps_by_hand__train_weights_that_start_small(std):
    """fastai's optimizers are no optimizers of torch either, so nothing rebalances after them."""
    plain, scaled = classified(None, std), classified("unit", std)
    assert plain < 0.2
    assert scaled < plain + 0.05


@pytest.mark.parametrize("first", [1e-4, 1e-3, 0.5])
def test__an_average_that_starts_with_zeros__has_a_scale_that_fits(first):
    layer = sct.scale_model(nn.Linear(64, 64, bias=False))
    x, w = gaussian(8, 64), layer.weight
    want = x @ w.detach().dequantize().t()
    with torch.no_grad():
        given = w.detach().clone()
        w.zero_()
        w.add_(given * first)
        w.add_(given * (1 - first))
    assert_in_range([w], 0.25, 4)
    assert (layer(x).dequantize() - want).norm() < 0.06 * want.norm()


@pytest.mark.parametrize("update", ["lerp_", "mul_ and add_"])
def test__a_running_average__keeps_its_scale_and_knows_its_rms(update):
    """Its terms are the same weight again and again, so their RMS is no root of squares."""
    layer = sct.scale_model(nn.Linear(32, 32, bias=False))
    average = copy.deepcopy(layer).requires_grad_(False)
    scale = float(average.weight.scale)
    for _ in range(2000):
        if update == "lerp_":
            average.weight.lerp_(layer.weight.detach(), 0.01)
        else:
            average.weight.mul_(0.99).add_(layer.weight.detach(), alpha=0.01)
    assert float(average.weight.scale) == scale
    assert 0.2 < float(average.weight.rms) / float(layer.weight.rms) <= 1
    assert_holds(average.weight, layer.weight.detach().dequantize(), 2.0**-20)


def test__an_average_that_is_assigned__has_a_scale_that_fits():
    """MoCo's update. Terms are copies of one weight, so the sum is larger than is expected."""
    torch.manual_seed(0)
    query = sct.scale_model(nn.Linear(32, 8))
    key = copy.deepcopy(query)
    x = torch.randn(16, 32)
    for _ in range(400):
        for q, k in zip(query.parameters(), key.parameters(), strict=True):
            k.data = k.data * 0.98 + q.data * 0.02
    for q, k in zip(query.parameters(), key.parameters(), strict=True):
        torch.testing.assert_close(k.detach().dequantize(), q.detach().dequantize())
        assert 1 / 4 <= float(k.detach().dequantize().square().mean().sqrt() / k.scale) <= 4
    torch.testing.assert_close(key(x).dequantize(), query(x).dequantize(), rtol=0.1, atol=0.1)


def test__a_part_of_a_flat_buffer__that_is_assigned__stays_one():
    flat = sct.scaled(torch.ones(8), "fp32")
    total = flat * 50 - flat * 49  # expects an RMS of 70
    p = nn.Parameter(sct.scaled(torch.zeros(4), "fp32"))
    p.data = total[:4]
    assert p.qdata.untyped_storage().data_ptr() == total.qdata.untyped_storage().data_ptr()
    p.data = total
    assert p.scale == 1.0
    assert torch.equal(p.detach().dequantize(), torch.ones(8))
