"""Functions with custom derivatives work in every spelling, differentiated twice, and compiled."""

import pytest
import torch
import torch.nn.functional as F
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
    "F.rms_norm": lambda x: F.rms_norm(x, (6,), eps=0.1),
    "torch.rms_norm of two dimensions": lambda x: torch.rms_norm(x, (4, 6)),
    "F.rms_norm with a weight": lambda x: F.rms_norm(x, (6,), x[0]),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", [None, sct.recipes.Unit(saved="e4m3fn")], ids=repr)
def test__rms_norm__has_the_default_eps_of_torch(recipe, dtype):
    """It is a number of float32 for every dtype, and decides the result of small inputs."""
    plain = (gaussian(4, 6) * 2.0**-5).to(dtype)
    x = sct.scaled(plain, recipe=recipe).requires_grad_()
    y = F.rms_norm(x, (6,))
    assert torch.equal(dequantized(y), F.rms_norm(plain, (6,)))
    grad = torch.autograd.grad(y, x, sct.scaled(torch.ones_like(plain)))[0]
    wide = plain.double().requires_grad_()
    eps = torch.finfo(torch.float32).eps
    want = torch.autograd.grad(F.rms_norm(wide, (6,), eps=eps).sum(), wide)[0]
    assert_close(dequantized(grad).double(), want, 2.0**-3 if recipe else 2.0**-6)


def assert_close(got, want, tolerance):
    assert float((got - want).norm()) <= tolerance * float(want.norm())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rms_norm(x, (5,)),
        lambda x: F.rms_norm(x, (6,), sct.scaled(gaussian(5))),
        lambda x: F.dropout(x, 1.5),
    ],
    ids=["shape", "weight", "probability"],
)
def test__bad_arguments__raise_the_errors_of_torch(call):
    with pytest.raises((RuntimeError, ValueError), match=r"shape|probability"):
        call(sct.scaled(gaussian(4, 6)))


@pytest.mark.parametrize("call", [F.dropout, lambda x, p: torch.dropout(x, p, True)])
def test__dropout__has_the_mask_of_torch_and_keeps_booleans(call):
    plain = gaussian(64, 16)
    x, kept = sct.scaled(plain).requires_grad_(), []
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = call(x, 0.25)
    torch.manual_seed(0)
    assert torch.equal(dequantized(y), call(plain, 0.25))
    assert [t.dtype for t in kept] == [torch.bool]
    grad = torch.autograd.grad(y, x, torch.ones_like(plain))[0]
    assert torch.equal(dequantized(grad), (y.dequantize() != 0) / 0.75)


def test__dropout__of_compiled_code_is_as_eager():
    x = sct.scaled(gaussian(8, 6)).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(lambda t: F.dropout(t, 0.5), fullgraph=True, backend="aot_eager")
    results = []
    for f in (compiled, lambda t: F.dropout(t, 0.5)):
        torch.manual_seed(0)
        results.append(gradient(f, x, False))
    got, want = results
    assert float(got.scale) == float(want.scale)
    assert torch.equal(got.qdata, want.qdata)


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
