"""Lion follows the algorithm of its paper in float64."""

import pytest
import torch
from assertions import dequantized
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import mup
from scaledtensor.errors import MupError


def published(p: Tensor, grads: list[Tensor], lr: float, betas: tuple[float, float], decay: float):
    """Algorithm 2 of arXiv 2302.06675."""
    w, m = p.double(), torch.zeros_like(p, dtype=torch.float64)
    for g in grads:
        c = betas[0] * m + (1 - betas[0]) * g.double()
        w = w - lr * (c.sign() + decay * w)
        m = betas[1] * m + (1 - betas[1]) * g.double()
    return w, m


def gradients(count: int = 6) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(30, 10, generator=rng) for _ in range(count)]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("maximize", [False, True])
def test__steps__are_those_of_the_paper(scaled, maximize):
    torch.manual_seed(0)
    start = torch.randn(30, 10)
    p = nn.Parameter(sct.scaled(start) if scaled else start.clone())
    optimizer = sct.optim.Lion(
        [p], 0.01, (0.8, 0.95), weight_decay=0.1, maximize=maximize
    )  # fmt: skip
    for g in gradients():
        p.grad = sct.scaled(-g if maximize else g) if scaled else (-g if maximize else g)
        optimizer.step()
    want, m = published(start, gradients(), 0.01, (0.8, 0.95), 0.1)
    torch.testing.assert_close(dequantized(p), want, rtol=2.0**-20, atol=2.0**-22)
    held = dequantized(optimizer.state[p]["exp_avg"])
    torch.testing.assert_close(held, m, rtol=2.0**-18, atol=2.0**-20)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "e4m3fn", "e5m2", "int8"])
def test__a_momentum_in_few_bits__has_nearly_always_the_same_signs(fmt):
    start = torch.zeros(30, 10)
    p = nn.Parameter(start.clone())
    optimizer = sct.optim.Lion([p], 0.01, state_format=fmt)
    for g in gradients():
        p.grad = g
        optimizer.step()
    want, _ = published(start, gradients(), 0.01, (0.9, 0.99), 0.0)
    steps = (dequantized(p) - want).abs() / 0.02
    assert float((steps < 0.5).double().mean()) > 0.9


def test__the_learning_rate__follows_the_rule_of_adam():
    p = mup.Parameter(torch.zeros(4, 16), "weight")
    (group,) = sct.optim.Lion([p], 1.0).param_groups
    assert group["lr"] == 0.25


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "not negative; got -1"),
        ({"betas": (0.9, 1.0)}, "betas are two numbers"),
        ({"weight_decay": -0.1}, "a weight decay is not negative"),
    ],
)
def test__numbers_that_cannot_be__are_refused(options, says):
    with pytest.raises(MupError, match=says):
        sct.optim.Lion([nn.Parameter(torch.zeros(3))], **options)
