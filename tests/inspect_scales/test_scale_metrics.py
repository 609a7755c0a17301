"""Numbers of a tensor: known values, broken ones, formats, ScaledTensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import gaussian

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import E4M3FN, E5M2, FORMATS, fake_quantize
from scaledtensor.inspect import Metrics, measure


def test__ones__have_known_numbers():
    found = measure(torch.ones(3, 4), E4M3FN)
    assert found.mean_abs == found.abs_mean == found.rms == found.abs_max == found.abs_min == 1
    assert found.std == found.saturated == found.underflowed == 0
    assert found.numel == 12
    assert found.scale is None
    assert found.held is found


def test__numbers__are_those_of_torch():
    x = torch.randn(1000) * 3 + 1
    found = measure(x, E4M3FN)
    wide = x.double()
    expected = {
        "mean_abs": wide.abs().mean(),
        "abs_mean": wide.mean().abs(),
        "std": wide.std(),
        "rms": wide.square().mean().sqrt(),
        "abs_max": wide.abs().max(),
        "abs_min": wide.abs().min(),
    }
    for name, value in expected.items():
        assert math.isclose(getattr(found, name), float(value), rel_tol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test__every_float__is_read_at_its_value(dtype):
    x = torch.tensor([0.0, -2.0, 6.0], dtype=dtype)
    found = measure(x, E4M3FN)
    assert (found.abs_max, found.abs_min, found.abs_min_nonzero) == (6, 0, 2)
    assert math.isclose(found.mean_abs, 8 / 3)


def test__codes_of_eight_bits__are_read_at_their_value():
    x = torch.tensor([0.0, -2.0, 6.0]).to(torch.float8_e5m2)
    assert measure(x, E5M2).abs_max == 6


def test__empty_and_single_elements__have_numbers():
    empty = measure(torch.empty(0, 3), E4M3FN)
    assert empty.numel == empty.rms == empty.abs_max == 0
    single = measure(torch.tensor(-3.0), E4M3FN)
    assert (single.std, single.rms, single.numel) == (0, 3, 1)


def test__nan_and_infinities__are_counted_and_left_out():
    x = torch.tensor([1.0, -3.0, math.nan, math.inf, -math.inf])
    found = measure(x, E4M3FN)
    assert (found.nans, found.infs, found.numel) == (1, 2, 5)
    assert (found.mean_abs, found.abs_max) == (2, 3)
    assert measure(torch.full((2,), math.nan), E4M3FN).rms == 0


def test__shares__count_what_a_format_loses():
    x = torch.tensor([0.0, 1.0, 448.0, 449.0, -1e6, 2.0**-9, 2.0**-10, 2.0**-11])
    found = measure(x, E4M3FN)
    assert found.saturated == 2 / 8
    assert found.underflowed == 2 / 8  # Halfway goes to zero, which is even.


@given(st.sampled_from(sorted(FORMATS)), st.integers(-30, 30), st.integers(0, 2**31))
def test__underflow__is_what_rounding_to_the_format_does(name, exponent, seed):
    fmt = FORMATS[name]
    x = gaussian(64, seed=seed) * 2.0**exponent
    rounded = fake_quantize(x.double(), fmt)
    lost = float(((rounded == 0) & (x != 0)).double().mean())
    assert measure(x, fmt).underflowed == lost
    assert measure(x, fmt).saturated == float((x.double().abs() > fmt.max).double().mean())


def test__a_scaled_tensor__is_read_as_value_and_as_elements():
    x = sct.ScaledTensor(torch.tensor([1.0, -2.0, 600.0]), 2.0**-3, "fp32")
    found = measure(x, E4M3FN)
    assert found.scale == 0.125
    assert found.abs_max == 75
    assert found.saturated == 0
    assert found.qdata is not None
    assert found.qdata.abs_max == 600
    assert found.qdata.saturated == 1 / 3
    assert found.held is found.qdata
    assert math.isclose(found.rms, found.qdata.rms / 8)


def test__what_shares_several_scales__is_read_at_its_value():
    x = sct.scaled(torch.randn(4, 64), "e4m3fn", granularity=sct.PerBlock((1, 32)))
    found = measure(x, E4M3FN)
    assert math.isclose(found.rms, float(x.dequantize().double().square().mean().sqrt()))


@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), 1.0]
)
def test__what_holds_no_floats__is_refused(x):
    with pytest.raises(UnsupportedError, match="strided float tensors"):
        measure(x, E4M3FN)


def test__names__go_with_full_names():
    assert len(Metrics.names()) == len(Metrics.full_names())
    assert Metrics.get_full_name("rms") == "root mean square"
    assert {"mean_abs", "abs_mean", "std", "abs_max", "abs_min", "numel"} <= set(Metrics.names())
