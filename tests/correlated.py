"""Networks with correlated terms, which no rule expects, and their distance from float32."""

import copy
import warnings

import torch
from tensors import value_of
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import SaturationWarning
from scaledtensor.recipes import Unit


def one_sign(layers=6, width=256):
    """Weights of one sign, where ReLU's outputs add up: 11 times more per layer than expected."""
    torch.manual_seed(0)
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.ReLU()]
        parts[-2].weight.data.abs_()
    return nn.Sequential(*parts), torch.randn(128, width)


def blurs(size, layers):
    """Box filters over 8 channels with similar outputs."""
    torch.manual_seed(0)
    made = [nn.Conv2d(8, 8, size, padding=size // 2, bias=False) for _ in range(layers)]
    for conv in made:
        conv.weight.data.fill_(2.0**-8 if size == 5 else 2.0**-6)
    return nn.Sequential(*made), torch.randn(4, 8, 32, 32)


def averages():
    torch.manual_seed(0)
    parts = [nn.Linear(64, 64, bias=False) for _ in range(8)]
    for linear in parts:
        linear.weight.data.fill_(1 / 64)
    return nn.Sequential(*parts), torch.randn(128, 64)


def smoothed(x, rounds):
    """Heat that spreads over a ring: the terms of each sum cancel."""
    for _ in range(rounds):
        x = x + 0.4 * (x.roll(1, 0) + x.roll(-1, 0) - 2 * x)
    return x


def scaled(model, recipe=Unit()):  # noqa: B008 - frozen
    return sct.scale_model(copy.deepcopy(model), recipe)


def error(x, y):
    return float((value_of(x).detach().float() - y.detach()).norm() / y.detach().norm())


def passed(model, x):
    """Return the output and the gradient of the first weight."""
    model.zero_grad()
    y = model(x)
    value_of(y).square().mean().backward()
    return y, next(model.parameters()).grad


def first_step(m, x):
    """Return the output of the second step, when compiled code is corrected."""
    optimizer = torch.optim.SGD(m.parameters(), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        for _ in range(2):
            y, _ = passed(m, x)
            optimizer.step()
    return y


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)
