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


def test__cache_filled_step_by_step__keeps_the_rms_of_what_it_holds():
    cache = torch.zeros_like(sct.scaled(gaussian(64, 8)))
    for i in range(4):
        cache.index_copy_(0, torch.arange(8 * i, 8 * i + 8), sct.scaled(gaussian(8, 8, seed=i) * 8))
    assert float(cache.scale) == 8
    assert 4 < float(cache.rms) < 16


def test__rows_added_expert_by_expert__count_each_row_once():
    """Sixteen experts with four rows each: the sum is of 64 rows, not of 16 tensors."""
    out = torch.zeros_like(sct.scaled(gaussian(64, 8)))
    for i in range(16):
        out.index_add_(0, torch.arange(4 * i, 4 * i + 4), sct.scaled(gaussian(4, 8, seed=i)))
    assert float(out.rms) == pytest.approx(1, rel=0.2)


def test__embedding_with_a_largest_norm__cuts_the_rows_in_use():
    table = gaussian(6, 8) * 2
    x = sct.scaled(table.clone())
    y = torch.nn.functional.embedding(torch.tensor([1, 4]), x, max_norm=1.0)
    want = torch.nn.functional.embedding(torch.tensor([1, 4]), table, max_norm=1.0)
    assert_holds(y, want, 2.0**-20)
    assert_holds(x, table, 2.0**-20)


UNSUPPORTED = {
    "complex": lambda x: torch.complex(x, x),
    "fft": lambda x: torch.fft.rfft(x),
    "eig": lambda x: torch.linalg.eig(x),
    "sparse": lambda x: x.to_sparse_csr(),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test__result_without_a_scaled_form__says_so(name):
    with pytest.raises(sct.errors.UnsupportedError, match="dequantize"):
        UNSUPPORTED[name](sct.scaled(gaussian(4, 4)))


def route(x, w):
    weights, chosen = (x @ torch.linspace(-1, 1, 32).view(8, 4)).softmax(-1).topk(2, -1)
    order = chosen.flatten().argsort()
    offs = torch.nn.functional.one_hot(chosen.flatten(), 4).sum(0).cumsum(0).to(torch.int32)
    rows = torch.nn.functional.grouped_mm(x[order // 2], w, offs=offs)
    rows = rows * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // 2, rows)


COMPILED = {
    "routing": lambda x, y: route(x, y),
    "scatter": lambda x, y: x.scatter_reduce(0, (torch.arange(64) % 3).view(8, 8), x, "mean"),
    "scan": lambda x, y: x.cumprod(0) + x.cummax(0).values + x.logcumsumexp(0),
    "median": lambda x, y: x.median(-1).values + x.kthvalue(3, -1).values,
    "factors": lambda x, y: torch.linalg.qr(x)[1] + torch.linalg.matrix_exp(x),
    "fill": lambda x, y: x.index_fill(0, torch.arange(2), 0.5).diagonal().diag_embed(),
}


@pytest.mark.parametrize("name", COMPILED)
def test__compiled__gives_the_value_and_gradient_of_eager(name):
    # torch compiles grouped products of bfloat16 only.
    wide = sct.recipes.Unit(forward="bf16", gradient="bf16")
    recipe = wide if name == "routing" else None
    x, y = (sct.scaled(gaussian(*s), recipe=recipe) for s in ((8, 8), (4, 8, 8)))
    x.requires_grad_()
    out = COMPILED[name](x, y)
    compiled = torch.compile(COMPILED[name], fullgraph=True)(x, y)
    tolerance = 2.0**-6 if recipe else 2.0**-14
    assert_holds(compiled, dequantized(out), tolerance)
    seed = sct.scaled(gaussian(*out.shape, seed=2))
    want, got = (torch.autograd.grad(o, x, seed)[0] for o in (out, compiled))
    assert_holds(got, dequantized(want), 4 * tolerance)
