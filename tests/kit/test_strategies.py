"""The strategies draw the values that they promise."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import scaledtensor as sct
from scaledtensor.errors import FormatError
from scaledtensor.formats import FORMATS, Format, decode, encode
from scaledtensor.scales.powers import is_power_of_two
from scaledtensor.testing import strategies


@given(strategies.formats(8, signed=True))
def test__formats__are_of_the_table(fmt):
    assert fmt.bits <= 8
    assert fmt.signed
    assert FORMATS[fmt.name] is fmt


@settings(max_examples=40)
@given(strategies.custom_formats())
def test__custom_formats__round_trip(fmt):
    assert isinstance(fmt, Format)
    codes = torch.arange(fmt.num_codes).to(torch.uint8)
    values = decode(codes.view(fmt.storage_dtype), fmt)
    finite = values.isfinite()
    assert torch.equal(encode(values, fmt).view(torch.uint8)[finite], codes[finite])


@given(st.data())
def test__values_near__are_of_their_dtype(data):
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    value = data.draw(strategies.values_near("e4m3fn", dtype))
    held = torch.tensor(value, dtype=torch.float64)
    assert math.isnan(value) or held.to(dtype).double() == held


@pytest.mark.parametrize("wanted", [2.5, -0.5, math.inf, 6.0])
def test__values_near__reach_values_ties_and_specials(wanted):
    assert find(strategies.values_near("e2m1fn"), lambda x: x == wanted) == wanted


@given(strategies.powers_of_two(0.25, 8.0))
def test__powers_of_two__are_within_their_bounds(x):
    assert x in (0.25, 0.5, 1, 2, 4, 8)


@given(strategies.scaled_tensors())
def test__scaled_tensors__have_power_of_two_scales(x):
    assert isinstance(x, sct.ScaledTensor)
    assert is_power_of_two(x.scale)
    assert x.dequantize().isfinite().all()


@given(
    strategies.scaled_tensors(
        st.just((2, 3)), strategies.formats(6, signed=True), st.just(2.0**-7), torch.bfloat16
    )
)
def test__scaled_tensors__are_what_is_asked_for(x):
    assert x.shape == (2, 3)
    assert x.format.bits <= 6
    assert x.scale == 2.0**-7
    assert x.dtype == torch.bfloat16


def test__no_format__is_an_error():
    with pytest.raises(FormatError, match="no format of at most 4 bits has signed=False"):
        strategies.formats(4, signed=False)


def test__without_hypothesis__the_rest_works_and_the_strategies_say_what_to_install():
    code = """
import sys
sys.modules["hypothesis"] = None
import scaledtensor.testing
try:
    import scaledtensor.testing.strategies
except scaledtensor.errors.UnsupportedError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'scaledtensor[testing]'" in ran.stdout
