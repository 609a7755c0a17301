"""A magnitude that stands out of its group is stored apart and costs the others no digits."""

import math

import pytest
import torch
from tensors import gaussian

from scaledtensor.formats import (
    BF16,
    E2M1FN,
    E4M3FN,
    E5M2,
    FP16,
    INT8,
    dequantize_expanded,
    quantize_expanded,
)

HELD = (E4M3FN, E5M2, INT8, FP16)
every_format = pytest.mark.parametrize("fmt", [*HELD, E2M1FN], ids=lambda f: f.name)


def rows(spike: float = 0.0, count: int = 32) -> torch.Tensor:
    x = gaussian(count, 128)
    if spike:
        x[:, 7] = spike
    return x


def back(x, fmt, **how):
    return dequantize_expanded(quantize_expanded(x, fmt, **how), fmt)


@pytest.mark.parametrize("fmt", HELD, ids=lambda f: f.name)
@pytest.mark.parametrize("spike", [1e3, -1e6, 1e30])
def test__neighbours_of_a_spike__have_their_digits(fmt, spike):
    """The others lose at most half a digit, as the maximum M of the rest is a power of two."""
    kept = [i for i in range(128) if i != 7]
    found, plain = back(rows(spike), fmt), back(rows(), fmt)
    error = (found - rows(spike))[:, kept].square().mean().sqrt()
    usual = (plain - rows())[:, kept].square().mean().sqrt()
    assert float(error) < 1.5 * float(usual)
    want = torch.full((32,), spike)
    torch.testing.assert_close(found[:, 7], want, rtol=2.0**-16, atol=0)


@every_format
def test__a_spike__takes_no_memory_and_shows_in_the_sign_of_its_m(fmt):
    with_it, without = quantize_expanded(rows(1e6), fmt), quantize_expanded(rows(), fmt)
    for a, b in zip(with_it, without, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert bool((with_it.amax < 0).all())
    assert bool((without.amax > 0).all())


def test__bf16__has_the_range_and_holds_nothing_apart():
    assert bool((quantize_expanded(rows(1e30), BF16).amax > 0).all())


@every_format
def test__what_stands_out__may_be_the_largest_number_or_beside_infinities(fmt):
    most = torch.finfo(torch.float32).max
    found = back(rows(most), fmt)
    torch.testing.assert_close(found[:, 7], torch.full((32,), most), rtol=2.0**-16, atol=0)
    x = rows(1e6)
    x[:, 9], x[:, 10], x[:, 11] = math.inf, -math.inf, 0.0
    found = back(x, fmt)
    if fmt is FP16:
        assert bool((found[:, 9] == math.inf).all())
    else:  # These elements saturate.
        assert torch.equal(found[:, 9], found[:, 7])
        assert torch.equal(found[:, 10], -found[:, 7])
    assert not found[:, 11].any()


@every_format
def test__two_of_one_magnitude__are_both_held(fmt):
    x = rows(1e6)
    x[:, 50] = -1e6
    found = back(x, fmt)
    torch.testing.assert_close(found[:, [7, 50]], x[:, [7, 50]], rtol=2.0**-16, atol=0)


@pytest.mark.parametrize("fmt", HELD, ids=lambda f: f.name)
def test__stochastic_rounding__has_the_values_as_its_mean(fmt):
    draws = 4000
    x = rows(1.2345678e6, 1).expand(draws, 128)
    rng = torch.Generator().manual_seed(0)
    found = back(x, fmt, rounding="stochastic", generator=rng)
    error = (found.double() - x.double()) / x.abs()
    deviation = error.std(0) / draws**0.5
    assert bool((error.mean(0).abs() <= 5 * deviation + 1e-6).all())
    assert float(error.abs().max()) < 1.5  # No neighbour is the spike.


@pytest.mark.parametrize("fmt", HELD, ids=lambda f: f.name)
def test__compiled__is_eager_up_to_ties(fmt):
    torch._dynamo.reset()
    for x in (rows(1e6), rows()):
        made = torch.compile(quantize_expanded, backend="aot_eager", fullgraph=True)(x, fmt)
        wanted = quantize_expanded(x, fmt)
        assert torch.equal(made.amax, wanted.amax)
        assert torch.equal(made.power, wanted.power)
        values = torch.compile(dequantize_expanded, backend="aot_eager", fullgraph=True)(made, fmt)
        apart = (values != dequantize_expanded(wanted, fmt)).float().mean()
        assert float(apart) < 1e-3
