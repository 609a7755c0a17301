"""`check_rule` passes rules that keep their promises, and names a broken promise."""

import pytest
import torch
import torch.nn.functional as F
from tensors import gaussian
from torch import Tensor

import scaledtensor as sct
from scaledtensor.errors import DTypeError, ShapeError
from scaledtensor.testing import assert_scaled_close, assert_unit_scaled, check_rule

GOOD = {
    "mm": (torch.mm, [[(64, 64), (64, 32)]], {}),
    "add": (torch.add, [[(64, 64), (64, 64)], [(8, 1), (8, 256)]], {}),
    "gelu": (F.gelu, [[(64, 64)], [(7,)]], {"scales": 0, "tolerance": 2}),
    "sum": (torch.sum, [[(64, 64)]], {}),
    "transpose": (torch.t, [[(64, 16)]], {}),
    "sign": (torch.sign, [[(64, 64)]], {"differentiable": False}),
}


@pytest.mark.parametrize("name", GOOD)
def test__our_rules__pass(name):
    operator, cases, how = GOOD[name]
    check_rule(operator, cases, **how)


def remade(x: Tensor, q: float = 1.0, scale: float = 1.0) -> Tensor:
    """Return `x` with other elements or another scale, if it is a ScaledTensor."""
    if not isinstance(x, sct.ScaledTensor):
        return x * 1.0
    held = (x.qdata * q, x.scale * scale, x.rms * 1.0)
    return sct.ScaledTensor.make(*held, x.format, x.dtype, x.recipe)


class Biased(torch.autograd.Function):
    """An identity with a gradient that is not linear in the incoming one."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g + 1e-5


class Doubled(torch.autograd.Function):
    """An identity with a wrong gradient of ScaledTensors."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g * 2 if isinstance(g, sct.ScaledTensor) else g


BAD = {
    "another value": (lambda x: remade(x, q=2.0), "the result of .*not close"),
    "no power of two": (lambda x: remade(x, 1 / 3, 3.0), "the result of .*is no power of two"),
    "out of range": (lambda x: remade(x, 64.0, 1 / 64), "the result of .*RMS of the elements is"),
}


@pytest.mark.parametrize("fault", BAD)
def test__a_broken_promise__is_named(fault):
    operator, message = BAD[fault]
    with pytest.raises(AssertionError, match=rf"(?s){message}"):
        check_rule(operator, [[(16, 16)]], differentiable=False)


def test__a_gradient_that_depends_on_the_loss_scale__is_named():
    with pytest.raises(AssertionError, match=r"gradient 0, for a gradient times 2\^3 of .* has"):
        check_rule(Biased.apply, [[(16, 16)]], scales=0)


def test__a_wrong_gradient__is_named():
    with pytest.raises(AssertionError, match=r"gradient 1 of .* for inputs of float32"):
        check_rule(lambda x, y: x + Doubled.apply(y), [[(8,)] * 2])


@pytest.mark.parametrize("cases", [[], [[]]])
def test__no_case__is_refused(cases):
    with pytest.raises(ShapeError, match="cases with one or more shapes"):
        check_rule(torch.neg, cases)


def test__several_results__are_refused():
    with pytest.raises(DTypeError, match="one result"):
        check_rule(lambda x: x.split(1), [[(4,)]])


def test__close__compares_value_scale_and_format():
    x = sct.scaled(gaussian(64))
    assert_scaled_close(x, x.dequantize(), rtol=0)
    assert_scaled_close(x, x * 1, rtol=0)
    with pytest.raises(AssertionError, match="not close"):
        assert_scaled_close(x, x.dequantize() * 1.01)
    with pytest.raises(AssertionError, match="format FP32, expected BF16"):
        assert_scaled_close(x, x.to_format("bf16"), rtol=1)
    with pytest.raises(AssertionError, match=r"scale 1\.0, expected 2\.0"):
        assert_scaled_close(x.rescale(1.0), x.rescale(2.0))


def test__unit_scaled__takes_tensors_and_samples():
    x = gaussian(4096)
    assert_unit_scaled(x)
    assert_unit_scaled(sct.scaled(x * 2.0**30))
    assert_unit_scaled(list(x.split(1)))
    with pytest.raises(AssertionError, match=r"is \d\.\d+, not in"):
        assert_unit_scaled(x * 3)
    with pytest.raises(ShapeError, match="got none"):
        assert_unit_scaled(torch.zeros(0))
