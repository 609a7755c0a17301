"""Unmodified torch.optim steps scaled parameters as it steps plain ones, and also smaller ones."""

import copy
import math

import pytest
import torch
from assertions import assert_holds, assert_shifted, dequantized
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import scaledtensor as sct

optim = torch.optim
OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "adagrad": (optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.001, "weight_decay": 0.1}),
    "rmsprop_centered": (optim.RMSprop, {"lr": 0.001, "centered": True, "momentum": 0.9}),
    "nadam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "asgd": (optim.ASGD, {"lr": 0.01, "t0": 2}),
    "adafactor": (optim.Adafactor, {"lr": 0.01}),
    "muon": (optim.Muon, {"lr": 0.02}),
}
#: Optimizers that are compiled with several parameters: each parameter's code follows the code of
#: the one before.
SEVERAL = ("sgd", "adamw", "adafactor")
#: Optimizers that torch compiles in another form than it runs in eager code.
OTHER_FORM = ("adagrad", "rmsprop", "radam", "rprop")
FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def forms_of(name: str) -> list[str]:
    make = OPTIMIZERS[name][0]
    if make is optim.Muon:
        return ["loop"]
    return ["loop", "foreach", *(["fused"] if make in FUSED else [])]


def options_of(name: str, form: str) -> dict[str, object]:
    make, options = OPTIMIZERS[name]
    return options if make is optim.Muon else options | FORMS[form]


every_form = pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in OPTIMIZERS for form in forms_of(name)]
)
every_form_of_adam = pytest.mark.parametrize("form", FORMS)


def plain_parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(6, 5, generator=rng).to(dtype), torch.zeros(5, dtype=dtype)]


def scaled_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(sct.scaled(p)) for p in plain_parameters(dtype)]


def gradients(steps: int, size: float) -> list[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [[torch.randn(s, generator=rng) * size for s in ((6, 5), (5,))] for _ in range(steps)]


def train(name, parameters, *, form="loop", size=1.0, steps=20, **more):
    """Return `parameters` after `steps` steps on Gaussian gradients of RMS `size`."""
    make = OPTIMIZERS[name][0]
    if make is optim.Muon:  # These are for matrices only.
        parameters = [p for p in parameters if p.dim() == 2]
    optimizer = make(parameters, **options_of(name, form) | more)
    for grads in gradients(steps, size):
        for p, g in zip(parameters, grads, strict=False):
            p.grad = sct.scaled(g.to(p.dtype)) if isinstance(p, sct.ScaledTensor) else g.to(p.dtype)
        optimizer.step()
    return parameters, optimizer


def reference(name, dtype, **options):
    return train(name, [nn.Parameter(p) for p in plain_parameters(dtype)], **options)[0]


@every_form
def test__twenty_steps__are_those_of_plain_float32(name, form):
    got, _ = train(name, scaled_parameters(), form=form)
    # Muon orthogonalises in bfloat16. A sum over a row may be rounded in another way than torch's.
    tolerance = {"muon": 2.0**-7, "adafactor": 2.0**-18}.get(name, 2.0**-21)
    for p, want in zip(got, reference(name, torch.float32, form=form), strict=True):
        assert isinstance(p, sct.ScaledTensor)
        assert p.format.name == "fp32"
        assert_holds(p, want, tolerance)


@every_form_of_adam
@pytest.mark.parametrize("eps", [1e-8, 1e-30])
@pytest.mark.parametrize("power", [-20, -40, -60])
def test__tiny_gradients__step_as_in_float64(power, eps, form):
    """The squares are no float32 numbers at 2**-60 or so. The scale holds them, and eps = 1e-8
    too."""
    size = 2.0**power
    got, optimizer = train("adamw", scaled_parameters(), size=size, eps=eps, form=form)
    exact = reference("adamw", torch.float64, size=size, eps=eps)
    for p, want, start in zip(got, exact, plain_parameters(torch.float64), strict=True):
        moved, wanted = dequantized(p) - start, want.detach() - start
        # These are twenty roundings of float32 parameters of size 2 to 4.
        torch.testing.assert_close(moved, wanted, rtol=2.0**-16, atol=2.0**-18)
        second = optimizer.state[p]["exp_avg_sq"]
        assert 0.1 < float(dequantized(second).mean()) / (size**2 * 0.02) < 3
    if eps == 1e-30:
        assert float((dequantized(got[0]) - plain_parameters(torch.float64)[0]).abs().max()) > 0.05


def test__the_same_tiny_gradients__are_lost_by_plain_float32():
    """This shows that the test above can fail."""
    got = reference("adamw", torch.float32, size=2.0**-70, eps=1e-40)
    exact = reference("adamw", torch.float64, size=2.0**-70, eps=1e-40)
    assert (got[0] - exact[0]).abs().max().item() > 0.01


@pytest.mark.parametrize("shift", [-30, 12])
@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test__a_loss_scale__moves_no_bit(name, shift):
    """SGD takes the same steps on gradients times 2**k at lr times 2**-k."""
    one, _ = train(name, scaled_parameters())
    lr = 0.1 * 2.0**-shift
    other, _ = train(name, scaled_parameters(), size=2.0**shift, lr=lr)
    for p, q in zip(one, other, strict=True):
        assert_shifted(p.detach(), q.detach(), 0)


#: Optimizers that forget the scale of their gradients if eps scales too, with options that leave
#: eps out.
INVARIANT = {
    # RAdam's first steps are not adaptive.
    **{
        name: {"eps": 0}
        for name in ("adamw", "amsgrad", "adagrad", "nadam", "adamax", "rmsprop", "muon")
    },
    "rmsprop_centered": {"eps": 0},
    "adafactor": {"eps": (0.0, 1e-3)},
    "rprop": {},
}


@pytest.mark.parametrize("shift", [-20, 12])
@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in INVARIANT for form in forms_of(name)]
)
def test__a_loss_scale__moves_no_bit_of_an_adaptive_step(name, form, shift):
    options = {"weight_decay": 0.0} | INVARIANT[name] if name != "rprop" else {}
    (one, _), (other, _) = (
        train(name, scaled_parameters(), form=form, size=2.0**k, **options) for k in (0, shift)
    )
    for p, q, start in zip(one, other, plain_parameters(torch.float64), strict=False):
        assert_shifted(p.detach(), q.detach(), 0)
        assert not torch.equal(dequantized(p), start)


@every_form_of_adam
@pytest.mark.parametrize("shift", [-30, 12])
def test__adam_states__move_only_their_scales(shift, form):
    """Adam forgets the loss scale, if eps scales too: the steps are bit-identical."""
    (one, a), (other, b) = (
        train("adamw", scaled_parameters(), size=2.0**k, eps=1e-8 * 2.0**k, form=form)
        for k in (0, shift)
    )
    for p, q in zip(one, other, strict=True):
        assert_shifted(p.detach(), q.detach(), 0)
        assert_shifted(a.state[p]["exp_avg"], b.state[q]["exp_avg"], shift)
        assert_shifted(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"], 2 * shift)


@every_form
def test__a_bfloat16_master__stays_one_and_follows(name, form):
    got, _ = train(name, scaled_parameters(torch.bfloat16), form=form, steps=5)
    exact = reference(name, torch.float64, steps=5)
    for p, want in zip(got, exact, strict=True):
        assert (p.dtype, p.format.name) == (torch.bfloat16, "bf16")
        assert_holds(p, want, 0.05)


@pytest.mark.parametrize("foreach", [None, False, True])
def test__clip_grad_norm__is_that_of_plain_gradients(foreach):
    parameters = scaled_parameters()
    plain = [nn.Parameter(p) for p in plain_parameters(torch.float32)]
    for p, q, g in zip(parameters, plain, gradients(1, 9.0)[0], strict=True):
        p.grad, q.grad = sct.scaled(g), g.clone()
    norms = [clip_grad_norm_(ps, 1.0, foreach=foreach) for ps in (parameters, plain)]
    torch.testing.assert_close(*norms)
    for p, q in zip(parameters, plain, strict=True):
        assert isinstance(p.grad, sct.ScaledTensor)
        assert_holds(p.grad, q.grad, 2.0**-22)
    assert float(clip_grad_norm_(parameters, 1.0, foreach=foreach)) == pytest.approx(1, rel=1e-5)


def test__clip_grad_value__bounds_values_not_elements():
    p = nn.Parameter(sct.scaled(torch.zeros(4)))
    p.grad = sct.scaled(torch.tensor([-9.0, -0.5, 0.5, 9.0]))
    clip_grad_value_([p], 1.0)
    assert_holds(p.grad, torch.tensor([-1.0, -0.5, 0.5, 1.0]), 0)


def model_and_batches(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return sct.scale_model(model, "unit"), torch.randn(4, 6, 8)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


@every_form
def test__five_steps_of_a_model__have_the_losses_of_float32(name, form):
    """Its products have 8-bit operands, and a step without a rule would be an error."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    model = sct.scale_model(copy.deepcopy(plain), "unit")
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    with sct.on_missing("error"):
        for m in (plain, model):
            optimizer = OPTIMIZERS[name][0](m.parameters(), **options_of(name, form))
            for _ in range(5):
                optimizer.zero_grad()
                loss = (m(x) - y).square().mean()
                loss.backward()
                optimizer.step()
            losses.append((m(x) - y).square().mean().item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert not math.isclose(losses[0], y.square().mean().item(), rel_tol=1e-3)


def test__lbfgs__finds_the_minimum_of_plain_float32():
    target = torch.tensor([1.0, -2.0, 0.5])
    found = []
    for wrap in (torch.Tensor.clone, sct.scaled):
        p = nn.Parameter(wrap(torch.zeros(3)))
        optimizer = optim.LBFGS([p], lr=0.5, line_search_fn="strong_wolfe")

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = ((p - target).square() * torch.tensor([1.0, 4.0, 0.25])).sum()
            loss.backward()
            return loss

        with sct.on_missing("error"):
            for _ in range(3):
                optimizer.step(closure)
        found.append(dequantized(p))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], target.double(), rtol=1e-3, atol=1e-3)


def test__a_scaler__unscales_in_the_fused_step_and_skips_infinities():
    parameters = scaled_parameters()
    optimizer = optim.AdamW(parameters, lr=0.01, fused=True)
    for infinite in (False, True):
        before = [dequantized(p).clone() for p in parameters]
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(infinite))
        for p, g in zip(parameters, gradients(1, 4.0)[0], strict=True):
            p.grad = sct.scaled(g)
        optimizer.step()
        moved = [
            not torch.equal(dequantized(p), b) for p, b in zip(parameters, before, strict=True)
        ]
        assert moved == [not infinite] * 2
    for p, want in zip(parameters, reference("adamw", torch.float32, steps=1), strict=True):
        assert_holds(p, want, 2.0**-20)


def test__accumulated_gradients__are_the_sum():
    model, batches = model_and_batches()
    total = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for x in batches:
        for t, g in zip(
            total,
            torch.autograd.grad(model(x).square().mean(), list(model.parameters())),
            strict=True,
        ):
            t += dequantized(g)
    for x in batches:
        model(x).square().mean().backward()
    for p, t in zip(model.parameters(), total, strict=True):
        assert isinstance(p.grad, sct.ScaledTensor)
        assert_holds(p.grad, t, 2.0**-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test__a_compiled_step__is_the_eager_one(name):
    """Compiles without fullgraph, which torch's own optimizers refuse. If torch compiles another
    form of the step (tensors and `where` for eager numbers and branches), the scale may differ."""
    make, options = OPTIMIZERS[name]

    def train(compiled: bool) -> list[nn.Parameter]:
        parameters = [nn.Parameter(sct.scaled(p)) for p in plain_parameters(torch.float32)]
        parameters = parameters[: None if name in SEVERAL else 1]
        optimizer = make(parameters, **options)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        rng = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in parameters:
                p.grad = sct.scaled(torch.randn(p.shape, generator=rng) * 2.0**-20)
            step()
        return parameters

    for eager, compiled in zip(train(False), train(True), strict=True):
        assert name in OTHER_FORM or torch.equal(eager.scale, compiled.scale)
        assert torch.isfinite(compiled.rms)
        assert torch.allclose(eager.dequantize(), compiled.dequantize(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("to_none", [True, False])
def test__zero_grad__leaves_nothing_behind(to_none):
    model, (x, *_) = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    first = [dequantized(p.grad).clone() for p in model.parameters()]
    optimizer.zero_grad(set_to_none=to_none)
    assert all(p.grad is None or not dequantized(p.grad).any() for p in model.parameters())
    model(x).square().mean().backward()
    for p, g in zip(model.parameters(), first, strict=True):
        assert_holds(p.grad, g, 0 if to_none else 2.0**-8)


@pytest.mark.parametrize(
    ("name", "form"),
    [(n, f) for n in ("momentum", "adamw", "adafactor", "muon") for f in forms_of(n)],
)
def test__a_saved_optimizer__goes_on_bit_for_bit(name, form, tmp_path):
    make, options = OPTIMIZERS[name][0], options_of(name, form)
    (model, batches), (twin, _) = model_and_batches(), model_and_batches()
    optimizers = [make(matrices(m), **options) for m in (model, twin)]

    def steps(m, optimizer, chosen):
        for x in chosen:
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()

    steps(model, optimizers[0], batches[:2])
    torch.save((model.state_dict(), optimizers[0].state_dict()), tmp_path / "checkpoint")
    weights, states = torch.load(tmp_path / "checkpoint", weights_only=True)
    twin.load_state_dict(weights)
    optimizers[1].load_state_dict(states)
    for m, o in zip((model, twin), optimizers, strict=True):
        steps(m, o, batches[2:])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_shifted(p.detach(), q.detach(), 0)


def test__groups_and_schedulers__set_each_rate():
    parameters = scaled_parameters()
    start = [dequantized(p).clone() for p in parameters]
    optimizer = torch.optim.SGD(
        [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.25
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        for p in parameters:
            p.grad = sct.scaled(torch.ones(p.shape))
        optimizer.step()
        schedule.step()
    for p, s, lr in zip(parameters, start, (0.5, 0.25), strict=True):
        assert_holds(p, s - 1.5 * lr, 2.0**-22)


OURS = {
    "torch": (optim.AdamW, {}),
    "ours": (sct.optim.AdamW, {}),
    "ours in E4M3": (sct.optim.AdamW, {"state_format": "e4m3fn"}),
}
every_adamw = pytest.mark.parametrize("name", OURS)


def trained_with_an_average(name: str, scaled: bool, average: object) -> nn.Module:
    make, options = OURS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    if scaled:
        sct.scale_model(model, "unit")
    optimizer = make(model.parameters(), lr=0.01, **options)
    averaged = optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        averaged.update_parameters(model)
    return averaged


@every_adamw
@pytest.mark.parametrize(
    "average", [None, optim.swa_utils.get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"]
)
def test__averages_of_weights__are_those_of_plain_ones(name, average):
    got = trained_with_an_average(name, True, average)
    want = trained_with_an_average("torch", False, average)
    torch.manual_seed(0)
    first = nn.Linear(8, 16).weight
    moved = want.module[0].weight - first
    for p, q in zip(got.module.parameters(), want.module.parameters(), strict=True):
        assert isinstance(p, sct.ScaledTensor)
        # The gradients are of products in FP8, and Adam makes steps of the same size from them.
        assert float((dequantized(p) - q).norm() / moved.norm()) < 0.2
    assert float(moved.norm()) > 0


@every_adamw
def test__a_loss_scaler__and_accumulated_gradients_step_as_one_batch_does(name):
    """Multiply by 2^16 and back, in two halves: the power of two goes into scales."""
    make, options = OURS[name]
    trained = []
    for halves, scale in ((1, 1.0), (2, 2.0**16)):
        model, batches = model_and_batches()
        optimizer = make(model.parameters(), lr=0.01, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            optimizer.zero_grad()
            for part in batches[0].chunk(halves):
                scaler.scale(model(part).square().sum()).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
        trained.append((float(norm), model))
    (norm, one), (other_norm, other) = trained
    assert other_norm == pytest.approx(norm, rel=0.05)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_holds(q.detach(), dequantized(p), 0.06)


@pytest.mark.parametrize("optimizer", [optim.Muon, sct.optim.Muon])
def test__muon__steps_under_any_factor_of_the_loss(optimizer):
    """Muon divides its gradient by the gradient's norm, in place, and then multiplies it. A scale
    that stays behind made its products saturate, and the weights NaN."""
    losses = {}
    for exponent in (0, -8, -14):
        torch.manual_seed(0)
        layer = sct.scale_model(nn.Linear(32, 48, bias=False))
        steps = optimizer(layer.parameters(), lr=1e-2, weight_decay=0.0)
        x, y = torch.randn(64, 32) + 3, torch.randn(64, 48)
        found = losses[exponent] = []
        for _ in range(4):
            steps.zero_grad()
            loss = (layer(x) - y).square().mean()
            (loss * 2.0**exponent).backward()
            steps.step()
            found.append(loss.item())
    assert losses[0][-1] < 0.97 * losses[0][0]
    assert losses[-8] == pytest.approx(losses[0], rel=1e-2)
    assert losses[-14] == pytest.approx(losses[0], rel=1e-2)
