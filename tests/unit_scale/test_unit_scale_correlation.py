"""Attention without a causal mask makes tokens alike, and `unit_scale` allows for it."""

import copy
import pickle

import pytest
import torch
from tensors import gaussian
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
import scaledtensor.functional as U
from scaledtensor import mup
from scaledtensor.models import interpose

WIDTH, LAYERS = 32, 4


class Layer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.causal = nn.LayerNorm(WIDTH), causal
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=self.causal)
        self.seen = rms(y)
        return x + self.o(y)


def stack(causal: bool = False, length: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(causal) for _ in range(LAYERS)))
    return sct.unit_scale(model, (tokens(length),))


def tokens(length: int) -> Tensor:
    return gaussian(8, length, WIDTH, seed=1)


def rms(x: Tensor) -> float:
    held = x.qdata if isinstance(x, sct.ScaledTensor) else x
    return float(held.detach().double().square().mean().sqrt())


def correlations(model: nn.Module) -> list[tuple[float, ...]]:
    (transform,) = interpose.transforms(model)
    return [
        tuple(s.work.correlation for (name, _), s in plan.steps.items() if "attention" in name)
        for plan in transform.plans.values()
    ]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("length", [2, 16, 256])
def test__what_every_layer_reads__is_of_unit_scale_at_any_length(length: int, scaled: bool) -> None:
    """The plan is made for 16 tokens. With independent tokens the last layer would be at 9, for
    256."""
    model = stack()
    if scaled:
        sct.scale_model(model)
    model(tokens(length))
    assert all(0.6 < layer.seen < 1.7 for layer in model), [layer.seen for layer in model]


def test__tokens__become_alike_from_layer_to_layer() -> None:
    (found,) = correlations(stack())
    assert found[0] < 0.05
    assert list(found) == sorted(found)
    assert 0.2 < found[-1] < 1


def test__causal_attention__has_the_law_of_independent_tokens() -> None:
    assert correlations(stack(causal=True)) == [(None,) * LAYERS]


def test__all_plans__have_the_correlations_of_initialisation() -> None:
    model = stack()
    (first,) = correlations(model)
    with torch.no_grad():
        for p in model.parameters():
            if mup.tags(p).mup_type != "norm":
                p.mul_(3).add_(0.1)
    model.eval()(tokens(8))
    assert correlations(model) == [first, first]
    assert correlations(pickle.loads(pickle.dumps(model))) == [first, first]
    # The plans do not depend on the first way of calling, nor on earlier learning.
    late = sct.unit_scale(copy.deepcopy(interpose.remove(model)), initialize=False)
    late(tokens(16))
    assert correlations(late) == [first]


def test__a_plan_of_other_attentions__changes_those_of_none() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(False) for _ in range(LAYERS))

        def forward(self, x: Tensor, short: Tensor | None = None) -> Tensor:
            for layer in self.layers if short is None else self.layers[:2]:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = sct.unit_scale(Model(), (tokens(16),))
    model(tokens(16), tokens(1))
    model.eval()(tokens(8))
    first, other, last = correlations(model)
    assert len(other) == 2
    assert last == first


def test__measuring__leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(16), *(Layer(False) for _ in range(2)))
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sct.unit_scale(model, (tokens(16),), initialize=False)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("keys", [16, 128])
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("scaled", [False, True])
def test__attention__is_of_unit_scale_at_its_correlation(
    correlation: float, keys: int, scaled: bool
) -> None:
    """Values and keys share a part, and the plain gradients have free scales."""
    rng = torch.Generator().manual_seed(0)

    def alike(*shape: int) -> Tensor:
        own = torch.randn(16, 4, *shape, generator=rng)
        shared = torch.randn(16, 4, 1, shape[1], generator=rng)
        return (correlation**0.5 * shared + (1 - correlation) ** 0.5 * own).requires_grad_()

    query = torch.randn(16, 4, keys, 64, generator=rng).requires_grad_()
    given = [query, alike(keys, 64), alike(keys, 64)]
    if scaled:
        held = [sct.scaled(x.detach()) for x in given]
        out = U.scaled_dot_product_attention(*held, correlation=correlation)
        assert 0.7 < rms(out) < 1.4
        return
    out = U.scaled_dot_product_attention(*given, constraint=None, correlation=correlation)
    assert 0.7 < rms(out) < 1.4
    for grad in torch.autograd.grad(out, given, torch.randn(out.shape, generator=rng)):
        assert 0.7 < float(grad.std()) < 1.4
