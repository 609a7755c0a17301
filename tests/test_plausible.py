"""Expected RMS that repeated, correlated terms carry away are measured, so no value is lost.

The rules add the squares of terms. If terms cancel, and the result enters the next sum, then the
expectation grows without end while the values do not.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from correlated import smoothed
from tensors import gaussian, value_of
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.recipes import Unit

WIDE = Unit(forward="fp32", gradient="fp32", activation="fp32")


def off(got: Tensor, want: Tensor) -> float:
    return float((value_of(got).float() - want).norm() / want.norm())


# --- results ---------------------------------------------------------------------------------


def inverted(x: Any, rounds: int) -> Any:
    """The inverse by Newton's iteration."""
    y = x.T / (x.abs().sum(0).max() * x.abs().sum(1).max())
    for _ in range(rounds):
        y = y @ (2 * torch.eye(len(x)) - x @ y)
    return y


@pytest.mark.parametrize("recording", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("power", [-18, 0, 18])
def test__an_expectation_that_runs_away__loses_no_value(
    recording: Callable[[], Any], power: int
) -> None:
    x, eye = gaussian(16, 8, power=power), 2 * torch.eye(16) + gaussian(16, 16) / 10
    with recording():
        heat, inverse = smoothed(sct.scaled(x), 300), inverted(sct.scaled(eye), 20)
    assert off(heat, smoothed(x, 300)) < 1e-5
    assert off(inverse, inverted(eye, 20)) < 1e-5
    for made in (heat, inverse):
        assert 2.0**-61 < made.rms < 2.0**61


class Smoothing(nn.Module):
    """A graph network whose rounds have no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(smoothed(self.into(x), 200))


@pytest.mark.parametrize(("recipe", "tolerance"), [("unit", 0.15), (WIDE, 1e-4)])
def test__a_model_of_many_correlated_rounds__has_its_gradients(
    recipe: Any, tolerance: float
) -> None:
    torch.manual_seed(0)
    reference = Smoothing()
    model = sct.scale_model(copy.deepcopy(reference), recipe)
    for net in (reference, model):
        (net(gaussian(16, 32)) - gaussian(16, 4, seed=1)).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert off(p.grad, q.grad) < tolerance


class Scan(nn.Module):
    """The parallel form of a gated recurrence: each factor is huge where the other vanishes."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.into, self.decay, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        decay = -self.rate * nn.functional.softplus(self.decay(x)).cumsum(1)
        return self.out(decay.exp() * (self.into(x) * (-decay).exp()).cumsum(1))


class Rendering(nn.Module):
    """Colours along rays, as NeRF adds them; the last interval has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        raw, length = self.net(x), torch.full((1, x.shape[1]), 0.1)
        length[:, -1] = 1e10
        opaque = 1 - torch.exp(-nn.functional.relu(raw[..., 3]) * length)
        clear = torch.cat([torch.ones(len(x), 1), 1 - opaque + 1e-10], 1).cumprod(1)
        return (opaque * clear[:, :-1]).unsqueeze(2) * raw[..., :3].sigmoid()


def prepared(
    made: Callable[[], nn.Module], recipe: Any, mode: str
) -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
    """Return a model in float32, the same under a recipe, and a function that runs the latter."""
    torch.manual_seed(0)
    torch.compiler.reset()
    reference = made()
    model = sct.scale_model(copy.deepcopy(reference), recipe)
    compiled = mode == "compiled"
    return reference, model, torch.compile(model, backend="aot_eager") if compiled else model


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("power", [-18, 0, 18])
@pytest.mark.parametrize(("recipe", "tolerance"), [("unit", 0.2), (WIDE, 1e-3)])
@pytest.mark.parametrize(
    "made", [lambda: Scan(1.0), lambda: Scan(1.5), Rendering], ids=["scan", "steep", "rendering"]
)
def test__factors_that_are_huge_where_the_other_vanishes__have_their_gradients(
    made: Callable[[], nn.Module], recipe: Any, tolerance: float, power: int, mode: str
) -> None:
    reference, model, run = prepared(made, recipe, mode)
    for net, forward in ((reference, reference), (model, run)):
        net.zero_grad()
        (forward(gaussian(8, 20, 16)).square().mean() * 2.0**power).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert off(p.grad, q.grad) < tolerance
        assert float(p.grad.norm() / q.grad.norm()) == pytest.approx(1, abs=tolerance)


class Forward(nn.Module):
    """The forward algorithm of a hidden Markov model, without a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.moves = nn.Linear(8, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        seen, moves = self.into(x).softmax(-1), self.moves.weight.softmax(-1)
        state, sums = seen[:, 0] / 5, []
        for i in range(1, 40):
            state = (state @ moves) * seen[:, i]
            sums.append(state.sum())
        return sums


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize(("recipe", "tolerance"), [("unit", 0.1), (WIDE, 1e-4)])
def test__products_of_one_sign__keep_their_order_in_a_loop(
    recipe: Any, tolerance: float, mode: str
) -> None:
    reference, _, run = prepared(Forward, recipe, mode)
    x = gaussian(3, 40, 8)
    for i, (got, want) in enumerate(zip(run(x), reference(x), strict=True), 1):
        assert float(value_of(got).log() - want.log()) / i == pytest.approx(0, abs=tolerance)


def test__a_product_of_one_sign__has_its_measured_rms() -> None:
    a, b = (sct.scaled(gaussian(16, 16, seed=i)).abs() for i in (0, 1))
    product = a @ b
    assert product.nonnegative
    assert float(product.rms) == pytest.approx(float(value_of(product).square().mean().sqrt()))
    assert 0.7 <= float(product.rms / product.scale) <= 1.5


def test__an_expectation_of_zero__stays() -> None:
    x = sct.scaled(torch.zeros(4, 4))
    assert (x * 2).rms == 0


# --- optimizers ------------------------------------------------------------------------------


def orthogonal(g: Any, steps: int = 5) -> Any:
    """Newton and Schulz's iteration, as programs around Muon write it (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


class ByHand(torch.optim.Optimizer):
    """Muon as programs write it by hand."""

    def __init__(self, parameters: Any, function: Callable[[Any], Any]) -> None:
        super().__init__(parameters, {"lr": 0.02})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p.grad)
            state["momentum"].lerp_(p.grad, 0.05)
            update = self.function(p.grad.lerp_(state["momentum"], 0.95))
            p.add_(update, alpha=-0.02)


def orthogonal_steps(model: nn.Module, how: str) -> float:
    compiled = torch.compile(orthogonal, backend="aot_eager")
    optimizer = ByHand(model.parameters(), compiled if how == "function" else orthogonal)
    x, y = gaussian(64, 32), gaussian(64, 32, seed=1)
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("how", ["eager", "function"])
def test__an_orthogonal_update_by_hand__trains_as_in_bfloat16(how: str) -> None:
    """The products of an optimizer's step have no weight, and their terms cancel."""
    torch.manual_seed(0)
    torch.compiler.reset()
    reference = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
    model = sct.scale_model(copy.deepcopy(reference))
    want = orthogonal_steps(reference, "eager")
    assert abs(orthogonal_steps(model, how) / want - 1) < 0.01


class Noting(torch.optim.Optimizer):
    """Notes how far each update is from plain bfloat16's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.off: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.off.append(off(orthogonal(p.grad), orthogonal(value_of(p.grad)).float()))


def test__an_orthogonal_update_by_hand__has_the_error_of_bfloat16() -> None:
    torch.manual_seed(0)
    model = sct.scale_model(nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))))
    optimizer = Noting([p for p in model.parameters() if p.dim() == 2])
    (model(gaussian(64, 64)) - gaussian(64, 64, seed=1)).square().mean().backward()
    optimizer.step()
    assert len(optimizer.off) == 2
    assert max(optimizer.off) < 0.1


def test__products_of_a_closure__are_cast_as_ever() -> None:
    """A closure runs the model in an optimizer's step, with gradients."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.Linear(32, 32))
    x, seen = gaussian(8, 32), []

    def closure() -> Tensor:
        y = model(x)
        product = y @ y.mT  # without a weight
        seen.append(product.dequantize().clone())
        loss = product.square().mean()
        loss.backward()
        return loss

    closure()
    torch.optim.SGD(model.parameters(), lr=0.0).step(closure)
    assert torch.equal(*seen)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(("recipe", "most"), [("unit", 0.12), (WIDE, 1e-3)])
def test__lbfgs__trains(search: str | None, recipe: Any, most: float) -> None:
    """Its directions are sums of terms that cancel, and its steps write them into parameters."""
    torch.manual_seed(1)
    x = gaussian(64, 8)
    y = torch.sin(x).sum(1, keepdim=True)
    model = sct.scale_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), recipe)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=search)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(6)]
    assert losses[-1] < most, losses
    for p in model.parameters():
        assert p.rms < 16 * p.dequantize().square().mean().sqrt() * 16


def test__a_parameter_whose_expectation_leaves_its_scale__is_measured() -> None:
    x = nn.Parameter(sct.scaled(gaussian(16, 16)))
    other = sct.scaled(gaussian(16, 16, power=-4))
    other.rms.fill_(2.0**20)  # as if correlated terms had carried it away
    with torch.no_grad():
        x.add_(other)
    want = (gaussian(16, 16) + gaussian(16, 16, power=-4)).square().mean().sqrt()
    torch.testing.assert_close(x.rms, want, rtol=1e-5, atol=0)
