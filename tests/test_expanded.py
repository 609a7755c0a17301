"""An ExpandedTensor holds values in groups that are widened to the range of a format."""

import copy

import pytest
import torch
from tensors import gaussian, saved_and_loaded

import scaledtensor as sct
from scaledtensor.errors import DTypeError, FormatError, ScaleError, ShapeError, UnsupportedError
from scaledtensor.formats import dequantize_expanded, quantize_expanded
from scaledtensor.tensors.expanded import ExpandedTensor


def numbers() -> torch.Tensor:
    return gaussian(6, 50)


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "int8", "e2m1fn", "fp16", "bf16"])
@pytest.mark.parametrize("unit", [1.0, 2.0**-70])
def test__its_value__is_that_of_its_groups_in_its_unit(fmt, unit):
    x = ExpandedTensor(numbers() * unit, fmt, tensor_scale=unit)
    want = dequantize_expanded(quantize_expanded(numbers(), fmt), fmt) * unit
    assert torch.equal(x.dequantize(), want)
    assert float(x.tensor_scale) == unit
    assert (x.shape, x.dtype, x.format.name) == ((6, 50), torch.float32, fmt)
    read = x.widened()
    assert type(read) is sct.ScaledTensor
    assert torch.equal(read.dequantize(), want)
    assert torch.equal((x * 2).dequantize(), want * 2)


@pytest.mark.parametrize("again", [saved_and_loaded, copy.deepcopy, torch.clone])
@pytest.mark.parametrize("fmt", ["e4m3fn", "int8", "fp16"])
def test__a_copy__has_the_same_bits(again, fmt):
    x = ExpandedTensor(numbers(), fmt, dtype=torch.bfloat16, tensor_scale=0.25)
    y = again(x)
    assert type(y) is sct.CodedTensor
    assert isinstance(y, ExpandedTensor)
    assert (y.shape, y.dtype, y.format, y.granularity) == (x.shape, x.dtype, x.format, 128)
    assert torch.equal(y.dequantize(), x.dequantize())
    for name in x.INNER:
        assert getattr(y, name).data_ptr() != getattr(x, name).data_ptr()


def test__its_rms__is_measured():
    x = ExpandedTensor(numbers())
    assert float(x.rms) == pytest.approx(float(x.dequantize().square().mean().sqrt()))


def test__nothing__is_written_into_its_codes():
    """A step of torch.optim writes into states that `optim` kept. The error names the way out."""
    said = "would write into a state in few bits"
    with pytest.raises(UnsupportedError, match=said) as raised:
        ExpandedTensor(numbers()).add_(1)
    assert "plain_state_dict" in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ExpandedTensor(numbers(), "fp32"), FormatError, "got fp32"),
        (lambda: ExpandedTensor(numbers(), group=0), ShapeError, "got 0"),
        (lambda: ExpandedTensor(numbers(), tensor_scale=3.0), ScaleError, "power of two; got 3"),
        (lambda: ExpandedTensor(numbers(), dtype=torch.int8), DTypeError, "appears as"),
    ],
)
def test__bad_input__says_what_is_allowed(call, error, says):
    with pytest.raises(error, match=says):
        call()
