"""Functions with custom derivatives work in every spelling, differentiated twice, and compiled."""

import pytest
import torch
from assertions import assert_second_derivative, dequantized, gradient
from tensors import gaussian
from torch import Tensor

import scaledtensor as sct
from scaledtensor.errors import RegistryError
from scaledtensor.ops import Raw, rule
from scaledtensor.ops.operators import define_operator

SPELLINGS = {
    "torch.logsumexp": lambda x: torch.logsumexp(x, -1),
    "Tensor.logsumexp": lambda x: x.logsumexp(dim=0, keepdim=True),
    "torch.special.logsumexp": lambda x: torch.special.logsumexp(x, 1),
    "logsumexp over two": lambda x: x.logsumexp((-1, 0)),
    "logsumexp over all but one": lambda x: x[None].logsumexp((2, 0), True),
    "torch.erf": torch.erf,
    "Tensor.erf": lambda x: x.erf(),
    "torch.special.erf": torch.special.erf,
    "x * x": lambda x: x * x,
    "torch.mul": lambda x: torch.mul(x, x),
    "Tensor.multiply": lambda x: x.multiply(x),
}
every_spelling = pytest.mark.parametrize("f", SPELLINGS.values(), ids=SPELLINGS)


@every_spelling
def test__second_derivative__is_that_of_the_plain_function(f):
    assert_second_derivative(f, sct.scaled(gaussian(4, 6)), 2.0**-12)


@every_spelling
def test__compiled__is_as_eager(f):
    x = sct.scaled(gaussian(4, 6)).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = gradient(compiled, x, False), gradient(f, x, False)
    assert float(got.scale) == float(want.scale)
    assert torch.equal(got.qdata, want.qdata)


@every_spelling
def test__plain_tensors__are_left_to_torch(f):
    x = gaussian(4, 6)
    assert type(f(x)) is Tensor


def test__the_gradient_of_logsumexp__is_a_softmax_in_range():
    """Autograd's spelling, by exp(x - lse), gave a result 2^-20 too low."""
    x = sct.scaled(gaussian(256, 4096)).requires_grad_()
    out = x.logsumexp(-1)
    grad = torch.autograd.grad(out, x, sct.scaled(gaussian(256, seed=1)))[0]
    assert 0.5 < float(grad.qdata.square().mean().sqrt()) < 2


# --- operators that this library defines -----------------------------------------------------


def test__a_defined_operator__keeps_the_tensors_that_its_derivative_names():
    seen = []

    def derivative(grad, y, result, x_shape, flag, grad_input_mask):
        seen.append((tuple(x_shape), flag, grad_input_mask, result))
        return grad * y, None

    own = define_operator(
        "test_scaled_by(Tensor x, Tensor y, bool flag=True) -> Tensor", derivative
    )

    @rule(own)
    def scaled_by(x: sct.ScaledTensor, y: sct.ScaledTensor, flag: bool = True) -> Raw:
        return Raw(x.qdata * y.qdata, x.scale * y.scale, x.rms * y.rms)

    x, y = sct.scaled(gaussian(4, 6)).requires_grad_(), sct.scaled(gaussian(4, 6, seed=1))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = own(x, y)
    assert [t is y for t in kept] == [True, False]  # y and the result, and not x
    (grad,) = torch.autograd.grad(out, x, out.detach())
    assert torch.equal(dequantized(grad), dequantized(out.detach() * y))
    ((shape, flag, mask, result),) = seen
    assert (shape, flag, mask) == ((4, 6), True, [True, False])
    assert torch.equal(dequantized(result), dequantized(out))


def test__a_derivative__names_arguments_and_results_only():
    with pytest.raises(RegistryError, match="has no argument and no result 'z'"):
        define_operator("test_unnamed(Tensor x) -> Tensor", lambda grad, z: grad)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test__extremes_over_a_plain_tensor__find_the_element_that_won(reduce):
    """Elements of the plain tensor are float32 numbers, which a BF16 result would round."""
    index = torch.tensor([0, 0, 1, 1])[:, None].expand(4, 16)
    x = gaussian(4, 16, dtype=torch.bfloat16).requires_grad_()
    held = sct.scaled(x.detach()).requires_grad_()
    for given in (x, held):
        given = given.float() if given is x else given
        gaussian(2, 16, seed=1).scatter_reduce(0, index, given, reduce).sum().backward()
    assert torch.equal(dequantized(held.grad), x.grad.double())
