"""torch.optim, unmodified, steps scaled parameters as it steps plain ones, and further down."""

import pytest
import torch
from assertions import assert_holds, assert_shifted, dequantized
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import scaledtensor as sct

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
for_loop_and_foreach = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])


def plain_parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(6, 5, generator=rng).to(dtype), torch.zeros(5, dtype=dtype)]


def scaled_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(sct.scaled(p)) for p in plain_parameters(dtype)]


def gradients(steps: int, size: float) -> list[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [[torch.randn(s, generator=rng) * size for s in ((6, 5), (5,))] for _ in range(steps)]


def train(name, parameters, *, foreach=False, size=1.0, steps=20, **more):
    """`parameters` after `steps` steps on Gaussian gradients of RMS `size`."""
    make, options = OPTIMIZERS[name]
    optimizer = make(parameters, foreach=foreach, **options | more)
    for grads in gradients(steps, size):
        for p, g in zip(parameters, grads, strict=True):
            p.grad = sct.scaled(g.to(p.dtype)) if isinstance(p, sct.ScaledTensor) else g.to(p.dtype)
        optimizer.step()
    return parameters, optimizer


def reference(name, dtype, **options):
    return train(name, [nn.Parameter(p) for p in plain_parameters(dtype)], **options)[0]


@for_loop_and_foreach
@every_optimizer
def test__twenty_steps__are_those_of_plain_float32(name, foreach):
    got, _ = train(name, scaled_parameters(), foreach=foreach)
    for p, want in zip(got, reference(name, torch.float32, foreach=foreach), strict=True):
        assert isinstance(p, sct.ScaledTensor)
        assert p.format.name == "fp32"
        assert_holds(p, want, 2.0**-21)


@for_loop_and_foreach
@pytest.mark.parametrize("eps", [1e-8, 1e-30])
@pytest.mark.parametrize("power", [-20, -40, -60])
def test__tiny_gradients__step_as_in_float64(power, eps, foreach):
    """Their squares are no float32 at 2**-60 or so; the scale holds them, and eps = 1e-8 too."""
    size = 2.0**power
    got, optimizer = train("adamw", scaled_parameters(), size=size, eps=eps, foreach=foreach)
    exact = reference("adamw", torch.float64, size=size, eps=eps)
    for p, want, start in zip(got, exact, plain_parameters(torch.float64), strict=True):
        moved, wanted = dequantized(p) - start, want.detach() - start
        # Twenty roundings of float32 parameters of size 2 to 4.
        torch.testing.assert_close(moved, wanted, rtol=2.0**-16, atol=2.0**-18)
        second = optimizer.state[p]["exp_avg_sq"]
        assert 0.1 < float(dequantized(second).mean()) / (size**2 * 0.02) < 3
    if eps == 1e-30:
        assert float((dequantized(got[0]) - plain_parameters(torch.float64)[0]).abs().max()) > 0.05


def test__the_same_tiny_gradients__are_lost_by_plain_float32():
    """Otherwise the test above would test nothing."""
    got = reference("adamw", torch.float32, size=2.0**-70, eps=1e-40)
    exact = reference("adamw", torch.float64, size=2.0**-70, eps=1e-40)
    assert (got[0] - exact[0]).abs().max().item() > 0.01


@pytest.mark.parametrize("shift", [-30, 12])
@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test__a_loss_scale__moves_no_bit(name, shift):
    """SGD on gradients times 2**k at lr times 2**-k."""
    one, _ = train(name, scaled_parameters())
    lr = 0.1 * 2.0**-shift
    other, _ = train(name, scaled_parameters(), size=2.0**shift, lr=lr)
    for p, q in zip(one, other, strict=True):
        assert_shifted(p.detach(), q.detach(), 0)


@for_loop_and_foreach
@pytest.mark.parametrize("shift", [-30, 12])
def test__adam_states__move_only_their_scales(shift, foreach):
    """Adam forgets the loss scale, if eps does too: bit-identical steps."""
    (one, a), (other, b) = (
        train("adamw", scaled_parameters(), size=2.0**k, eps=1e-8 * 2.0**k, foreach=foreach)
        for k in (0, shift)
    )
    for p, q in zip(one, other, strict=True):
        assert_shifted(p.detach(), q.detach(), 0)
        assert_shifted(a.state[p]["exp_avg"], b.state[q]["exp_avg"], shift)
        assert_shifted(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"], 2 * shift)


@for_loop_and_foreach
@every_optimizer
def test__a_bfloat16_master__stays_one_and_follows(name, foreach):
    got, _ = train(name, scaled_parameters(torch.bfloat16), foreach=foreach, steps=5)
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


@for_loop_and_foreach
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test__a_saved_optimizer__goes_on_bit_for_bit(name, foreach, tmp_path):
    make, options = OPTIMIZERS[name]
    (model, batches), (twin, _) = model_and_batches(), model_and_batches()
    optimizers = [make(m.parameters(), foreach=foreach, **options) for m in (model, twin)]

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
