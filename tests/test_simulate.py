"""`simulate_format` rounds the operands of products in every spelling, forwards and backwards."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor import errors, formats
from scaledtensor.formats import E2M1FN, E4M3FN, E5M2, fake_quantize
from scaledtensor.models import interpose
from scaledtensor.models.simulate import simulate_format, simulate_fp8


class Product(nn.Module):
    def __init__(self, spelling: Any, *shape: int) -> None:
        super().__init__()
        self.spelling = spelling
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(x, self.weight)


SPELLINGS = {
    "@": lambda x, w: x @ w,
    "matmul": torch.matmul,
    "method": lambda x, w: x.matmul(w),
    "mm": torch.mm,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "einsum of a list": lambda x, w: torch.einsum("ij,jk->ik", [x, w]),
    "linear": lambda x, w: F.linear(x, w.mT),
    "by name": lambda x, w: F.linear(input=x, weight=w.mT),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "addmm": lambda x, w: torch.addmm(torch.zeros(w.shape[1]), x, w),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(1, 1, 1), x[None], w[None])[0],
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=1),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w]),
    "conv1d": lambda x, w: F.conv1d(x[..., None], w.mT[..., None])[..., 0],
}


def expected(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    xq, wq, gq = fake_quantize(x, E4M3FN), fake_quantize(w, E4M3FN), fake_quantize(g, E5M2)
    return xq @ wq, gq @ wq.mT, xq.mT @ gq


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=list(SPELLINGS))
@pytest.mark.parametrize("compiled", [False, True])
def test__every_spelling__multiplies_rounded_operands(spelling: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()  # All spellings share one code object.
    model = simulate_fp8(Product(spelling, 8, 4))
    x, g = torch.randn(6, 8, requires_grad=True), torch.randn(6, 4)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    y = run(x)
    y.backward(g)
    out, dx, dw = expected(x.detach(), model.weight.detach(), g)
    torch.testing.assert_close(y, out)
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(model.weight.grad, dw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test__a_format_that_holds_every_operand__compiled_keeps_gradients(dtype: torch.dtype) -> None:
    """Dynamo of torch 2.11 loses gradients if a function returns a tensor under two names."""
    torch.compiler.reset()
    model = simulate_format(Product(torch.mm, 8, 4).to(dtype), dtype, None)
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
    (expected,) = torch.autograd.grad(torch.mm(x, model.weight).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test__attention_and_recurrent_layers__are_entered() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    for layer in (nn.MultiheadAttention(16, 4, batch_first=True), nn.LSTM(16, 8), nn.GRU(16, 8)):
        args = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
        before = layer(*args)[0]
        exact = simulate_format(copy.deepcopy(layer), "fp32", "fp32")(*args)[0]
        torch.testing.assert_close(exact, before)
        off = simulate_fp8(layer)(*args)[0] - before
        assert 1e-3 < off.norm() / before.norm() < 0.2


def test__what_is_no_product__is_exact() -> None:
    model = simulate_format(nn.Sequential(nn.LayerNorm(8), nn.GELU()), "e2m1fn", "e2m1fn")
    x = torch.randn(4, 8)
    assert torch.equal(model(x), F.gelu(F.layer_norm(x, (8,))))


def test__a_bias__is_not_rounded() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(simulate_format(layer, "e2m1fn")(torch.randn(2, 4))[0], layer.bias)


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test__every_format__serves(name: str) -> None:
    fmt = formats.get(name)
    torch.manual_seed(0)
    model = Product(torch.matmul, 8, 4)
    x, g = torch.randn(6, 8), torch.randn(6, 4)
    simulate_format(model, fmt, fmt)(x).backward(g)
    xq, gq = fake_quantize(x, fmt), fake_quantize(g, fmt)  # E8M0 has no sign, so this gives NaN.
    torch.testing.assert_close(model.weight.grad, xq.mT @ gq, equal_nan=True)


def test__rounding_modes_and_overflow__are_taken() -> None:
    x = torch.tensor([[1e6, 1.0]])
    model = Product(lambda x, w: x @ torch.eye(2), 1)
    assert simulate_format(copy.deepcopy(model), E5M2)(x)[0, 0] == E5M2.max
    infinite = simulate_format(copy.deepcopy(model), E5M2, overflow="ieee")(x)
    assert not infinite[0, 0].isfinite()
    torch.manual_seed(0)
    rounded = simulate_format(model, E2M1FN, rounding="stochastic")(torch.full((999, 2), 1.25))
    assert set(rounded.unique().tolist()) == {1.0, 1.5}
    assert 1.2 < rounded.mean() < 1.3


def test__the_model__stays_itself_and_comes_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    plain = model(x)
    keys = list(model.state_dict())
    assert simulate_fp8(model) is model
    assert list(model.state_dict()) == keys
    simulated = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), simulated)
        with torch.no_grad():
            twin[0].weight.zero_()
        assert torch.equal(model(x), simulated)
    assert torch.equal(interpose.remove(model)(x), plain)
    assert "forward" not in vars(model)


def test__an_exported_model__is_the_simulated_one() -> None:
    model = simulate_fp8(nn.Linear(8, 4)).eval()
    x = torch.randn(2, 8)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test__bad_input__is_named() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(errors.FormatError, match="e9m9"):
        simulate_format(layer, "e9m9")
    with pytest.raises(errors.FormatError, match="unknown format 8"):
        simulate_format(layer, 8)
    with pytest.raises(ValueError, match="rounding"):
        simulate_format(layer, rounding="up")
    with pytest.raises(errors.ModelError, match=r"nn\.Module"):
        simulate_format(torch.zeros(1))
    with pytest.raises(errors.ModelError, match="compiled"):
        simulate_format(torch.compile(layer))
    simulate_fp8(layer)
    with pytest.raises(errors.ModelError, match="already"):
        simulate_fp8(layer)


def test__scaled_models__are_refused_in_either_order() -> None:
    simulated = simulate_fp8(nn.Linear(2, 2))
    for model in (simulated, nn.Sequential(nn.Linear(2, 2), simulated)):
        with pytest.raises(errors.UnsupportedError, match=r"Unit\(forward.*interpose\.remove"):
            sct.scale_model(model)
        assert not any(isinstance(p, sct.ScaledTensor) for p in model.parameters())
    scaled = sct.scale_model(interpose.remove(simulated))
    with pytest.raises(errors.UnsupportedError, match=r"Unit\(forward"):
        simulate_fp8(nn.Sequential(nn.Linear(2, 2), scaled))
    assert isinstance(scaled(torch.ones(1, 2)), sct.ScaledTensor)
