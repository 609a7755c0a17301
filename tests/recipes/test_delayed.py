"""Delayed scaling: the arithmetic of a history, its growth, and the operations that it survives."""

import copy
import dataclasses
import gc
import io
import pickle
import threading
import warnings

import pytest
import torch
from assertions import dequantized
from tensors import gaussian, saved_and_loaded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import ModelError, RecipeWarning
from scaledtensor.models import delayed
from scaledtensor.recipes import Current, Delayed, Unit

INPUT, WEIGHT, GRADIENT = range(3)


def network(recipe: Delayed = Delayed(), seed: int = 0) -> nn.Sequential:  # noqa: B008 - frozen
    torch.manual_seed(seed)
    return sct.scale_model(
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False)), recipe
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[float], run=None):
    """Return the losses of steps on inputs of these sizes."""
    rng, losses = torch.Generator().manual_seed(7), []
    for size in sizes:
        x = torch.randn(64, 16, generator=rng) * size
        loss = (run or model)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def casts(monkeypatch):
    """Record the row, the amax of the operand, and the largest value of its scale for each cast."""
    seen: list[tuple[int, float, float]] = []
    op = sct.tensors.verbs.delayed_scale
    real = sct.ops.RULES[op]

    def spy(x, history, cast, row, record):
        scale = real.function(x, history, cast, row, record)
        fmt = sct.formats.get("e5m2" if row == GRADIENT else "e4m3fn")
        seen.append((row, float(dequantized(x).abs().max()), float(scale) * fmt.max))
        return scale

    monkeypatch.setitem(sct.ops.RULES, op, dataclasses.replace(real, call=spy))
    sct.ops.registry._handlers.clear()
    yield seen
    sct.ops.registry._handlers.clear()


@pytest.mark.parametrize("choose", ["max", "recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test__the_scale__is_that_of_earlier_steps(casts, choose, margin):
    recipe = Delayed(history=3, margin=margin, choose=choose, guard=False)
    model = sct.scale_model(nn.Sequential(nn.Linear(16, 32)), recipe)
    sizes = [1.0, 8.0, 2.0, 0.5, 0.5, 0.5, 0.5, 3.0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        steps(model, adam(model), sizes)
    for row in (INPUT, WEIGHT, GRADIENT):
        amaxes = [amax for r, amax, _ in casts if r == row]
        limits = [limit for r, _, limit in casts if r == row]
        assert len(amaxes) == len(sizes)
        for i, limit in enumerate(limits):
            past = amaxes[max(0, i - 3) : i] or amaxes[:1]
            chosen = max(past) if choose == "max" else past[-1]
            assert limit == pytest.approx(chosen * 2.0**margin, rel=1e-6)
    inputs = [amax for r, amax, _ in casts if r == INPUT]
    assert max(inputs) > 8 * min(inputs)  # Otherwise the test sees nothing.


GROWTH = [10.0**i for i in range(6)]


def relative_errors(recipe) -> list[float]:
    torch.manual_seed(0)
    model = sct.scale_model(nn.Linear(16, 32, bias=False), recipe)
    plain = dequantized(model.weight.detach()).float()
    errors, rng = [], torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for size in GROWTH:
        x = torch.randn(64, 16, generator=rng) * size
        y = model(x)
        want = x @ plain.t()
        errors.append(float((dequantized(y) - want).norm() / want.norm()))
        y.square().mean().backward()
        optimizer.step()
    return errors


def test__growth_of_ten_times_a_step__loses_nothing_under_guard():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecipeWarning)
        guarded = relative_errors(Delayed())
    current = relative_errors(Current(gradient="e5m2"))
    assert max(guarded) < 0.06
    assert guarded == pytest.approx(current, rel=0.02)


def test__growth_without_guard__saturates_and_says_so_in_every_step():
    with pytest.warns(RecipeWarning) as told:
        errors = relative_errors(Delayed(guard=False))
    assert errors[0] < 0.06
    assert min(errors[1:]) > 0.3
    found = [str(w.message) for w in told if w.category is RecipeWarning]
    assert len(found) == len(GROWTH) - 1
    assert "saturated 2 casts in this step (2 in all) at weight of Linear(" in found[0]


def test__growth__is_counted_either_way():
    model = network()
    steps(model, adam(model), GROWTH)
    found = delayed.exceeded(model)
    assert set(found) == {"0.weight", "2.weight"}
    assert found["0.weight"]["input"] == len(GROWTH) - 1
    assert found["0.weight"]["gradient"] == len(GROWTH) - 1
    steady = network()
    steps(steady, adam(steady), [1.0] * 4)
    assert delayed.exceeded(steady)["0.weight"]["input"] <= 2


@pytest.mark.parametrize("guard", [False, True])
def test__save_and_resume__is_bit_for_bit_the_uninterrupted_run(guard):
    sizes = [1.0, 3.0, 0.2, 5.0, 1.0, 0.1]
    recipe = Delayed(history=3, guard=guard)

    def fresh():
        model = network(recipe, seed=3)
        return model, adam(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        model, optimizer = fresh()
        rest = steps(model, optimizer, sizes)
        first, other = fresh()
        steps(first, other, sizes[:3])
        again = network(recipe, seed=4)
        optimizer = adam(again)
        states = saved_and_loaded([first.state_dict(), other.state_dict()])
        again.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        rng = torch.Generator().manual_seed(7)
        for _ in sizes[:3]:
            torch.randn(64, 16, generator=rng)
        resumed = []
        for size in sizes[3:]:
            x = torch.randn(64, 16, generator=rng) * size
            loss = again(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            resumed.append(float(loss.detach()))
    assert resumed == rest[3:]
    for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(dequantized(a), dequantized(b))
    assert model[0].weight_amax[:, 1:-1].count_nonzero() == 9


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test__compiled__keeps_the_same_history(backend):
    eager, model = network(), network()
    sizes = [1.0, 4.0, 0.5]
    want = steps(eager, adam(eager), sizes)
    torch._dynamo.reset()
    found = steps(model, adam(model), sizes, torch.compile(model, fullgraph=True, backend=backend))
    exact = backend == "aot_eager"
    assert found == (want if exact else pytest.approx(want, rel=0.05))
    for a, b in zip(eager.buffers(), model.buffers(), strict=True):
        assert a[:, 1:4].count_nonzero() == 9
        assert torch.equal(a, b) if exact else torch.allclose(a[:, 1:4], b[:, 1:4], rtol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test__checkpointed__records_a_step_once(reentrant):
    plain, model = network(), network()
    x = torch.randn(64, 16)
    for net, run in (
        (plain, plain),
        (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for size in (1.0, 5.0):
            input = (x * size).requires_grad_()
            run(input).square().mean().backward()
            optimizer.step()
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a[:, :-1], b[:, :-1])
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(dequantized(a.grad), dequantized(b.grad))


def test__without_gradients__nothing_is_recorded():
    model = network()
    steps(model, adam(model), [1.0])
    before = [b.clone() for b in model.buffers()]
    with torch.no_grad():
        model(torch.randn(4, 16) * 100)
    with torch.inference_mode():
        model(torch.randn(4, 16) * 100)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test__a_copy__has_a_history_of_its_own(again):
    model = network()
    steps(model, adam(model), [1.0])
    before = [b.clone() for b in model.buffers()]
    other = again(model)
    steps(other, adam(other), [5.0, 5.0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert all(b[:, 1:4].count_nonzero() == 9 for b in other.buffers())


def test__a_checkpoint_of_the_original__loads_and_histories_begin_anew():
    """Histories of other weights stay. Contents of memory after `to_empty` must not count."""
    model = network()
    steps(model, adam(model), [1.0])
    before = model[2].weight_amax.clone()
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    of_first = {k: v for k, v in plain.state_dict().items() if k.startswith("0.")}
    model.load_state_dict(of_first, strict=False)
    assert not model[0].weight_amax.any()
    assert torch.equal(model[2].weight_amax, before)
    assert torch.equal(dequantized(model[0].weight), plain[0].weight)


def near(model: nn.Module, plain: nn.Module) -> bool:
    x = gaussian(64, 16, seed=3)
    y, want = dequantized(model(x)), plain(x)
    return bool((y - want).norm() / want.norm() < 0.08)


def plain_network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = plain_network()
    return sct.scale_model(model, Delayed())


def emptied() -> nn.Module:
    """Return a model from the meta device, with buffers that hold anything."""
    model = on_meta().to_empty(device="cpu")
    for b in model.buffers():
        b.fill_(1e6)
    return model


def test__from_the_meta_device__no_history_is_what_memory_held():
    plain, model = plain_network(), emptied()
    model.load_state_dict(plain.state_dict())
    assert near(model, plain)
    model = emptied()
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.copy_(q)
    assert near(model, plain)
    assert model[0].weight_amax.max() < 100


def test__assigned_to_the_meta_device__histories_come_along():
    plain, model = plain_network(), on_meta()
    model.load_state_dict(plain.state_dict(), assign=True)  # These are plain parameters.
    sct.scale_model(model, Delayed())
    assert near(model, plain)
    assert not any(b.is_meta for b in model.buffers())


def test__exported__a_program_needs_no_model():
    model = network().eval()
    steps(model, adam(model), [1.0, 2.0])
    x = torch.randn(4, 16)
    want = dequantized(model(x))
    before = [b.clone() for b in model.buffers()]
    program = torch.export.export(model, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded, here = torch.export.load(file).module(), program.module()
    again = copy.deepcopy(here)
    assert torch.equal(dequantized(loaded(x)), want)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    del model, program
    gc.collect()
    for run in (here, again):
        assert torch.equal(dequantized(run(x)), want)


def test__half_precision__histories_stay_float32():
    model = network().half()
    x = torch.randn(64, 16).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x).float().square().sum() * 2.0**26).backward()
        optimizer.step()
    assert all(float(dequantized(p.grad).abs().max()) > 0 for p in model.parameters())
    assert model[0].weight_amax.dtype is torch.float32
    assert model[0].weight_amax.isfinite().all()
    assert model[0].weight_amax[GRADIENT, 1] > 65504


def test__a_weight_that_moves__has_a_history_where_it_is():
    model = network()
    steps(model, adam(model), [1.0])
    moved = nn.Linear(16, 32)
    moved.weight, moved.bias = model[0].weight, model[0].bias
    model[0] = moved
    sct.scale_model(model, Delayed())
    gc.collect()
    steps(model, adam(model), [1.0, 2.0])
    assert moved.weight_amax[:, 1:3].count_nonzero() == 6


def test__a_copy_that_failed__breaks_no_other_model():
    model = network()
    model[0].lock = threading.Lock()
    with pytest.raises(TypeError) as kept:
        copy.deepcopy(model)
    other = network()
    steps(other, adam(other), [1.0])
    assert other[0].weight_amax[:, 1].count_nonzero() == 3
    del kept


def test__frozen_weights__have_histories_too():
    torch.manual_seed(0)
    model = plain_network()
    model[0].weight.requires_grad_(False)
    sct.scale_model(model, Delayed())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
    for size in (10.0, 1.0):
        model(torch.ones(4, 16) * size).square().mean().backward()
        optimizer.step()
    assert model[0].weight_amax[INPUT, :3].tolist() == pytest.approx([0.0, 1.0, 10.0], rel=0.01)


def test__a_buffer_of_the_user__is_no_history():
    plain = plain_network()
    plain[0].register_buffer("weight_amax", torch.zeros(2))
    with pytest.raises(ModelError, match=r"history of 0\.weight.*0\.weight_amax.*rename"):
        sct.scale_model(plain, Delayed())
    assert type(plain[0].weight) is nn.Parameter
    sct.scale_model(plain, Unit())
    assert delayed.exceeded(plain) == {}


def test__a_parametrized_weight__leaves_no_history_behind():
    model = network()
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    sct.unscale_model(model)
    assert not [name for name in model.state_dict() if name.endswith("_amax")]


def test__calibrated__what_a_step_saw_before_counts_no_more():
    model = network()
    model(torch.ones(4, 16) * 1000)
    sct.calibrate(model, [torch.ones(4, 16)])
    assert float(model[0].weight_amax[INPUT, 1]) == pytest.approx(1.0, rel=0.01)


def test__unscaled__nothing_of_it_is_left():
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    model = network()
    steps(model, adam(model), [1.0])
    sct.unscale_model(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert str(model) == str(plain)
    assert "forward" not in model[0].__dict__
    assert not model[0]._load_state_dict_pre_hooks
    sct.scale_model(model, Unit())
    model(torch.randn(4, 16)).square().mean().backward()


class ByAddmm(nn.Module):
    """A linear layer in GPT-2's spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class ByMatmul(ByAddmm):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (ByAddmm, (64, 16)),
        (ByMatmul, (64, 16)),
        (lambda: nn.Conv1d(4, 8, 3, padding=1), (5, 4, 16)),
        (lambda: nn.Conv2d(4, 8, 3, bias=False), (5, 4, 6, 6)),
        (lambda: nn.ConvTranspose1d(4, 8, 3), (5, 4, 16)),
    ],
)
def test__every_spelling_with_a_weight__has_a_history(make, shape):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plain = copy.deepcopy(model)
    sct.scale_model(model, Delayed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for size in (4.0, 1.0):
        model.zero_grad()
        plain.zero_grad()
        y, want = model(x * size), plain(x * size)
        y.square().mean().backward()
        want.square().mean().backward()
        optimizer.step()
    assert (dequantized(y) - want).norm() / want.norm() < 0.06
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (dequantized(p.grad) - q.grad).norm() / q.grad.norm() < 0.12
    assert model.weight_amax[:, 1:3].count_nonzero() == 6
    assert model.weight_amax[INPUT, 2] == pytest.approx(4 * float(x.abs().max()), rel=0.01)


def test__products_without_a_parameter__are_scaled_by_their_own_amax():
    a, b = (sct.scaled(torch.randn(2, 8, 8) * s, recipe=Delayed()) for s in (1.0, 300.0))
    found, want = a @ b, dequantized(a) @ dequantized(b)
    assert (dequantized(found) - want).norm() / want.norm() < 0.06


def test__advance__ends_a_step_without_an_optimizer():
    model = network()
    model(torch.randn(4, 16)).square().mean().backward()
    assert model[0].weight_amax[INPUT, 1] == 0
    delayed.advance(model)
    assert model[0].weight_amax[INPUT, 1] > 0
    assert model[0].weight_amax[INPUT, 0] == 0


def test__the_size_of_the_loss__changes_no_code():
    found = []
    for factor in (1.0, 2.0**-18):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for size in (1.0, 3.0):
            model.zero_grad()
            (model(torch.ones(4, 16) * size).square().mean() * factor).backward()
            optimizer.step()
        found.append(model[0].weight.grad)
    assert torch.equal(found[0].qdata, found[1].qdata)
    assert torch.equal(found[0].scale * 2.0**-18, found[1].scale)


def test__of_a_unit_scaled_model__products_have_histories():
    model = sct.unit_scale(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))
    sct.scale_model(model, Delayed())
    steps(model, adam(model), [1.0, 2.0])
    for module in (model[0], model[2]):
        assert module.weight_amax[:, 1:3].count_nonzero() == 6


class Outside(nn.Module):
    """Other modules multiply its weights, through views and under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.first.weight
        self.last = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.linear(x, self.first.weight)) @ self.last.weight.t()


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, lambda m: m.to(torch.bfloat16)])
@pytest.mark.parametrize("compiled", [False, True])
def test__a_weight_has_one_history__wherever_it_is_multiplied(again, compiled):
    torch.manual_seed(0)
    model = again(sct.scale_model(Outside(), Delayed()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dtype = model.last.weight.dtype
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for size in (1.0, 4.0):
        x = torch.ones(4, 16, dtype=dtype) * size
        run(x).square().mean().backward()
        optimizer.step()
    assert sorted(n for n, _ in model.named_buffers()) == ["first.weight_amax", "last.weight_amax"]
    for module in (model.first, model.last):
        assert module.weight_amax[:, 1:3].count_nonzero() == 6
    inner = F.linear(x, model.first.weight)
    for module, row, values in (
        (model.first, INPUT, torch.cat([dequantized(inner), x])),
        (model.last, INPUT, dequantized(model.again(inner))),
        (model.last, WEIGHT, dequantized(model.last.weight)),
    ):
        amax = float(values.abs().max())
        assert float(module.weight_amax[row, 1]) == pytest.approx(amax, rel=0.1)


def test__accumulated_steps__may_run_backward_in_any_order():
    """The next graph writes to a history that a graph has saved."""
    torch._dynamo.reset()
    model = network()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    first, second = (run(torch.ones(4, 16) * s).square().mean() for s in (1.0, 2.0))
    second.backward()
    first.backward()
    delayed.advance(model)
    assert model[0].weight_amax[:, 1].count_nonzero() == 3


@pytest.mark.parametrize("compiled", [False, True])
def test__of_gpt2__every_weight_has_a_history(compiled):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=32,
        vocab_size=65,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 65, (2, 16))
    want = model(input_ids=tokens).logits.detach()
    sct.scale_model(model, Delayed())
    logits = model(input_ids=tokens).logits
    assert (dequantized(logits) - want).norm() / want.norm() < 0.1

    def loss() -> Tensor:
        found = model(input_ids=tokens).logits
        return F.cross_entropy(found.flatten(0, 1), tokens.flatten())

    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    run().backward()
    delayed.advance(model)
    found = {n: b for n, b in model.named_buffers() if n.endswith("weight_amax")}
    assert len(found) == 4 + 1
    used = {n for n, b in found.items() if bool((b[:, 1] > 0).all())}
    assert used == set(found), set(found) - used


@pytest.mark.parametrize("make", [lambda: nn.LSTM(8, 16), lambda: nn.MultiheadAttention(8, 2)])
def test__modules_that_call_no_linear__run(make):
    model = sct.scale_model(make(), Delayed())
    x = torch.randn(5, 3, 8)
    y = model(x)[0] if isinstance(model, nn.LSTM) else model(x, x, x)[0]
    y.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    for b in model.buffers():
        assert b[:, 0].isfinite().all()


def test__scaled_part_by_part__each_keeps_its_history():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    sct.scale_model(model, Delayed(history=4), lambda module, fqn: fqn == "0")
    steps(model, adam(model), [1.0])
    before = model[0].weight_amax.clone()
    sct.scale_model(model, Delayed(history=8), lambda module, fqn: fqn == "2")
    assert torch.equal(model[0].weight_amax, before)
    assert model[2].weight_amax.shape == (3, 10)
    steps(model, adam(model), [1.0])
    assert model[0].weight_amax[INPUT, 2] == before[INPUT, 1]


def test__in_torch_func__products_are_not_cast_and_nothing_is_recorded():
    """As under every recipe, the transforms' wrappers hide scaled tensors."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)

    def gradients(recipe):
        torch.manual_seed(1)
        model = sct.scale_model(nn.Linear(16, 4), recipe)
        params = dict(model.named_parameters())

        def loss(params):
            return torch.func.functional_call(model, params, (x,)).square().mean()

        return model, torch.func.grad(loss)(params)

    (model, found), (_, wanted) = gradients(Delayed()), gradients(Unit())
    for name, g in found.items():
        assert torch.equal(dequantized(g), dequantized(wanted[name]))
    assert not model.weight_amax.any()


@pytest.mark.parametrize("compiled", [False, True])
def test__calibrated__inference_has_static_scales_of_the_data(compiled):
    torch.manual_seed(0)
    linear = nn.Linear(16, 32, bias=False)
    model = sct.scale_model(nn.Sequential(linear, nn.BatchNorm1d(32)), Delayed(guard=False))
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    batches = [torch.randn(8, 16) * size for size in (1.0, 6.0, 2.0)]
    averages = model[1].running_mean.clone()
    assert sct.calibrate(run, batches) == {}
    assert torch.equal(model[1].running_mean, averages)
    assert torch.equal(model[1].num_batches_tracked, torch.tensor(0))
    largest = float(torch.stack(batches).abs().max())
    kept = linear.weight_amax.clone()
    assert float(kept[INPUT, 1]) == pytest.approx(largest, rel=0.01)
    with torch.no_grad():
        run.eval()
        small, large = (torch.full((1, 16), n * largest) for n in (0.5, 8.0))
        want = [dequantized(linear.weight.detach()).sum(1) * n for n in (0.5 * largest, largest)]
        for x, sums in zip((small, large), want, strict=True):
            y = dequantized(run(x))[0] * (1 + model[1].eps) ** 0.5
            assert (y - sums).norm() / sums.norm() < 0.06  # The large one saturates at the amax.
    assert torch.equal(linear.weight_amax, kept)


def test__calibrated_by_a_loss__the_first_step_has_scales_of_gradients():
    model = network()
    x = torch.randn(64, 16) * 3
    sct.calibrate(model, [x], loss=lambda m, x: m(x).square().mean())
    assert model[0].weight_amax[:, 1].count_nonzero() == 3
    assert all(p.grad is None for p in model.parameters())


def test__a_calibration_that_fails__leaves_the_history():
    model = network()
    steps(model, adam(model), [1.0])
    before = [b.clone() for b in model.buffers()]

    def fails(model, x):
        model(x)
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        sct.calibrate(model, [torch.randn(4, 16) * 100], call=fails)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
