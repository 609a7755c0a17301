"""Programs that people compile: losses inside and outside of the compiled code, custom gradients,
whole steps, compiled optimizers, and graph breaks anywhere."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from assertions import dequantized
from tensors import gaussian
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import scaledtensor as sct
from scaledtensor.compat.torchao import float8 as ao
from scaledtensor.errors import MissingRuleWarning
from scaledtensor.scales.powers import is_power_of_two

RECIPES = ["unit", "current", "delayed", "mxfp8"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class LM(nn.Module):
    """A model that returns the loss beside the logits, as models of transformers do when given
    labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 32)

    def hidden(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.view(-1, 32), labels.view(-1)), logits


def lm() -> LM:
    torch.manual_seed(0)
    return sct.scale_model(LM())


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 32, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    return drawn[0], drawn[1]


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


def assert_same_gradients(eager: nn.Module, other: nn.Module) -> None:
    """Both have gradients of the same values. A bias has a plain gradient in eager code if the loss
    is a plain sum."""
    for (name, p), q in zip(eager.named_parameters(), other.parameters(), strict=True):
        assert isinstance(q.grad, sct.ScaledTensor), name
        assert is_power_of_two(q.grad.scale), name
        assert torch.equal(dequantized(p.grad), dequantized(q.grad)), name


# --- what is done with the output ------------------------------------------------------------

# The weights fit bfloat16, the format of the output and therefore of its gradient.
WEIGHTS = gaussian(16, 32, seed=1).bfloat16().float()

BACKWARD: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda y: y.sum().backward(),
    "mean": lambda y: y.mean().backward(),
    "weighted": lambda y: (y * WEIGHTS).sum().backward(),
    "column": lambda y: y[:, 0].sum().backward(),
    "as_float": lambda y: y.float().sum().backward(),
    "own_gradient": lambda y: y.backward(WEIGHTS),
    "own_scaled_gradient": lambda y: y.backward(torch.ones_like(y)),
    "two_losses": lambda y: (y.square().mean() + y.sum()).backward(),
}


@pytest.mark.parametrize("name", BACKWARD)
def test__a_loss_outside_of_the_compiled_model(name: str) -> None:
    eager = sct.scale_model(mlp())
    model = copy.deepcopy(eager)
    x = torch.randn(16, 32)
    BACKWARD[name](eager(x))
    BACKWARD[name](compiled(model)(x))
    assert_same_gradients(eager, model)


@pytest.mark.parametrize("recipe", RECIPES)
def test__the_sum_of_what_a_compiled_model_returns__under_each_recipe(recipe: str) -> None:
    eager = sct.scale_model(mlp(), recipe)
    model = copy.deepcopy(eager)
    x = torch.randn(16, 32)
    eager(x).sum().backward()
    compiled(model)(x).sum().backward()
    assert_same_gradients(eager, model)


def test__the_example_of_torchao() -> None:
    eager = ao.convert_to_float8_training(mlp())
    model = copy.deepcopy(eager)
    x = torch.randn(16, 32)
    eager(x).sum().backward()
    compiled(model)(x).sum().backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test__a_gradient_through_autograd_grad() -> None:
    eager = sct.scale_model(mlp())
    model = copy.deepcopy(eager)
    x = torch.randn(16, 32)
    expected = torch.autograd.grad(eager(x), list(eager.parameters()), WEIGHTS)
    found = torch.autograd.grad(compiled(model)(x), list(model.parameters()), WEIGHTS)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.dequantize(), b.dequantize())


def test__logits_beside_the_loss__need_no_gradient() -> None:
    eager, model = lm(), lm()
    eager(*tokens())[0].backward()
    loss, logits = compiled(model)(*tokens())
    assert isinstance(logits, sct.ScaledTensor)
    loss.backward()
    assert_same_gradients(eager, model)


def test__one_compiled_region_after_another() -> None:
    eager, model = lm(), lm()
    t, _ = tokens()
    eager.head(eager.hidden(t)).sum().backward()
    hidden = compiled(model.hidden)
    total = torch.compile(lambda x: model.head(x).sum(), backend="aot_eager")
    total(hidden(t)).backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(dequantized(p.grad), dequantized(q.grad))


def test__other_subclasses__are_told_what_torch_tells_them() -> None:
    """A gradient that becomes a ScaledTensor changes nothing for another class."""
    p = nn.Parameter(TwoTensor(torch.randn(4), torch.randn(4)))
    y = compiled(lambda p: p * 2)(p)
    with pytest.raises(RuntimeError, match="Expected a TwoTensor tangent but got a plain Tensor"):
        y.backward(torch.ones(4))


# --- what is inside --------------------------------------------------------------------------


def test__backward_inside_of_the_compiled_function() -> None:
    eager, model = lm(), lm()
    eager(*tokens())[0].backward()

    @compiled
    def step(t: Tensor, y: Tensor) -> Tensor:
        loss, _ = model(t, y)
        loss.backward()
        return loss

    step(*tokens())
    assert_same_gradients(eager, model)


def test__a_whole_step_inside_of_the_compiled_function() -> None:
    eager, model = lm(), lm()

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., float]:
        def step(t: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss, _ = model(t, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return step

    plain = step_of(eager, torch.optim.SGD(eager.parameters(), lr=0.1))
    whole = compiled(step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(2):
        assert plain(*tokens()) == whole(*tokens())


def test__a_graph_that_breaks_anywhere__leaves_whole_tensors() -> None:
    eager, model = lm(), lm()
    eager(*tokens())[0].backward()
    seen = []

    @compiled
    def loss_of(t: Tensor, y: Tensor) -> Tensor:
        x = model.hidden(t)
        torch._dynamo.graph_break()
        seen.append((type(x), x.format.name))
        logits = model.head(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.view(-1, 32), y.view(-1))

    loss_of(*tokens()).backward()
    assert seen == [(sct.ScaledTensor, "bf16")]
    assert_same_gradients(eager, model)


@pytest.mark.parametrize("form", ["single", "foreach"])
def test__a_compiled_adamw__expects_of_its_moments_what_the_eager_one_does(form: str) -> None:
    """Dynamo spells their updates with other operators. One is x + w (y - x), with terms that are
    not independent. Others are a product and a sum, which hide that squares are squares."""

    def trained(compile_it: bool) -> dict[str, tuple[float, Tensor]]:
        torch.manual_seed(0)
        model = sct.scale_model(nn.Sequential(nn.Linear(32, 32)))  # Dynamo unrolls the parameters
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=form == "foreach")
        step = compiled(optimizer.step) if compile_it else optimizer.step
        x = gaussian(16, 32, seed=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", MissingRuleWarning)
            for _ in range(8):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                step()
        weight = model[0].weight
        moments = optimizer.state[weight]
        held = {"weight": weight, **{k: moments[k] for k in ("exp_avg", "exp_avg_sq")}}
        return {k: (float(v.rms), v.detach().dequantize()) for k, v in held.items()}

    found = trained(True)
    for name, (rms, value) in trained(False).items():
        # One measures the scale, and the other expects it.
        assert 0.5 <= found[name][0] / rms <= 2, name
        torch.testing.assert_close(found[name][1], value, rtol=1e-3, atol=1e-4 * rms)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test__a_function_with_the_backward_pass_and_the_step__does_as_eager_code(optimizer):
    """Dynamo compiles the Python frames beside the graph break of `backward`."""
    torch.compiler.reset()
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = sct.scale_model(nn.Linear(8, 8))
        stepped = optimizer(model.parameters(), 1e-2)

        def step(x, model=model, stepped=stepped):
            y = model(x)
            y.square().mean().backward()
            stepped.step()
            stepped.zero_grad()
            return y.detach()

        run = torch.compile(step, backend="aot_eager") if compiles else step
        xs = gaussian(3, 4, 8, seed=1)
        found.append(
            ([run(x).dequantize() for x in xs], [p.dequantize() for p in model.parameters()])
        )
    for eager, compiled in zip(*found, strict=True):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
