"""States of optimizers in 8 bits: torch's steps on them, what they keep, what goes to a file."""

import copy
import io

import pytest
import torch
from assertions import dequantized
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import FormatError
from scaledtensor.expanded import ExpandedTensor
from scaledtensor.optim import states as module

ANY = {"allow_non_unit_scaling_params": True}
OPTIMIZERS = {
    "sgd": (sct.optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
    "adam": (sct.optim.Adam, torch.optim.Adam, {"amsgrad": True}),
    "adamw": (sct.optim.AdamW, torch.optim.AdamW, {"foreach": True}),
    "muon": (sct.optim.Muon, torch.optim.Muon, {}),
}


def matrices(scaled: bool) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
    return sct.scale_model(made, "unit") if scaled else made


def give_gradients(model: nn.Module, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        g = torch.randn(p.shape, generator=rng) * 2.0**-6
        p.grad = sct.scaled(g) if isinstance(p, sct.ScaledTensor) else g


def momenta(optimizer: torch.optim.Optimizer) -> list[ExpandedTensor]:
    return [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]


def values(model: nn.Module) -> list[Tensor]:
    return [dequantized(p) for p in model.parameters()]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test__a_step__is_torchs_on_the_values_of_the_states(name, scaled):
    ours, theirs, options = OPTIMIZERS[name]
    model = matrices(scaled)
    low = ours(
        model.parameters(), 1e-2, state_format="e4m3fn", state_rounding="nearest_even",
        weight_decay=0.1, independent_weight_decay=False, **ANY, **options,
    )  # fmt: skip
    for seed in range(3):
        give_gradients(model, seed)
        low.step()
    wanted = copy.deepcopy(model)
    exact = theirs(wanted.parameters(), 1e-2, weight_decay=0.1, **options)
    exact.load_state_dict(
        {**low.plain_state_dict(), "param_groups": exact.state_dict()["param_groups"]}
    )
    for each in (model, wanted):
        give_gradients(each, 3)
    low.step()
    exact.step()
    for a, b in zip(values(model), values(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-20, atol=2.0**-26)
    for x in momenta(low):
        assert isinstance(x, ExpandedTensor)
        assert x.format.name == "e4m3fn"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test__in_fp32__nothing_is_different(name):
    ours, theirs, options = OPTIMIZERS[name]
    models = [matrices(False) for _ in range(2)]
    made = [
        ours(models[0].parameters(), 1e-2, weight_decay=0, **ANY, **options),
        theirs(models[1].parameters(), 1e-2, weight_decay=0, **options),
    ]
    for seed in range(3):
        for model, optimizer in zip(models, made, strict=True):
            give_gradients(model, seed)
            optimizer.step()
    for a, b in zip(values(models[0]), values(models[1]), strict=True):
        assert torch.equal(a, b)
    assert not any(isinstance(x, ExpandedTensor) for x in momenta(made[0]))


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
def test__two_states__take_little_more_than_two_bytes(fmt):
    model = nn.Linear(256, 300)
    optimizer = sct.optim.AdamW(model.parameters(), state_format=fmt, **ANY)
    give_gradients(model)
    optimizer.step()
    parts = ("qdata", "scale", "tensor_scale", "rms")
    held = sum(getattr(x, part).nbytes for x in momenta(optimizer) for part in parts)
    assert held / sum(p.numel() for p in model.parameters()) < 2.1


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test__training__ends_where_it_does_in_fp32(fmt, scaled):
    def train(**options: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        if scaled:
            sct.scale_model(model)
        x = torch.randn(256, 16)
        y = torch.tanh(x @ torch.randn(16, 4))
        optimizer = sct.optim.AdamW(model.parameters(), 1e-2, **ANY, **options)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss)

    assert train(state_format=fmt) == pytest.approx(train(), rel=0.25, abs=0.003)


def test__an_average_that_decays_slowly__does_so_only_when_rounding_is_stochastic():
    """Beside others that hold the largest magnitude of its group where it is."""

    def mean_after(rounding: str) -> float:
        torch.manual_seed(0)
        p = nn.Parameter(torch.zeros(4096))
        optimizer = sct.optim.Adam([p], 0.0, state_format="e4m3fn", state_rounding=rounding, **ANY)
        idle = torch.arange(4096) % 2 == 0
        p.grad = torch.randn(4096)
        optimizer.step()
        first = optimizer.state[p]["exp_avg_sq"].dequantize()[idle].mean()
        p.grad = torch.where(idle, 0.0, p.grad)
        for _ in range(200):
            optimizer.step()
        return float(optimizer.state[p]["exp_avg_sq"].dequantize()[idle].mean() / first)

    assert mean_after("stochastic") == pytest.approx(0.999**200, abs=0.05)
    assert mean_after("nearest_even") > 0.95


def test__a_run_from_a_file__is_bit_for_bit_the_uninterrupted_one():
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            give_gradients(model, seed)
            optimizer.step()

    whole = matrices(False)
    optimizer = sct.optim.AdamW(whole.parameters(), 1e-2, state_format="e4m3fn", **ANY)
    torch.manual_seed(1)
    steps(whole, optimizer, range(3))
    file = io.BytesIO()
    torch.save((whole.state_dict(), optimizer.state_dict(), torch.get_rng_state()), file)
    steps(whole, optimizer, range(3, 6))

    file.seek(0)
    weights, held, rng = torch.load(file, weights_only=True)
    again = matrices(False)
    again.load_state_dict(weights)
    resumed = sct.optim.AdamW(again.parameters(), 1e-2, state_format="e4m3fn", **ANY)
    resumed.load_state_dict(held)
    torch.set_rng_state(rng)
    steps(again, resumed, range(3, 6))
    for a, b in zip(values(whole), values(again), strict=True):
        assert torch.equal(a, b)
    for x, y in zip(momenta(optimizer), momenta(resumed), strict=True):
        assert torch.equal(x.qdata.view(torch.uint8), y.qdata.view(torch.uint8))
        assert torch.equal(x.scale, y.scale)
        assert torch.equal(x.tensor_scale, y.tensor_scale)


def test__states_of_torchs_own_class__are_narrowed_when_loaded():
    model = matrices(False)
    theirs = torch.optim.AdamW(model.parameters())
    give_gradients(model)
    theirs.step()
    ours = sct.optim.AdamW(model.parameters(), state_format="int8", **ANY)
    ours.load_state_dict({**theirs.state_dict(), "param_groups": ours.state_dict()["param_groups"]})
    for x, y in zip(momenta(ours), momenta(theirs), strict=True):
        assert isinstance(x, ExpandedTensor)
        size = y.abs().max()
        torch.testing.assert_close(x.dequantize(), y, rtol=0.2, atol=0.02 * float(size))


def test__large_groups_of_parameters__are_taken_in_parts(monkeypatch):
    def stepped() -> list[Tensor]:
        model = matrices(False)
        options = {"state_format": "e4m3fn", "state_rounding": "nearest_even"}
        optimizer = sct.optim.AdamW(model.parameters(), 1e-2, **options, **ANY)
        for seed in range(3):
            give_gradients(model, seed)
            optimizer.step()
        assert len(optimizer.param_groups[0]["params"]) == 3
        return values(model)

    whole = stepped()
    monkeypatch.setattr(module, "_PART", 24 * 24 + 1)
    for a, b in zip(whole, stepped(), strict=True):
        assert torch.equal(a, b)


def test__hooks_schedulers_closures_and_new_groups__work_as_usual():
    model = matrices(False)
    first, *others = model.parameters()
    optimizer = sct.optim.SGD([first], 1.0, momentum=0.9, state_format="e4m3fn", **ANY)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.add_param_group({"params": others})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in (first, others[0]))
        loss.backward()
        return loss

    before = float(closure())
    assert float(optimizer.step(closure)) == before
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]
    assert seen == ["step"]
    assert len(momenta(optimizer)) == 2  # nothing for what has no gradient
    assert len(momenta(copy.deepcopy(optimizer))) == 2


def test__a_step_that_fails__leaves_the_states(monkeypatch):
    model = matrices(False)
    optimizer = sct.optim.SGD(model.parameters(), 1.0, momentum=0.9, state_format="e4m3fn", **ANY)
    give_gradients(model)
    optimizer.step()
    held = momenta(optimizer)
    next(model.parameters()).grad = torch.zeros(24, 24).to_sparse()
    optimizer.param_groups[0]["nesterov"] = "neither"
    monkeypatch.setattr(torch.optim.SGD, "_init_group", None)
    with pytest.raises(TypeError):
        optimizer.step()
    assert momenta(optimizer) == held or all(
        a is b for a, b in zip(momenta(optimizer), held, strict=True)
    )
    assert len(optimizer.param_groups[0]["params"]) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"state_format": "bf16"}, "state_format is one of 'fp32', 'e4m3fn'.*got 'bf16'"),
        ({"state_rounding": "up"}, "state_rounding is one of 'stochastic', .*got 'up'"),
    ],
)
def test__bad_input__says_what_is_allowed(options, says):
    with pytest.raises(FormatError, match=says):
        sct.optim.AdamW(matrices(False).parameters(), **options, **ANY)
