"""Products take operands of one dtype, as torch's do; autocast converts as it does for torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_holds
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import DTypeMismatchError

DTYPES = [
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
RECIPES = ["unit", "current", sct.recipes.Current(granularity="row"), sct.recipes.PerGemm(keep=())]

#: A call of each spelling of a product, with a plain input and a weight of 8 x 16.
PRODUCTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "linear": F.linear,
    "@": lambda x, w: x @ w.t(),
    "reversed @": lambda x, w: w @ x.t(),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None]),
    "mv": lambda x, w: torch.mv(w, x[0]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "addmm": lambda x, w: torch.addmm(torch.zeros(8), x, w.t()),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [1])),
    "conv1d": lambda x, w: torch.conv1d(x[None], w[:, :4, None]),
    "bilinear": lambda x, w: F.bilinear(x, x, w[:, None, :].expand(8, 16, 16)),
}


def outcome(call: Callable[[], Tensor]) -> torch.dtype | None:
    """Return the dtype of a result, or None if the call fails."""
    try:
        return call().dtype
    except (RuntimeError, NotImplementedError):
        return None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test__a_linear__takes_what_torch_takes(bias, recipe, autocast):
    plain = nn.Linear(16, 8, bias=bias)
    model = sct.scale_model(copy.deepcopy(plain), recipe)
    for dtype in DTYPES:
        x = torch.ones(4, 16).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wanted = outcome(lambda x=x: plain(x))
            if wanted is not None:
                y = model(x)
                assert isinstance(y, sct.ScaledTensor)
                assert y.dtype == (wanted if recipe in ("unit", "current") else y.dtype)
                y.sum().backward()
                assert model.weight.grad.dtype == torch.float32
                continue
            with pytest.raises(RuntimeError, match=f"one dtype, as in torch; got .*{dtype}"):
                model(x)
        if dtype.is_floating_point and dtype is not torch.float64:
            with pytest.raises(DTypeMismatchError, match=f"got {dtype} and torch.float32"):
                model(sct.scaled(x))
    assert outcome(lambda: plain(torch.ones(4, 16))) == model(torch.ones(4, 16)).dtype


@pytest.mark.parametrize("product", PRODUCTS)
def test__every_spelling__refuses_two_dtypes(product):
    w, call = torch.randn(8, 16), PRODUCTS[product]
    for recipe in (None, "unit"):
        held = sct.scaled(w, recipe=recipe)
        x = torch.randn(4, 16)
        assert_holds(call(x, held), call(x, held.dequantize()), 1.0)
        for dtype in (torch.int64, torch.bfloat16, torch.float64):
            given = x.to(dtype)
            assert outcome(lambda given=given: call(given, w)) is None
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode(), pytest.raises(RuntimeError, match=r"(one dtype, as in|have same) "):
                    call(given, held)


def test__compiled__they_are_refused_too():
    model = sct.scale_model(nn.Linear(16, 8))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="one dtype, as in torch"):
        compiled(torch.ones(4, 16, dtype=torch.bfloat16))


def test__within_transforms__they_are_refused_too():
    model = sct.scale_model(nn.Linear(16, 8))
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    assert set(torch.func.grad(loss)(params, torch.ones(4, 16))) == {"weight", "bias"}
    for dtype in (torch.int64, torch.float64):
        with pytest.raises(RuntimeError, match="one dtype, as in torch"):
            torch.func.grad(loss)(params, torch.ones(4, 16, dtype=dtype))


def test__a_bias__is_converted_by_autocast_as_torch_does():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(48, 8))
    model, x = sct.scale_model(copy.deepcopy(plain)), torch.randn(2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        want = plain(x)
    assert y.dtype == want.dtype == torch.bfloat16
    assert_holds(y, want, 0.2)
    y.square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(DTypeMismatchError):
        F.linear(torch.ones(2, 48), model[2].weight, torch.zeros(8, dtype=torch.float64))
