"""Data movement beyond a functional operator: views taken in place, resized tensors."""

import pytest
import torch
from assertions import assert_holds, dequantized

import scaledtensor as sct


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


RESHAPED = {
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_dim": lambda x: x.squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "t_": lambda x: x.squeeze_(0).t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "as_strided_": lambda x: x.as_strided_((2, 3), (1, 4)),
    "resize_": lambda x: x.resize_(3, 2),
    "resize_as_": lambda x: x.resize_as_(sct.scaled(torch.zeros(2, 2))),
}


@pytest.mark.parametrize("name", RESHAPED)
def test__view_in_place__is_the_same_tensor_on_the_same_elements(name):
    x = sct.scaled(gaussian(1, 3, 4) * 8)
    other, plain, scale = x.detach(), dequantized(x), x.scale
    assert RESHAPED[name](x) is x
    want = RESHAPED[name](plain)
    assert (x.shape, x.stride()) == (want.shape, want.stride()) == (x.qdata.shape, x.qdata.stride())
    assert_holds(x, want, 0)
    assert x.scale is scale
    x.zero_()
    assert (dequantized(other) == 0).any()


def test__view_in_place__compiles_and_has_a_gradient():
    def f(x):
        y = x * 2
        y.squeeze_(0)
        return y.t_() @ y.t()

    x, seed = sct.scaled(gaussian(1, 3, 4)).requires_grad_(), sct.scaled(gaussian(4, 4))
    want = torch.autograd.grad(f(x), x, seed)[0]
    got = torch.autograd.grad(torch.compile(f, fullgraph=True)(x), x, seed)[0]
    assert_holds(got, dequantized(want), 2.0**-17)
    plain = dequantized(x).requires_grad_()
    assert_holds(want, torch.autograd.grad(f(plain), plain, dequantized(seed))[0], 2.0**-17)
