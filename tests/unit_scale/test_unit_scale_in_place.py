"""A transformed model that writes in place computes the result of its out-of-place spelling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import gaussian
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor import errors

WIDTH = 16
PROGRAMS: dict[str, Callable[..., Tensor]] = {}


def program(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    PROGRAMS[forward.__name__] = forward
    return forward


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], in_place: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.run, self.in_place = forward, in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x, self.in_place)


@program
def activation(m: Model, x: Tensor, in_place: bool) -> Tensor:
    return m.b(F.relu(m.a(x), inplace=in_place))


@program
def activations(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = F.silu(F.dropout(m.a(x), 0.0, True, in_place), inplace=in_place)
    x = F.hardtanh(m.b(x), inplace=in_place)
    return m.b(F.elu(m.c(x), inplace=in_place))


@program
def residual_of_a_basic_block(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    y = m.norm(m.c(F.relu(m.norm(m.b(x)), inplace=in_place)))
    if in_place:
        y += x
        return y.relu_()
    return F.relu(y + x)


@program
def skip_that_is_written_first(m: Model, x: Tensor, in_place: bool) -> Tensor:
    if in_place:
        x = x + 0
        skip = x
        x += 1
        x = m.b(x)
        x += skip
    else:
        skip = x + 1
        x = m.b(skip) + skip
    return m.c(x)


@program
def skip_of_a_product_that_is_written_first(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    if in_place:
        skip = x
        x += 1
        y = m.b(x.tanh())
        y += skip
        return m.c(y)
    x = x + 1
    return m.c(m.b(x.tanh()) + x)


@program
def formula(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    if in_place:
        x.add_(1)
        x.mul_(0.5)
        x.exp_()  # Its derivative reads its result.
    else:
        x = ((x + 1) * 0.5).exp()
    return m.b(x)


@program
def through_a_view(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    if in_place:
        x.view(-1, 4, WIDTH // 4)[:, 1].mul_(8.0)
    else:
        parts = x.view(-1, 4, WIDTH // 4)
        x = torch.stack((parts[:, 0], parts[:, 1] * 8.0, *parts.unbind(1)[2:]), 1).view(-1, WIDTH)
    return m.b(x)


@program
def by_index(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    if not in_place:
        return m.b(torch.where(torch.arange(WIDTH) < 8, x, x.exp()))
    y = torch.zeros_like(x)
    y[:, :8] = x[:, :8]
    y[:, 8:] = x[:, 8:].exp()
    return m.b(y)


@program
def product(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    if in_place:
        return m.b(x).addmm_(x.tanh(), m.c.weight)
    return torch.addmm(m.b(x), x.tanh(), m.c.weight)


@program
def queries_and_keys(m: Model, x: Tensor, in_place: bool) -> Tensor:
    q, k, v = (layer(x).view(4, -1, 2, 8).transpose(1, 2) for layer in (m.a, m.b, m.c))
    if in_place:
        q *= 0.5
        k.mul_(2.0)
    else:
        q, k = q * 0.5, k * 2.0
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, WIDTH)


@program
def loss(m: Model, x: Tensor, in_place: bool) -> Tensor:
    value = F.mse_loss(m.b(m.a(x)), x)
    penalty = 0.1 * m.a.weight.square().mean()
    if in_place:
        value += penalty
        return value
    return value + penalty


@program
def shape(m: Model, x: Tensor, in_place: bool) -> Tensor:
    x = m.a(x)
    if in_place:
        x.unsqueeze_(0)
        x.exp_()
    else:
        x = x.unsqueeze(0).exp()
    return m.b(x)


def results(how: str, name: str, in_place: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(PROGRAMS[name], in_place)
    if how != "simulate_fp8":
        sct.unit_scale(model)
    if how != "unit_scale":
        sct.simulate_fp8(model)
    x = gaussian(24, WIDTH).requires_grad_()
    y = model(x)
    (y * gaussian(*y.shape)).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(model(x.detach().clone()), y.detach())
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("how", ["unit_scale", "simulate_fp8", "both"])
@pytest.mark.parametrize("name", PROGRAMS)
def test__a_model_that_writes_in_place__is_the_one_that_does_not(name: str, how: str) -> None:
    torch.testing.assert_close(results(how, name, True), results(how, name, False))


@pytest.mark.parametrize("name", ["residual_of_a_basic_block", "skip_that_is_written_first"])
def test__compiled__it_is_the_same(name: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(PROGRAMS[name], True)
    x = gaussian(24, WIDTH)
    sct.simulate_fp8(sct.unit_scale(model, (x,)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters = [p for p in model.parameters() if p is not model.a.bias]
    found, expected = (
        torch.autograd.grad(run(x).square().sum(), parameters, allow_unused=True)
        for run in (compiled, model)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test__what_is_written__is_seen_under_every_name_of_the_tensor() -> None:
    """The result of an in-place call is its first argument, and views of it are views of it."""
    seen: list[Any] = []

    def forward(m: Model, x: Tensor, in_place: bool) -> Tensor:
        x = m.a(x)
        row = x[0]
        y = x.relu_()
        seen[:] = [y is x, bool((row >= 0).all())]
        return m.b(x)

    model = sct.unit_scale(Model(forward, True))
    model(gaussian(4, WIDTH)).sum().backward()
    assert seen == [True, True]


def test__a_view_with_a_scale_of_its_own__is_not_written_into() -> None:
    def forward(m: Model, x: Tensor, in_place: bool) -> Tensor:
        y = m.a(x).exp().view(-1, 2, WIDTH // 2)
        used = y.flatten(1).detach() @ m.b.weight
        y += 1
        return used + m.c(y.flatten(1))

    with pytest.raises(errors.UnsupportedError, match="writes into a view"):
        sct.unit_scale(Model(forward, True), (gaussian(4, WIDTH),))
