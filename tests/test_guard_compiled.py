"""The guard of `Unit` works in compiled code: shifts are data of a graph, corrected between its
runs."""

import copy
import io
import warnings

import pytest
import torch
from correlated import Block, error, first_step, one_sign, passed, scaled, smoothed
from torch import nn
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import SaturationWarning
from scaledtensor.ops.products import sites
from scaledtensor.recipes import Unit


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    """Each warning is given once per process, so its record is emptied here."""
    monkeypatch.setattr(sites, "_told", set())


@pytest.fixture
def nothing_compiled():
    """Dynamo allows a function eight graphs, and other tests compile these modules too."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test__compiled_training__tells_what_saturates_and_is_corrected_within_three_steps(backend):
    model, x = one_sign()
    want, gradient = passed(model, x)
    m = scaled(model, Unit(gradient="e4m3fn"))
    compiled = torch.compile(m, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)

    def step():
        y, g = passed(compiled, x)
        optimizer.step()
        return error(y, want), error(g, gradient)

    with pytest.warns(SaturationWarning, match=r"of the inputs of \d+\.weight are .* next step on"):
        assert min(step()) > 0.9
    with warnings.catch_warnings(), torch.compiler.set_stance("fail_on_recompile"):
        warnings.simplefilter("error")  # This happens once per process.
        for _ in range(3):
            step()
        of_output, of_gradient = step()
    assert of_output < 0.05
    assert of_gradient < 0.15
    assert all(p.recipe.shifts[0] > 0 for p in [*m.parameters()][3:])
    assert any(p.recipe.shifts[1] > 0 for p in m.parameters())


@pytest.mark.usefixtures("nothing_compiled")
def test__compiled_code__finds_about_the_shifts_of_eager_code():
    found = []
    for compiles in (False, True):
        model, x = one_sign()
        m = scaled(model)
        run = torch.compile(m, backend="aot_eager") if compiles else m
        optimizer = torch.optim.SGD(m.parameters(), 0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaturationWarning)
            for _ in range(4):
                passed(run, x)
                optimizer.step()
        found.append([p.recipe.shifts for p in m.parameters()])
    for eager, compiled in zip(*found, strict=True):
        assert all(abs(a - b) <= 1 for a, b in zip(eager, compiled, strict=True))


@pytest.mark.usefixtures("nothing_compiled")
def test__compiled_code_without_an_optimizer__is_corrected_when_it_runs_again():
    model, x = one_sign()
    m = scaled(model)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with pytest.warns(SaturationWarning, match="from the next step on"):
        passed(compiled, x)
    for _ in range(3):
        y, _ = passed(compiled, x)
    assert error(y, model(x)) < 0.08


@pytest.mark.usefixtures("nothing_compiled")
def test__a_site_that_another_one_hid__is_corrected_in_the_next_step():
    """Gradients that are zero because of a saturated input say nothing about their own casts."""
    model, x = one_sign(6, 128)
    want = [passed(model, x)[1], *(p.grad for p in model.parameters())]
    m = scaled(model, Unit(gradient="e4m3fn"))
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        for _ in range(6):
            _, first = passed(compiled, x)
            optimizer.step()
    for g, w in zip([first, *(p.grad for p in m.parameters())], want, strict=True):
        assert error(g, w) < 0.15


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),
        lambda w: w.detach().t(),
        lambda w: w.view(8, 8).mT,
        lambda w: w.chunk(2)[0].t(),
    ],
    ids=["t", "detach", "view", "chunk"],
)
def test__a_view_of_a_weight__has_its_shifts_in_compiled_code(view):
    torch.manual_seed(0)
    m = sct.scale_model(nn.Linear(8, 8, bias=False), Unit(guard=False, shifts=(8, 0)))
    x = torch.randn(4, 8)

    def run(x):
        return x @ view(m.weight)

    y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y.qdata, run(x).qdata)
    assert torch.equal(y.scale, run(x).scale)


class Left(nn.Module):
    """Linear layers with the weight as the first operand."""

    def __init__(self, product):
        super().__init__()
        model, _ = one_sign(6, 128)
        self.layers = nn.ModuleList(model[::2])
        self.product = product

    def forward(self, x):
        for layer in self.layers:
            x = self.product(layer.weight, x).relu()
        return x


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    "product",
    [torch.matmul, lambda w, x: torch.einsum("oi,ib->ob", w, x), lambda w, x: torch.mm(w, x)],
    ids=["matmul", "einsum", "mm"],
)
def test__a_weight_that_stands_first__is_corrected(compiles, product):
    model = Left(product)
    x = torch.randn(128, 64)
    m = scaled(model)
    run = torch.compile(m, backend="aot_eager", fullgraph=True) if compiles else m
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        for _ in range(4):
            y, _ = passed(run, x)
            optimizer.step()
    assert error(y, model(x)) < 0.08


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("what", ["an evaluation", "empty batches"])
def test__what_trains_nothing__does_not_use_up_the_first_look(compiles, what):
    model, x = one_sign()
    m = scaled(model)
    run = torch.compile(m, backend="aot_eager") if compiles else m
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        if what == "an evaluation":
            with torch.no_grad():
                for _ in range(3):
                    run(x)
        else:
            optimizer = torch.optim.SGD(m.parameters(), 0.0)
            for _ in range(2):
                run(x[:0]).sum().backward()
                optimizer.step()
    if compiles:
        first_step(run, x)
    assert error(first_step(run, x), model(x)) < 0.08


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("reentrant", [True, False])
def test__compiled_blocks_that_are_recomputed__are_corrected(reentrant):
    model, x = one_sign()
    m = scaled(nn.Sequential(*(Block(layer) for layer in model)))
    for block in m:
        block.compile(backend="aot_eager")

    def run(x):
        x = x.clone().requires_grad_()
        return checkpoint(
            m[4:], checkpoint(m[:4], x, use_reentrant=reentrant), use_reentrant=reentrant
        )

    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        for _ in range(5):
            y = run(x)
            y.square().mean().backward()
            optimizer.step()
    assert error(y, model(x)) < 0.08


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("k", [-40, 18])
def test__a_factor_of_the_loss__changes_no_bit_and_no_shift_of_compiled_code(k):
    def corrected(multiplier):
        model, x = one_sign(4, 64)
        m = scaled(model, Unit(gradient="e4m3fn"))
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.AdamW(m.parameters(), 1e-4, eps=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaturationWarning)
            for _ in range(5):
                optimizer.zero_grad()
                (compiled(x).dequantize().square().mean() * multiplier).backward()
                optimizer.step()
        return [*m.parameters()]

    for p, q in zip(corrected(1.0), corrected(2.0**k), strict=True):
        assert p.recipe == q.recipe
        assert torch.equal(p.qdata, q.qdata)
        assert torch.equal(p.scale, q.scale)


@pytest.mark.usefixtures("nothing_compiled")
def test__layers_with_other_shifts__share_their_compiled_code():
    """Dynamo compiles a function for at most eight reasons."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(10)]
    x = torch.randn(4, 8, requires_grad=True)
    for i, layer in enumerate(layers):
        scaled_layer = sct.scale_model(layer, Unit(guard=False, shifts=(i, -i), gradient="e4m3fn"))
        assert scaled_layer is layer

    def run(layer, x):
        return layer(x)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    compiled(layers[0], x)
    for layer in layers:
        with torch.compiler.set_stance("fail_on_recompile"):
            y = compiled(layer, x)
        made = torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y))
        z = layer(x)
        wanted = torch.autograd.grad(z, [x, layer.weight], torch.ones_like(z))
        for a, b in zip((y, made[1]), (z, wanted[1]), strict=True):
            assert torch.equal(a.qdata, b.qdata)
            assert torch.equal(a.scale, b.scale)
        assert torch.equal(made[0], wanted[0])


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "load_state_dict"])
def test__shifts__reach_compiled_code_as_a_model_comes(way):
    model, x = one_sign(4, 64)
    m = scaled(model)
    sct.calibrate(m, [x])
    if way == "deepcopy":
        other = copy.deepcopy(m)
    elif way == "pickle":
        held = io.BytesIO()
        torch.save(m, held)
        held.seek(0)
        other = torch.load(held, weights_only=False)
    else:
        other = scaled(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        compiled(x)
        if way == "load_state_dict":  # The shift goes into existing compiled code.
            other.load_state_dict(m.state_dict())
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x).qdata, m(x).qdata)


@pytest.mark.usefixtures("nothing_compiled")
def test__compiled_inference__is_warned_of_and_left_as_it_is():
    model, x = one_sign()
    m = scaled(model)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        with pytest.warns(SaturationWarning, match=r"Outside of training nothing .*calibrate"):
            compiled(x)
        compiled(x)
    assert all(p.recipe.shifts == (0, 0) for p in m.parameters())


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("by_block", [False, True])
def test__a_compiled_model__is_calibrated_and_follows(by_block):
    model, x = one_sign()
    m = scaled(model)
    if by_block:
        run = m = scaled(nn.Sequential(*(Block(layer) for layer in model)))
        for block in m:
            block.compile(backend="aot_eager", fullgraph=True)
    else:
        run = torch.compile(m, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        run(x)
    found = sct.calibrate(run, [x])
    inner = "layer." * by_block
    assert all(f"{name}.{inner}weight" in found for name in ("6", "8", "10"))
    with warnings.catch_warnings(), torch.compiler.set_stance("fail_on_recompile"):
        warnings.simplefilter("error")
        with torch.no_grad():
            assert error(run(x), model(x)) < 0.08


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("shape", [(0, 8), (3, 8), (2, 0, 8), (8,)])
def test__compiled_products__of_any_shape__are_those_of_eager_code(shape):
    m = scaled(nn.Linear(8, 8, bias=False), Unit())

    def run(x):
        return m(x), torch.einsum("...i->...i", x), x @ m.weight.t()

    x = sct.scaled(torch.ones(shape), "bf16", recipe=Unit())
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(x), run(x), strict=True):
        assert torch.equal(a.qdata, b.qdata)
        assert torch.equal(a.scale, b.scale)


@pytest.mark.usefixtures("nothing_compiled")
def test__compiled_code__counts_when_the_parameters_are_rebalanced():
    """The products fit at first and not in a later step. The step that looks reports it."""
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64, bias=False), torch.randn(128, 64)
    m = scaled(linear, Unit(rebalance=3))
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(m.parameters(), 1e-3)
    fits = sct.scaled(x, "fp32", recipe=Unit())
    tail = torch.where(x.abs() > 2, 4096.0, 1.0) * x  # This is 5% beyond, which no rule expects.
    grown = fits.like(tail / fits.scale, fits.scale, fits.rms)
    told = []
    for step in range(8):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            compiled(grown if step > 3 else fits).dequantize().sum().backward()
        told += [step] * any(w.category is SaturationWarning for w in found)
        optimizer.step()
    assert told == [5]


class Heat(nn.Module):
    """A network before rounds of heat, whose gradient is far smaller than its rules say."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 4))

    def forward(self, x):
        return smoothed(self.net(x), 50)


@pytest.mark.usefixtures("nothing_compiled")
def test__a_gradient_that_vanishes_whole__is_found_within_three_steps():
    torch.manual_seed(0)
    model, x = Heat(), torch.randn(16, 8)
    model(x).square().mean().backward()
    want = model.net[0].weight.grad.clone()
    model.zero_grad()
    sct.scale_model(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    errors = []
    for _ in range(4):
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
        errors.append(error(model.net[0].weight.grad.dequantize(), want))
    assert errors[0] == 1
    assert max(errors[2:]) < 0.1


def started_at_zero():
    """A network whose last weight is zero, so that the first one has no gradient, also compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
    nn.init.zeros_(model[2].weight)
    x = torch.randn(64, 16)
    sct.scale_model(model)
    return model, torch.compile(model, backend="aot_eager", fullgraph=True), x


@pytest.mark.usefixtures("nothing_compiled")
def test__a_branch_that_starts_at_zero__keeps_its_shifts():
    model, compiled, x = started_at_zero()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaturationWarning)
        for _ in range(4):
            optimizer.zero_grad()
            (compiled(x) - x).square().sum().backward()
            optimizer.step()
            assert model[0].weight.recipe.shifts[1] > -8
    assert model[0].weight.grad.dequantize().norm() > 0


@pytest.mark.usefixtures("nothing_compiled")
def test__a_gradient_that_is_zero__is_sought_a_few_times():
    model, compiled, x = started_at_zero()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    shifts = []
    for _ in range(9):
        compiled(x).square().sum().backward()
        optimizer.step()
        shifts.append(model[0].weight.recipe.shifts[1])
    assert sites._LOWEST <= min(shifts) < sites._LOWEST + 16
    assert shifts[-1] == 0
