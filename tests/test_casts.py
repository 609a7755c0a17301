"""Derivatives of the verbs follow from their mathematics, for scaled and plain gradients."""

import pytest
import torch
from assertions import assert_holds, dequantized
from torch import Tensor

import scaledtensor as sct
from scaledtensor.errors import DTypeError

VERBS = {
    "dequantize": (lambda x: x.dequantize(), 1.0),
    "to_format": (lambda x: x.to_format("e4m3fn"), 1.0),
    "rescale": (lambda x: x.rescale(2.0**9), 1.0),
    "expect": (lambda x: torch.ops.scaledtensor.expect(x, 8.0), 1.0),
    "drop": (sct.drop, 2.0**-3),
}


def source(dtype: torch.dtype = torch.float32) -> sct.ScaledTensor:
    x = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 8
    return sct.scaled(x.to(dtype), "fp32", 8.0).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test__the_gradient__is_the_incoming_one_times_the_derivative(verb, plain, dtype):
    run, derivative = VERBS[verb]
    x = source(dtype)
    y = run(x)
    grad = torch.arange(8).to(dtype)
    held = grad if plain or type(y) is Tensor else sct.scaled(grad, "fp32")
    (got,) = torch.autograd.grad(y, x, held)
    assert got.dtype == dtype
    assert_holds(got, grad.double() * derivative, 0)


@pytest.mark.parametrize("verb", VERBS)
def test__the_gradient__can_be_differentiated_again(verb):
    run, derivative = VERBS[verb]
    x, w = source(), torch.arange(8.0, requires_grad=True)
    (got,) = torch.autograd.grad(run(x), x, w, create_graph=True)
    got.square().sum().backward()
    assert_holds(w.grad, 2 * derivative**2 * w, 0)


def test__an_8_bit_gradient__is_cast_once_on_the_way_back():
    x = source()
    y = sct.ops.RULES  # The rule behind it is looked up below.
    assert torch.ops.scaledtensor.gradient_to_format.default in y
    out = torch.ops.scaledtensor.gradient_to_format(x, "e5m2")
    assert_holds(out, dequantized(x), 0)
    (got,) = torch.autograd.grad(out, x, sct.scaled(torch.randn(8)))
    assert got.format.name == "e5m2"


def test__drop__never_writes_into_its_argument():
    x = source().detach()
    before = dequantized(x)
    sct.drop(x).add_(1)
    sct.drop(x).copy_(torch.zeros(8))
    x.to_format("fp32").mul_(2)
    assert_holds(x, before, 0)


@pytest.mark.parametrize("growth", [2.0**-5, 0.6, 1.0, 6.0, 2.0**7])
def test__expect__holds_the_value_under_the_scale_of_the_rms_that_is_known(growth):
    x = source().detach()
    y = torch.ops.scaledtensor.expect(x, growth)
    assert_holds(y, dequantized(x), 0)
    assert 2**-0.5 <= growth * float(x.rms) / float(y.scale) <= 2**0.5
    # Results of it use that RMS.
    assert float((y * 1.0).scale) == float(y.scale)


@pytest.mark.parametrize("move", [-253, -200, -130, 130, 200, 253])
def test__rescale__reaches_every_scale_from_every_other(move):
    low, high = sorted((2.0**-126, 2.0 ** (abs(move) - 126)))
    start, end = (low, high) if move > 0 else (high, low)
    element = 2.0**100 if move > 0 else 2.0**-100
    x = sct.ScaledTensor(torch.tensor([0.0, element]), start, "fp32")
    y = x.rescale(end)
    assert float(y.scale) == end
    assert float(y.qdata[0]) == 0.0
    expected = torch.tensor(element, dtype=torch.float64) * (start / end)
    assert float(y.qdata[1]) == float(expected.float())


@pytest.mark.parametrize("verb", ["to_format", "rescale", "expect", "drop", "dequantize"])
def test__verbs__answer_a_plain_tensor_by_name(verb):
    more = {"to_format": ("bf16",), "rescale": (torch.tensor(2.0),), "expect": (2.0,)}.get(verb, ())
    with pytest.raises(DTypeError, match=r"scaledtensor\.scaled"):
        getattr(torch.ops.scaledtensor, verb)(torch.ones(2), *more)
