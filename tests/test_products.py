"""Every spelling of a matrix product multiplies 8-bit operands, cast before autograd saves them."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_holds, dequantized
from torch import nn

import scaledtensor as sct
from scaledtensor.formats import E4M3FN, E5M2, Format
from scaledtensor.ops.products import linear
from scaledtensor.ops.rules import matmul

UNIT = sct.recipes.Unit()
FORWARD = (E4M3FN, E4M3FN)


@pytest.fixture(autouse=True)
def _linear_by_operators(monkeypatch):
    """Turn off the single node of a linear layer. tests/ops/test_linear.py shows that it has the
    same bits."""
    monkeypatch.setattr(linear, "serves", lambda x, weight: False)


@pytest.fixture
def products(monkeypatch):
    """Record the two formats of each product that ran; a plain operand shows its dtype."""
    seen = []
    run = matmul._product

    def spy(function, a, b):
        seen.append(tuple(x.format if isinstance(x, sct.ScaledTensor) else x.dtype for x in (a, b)))
        return run(function, a, b)

    monkeypatch.setattr(matmul, "_product", spy)
    return seen


@pytest.fixture
def casts(monkeypatch):
    """Count the casts to each format, by the formats of the results."""
    seen: Counter[Format] = Counter()
    op = torch.ops.scaledtensor.to_format.default
    row = sct.ops.RULES[op]

    def spy(x, name):
        seen[sct.formats.get(name)] += 1
        return row.call(x, name)

    monkeypatch.setitem(sct.ops.RULES, op, dataclasses.replace(row, call=spy))
    sct.ops.registry._handlers.clear()
    yield seen
    sct.ops.registry._handlers.clear()


def operands(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [sct.scaled(torch.randn(s, generator=rng), recipe=UNIT).requires_grad_() for s in shapes]


SPELLINGS = {
    "F.linear": (F.linear, (4, 8), (5, 8), (5,)),
    "F.linear keywords": (lambda x, w: F.linear(input=x, weight=w, bias=None), (4, 8), (5, 8)),
    "@": (lambda a, b: a @ b, (2, 4, 8), (8, 5)),
    "torch.matmul": (torch.matmul, (4, 8), (8, 5)),
    "Tensor.matmul": (lambda a, b: a.matmul(b), (4, 8), (8, 5)),
    "torch.mm": (torch.mm, (4, 8), (8, 5)),
    "torch.bmm": (torch.bmm, (2, 4, 8), (2, 8, 5)),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), (2, 4, 8), (8, 5)),
    "torch.addmm": (torch.addmm, (5,), (4, 8), (8, 5)),
    "Tensor.addmm": (lambda c, a, b: c.addmm(a, b, beta=2, alpha=3), (4, 5), (4, 8), (8, 5)),
    "torch.baddbmm": (torch.baddbmm, (2, 4, 5), (2, 4, 8), (2, 8, 5)),
    "Tensor.baddbmm keywords": (
        lambda c, a, b: c.baddbmm(batch1=a, batch2=b),
        (2, 4, 5),
        (2, 4, 8),
        (2, 8, 5),
    ),
    "torch.addbmm": (torch.addbmm, (4, 5), (2, 4, 8), (2, 8, 5)),
    "torch.tensordot": (lambda a, b: torch.tensordot(a, b, 1), (4, 8), (8, 5)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test__every_spelling__multiplies_8_bit_operands(name, products):
    run, *shapes = SPELLINGS[name]
    inputs = operands(*shapes)
    out = run(*inputs)
    assert products == [FORWARD]
    products.clear()
    out.square().sum().backward()
    assert [set(p) for p in products] == [{E4M3FN, E5M2}] * 2
    plain = [dequantized(x).requires_grad_() for x in inputs]
    want = run(*plain)
    want.square().sum().backward()
    assert_holds(out, want, 0.15)
    for x, p in zip(inputs, plain, strict=True):
        assert_holds(x.grad, p.grad, 0.4)


def hf_conv1d():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(5, 8)


@pytest.mark.parametrize(
    ("make", "shapes", "count"),
    [
        (lambda: nn.Linear(8, 5), [(4, 8)], 1),
        (hf_conv1d, [(4, 8)], 1),
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True), [(2, 4, 8)] * 3, 6),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [(2, 4, 8)], 4),
    ],
    ids=["Linear", "Conv1D", "MultiheadAttention", "TransformerEncoderLayer"],
)
@pytest.mark.parametrize("train", [True, False])
def test__modules__multiply_8_bit_operands(make, shapes, count, train, products):
    torch.manual_seed(0)
    model = make().train(train)
    inputs = [torch.randn(s) for s in shapes]
    with torch.no_grad():  # A graph would hold the parameters.
        want = model(*inputs)
    want = want[0] if isinstance(want, tuple) else want
    sct.scale_model(model)
    out = model(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    assert products == [FORWARD] * count
    assert_holds(out, want, 0.2)
    products.clear()
    out.square().sum().backward()
    assert products
    assert all(set(p) == {E4M3FN, E5M2} for p in products)
    with torch.no_grad():
        again = model(*inputs)
        assert_holds(again[0] if isinstance(again, tuple) else again, want, 0.2)


def test__attention_that_shares_its_input__casts_as_one_projection(products):
    model = sct.scale_model(nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 4, 8)
    model(x, x, x, need_weights=False)
    assert products == [FORWARD] * 2


def test__autograd__saves_one_byte_per_element():
    saved = []
    model = sct.scale_model(nn.Linear(8, 16))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(torch.randn(3, 8, requires_grad=True))
    assert sorted(x.qdata.numel() * x.qdata.itemsize for x in saved) == [3 * 8, 8 * 16]
    assert {x.format for x in saved} == {E4M3FN}


def test__a_gradient__is_cast_once_for_dgrad_and_wgrad(products, casts):
    model = sct.scale_model(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    out = model(torch.randn(3, 8, requires_grad=True))
    assert casts == {E4M3FN: 4}
    casts.clear()
    products.clear()
    out.square().sum().backward()
    assert (casts[E5M2], casts[E4M3FN]) == (2, 0)
    assert len(products) == 4
    assert all(p[0] is E5M2 and p[1] is E4M3FN for p in products)


@pytest.mark.parametrize(("frozen", "count"), [(True, 1), (False, 2)])
def test__a_frozen_weight__has_no_wgrad(frozen, count, products):
    model = sct.scale_model(nn.Linear(8, 16).requires_grad_(not frozen))
    x = torch.randn(3, 8, requires_grad=True)
    out = model(x)
    products.clear()
    out.square().sum().backward()
    assert products == [(E5M2, E4M3FN)] * count
    assert x.grad.dtype == torch.float32


def test__a_module_left_out__multiplies_no_8_bit_operand(products):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4))
    sct.scale_model(model, filter_fn=lambda module, fqn: fqn != "1")
    model(torch.randn(3, 8)).square().sum().backward()
    eight = [any(f in (E4M3FN, E5M2) for f in pair) for pair in products]
    assert eight.count(False) == 3  # This is the middle layer: forward, dgrad, wgrad.
    assert eight.count(True) == 2 + 3  # These are both others, and the first needs no dgrad.


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("window", [torch.conv2d, torch.conv_transpose2d])
def test__a_plain_filter__is_not_cast(window, compiled):
    """An impulse gives the filter itself, in BF16. SSIM subtracts the results of such filters."""
    torch.manual_seed(0)
    g = torch.exp(-((torch.arange(5) - 2.0) ** 2) / 4.5)
    blur = (g[:, None] * g / g.sum() ** 2)[None, None]
    model = nn.Conv2d(3, 1, 3)
    x = torch.rand(2, 3, 16, 16)

    def run(x):
        return window(model(x) + 4, blur).square().mean()

    run(x).backward()
    want = model.weight.grad
    model.zero_grad()
    sct.scale_model(model)
    call = torch.compile(run, fullgraph=True) if compiled else run
    with torch.no_grad():
        impulse = F.pad(torch.ones(1, 1, 1, 1), (4,) * 4) + 0 * model(x)[:1, :1, :1, :1]
        y = window(impulse, blur)
    border = (y.shape[-1] - 5) // 2
    assert_holds(F.pad(y, (-border,) * 4), blur, 2.0**-8)
    call(x).backward()
    assert_holds(model.weight.grad, want, 0.1)


def test__without_a_recipe__operands_stay_as_they_are(products):
    a, b = (sct.scaled(torch.randn(4, 4)) for _ in range(2))
    assert_holds(a @ b, dequantized(a) @ dequantized(b), 2.0**-20)
    assert products == [(a.format, b.format)]


def test__a_plain_filter_by_time__is_not_cast():
    (x,) = operands((9, 2, 8))
    window = torch.randn(3, 8, 4)
    y = torch.conv_tbc(x, window, torch.zeros(4))
    want = torch.conv_tbc(dequantized(x).float(), window, torch.zeros(4))
    assert_holds(y, want, 2.0**-7)
