"""Optimizers keep their states in few bits: their steps, the memory, and the saved files."""

import copy
import io
import math
import pickle

import pytest
import torch
from assertions import assert_holds, assert_shifted, dequantized
from tensors import gaussian
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.errors import DTypeError, FormatError, ShapeError, UnsupportedError
from scaledtensor.optim import buckets, kernel, step
from scaledtensor.tensors.expanded import ExpandedTensor

FORMATS = ("bf16", "fp16", "e4m3fn", "e5m2", "int8")
#: Distance of a step from torch's, relative to its length, after four steps of Gaussian gradients.
FAR = {"bf16": 2e-3, "fp16": 3e-4, "e4m3fn": 0.02, "e5m2": 0.03, "int8": 0.02}
OPTIMIZERS = {
    "sgd": (sct.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (sct.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (sct.optim.Adam, torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (sct.optim.AdamW, torch.optim.AdamW, {}),
    "muon": (sct.optim.Muon, torch.optim.Muon, {}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def every_way(*formats: str) -> pytest.MarkDecorator:
    """Run eager and compiled. Only E4M3 compiles by default, since a compilation takes ten
    seconds."""
    ways = [pytest.param(fmt, False, id=f"{fmt}-eager") for fmt in formats]
    for fmt in formats:
        marks = () if fmt == "e4m3fn" else pytest.mark.slow
        ways.append(pytest.param(fmt, True, marks=marks, id=f"{fmt}-compiled"))
    return pytest.mark.parametrize(("fmt", "compiled"), ways)


every_kind = pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])


def matrices(scaled: bool = False) -> nn.Module:
    """Return a model with 24 x 24 matrices, which are no whole number of groups."""
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
    return sct.scale_model(made, "unit") if scaled else made


def give_gradients(model: nn.Module, seed: int = 0, size: float = 2.0**-6) -> None:
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        g = torch.randn(p.shape, generator=rng) * size
        p.grad = sct.scaled(g) if isinstance(p, sct.ScaledTensor) else g.to(p.dtype)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range, **more: float) -> None:
    for seed in seeds:
        give_gradients(model, seed, **more)
        optimizer.step()


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]


def values(model: nn.Module) -> list[Tensor]:
    return [dequantized(p).clone() for p in model.parameters()]


def assert_same_bits(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Two optimizers have the same bits in every part of every state."""
    assert len(momenta(a)) == len(momenta(b)) > 0
    for x, y in zip(momenta(a), momenta(b), strict=True):
        assert type(x) is type(y)
        for name in getattr(x, "INNER", ()):
            if name != "rms":
                assert torch.equal(
                    *(getattr(t, name).view(torch.uint8) for t in (x, y))
                    if getattr(x, name).dtype.itemsize == 1
                    else (getattr(x, name), getattr(y, name))
                )
        if not isinstance(x, sct.ScaledTensor):
            assert torch.equal(x, y)


@every_kind
@pytest.mark.parametrize("fmt", FORMATS)
@every_optimizer
def test__steps__are_torchs_within_the_digits_of_the_states(name, fmt, scaled):
    ours, theirs, options = OPTIMIZERS[name]
    if fmt not in ("e4m3fn", "bf16") and name != "adamw":
        return
    model, wanted = matrices(scaled), matrices(scaled)
    start = values(model)
    low = ours(model.parameters(), 1e-2, weight_decay=0.1, state_format=fmt, **options)
    exact = theirs(wanted.parameters(), 1e-2, weight_decay=0.1, **options)
    for m, optimizer in ((model, low), (wanted, exact)):
        steps(m, optimizer, range(4))
    for got, want, before in zip(values(model), values(wanted), start, strict=True):
        far = (got - want).norm() / (want - before).norm()
        # Muon multiplies in bfloat16.
        assert 0 < float(far) < max(FAR[fmt], 0.03 if name == "muon" else 0)
    assert all(isinstance(x, ExpandedTensor) and x.format.name == fmt for x in momenta(low))


@every_kind
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "muon"])
def test__a_step__is_torchs_on_the_values_of_the_states(name, scaled):
    """Both take one step from the same states, so only the rounding of states differs."""
    ours, theirs, options = OPTIMIZERS[name]
    model = matrices(scaled)
    low = ours(model.parameters(), 1e-2, weight_decay=0.1, state_format="e4m3fn", **options)
    steps(model, low, range(3))
    wanted = copy.deepcopy(model)
    exact = theirs(wanted.parameters(), 1e-2, weight_decay=0.1, **options)
    exact.load_state_dict(low.plain_state_dict())
    for m, optimizer in ((model, low), (wanted, exact)):
        steps(m, optimizer, range(3, 4))
    for a, b in zip(values(model), values(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-18, atol=2.0**-24)


@every_optimizer
def test__in_fp32__nothing_is_different(name):
    ours, theirs, options = OPTIMIZERS[name]
    models = [matrices() for _ in range(2)]
    for model, make in zip(models, (ours, theirs), strict=True):
        steps(model, make(model.parameters(), 1e-2, **options), range(3))
    for a, b in zip(values(models[0]), values(models[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("fmt", "most"), [("e4m3fn", 2.1), ("e5m2", 2.1), ("int8", 2.1), ("fp16", 4.1), ("bf16", 4.1)]
)
def test__two_states__take_the_bytes_that_they_should(fmt, most):
    """Count whole storages, so that views of a larger tensor would show."""
    model = nn.Linear(256, 300)
    optimizer = sct.optim.AdamW(model.parameters(), state_format=fmt)
    steps(model, optimizer, range(1))
    parts = [getattr(x, part) for x in momenta(optimizer) for part in x.INNER]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in parts)}
    assert most - 0.2 < sum(storages.values()) / sum(p.numel() for p in model.parameters()) < most


@pytest.mark.parametrize(
    "rounding", ["nearest_even", pytest.param("stochastic", marks=pytest.mark.slow)]
)
@every_kind
def test__compiled__is_eager_up_to_ties(scaled, rounding):
    trained = []
    for compiled in (False, True):
        model = matrices(scaled)
        optimizer = sct.optim.AdamW(
            model.parameters(), 1e-2, state_format="e4m3fn", state_rounding=rounding,
            compiled=compiled,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["seed"] = 5
        steps(model, optimizer, range(2))
        trained.append((model, optimizer))
    for a, b in zip(*(values(m) for m, _ in trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for x, y in zip(*(momenta(o) for _, o in trained), strict=True):
        assert torch.equal(x.scale, y.scale) or rounding == "stochastic"
        same = x.qdata.view(torch.uint8) == y.qdata.view(torch.uint8)
        assert float(same.float().mean()) > 0.99


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion", "Muon"])
@every_kind
def test__compiled_by_the_program__is_the_same_step(scaled, kind):
    """PyTorch's recipe for compiled optimizers has this form."""
    trained = []
    for spelled in (lambda f: f, torch.compile, lambda f: torch.compile(lambda: f())):
        model = matrices(scaled)
        made = getattr(sct.optim, kind)(model.parameters(), lr=1e-2, state_format="e4m3fn")
        made.step = spelled(made.step)
        steps(model, made, range(3))
        trained.append(list(values(model)))
    for others in trained[1:]:
        assert all(map(torch.equal, trained[0], others))


def test__compiled__parts_have_the_bits_of_the_whole():
    """Ranks may cut a parameter between any groups: tails of vectors are rounded like vectors."""
    groups = 37
    start = gaussian(groups * 128)

    def train(*counts: int) -> tuple[Tensor, Tensor]:
        cuts = [128 * n for n in counts]
        model = nn.ParameterList(nn.Parameter(x.clone()) for x in start.split(cuts))
        optimizers = [
            sct.optim.AdamW([p], 1e-2, state_format="e4m3fn", compiled=True) for p in model
        ]
        rng = torch.Generator().manual_seed(1)
        for _ in range(3):
            g = torch.randn(len(start), generator=rng) * torch.rand(len(start), generator=rng) ** 6
            for p, optimizer, part in zip(model, optimizers, g.split(cuts), strict=True):
                p.grad = part.clone()
                optimizer.step()
        codes = [x.qdata.view(torch.uint8) for o in optimizers for x in momenta(o)[1::2]]
        return torch.cat(values(model)), torch.cat(codes)

    whole = train(groups)
    for cut in (7, 16, 20):
        for a, b in zip(whole, train(cut, groups - cut), strict=True):
            assert torch.equal(a, b)


def test__compiling__is_chosen_by_size(monkeypatch):
    seen = []
    real = buckets.run

    def run(*given):
        seen.append(given[-1])
        real(*given[:-1], False)

    monkeypatch.setattr(buckets, "run", run)
    for wanted, least in ((False, 1 << 18), (True, 100)):
        monkeypatch.setattr(step, "COMPILED_FROM", least)
        model = matrices()
        with native.left_out():
            steps(model, sct.optim.AdamW(model.parameters(), state_format="e4m3fn"), range(1))
        assert seen.pop() is wanted


def test__an_average_that_decays_slowly__does_so_only_when_rounding_is_stochastic():
    """The other elements of each group hold its largest magnitude constant."""

    def mean_after(rounding: str) -> float:
        torch.manual_seed(0)
        p = nn.Parameter(torch.zeros(4096))
        optimizer = sct.optim.Adam([p], 0.0, state_format="e4m3fn", state_rounding=rounding)
        idle = torch.arange(4096) % 2 == 0
        p.grad = torch.randn(4096)
        optimizer.step()
        first = optimizer.state[p]["exp_avg_sq"].dequantize()[idle].mean()
        p.grad = torch.where(idle, 0.0, p.grad)
        for _ in range(200):
            optimizer.step()
        return float(optimizer.state[p]["exp_avg_sq"].dequantize()[idle].mean() / first)

    assert mean_after("stochastic") == pytest.approx(0.999**200, abs=0.03)
    assert mean_after("nearest_even") > 0.95


# --- groups that are hard to keep ------------------------------------------------------------

GROUPS = {
    "constant": torch.full((128,), 0.3),
    "nearly constant": torch.linspace(1.0, 1.0 + 1e-6, 128),
    "zero": torch.zeros(128),
    "one number": torch.zeros(128).index_fill(0, torch.tensor([77]), -2e-9),
    "tiny": torch.linspace(1e-20, 2e-20, 128),
    "wide": torch.logspace(-2.5, 2.5, 128),
    "very wide": torch.logspace(-15, 15, 128),
}


@every_way("fp16", "e4m3fn", "e5m2", "int8")
def test__hard_groups__step_as_in_float32(fmt, compiled):
    gradient = torch.cat(list(GROUPS.values()))
    found = []
    for make, options in (
        (sct.optim.AdamW, {"state_format": fmt, "compiled": compiled}),
        (torch.optim.AdamW, {}),
    ):
        p = nn.Parameter(torch.ones(len(gradient)))
        optimizer = make([p], 0.1, weight_decay=0.0, eps=1e-30, **options)
        for _ in range(3):
            p.grad = gradient.clone()
            optimizer.step()
        found.append(p.detach())
    assert bool(found[0].isfinite().all())
    # These are three steps of 0.1 along the sign. A square of 1e-20 is no normal float32 number.
    usual = gradient.abs() > 1e-18
    # The values are further apart than the codes reach.
    usual[-128 if fmt != "int8" else -256 :] = False
    torch.testing.assert_close(found[0][usual], found[1][usual], rtol=0, atol=0.1)
    assert float((found[0] - found[1]).abs().max()) < 10
    still = gradient == 0
    assert torch.equal(found[0][still], torch.ones(int(still.sum())))


@every_way(*FORMATS)
def test__what_is_not_finite__shows_in_the_parameter_as_in_float32(fmt, compiled):
    """The others of its group continue."""
    trained = []
    for make, options in (
        (sct.optim.AdamW, {"state_format": fmt, "compiled": compiled}),
        (torch.optim.AdamW, {}),
    ):
        p = nn.Parameter(torch.ones(256))
        optimizer = make([p], 0.1, **options)
        for i in range(3):
            p.grad = torch.linspace(0.5, 1.5, 256)
            if i == 0:
                p.grad[3], p.grad[4], p.grad[5] = math.inf, -math.inf, math.nan
            optimizer.step()
        trained.append(p.detach())
    assert torch.equal(trained[0].isfinite(), trained[1].isfinite())
    assert trained[0].isfinite().sum() == 253
    kept = trained[1].isfinite()
    torch.testing.assert_close(trained[0][kept], trained[1][kept], rtol=0, atol=0.02)


@pytest.mark.parametrize("fmt", ["e4m3fn", "int8"])
def test__a_gradient_whose_square_overflows__makes_no_step_of_its_own_size(fmt):
    p = nn.Parameter(torch.ones(128))
    optimizer = sct.optim.AdamW([p], 0.1, weight_decay=0.0, state_format=fmt)
    for i in range(3):
        p.grad = torch.ones(128)
        if i == 0:
            p.grad[7] = 1e25
        optimizer.step()
    assert bool(((p - 1).abs() < 4).all())


# --- scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shift", [-18, 12])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test__a_loss_scale__moves_the_units_of_states_and_no_bit(name, shift, fmt):
    """Adam forgets the loss scale, if eps scales too: the steps are bit-identical."""
    ours, _, options = OPTIMIZERS[name]
    runs = []
    for k in (0, shift):
        model = matrices(True)
        optimizer = ours(
            model.parameters(), 1e-2, eps=1e-8 * 2.0**k, weight_decay=0, state_format=fmt, **options
        )
        steps(model, optimizer, range(5), size=2.0 ** (k - 6))
        runs.append((model, optimizer))
    (one, a), (other, b) = runs
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_shifted(p.detach(), q.detach(), 0)
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            x, y = a.state[p][key], b.state[q][key]
            assert torch.equal(x.qdata.view(torch.uint8), y.qdata.view(torch.uint8))
            assert torch.equal(x.scale, y.scale)
            assert torch.equal(x.power, y.power)
            assert float(y.tensor_scale / x.tensor_scale) == 2.0 ** (shift * power)


def test__a_training_under_a_loss_scale__has_the_same_bits():
    """Forward, backward in FP8, and steps with states in E4M3 give the same losses, values and
    codes."""
    runs = []
    for k in (0, -18):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
        sct.scale_model(model, "unit")
        x, y = torch.randn(32, 16), torch.randn(32, 8)
        optimizer = sct.optim.AdamW(
            model.parameters(), 1e-2, eps=1e-8 * 2.0**k, state_format="e4m3fn"
        )
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (loss * 2.0**k).backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        runs.append((losses, values(model), momenta(optimizer)))
    (one, weights, held), (other, others, kept) = runs
    assert one == other
    assert one[-1] < 0.9 * one[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for x, y in zip(held, kept, strict=True):
        assert torch.equal(x.qdata.view(torch.uint8), y.qdata.view(torch.uint8))


@pytest.mark.parametrize("power", [-40, -70])
def test__tiny_gradients__step_as_in_float64(power):
    """The squares are no float32 numbers, and the unit of the states holds them."""
    size = 2.0**power
    model = matrices(True)
    start = values(model)
    optimizer = sct.optim.AdamW(
        model.parameters(), 1e-2, eps=1e-30, weight_decay=0, state_format="fp16"
    )
    steps(model, optimizer, range(4), size=size)
    wanted = [nn.Parameter(x.clone()) for x in start]
    exact = torch.optim.AdamW(wanted, 1e-2, eps=1e-30, weight_decay=0)
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        for p in wanted:
            p.grad = (torch.randn(p.shape, generator=rng) * size).double()
        exact.step()
    for p, want, before in zip(model.parameters(), wanted, start, strict=True):
        moved = want.detach() - before
        assert float((dequantized(p) - want.detach()).norm() / moved.norm()) < 1e-3


@pytest.mark.parametrize("fmt", ["e4m3fn", "fp16"])
def test__gradients__may_be_plain_or_under_any_scale(fmt):
    """The values are the same in another representation."""
    moved = []
    for hold in (
        sct.scaled,
        lambda g: sct.scaled(g, scale=2.0**9),
        lambda g: sct.scaled(g, "bf16"),
        lambda g: g,
    ):
        p = nn.Parameter(sct.scaled(torch.full((300,), 0.7)))
        optimizer = sct.optim.AdamW([p], 1e-2, state_format=fmt)
        for seed in range(3):
            rng = torch.Generator().manual_seed(seed)
            p.grad = hold(torch.randn(300, generator=rng).bfloat16().float())
            optimizer.step()
        moved.append(dequantized(p))
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test__a_parameter_of_zeros__takes_the_scale_of_its_values(master):
    """A bias starts as zeros. A tensor that is known to be zero must not stay so."""
    p = nn.Parameter(sct.scaled(torch.zeros(40), master))
    optimizer = sct.optim.AdamW([p], 2.0**-10, state_format="e4m3fn")
    for _ in range(2):
        p.grad = sct.scaled(torch.ones(40))
        optimizer.step()
    assert_holds(p.detach(), torch.full((40,), -(2.0**-9)), 2.0**-8)
    assert 0.5 < float(p.qdata.float().abs().mean()) < 4
    assert float(p.rms) > 0


def test__weights_that_products_have_cast__are_cast_again_after_a_step():
    """A product casts a weight once for all its uses, until somebody writes into it."""
    torch.manual_seed(0)
    layer = sct.scale_model(nn.Linear(64, 64, bias=False), "unit")
    x = torch.randn(16, 64)
    optimizer = sct.optim.AdamW(layer.parameters(), 0.1, state_format="e4m3fn")
    before = layer(x)
    before.square().mean().backward()
    optimizer.step()
    fresh = copy.deepcopy(layer)
    assert torch.equal(layer(x).dequantize(), fresh(x).dequantize())
    assert not torch.equal(layer(x).dequantize(), before.dequantize())


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@every_kind
@every_optimizer
def test__a_run_from_a_file__is_bit_for_bit_the_uninterrupted_one(name, scaled, rounding):
    make, _, options = OPTIMIZERS[name]
    options = options | {"state_format": "e4m3fn", "state_rounding": rounding}
    whole = matrices(scaled)
    optimizer = make(whole.parameters(), 1e-2, **options)
    steps(whole, optimizer, range(3))
    file = io.BytesIO()
    torch.save((whole.state_dict(), optimizer.state_dict()), file)
    steps(whole, optimizer, range(3, 6))

    file.seek(0)
    weights, held = torch.load(file, weights_only=True)
    again = matrices(scaled)
    again.load_state_dict(weights)
    resumed = make(again.parameters(), 1e-2, **options)
    resumed.load_state_dict(held)
    steps(again, resumed, range(3, 6))
    for a, b in zip(values(whole), values(again), strict=True):
        assert torch.equal(a, b)
    assert_same_bits(optimizer, resumed)


@pytest.mark.parametrize(
    "restore",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["copy", "pickle"],
)
@every_kind
def test__a_copy_of_model_and_optimizer__goes_on_to_the_same_bits(scaled, restore):
    model = matrices(scaled)
    optimizer = sct.optim.AdamW(
        model.parameters(), 1e-2, state_format="e4m3fn", state_rounding="stochastic"
    )
    steps(model, optimizer, range(2))
    pair = restore((model, optimizer))
    for m, o in ((model, optimizer), pair):
        steps(m, o, range(2, 4))
    for a, b in zip(values(model), values(pair[0]), strict=True):
        assert torch.equal(a, b)
    assert_same_bits(optimizer, pair[1])


@every_kind
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test__states_of_torchs_own_class__are_narrowed_when_loaded(name, scaled):
    make, theirs, options = OPTIMIZERS[name]
    model = matrices(scaled)
    exact = theirs(model.parameters(), **options)
    steps(model, exact, range(2))
    low = make(model.parameters(), state_format="int8", **options)
    low.load_state_dict(copy.deepcopy(exact.state_dict()))
    for x, y in zip(momenta(low), momenta(exact), strict=True):
        assert isinstance(x, ExpandedTensor)
        assert x.format.name == "int8"
        wanted = dequantized(y).float()
        torch.testing.assert_close(
            x.dequantize(), wanted, rtol=0.2, atol=0.02 * float(wanted.abs().max())
        )
    assert [g["state_format"] for g in low.param_groups] == ["int8"]
    other = copy.deepcopy(model)
    low = make(other.parameters(), state_format="fp16", **options)
    low.load_state_dict(copy.deepcopy(exact.state_dict()))
    # Averages of scaled gradients and of their squares have different scales.
    steps(model, exact, range(2, 5))
    steps(other, low, range(2, 5))
    for x, y in zip(values(other), values(model), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@every_kind
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test__torchs_own_class__goes_on_from_our_states(name, scaled):
    make, theirs, options = OPTIMIZERS[name]
    model = matrices(scaled)
    low = make(model.parameters(), 1e-2, state_format="e4m3fn", **options)
    steps(model, low, range(2))
    exact = theirs(model.parameters(), 1.0, **options)
    exact.load_state_dict(low.plain_state_dict())
    assert exact.param_groups[0]["lr"] == 1e-2
    for x, y in zip(momenta(low), momenta(exact), strict=True):
        assert type(y) is (sct.ScaledTensor if scaled else Tensor)
        torch.testing.assert_close(dequantized(y), x.dequantize().double(), rtol=2.0**-22, atol=0)
    steps(model, exact, range(2, 3))


def test__another_format__is_that_of_the_optimizer_that_loads():
    model = matrices()
    first = sct.optim.AdamW(model.parameters(), 1e-2, state_format="fp16")
    steps(model, first, range(2))
    second = sct.optim.AdamW(model.parameters(), 1e-3, state_format="e4m3fn")
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 1e-2
    for x, y in zip(momenta(second), momenta(first), strict=True):
        assert x.format.name == "e4m3fn"
        torch.testing.assert_close(x.dequantize(), y.dequantize(), rtol=0.1, atol=1e-7)
    third = sct.optim.AdamW(model.parameters(), state_format="fp32")
    third.load_state_dict(first.state_dict())
    assert all(type(x) is Tensor and x.dtype == torch.float32 for x in momenta(third))


def test__a_float32_state_of_a_narrow_parameter__comes_back_to_the_bit():
    """torch's own load would round it to the parameter's dtype."""
    p = nn.Parameter(torch.ones(130, dtype=torch.bfloat16))
    optimizer = sct.optim.Lion([p])
    p.grad = torch.linspace(0, 1, 130).bfloat16()
    for _ in range(3):
        optimizer.step()
    again = sct.optim.Lion([p])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (x,), (y,) = momenta(optimizer), momenta(again)
    assert x.dtype == torch.float32
    assert torch.equal(x, y)
    assert not torch.equal(x, x.bfloat16().float())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test__the_buffer_that_sgd_has_not__is_none(momentum):
    p = nn.Parameter(torch.ones(9))
    exact = torch.optim.SGD([p], 0.5)
    p.grad = torch.ones(9)
    exact.step()
    low = sct.optim.SGD([p], momentum=momentum, state_format="e4m3fn")
    low.load_state_dict(exact.state_dict())
    low.param_groups[0]["momentum"] = momentum
    low.step()
    assert torch.equal(p.detach(), torch.zeros(9))


def test__states_that_fit_no_parameter__change_nothing():
    model = matrices()
    optimizer = sct.optim.AdamW(model.parameters(), 1e-2, state_format="e4m3fn")
    steps(model, optimizer, range(2))
    held = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(held)
    other["state"][1]["exp_avg"] = torch.zeros(3)
    before = momenta(optimizer)
    with pytest.raises(ShapeError, match=r"'exp_avg' of a parameter of shape \(24, 24\) .*\(3,\)"):
        optimizer.load_state_dict(other)
    other = copy.deepcopy(held)
    other["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other)
    assert all(a is b for a, b in zip(momenta(optimizer), before, strict=True))
    steps(model, optimizer, range(2, 3))


def test__a_state_dict__holds_no_more_than_the_states():
    """Views of shared storage go to a file once."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer = sct.optim.AdamW(model.parameters(), state_format="e4m3fn")
    steps(model, optimizer, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 2.3 * sum(p.numel() for p in model.parameters()) + 30000


# --- what an optimizer of torch does besides -------------------------------------------------


def test__hooks_schedulers_closures_and_new_groups__work_as_usual():
    model = matrices()
    first, *others = model.parameters()
    optimizer = sct.optim.SGD([first], 1.0, momentum=0.9, state_format="e4m3fn")
    torch.optim.SGD([first], 1.0).step()  # torch's class has hooks of its own from this version on.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.add_param_group({"params": others, "state_format": "fp16", "lr": 4.0})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in (first, others[0]))
        loss.backward()
        return loss

    before = float(closure())
    assert float(optimizer.step(closure)) == before
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 2.0]
    assert seen == ["step"]
    # A parameter without a gradient has no state.
    assert [x.format.name for x in momenta(optimizer)] == ["e4m3fn", "fp16"]


def test__in_fp32__hooks_run_once():
    model = matrices()
    steps(model, torch.optim.AdamW(model.parameters()), range(1))
    optimizer = sct.optim.AdamW(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    steps(model, optimizer, range(1))
    assert seen == ["step"]


def test__groups__have_learning_rates_of_their_own():
    """One call steps them all; a learning rate may be a tensor."""
    ps = [nn.Parameter(torch.zeros(130)) for _ in range(3)]
    rates = (1.0, torch.tensor(0.5), 0.25)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(ps, rates, strict=True)]
    optimizer = sct.optim.AdamW(groups, state_format="e4m3fn", weight_decay=0.0)
    for p in ps:
        p.grad = torch.ones(130)
    optimizer.step()
    for p, lr in zip(ps, (1.0, 0.5, 0.25), strict=True):
        torch.testing.assert_close(p.detach(), torch.full((130,), -lr))


def test__parameters_with_and_without_gradients__take_turns():
    """The set of parameters that step together changes, and their states do not."""

    def train(together: bool) -> list[Tensor]:
        model = matrices()
        ps = list(model.parameters())
        optimizers = [
            sct.optim.AdamW(part, 1e-2, state_format="e4m3fn")
            for part in ([ps] if together else [[p] for p in ps])
        ]
        for seed in range(6):
            give_gradients(model, seed)
            ps[seed % 3].grad = None
            for optimizer in optimizers:
                optimizer.step()
        return values(model)

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b)


def test__large_parameters__are_stepped_where_they_are(monkeypatch):
    """Many elements are stepped in more calls than one, with the same bits."""

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        steps(model, sct.optim.AdamW(model.parameters(), state_format="e4m3fn"), range(3))
        return values(model)

    whole = train()
    monkeypatch.setattr(buckets, "ALONE", 2048)
    for a, b in zip(whole, train(), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(buckets, "TOGETHER", 300)
    monkeypatch.setattr(kernel, "_PIECE", 3)
    for a, b in zip(whole, train(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test__copies__are_made_by_pieces(monkeypatch, rounding):
    """The bits are the same for any number of parameters per copy, with or without whole groups."""
    sizes = []
    real = buckets.run

    def run(*given):
        sizes.append(len(given[1]))
        real(*given)

    def train(most: int) -> list[Tensor]:
        sizes.clear()
        monkeypatch.setattr(buckets, "COPIED", most)
        torch.manual_seed(0)
        shapes = ((20, 64), (64, 20), (20, 96), (96, 1))
        model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
        optimizer = sct.optim.AdamW(
            model.parameters(), state_format="e4m3fn", state_rounding=rounding
        )
        optimizer.param_groups[0]["seed"] = 5
        with native.left_out():
            steps(model, optimizer, range(3))
        return values(model)

    monkeypatch.setattr(buckets, "run", run)
    whole = train(1 << 11)
    assert sizes == [40] * 3
    for most, calls in ((1, 8), (8, 6), (16, 3)):
        for a, b in zip(whole, train(most), strict=True):
            assert torch.equal(a, b)
        assert len(sizes) == (3 * calls if rounding == "nearest_even" else 3)


def test__a_step_that_fails_midway__counts_what_it_stepped(monkeypatch):
    real, calls = buckets.run, []

    def run(*given):
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("no compiler")
        real(*given)

    monkeypatch.setattr(buckets, "run", run)
    monkeypatch.setattr(buckets, "TOGETHER", 128)
    ps = [nn.Parameter(torch.zeros(128)) for _ in range(3)]
    for p in ps:
        p.grad = torch.ones(128)
    optimizer = sct.optim.AdamW(ps, state_format="e4m3fn")
    with native.left_out(), pytest.raises(RuntimeError, match="no compiler"):
        optimizer.step()
    stepped = [bool(p.any()) for p in ps]
    assert stepped == [True, False, False]
    counted = [bool(optimizer.state[p].get("step", 0)) for p in ps]
    assert counted == stepped


def test__compiled_pieces__are_alike(monkeypatch):
    """The pieces have any number of groups, but never a single group at the end."""
    sizes = []

    def recorded(elements, *rest):
        sizes.append(len(elements))
        return [None, None]

    monkeypatch.setattr(kernel, "_compiled", lambda plan: recorded)
    monkeypatch.setattr(kernel, "_COMPILED_PIECE", 8)
    p = nn.Parameter(torch.zeros(17 * 128))
    p.grad = torch.ones_like(p)
    sct.optim.AdamW([p], state_format="e4m3fn", compiled=True).step()
    assert sizes == [6, 6, 5]


def test__elements_in_any_order_of_memory__are_stepped():
    torch.manual_seed(0)
    start = torch.randn(4, 3, 8, 8)
    found = []
    for fmt in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone(memory_format=fmt))
        optimizer = sct.optim.AdamW([p], 1e-2, state_format="e4m3fn")
        p.grad = torch.arange(768.0).view(4, 3, 8, 8).to(memory_format=fmt)
        optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
    assert found[1].is_contiguous(memory_format=torch.channels_last)


def test__autograd__sees_that_a_parameter_was_written():
    p = nn.Parameter(torch.ones(8))
    y = (p * p).sum()
    p.grad = torch.ones(8)
    sct.optim.AdamW([p], state_format="e4m3fn").step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test__a_gradient_scaler__skips_infinities():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    p = nn.Parameter(sct.scaled(torch.ones(130)))
    optimizer = sct.optim.AdamW([p], 0.1, state_format="e4m3fn", weight_decay=0.0)
    for grow, wanted in ((1.0, 0.9), (math.inf, 0.9), (1.0, 0.8)):
        optimizer.zero_grad()
        scaler.scale((p * grow).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_holds(p.detach(), torch.full((130,), wanted), 2.0**-10)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"state_format": "fp8"}, FormatError, "state_format is one of 'fp32', .*got 'fp8'"),
        ({"state_rounding": "up"}, FormatError, "state_rounding is one of .*got 'up'"),
        ({"master_format": "fp8"}, FormatError, "master_format is one of None, .*got 'fp8'"),
        ({"compiled": "yes"}, FormatError, "compiled is True, False or None; got 'yes'"),
        ({"state_format": "fp16", "fused": True}, UnsupportedError, "fused=True is of torch's"),
        ({"state_format": "fp16", "capturable": True}, UnsupportedError, "capturable=True"),
    ],
)
def test__bad_options__say_what_is_allowed(options, error, says):
    with pytest.raises(error, match=says):
        sct.optim.AdamW(matrices().parameters(), **options)


@pytest.mark.parametrize(
    ("p", "grad", "error", "says"),
    [
        (torch.ones(9), torch.zeros(9).to_sparse(), UnsupportedError, "dense.*sparse_coo"),
        (torch.ones(9).double(), torch.zeros(9).double(), DTypeError, "float32, .*float64"),
    ],
)
def test__tensors_that_no_step_takes__change_nothing(p, grad, error, says):
    good, bad = nn.Parameter(torch.ones(9)), nn.Parameter(p)
    optimizer = sct.optim.AdamW([good, bad], state_format="e4m3fn")
    good.grad, bad.grad = torch.ones(9), grad
    with pytest.raises(error, match=says):
        optimizer.step()
    assert torch.equal(good.detach(), torch.ones(9))
    assert not momenta(optimizer)
