"""A loss times 2**k gives the same gradient elements, bit for bit, in every spelling of a model."""

import math

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_in_range, assert_shifted
from hypothesis import given, settings
from hypothesis import strategies as st

import scaledtensor as sct
from scaledtensor.ops.products.dtype import product_dtype

TOKENS, WIDTH, HEADS, VOCABULARY = 16, 32, 4, 50


def by_linear(x, w):
    return F.linear(x, w)


def by_operator(x, w):
    return x @ w.t()


def by_method(x, w):
    return x.matmul(w.t())


def by_einsum(x, w):
    return torch.einsum("bti,oi->bto", x, w)


def by_bmm(x, w):
    return torch.bmm(x, w.t().expand(x.shape[0], -1, -1))


def by_baddbmm(x, w):
    zero = x.new_zeros(x.shape[0], x.shape[1], w.shape[0])
    return torch.baddbmm(zero, x, w.t().expand(x.shape[0], -1, -1))


def by_addmm(x, w):
    zero = x.new_zeros(x.shape[0] * x.shape[1], w.shape[0])
    return torch.addmm(zero, x.flatten(0, 1), w.t()).unflatten(0, x.shape[:2])


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gpt(p, product, x):
    """A block with learned positions, layer norms with bias, fused attention, gelu, a tied
    readout."""
    h = F.layer_norm(x, (WIDTH,), p["norm1"], p["bias1"])
    q, k, v = (heads(t) for t in product(h, p["qkv"]).chunk(3, -1))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + product(a.transpose(1, 2).flatten(2), p["out"])
    h = F.layer_norm(x, (WIDTH,), p["norm2"], p["bias2"])
    return x + product(F.gelu(product(h, p["up"])), p["down"])


def llama(p, product, x):
    """A block with rotary positions, RMS norms, spelled-out attention, a gated silu."""
    h = F.rms_norm(x, (WIDTH,), p["norm1"])
    q, k, v = (heads(t) for t in product(h, p["qkv"]).chunk(3, -1))
    q, k = rotated(q), rotated(k)
    logits = (q @ k.mT) / math.sqrt(q.shape[-1])
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    a = logits.masked_fill(future, float("-inf")).softmax(-1) @ v
    x = x + product(a.transpose(1, 2).flatten(2), p["out"])
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * p["norm2"]
    return x + product(F.silu(product(h, p["up"])) * product(h, p["gate"]), p["down"])


def rotated(x):
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def parameters(wrap, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def made(*shape, std):
        return wrap(torch.randn(shape, generator=rng) * std).requires_grad_()

    return {
        "table": made(VOCABULARY, WIDTH, std=0.02),
        "positions": made(TOKENS, WIDTH, std=0.02),
        "qkv": made(3 * WIDTH, WIDTH, std=0.2),
        "out": made(WIDTH, WIDTH, std=0.2),
        "up": made(4 * WIDTH, WIDTH, std=0.2),
        "gate": made(4 * WIDTH, WIDTH, std=0.2),
        "down": made(WIDTH, 4 * WIDTH, std=0.1),
        **{f"norm{i}": made(WIDTH, std=1) for i in (1, 2)},
        **{f"bias{i}": made(WIDTH, std=0.1) for i in (1, 2)},
    }


def gradients(block, product, wrap, factor=1.0, seed=0):
    p = parameters(wrap, seed)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    x = F.embedding(tokens[:, :-1], p["table"]) + p["positions"]
    logits = product(block(p, product, x), p["table"])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss * factor).backward()
    return loss.detach(), {name: t.grad for name, t in p.items() if t.grad is not None}


def by_unit_recipe(t):
    return sct.scaled(t, recipe=sct.recipes.Unit())


blocks = pytest.mark.parametrize("block", [gpt, llama])
products = pytest.mark.parametrize(
    "product",
    [by_linear, by_operator, by_method, by_einsum, by_bmm, by_baddbmm, by_addmm],
)


@products
@blocks
@settings(max_examples=3)
@given(k=st.integers(-40, 40))
def test__loss_times_a_power_of_two__moves_only_the_scales_of_gradients(block, product, k):
    loss, before = gradients(block, product, by_unit_recipe)
    same, after = gradients(block, product, by_unit_recipe, 2.0**k)
    assert torch.equal(loss, same)
    assert before.keys() == after.keys()
    for name in before:
        assert isinstance(before[name], sct.ScaledTensor)
        assert_shifted(before[name], after[name], k)


@products
@blocks
def test__fp8_gradients__are_near_those_of_float32(block, product):
    loss, got = gradients(block, product, by_unit_recipe)
    exact, want = gradients(block, product, torch.clone)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name].dequantize() - want[name]).norm() / want[name].norm()
        assert error < 0.2, f"{name}: relative error {error:.3f}"
        assert_in_range([got[name]], 0.1, 8, what=name)


def test__compiled_block__moves_only_scales_too():
    compiled = torch.compile(gpt, fullgraph=True)
    loss, before = gradients(compiled, by_linear, by_unit_recipe)
    _, after = gradients(compiled, by_linear, by_unit_recipe, 2.0**-33)
    eager, want = gradients(gpt, by_linear, by_unit_recipe)
    torch.testing.assert_close(loss, eager, rtol=1e-2, atol=0)
    for name in want:
        assert_shifted(before[name], after[name], -33)
        if product_dtype(torch.device("cpu")) == torch.bfloat16:
            difference = before[name].dequantize() - want[name].dequantize()
            assert difference.norm() < 0.1 * want[name].dequantize().norm(), name
    # A compiler rounds less often than eager code. An operator fused with a float32 product sees
    # that product before its rounding to bfloat16. So single errors differ, and their mean does
    # not.
    errors = {name: torch.zeros(2) for name in want}
    for seed in range(6):
        _, exact = gradients(gpt, by_linear, torch.clone, seed=seed)
        for i, block in enumerate((compiled, gpt)):
            _, got = gradients(block, by_linear, by_unit_recipe, seed=seed)
            for name, of in errors.items():
                of[i] += (got[name].dequantize() - exact[name]).square().sum()
    for name, (of_compiled, of_eager) in errors.items():
        assert of_compiled.sqrt() < 1.15 * of_eager.sqrt(), name
