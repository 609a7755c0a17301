"""Recipes, histories, `simulate_format` and `unit_scale` all read one table of products."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import dequantized
from tensors import gaussian
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor.formats import E4M3FN, E5M2, fake_quantize
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.models.simulate import simulate_fp8
from scaledtensor.ops.products.table import PRODUCTS
from scaledtensor.recipes import MXFP8, Delayed, Unit

#: A call of a spelling with an input (2, 8, 16) and a weight, and the weight's shape.
Call = tuple[Callable[[Any, Tensor, Any], Tensor], tuple[int, ...]]

BATCHED = (2, 16, 4)
CALLS: dict[str, Call] = {
    "linear": (lambda f, x, w: f(x, w, torch.ones(4)), (4, 16)),
    "bilinear": (lambda f, x, w: f(x, x.detach(), weight=w), (4, 16, 16)),
    "matmul": (lambda f, x, w: f(x, w), (16, 4)),
    "reflected_matmul": (lambda f, x, w: f(w, x), (16, 4)),
    "mm": (lambda f, x, w: f(x[0], mat2=w), (16, 4)),
    "mv": (lambda f, x, w: f(w, vec=x[0, 0]), (4, 16)),
    "bmm": (lambda f, x, w: f(x, w), BATCHED),
    "inner": (lambda f, x, w: f(x, other=w), (4, 16)),
    "einsum": (lambda f, x, w: f("bij,jk->bik", x, w), (16, 4)),
    "tensordot": (lambda f, x, w: f(x, w, dims=1), (16, 4)),
    "multi_dot": (lambda f, x, w: f([x[0], w, torch.eye(4)]), (16, 4)),
    "chain_matmul": (lambda f, x, w: f(x[0], w), (16, 4)),
    "addmm": (lambda f, x, w: f(torch.ones(8, 4), x[0], w, beta=0.5, alpha=2), (16, 4)),
    "addmv": (lambda f, x, w: f(torch.ones(4), w, x[0, 0]), (4, 16)),
    "baddbmm": (lambda f, x, w: f(torch.ones(2, 8, 4), x, w), BATCHED),
    "addbmm": (lambda f, x, w: f(torch.ones(8, 4), x, batch2=w), BATCHED),
    "conv1d": (lambda f, x, w: f(x, w, torch.ones(4)), (4, 8, 3)),
    "conv2d": (lambda f, x, w: f(x[None], w), (4, 2, 3, 3)),
    "conv3d": (lambda f, x, w: f(x[None, None], w), (4, 1, 1, 3, 3)),
    "conv_transpose1d": (lambda f, x, w: f(x, w), (8, 4, 3)),
    "conv_transpose2d": (lambda f, x, w: f(x[None], w), (2, 4, 3, 3)),
    "conv_transpose3d": (lambda f, x, w: f(x[None, None], w), (1, 4, 1, 3, 3)),
    "convolution": (
        lambda f, x, w: f(x, w, None, [1], [0], [1], False, [0], 1),
        (4, 8, 3),
    ),
    "conv_tbc": (lambda f, x, w: f(x, w, torch.ones(4), 1), (3, 16, 4)),
    "grouped_mm": (
        lambda f, x, w: f(x[0], w, offs=torch.tensor([3, 8], dtype=torch.int32)),
        (2, 16, 16),
    ),
    "scaled_dot_product_attention": (lambda f, x, w: f(x, w, value=w), (2, 8, 16)),
    "dot": (lambda f, x, w: f(x[0, 0], w), (16,)),
    "outer": (lambda f, x, w: f(x[0, 0], vec2=w), (4,)),
    "sparse_mm": (lambda f, x, w: f(_sparse(), w), (8, 4)),
    "sparse_addmm": (lambda f, x, w: f(torch.ones(8, 4), _sparse(), w), (8, 4)),
}


def _sparse() -> Tensor:
    return torch.eye(8).to_sparse()


def named(spelling: Any) -> str:
    place = "Tensor" if hasattr(Tensor, spelling.__name__) and spelling in METHODS else "torch"
    return f"{place}.{spelling.__name__}"


METHODS = {getattr(Tensor, name) for name in dir(Tensor) if callable(getattr(Tensor, name))}
SPELLINGS = pytest.mark.parametrize("spelling", PRODUCTS, ids=named)
CAST = pytest.mark.parametrize(
    "spelling",
    [f for f, p in PRODUCTS.items() if p.on is not None and p.places],
    ids=named,
)


class Multiplies(nn.Module):
    """A module with one product of the input and a weight, in one spelling."""

    def __init__(self, spelling: Any) -> None:
        super().__init__()
        self.spelling = spelling
        self.call, shape = CALLS[PRODUCTS[spelling].name]
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.spelling, x, self.weight)


def given(seed: int = 0) -> Tensor:
    return gaussian(2, 8, 16, seed=seed).requires_grad_()


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the result, and the gradients of input and weight."""
    y = model(x)
    seed = gaussian(*y.shape, seed=9)
    y.backward(sct.scaled(seed) if isinstance(y, sct.ScaledTensor) else seed)
    return [dequantized(t).float() for t in (y.detach(), x.grad, model.weight.grad)]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("table", [PRODUCTS, COUNTERPARTS], ids=["products", "counterparts"])
def test__a_spelling_in_the_table__is_the_very_function(table: Any) -> None:
    """`torch.mm` and `torch.dsmm` are equal, so a table has one of them. Dynamo of torch 2.15 looks
    for the object."""
    there = {id(spelling) for spelling in table}
    for module in (torch, Tensor, F, torch.linalg, torch.functional, torch.special):
        for name, found in vars(module).items():
            if callable(found) and name not in ("spmm", "dsmm") and found in table:
                assert id(found) in there, name


def test__every_name_in_the_table__has_a_call_here() -> None:
    assert {p.name for p in PRODUCTS.values()} == set(CALLS)


@CAST
@pytest.mark.parametrize("recipe", [Unit(), Delayed(), MXFP8()], ids=lambda r: type(r).__name__)
@pytest.mark.filterwarnings("ignore::scaledtensor.errors.RecipeWarning")
def test__under_a_recipe__every_spelling_is_the_product(spelling: Any, recipe: Any) -> None:
    want = results(Multiplies(spelling), given())
    got = results(sct.scale_model(Multiplies(spelling), recipe), given())
    for value, expected in zip(got, want, strict=True):
        assert relative(value, expected) < 0.12


@CAST
def test__under_a_recipe__every_spelling_saves_8_bit_operands(spelling: Any) -> None:
    model, saved = sct.scale_model(Multiplies(spelling), Unit()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = model(given())
    y.sum().backward()
    large = [t for t in saved if t.numel() >= model.weight.numel() and t.dtype.is_floating_point]
    ours = [t for t in large if isinstance(t, sct.ScaledTensor) and t.format == E4M3FN]
    assert ours


@CAST
def test__under_delayed_scaling__every_spelling_fills_the_history(spelling: Any) -> None:
    model = sct.scale_model(Multiplies(spelling), Delayed())
    weight = dequantized(model.weight.detach()).float()
    x = given()
    results(model, x)
    seen = model.weight_amax[:, 0]
    assert (seen > 0).all()  # These are the input, the weight and the gradient.
    assert float(seen[1]) == pytest.approx(float(weight.abs().max()), rel=1e-3)


@pytest.mark.parametrize("spelling", [f for f, p in PRODUCTS.items() if p.places], ids=named)
def test__simulated__every_spelling_rounds_operands_and_gradient(spelling: Any) -> None:
    """The result is the product of rounded operands with a rounded gradient."""
    x = given()
    got = results(simulate_fp8(Multiplies(spelling)), x)
    plain = Multiplies(spelling)
    with torch.no_grad():
        plain.weight.copy_(fake_quantize(plain.weight, E4M3FN))
    rounded = fake_quantize(x.detach(), E4M3FN).requires_grad_()
    y = plain(rounded)
    seed = gaussian(*y.shape, seed=9)
    y.backward(fake_quantize(seed, E5M2))
    for value, want in zip(got, (y.detach(), rounded.grad, plain.weight.grad), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-4)


@SPELLINGS
def test__unit_scaled__every_spelling_has_a_counterpart_or_none(spelling: Any) -> None:
    product = PRODUCTS[spelling]
    vectors = product.name in {"dot", "outer"}
    assert (spelling in COUNTERPARTS) == (bool(product.places) and not vectors)


_ADDED = """
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

def multiplied(input, other):
    if has_torch_function((input, other)):
        return handle_torch_function(multiplied, (input, other), input, other)
    return torch.matmul(input, other)

torch.linalg.matmul = multiplied  # its row of the table is now of a function unknown elsewhere
import scaledtensor as sct

class Model(nn.Module):
    def __init__(self, product=multiplied):
        super().__init__()
        torch.manual_seed(0)
        self.product, self.weight = product, nn.Parameter(torch.randn(16, 4))
    def forward(self, x):
        return self.product(x, self.weight)

x = torch.randn(8, 16)
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
    sct.scale_model(Model(), "unit")(x.clone().requires_grad_())
assert {t.format.name for t in saved if isinstance(t, sct.ScaledTensor)} == {"e4m3fn"}, saved
model = sct.scale_model(Model(), "delayed")
model(x.clone().requires_grad_()).sum().backward()
assert (model.weight_amax[:, 0] > 0).all()
from scaledtensor.formats import fake_quantize
q = lambda t: fake_quantize(t, "e4m3fn")
assert torch.equal(sct.simulate_fp8(Model())(x), q(x) @ q(Model().weight))
models = [sct.unit_scale(Model()), sct.unit_scale(Model(torch.matmul))]
for model in models:
    model(x).sum().backward()
assert torch.equal(*(model.weight.grad for model in models))
"""


def test__a_product_that_is_added_to_the_table__is_seen_by_all_of_them() -> None:
    """The test runs in its own process, where one row is for a function that is no product of
    torch."""
    subprocess.run([sys.executable, "-c", _ADDED], check=True)


def test__in_place_products__are_cast_and_written_into_their_target() -> None:
    torch.manual_seed(0)
    weight = sct.scaled(torch.randn(16, 4), recipe="unit").requires_grad_()
    x = torch.randn(8, 16)
    for target in (
        torch.ones(8, 4),
        sct.scaled(torch.ones(8, 4)),
        sct.scaled(torch.ones(8, 4) * 64),
    ):
        before, scale = dequantized(target).clone(), getattr(target, "scale", None)
        got = target.addmm_(x, weight, beta=0.5, alpha=2)
        assert got is target
        want = before * 0.5 + 2 * x.double() @ dequantized(weight.detach())
        assert relative(dequantized(got.detach()), want) < 0.06
        if scale is not None:
            assert torch.equal(target.scale, scale)


def test__operands_by_keyword__are_rounded_too() -> None:
    """torch.mv calls its second operand `vec`, torch.inner `other`."""
    x, w = torch.randn(8), torch.randn(4, 8)
    q = lambda t: fake_quantize(t, E4M3FN)  # noqa: E731

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            both = torch.inner(input=x, other=x), torch.linalg.multi_dot(tensors=[w, x])
            return torch.mv(input=w, vec=x), *both, F.linear(x, weight=w)

    got = simulate_fp8(Model())(x)
    want = (q(w) @ q(x), q(x) @ q(x), q(w) @ q(x), q(w) @ q(x))
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected)
