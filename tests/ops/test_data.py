"""Data movement without a functional operator: views taken in place, and resized tensors."""

import pytest
import torch
from assertions import assert_holds, dequantized
from tensors import gaussian
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import scaledtensor as sct

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
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x), x, seed)[0]
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
    """Sixteen experts have four rows each, and the sum is over 64 rows, not over 16 tensors."""
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


def test__a_compressed_result__has_no_scaled_form_and_says_so():
    with pytest.raises(sct.errors.UnsupportedError, match="dequantize"):
        sct.scaled(gaussian(4, 4)).to_sparse_csr()


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Meta's Llama and torchtitan turn queries in this way: by a product of complex numbers."""
    angles = torch.outer(torch.arange(6.0), 10.0 ** -torch.arange(4.0))
    turned = torch.view_as_complex(x.float().reshape(6, 4, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(1).type_as(x)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """FNet mixes tokens in this way."""
    return torch.fft.fftn(x, dim=(0, 1)).real


def correlated(x: torch.Tensor) -> torch.Tensor:
    """Autoformer finds periods in this way."""
    f = torch.fft.rfft(x, dim=0)
    return torch.fft.irfft(f * torch.conj(f), n=len(x), dim=0)


@pytest.mark.parametrize("function", [rotary, mixed, correlated])
def test__complex_numbers_on_the_way__are_plain(function):
    plain, w = gaussian(6, 8).requires_grad_(), gaussian(8, 8)
    function(plain).mm(w).square().mean().backward()
    found = []
    for multiplier in (1.0, 2.0**-20):
        x = sct.scaled(plain.detach()).requires_grad_()
        weight = sct.scaled(w)
        y = function(x) @ weight
        assert isinstance(y, sct.ScaledTensor)
        (y.square().mean() * multiplier).backward()
        found.append(x.grad)
    assert_holds(found[0], plain.grad, 2.0**-6)
    assert torch.equal(dequantized(found[0]) * 2.0**-20, dequantized(found[1]))


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


@pytest.mark.parametrize(
    ("name", "backend"),
    # Inductor's code for torch's operators is torch's affair, so a reduction and views stand for
    # all.
    [*((name, "aot_eager") for name in COMPILED), ("scatter", "inductor"), ("fill", "inductor")],
)
def test__compiled__gives_the_value_and_gradient_of_eager(name, backend):
    # torch compiles grouped products of bfloat16 only.
    wide = sct.recipes.Unit(forward="bf16", gradient="bf16")
    recipe = wide if name == "routing" else None
    x, y = (sct.scaled(gaussian(*s), recipe=recipe) for s in ((8, 8), (4, 8, 8)))
    x.requires_grad_()
    out = COMPILED[name](x, y)
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend=backend)(x, y)
    tolerance = 2.0**-6 if recipe else 2.0**-14
    assert_holds(compiled, dequantized(out), tolerance)
    seed = sct.scaled(gaussian(*out.shape, seed=2))
    want, got = (torch.autograd.grad(o, x, seed)[0] for o in (out, compiled))
    assert_holds(got, dequantized(want), 4 * tolerance)


# --- a part without elements -----------------------------------------------------------------

#: Parts without elements, as caches of keys and values begin.
EMPTY = {
    "cache": lambda: torch.tensor([]),
    "no columns": lambda: torch.zeros(3, 0),
    "scaled": lambda: sct.scaled(torch.zeros(3, 0)),
    "of BF16": lambda: torch.zeros(3, 0, dtype=torch.bfloat16),
}


def plain(x: Tensor) -> Tensor:
    return x.detach().dequantize() if isinstance(x, sct.ScaledTensor) else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("first", [True, False])
def test__cat__keeps_the_scale_of_the_one_part_that_has_elements(name, dtype, first):
    x = sct.scaled((gaussian(3, 4) * 37).to(dtype)).requires_grad_()
    parts = [EMPTY[name](), x] if first else [x, EMPTY[name]()]
    made = torch.cat(parts, -1)
    want = torch.cat([plain(part) for part in parts], -1)
    assert (made.dtype, made.format) == (want.dtype, x.format)
    assert_holds(made, want, 0)
    assert (made.scale, made.rms) == (x.scale, x.rms)
    made.sum().backward()
    assert_holds(x.grad, torch.ones(3, 4), 0)
    made.detach().mul_(2.0**30)  # moves the scale of the copy alone
    assert_holds(x, want.to(dtype), 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test__cat__of_an_empty_cache_measures_nothing_in_traced_code(backend):
    def f(x):
        return torch.cat([torch.tensor([], dtype=x.dtype), x * 3], 0)

    nodes = []

    def seen(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    x = sct.scaled(gaussian(3, 4) * 8)
    compiled = torch.compile(f, fullgraph=True, backend=backend)(x)
    assert_holds(compiled, dequantized(f(x)), 0)
    assert compiled.scale == f(x).scale
    torch.compiler.reset()
    torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=seen))(x)
    assert "aten.cat.default" in nodes
    assert not any("measured" in node for node in nodes)


def test__cat__of_parts_that_do_not_fit_fails_as_for_plain_tensors():
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([torch.zeros(0, 5), sct.scaled(gaussian(2, 3))], 0)
