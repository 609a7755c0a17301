"""The range holds over depth: no factor of sqrt(2) is lost to rounding."""

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_in_range

import scaledtensor as sct

DEPTH = 64
LAYERS = 24
WIDTH = 128
recipes = pytest.mark.parametrize("recipe", [None, sct.recipes.Unit()], ids=str)


def unit(*shape, recipe=None):
    return sct.scaled(torch.randn(shape), recipe=recipe)


def test__64_residual_adds__stay_in_range():
    torch.manual_seed(0)
    x = unit(2**12)
    for _ in range(DEPTH):
        x = x + unit(2**12)
        assert_in_range([x])
    assert float(x.scale) == 8


@recipes
def test__64_matmuls__stay_in_range_both_ways(recipe):
    torch.manual_seed(0)
    x = first = unit(256, WIDTH, recipe=recipe).requires_grad_()
    for _ in range(DEPTH):
        x = x @ unit(WIDTH, WIDTH, recipe=recipe)
        # The factor is 128**-0.5 per product, up to the sqrt(2) that must not be lost.
        x = x * 2.0**-4
        assert_in_range([x])
    assert_in_range([torch.autograd.grad(x, first, unit(256, WIDTH))[0]])


def test__64_halvings_of_energy__stay_in_range():
    torch.manual_seed(0)
    x = unit(2**14)
    for _ in range(DEPTH):
        x = (x + unit(2**14) * float(x.rms)) * 0.5
        assert_in_range([x])


@recipes
def test__residual_mlps__stay_in_range_forward_and_backward(recipe):
    torch.manual_seed(0)
    parameters = []

    def weight(n_out, n_in):
        w = sct.scaled(torch.randn(n_out, n_in) * n_in**-0.5, recipe=recipe).requires_grad_()
        parameters.append(w)
        return w

    x = first = unit(256, WIDTH, recipe=recipe).requires_grad_()
    stream = []
    for _ in range(LAYERS):
        h = F.layer_norm(x, (WIDTH,))
        h = F.gelu(F.linear(h, weight(4 * WIDTH, WIDTH)))
        assert_in_range([h])
        x = x + F.linear(h, weight(WIDTH, 4 * WIDTH))
        x.retain_grad()
        stream.append(x)
        assert_in_range([x])
    x.backward(unit(256, WIDTH) * 2.0**-30)
    for t in (first, *stream, *parameters):
        assert_in_range([t.grad])
