"""The closed forms hold for random sizes and hyperparameters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaledtensor.functional as U

sizes = st.integers(16, 160)
seeds = st.integers(0, 2**31)
few = settings(max_examples=15)


def leaves(seed, *shapes):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=rng).requires_grad_() for s in shapes]


def assert_unit(out, tensors, seed, low=0.8, high=1.25):
    rng = torch.Generator().manual_seed(seed + 1)
    gradients = torch.autograd.grad(out, tensors, torch.randn(out.shape, generator=rng))
    for x in (out, *gradients):
        slack = 1 + 4 / math.sqrt(x.numel())
        assert low / slack <= float(x.detach().square().mean().sqrt()) <= high * slack


@few
@given(seeds, sizes, sizes, sizes)
def test__products__over_sizes(seed, n, k, m):
    x, w = leaves(seed, (n, k), (m, k))
    assert_unit(U.linear(x, w, constraint=None), (x, w), seed)
    assert_unit(U.matmul(x, w.mT, None), (x, w), seed)
    assert_unit(U.einsum("nk,mk->nm", x, w, constraint=None), (x, w), seed)


@few
@given(
    seeds,
    st.integers(4, 8).map(lambda n: 4 * n),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 3),
)
def test__convolutions__over_their_geometry(seed, channels, groups, taps, stride, dilation):
    stride = min(stride, taps)  # Beyond this, inputs are skipped and their gradient is zero.
    options = {"stride": stride, "dilation": dilation, "groups": groups, "constraint": None}
    x, w = leaves(seed, (4, channels, 128), (32, channels // groups, taps))
    assert_unit(U.conv1d(x, w, **options), (x, w), seed, 0.75, 1.3)
    if dilation == 1:  # Otherwise some positions meet more taps than others.
        x, w = leaves(seed, (4, channels, 64), (channels, 32 // groups, taps))
        assert_unit(U.conv_transpose1d(x, w, **options), (x, w), seed, 0.75, 1.3)


@few
@given(
    seeds,
    st.sampled_from([32, 64, 128]),
    st.sampled_from([16, 32, 64]),
    st.floats(0.5, 4),
    st.booleans(),
)
def test__attention__over_lengths_and_sharpness(seed, length, d, mult, causal):
    q, k, v = leaves(seed, *((2, 2, length, d),) * 3)
    options = {"mult": mult, "is_causal": causal, "constraint": None}
    out = U.scaled_dot_product_attention(q, k, v, **options)
    assert_unit(out, (q, k, v), seed, 0.7, 1.4)


@few
@given(seeds, st.floats(0.1, 16))
def test__activations__over_sharpness(seed, mult):
    for function in (U.gelu, U.silu, U.tanh, U.sigmoid):
        (x,) = leaves(seed, (20_000,))
        low = 0.8
        # This is the RMS; the mean is not removed.
        high = 1.4 if function in (U.gelu, U.silu) else 1.25
        assert_unit(function(x, mult, None), (x,), seed, low, high)


# --- what a closed form does not depend on ---------------------------------------------------


def test__attention_of_a_fixed_context__decodes_as_it_was_trained():
    """One token against a cache gives the result of the whole sequence."""
    q, k, v = (t.detach() for t in leaves(0, *((1, 2, 48, 16),) * 3))
    whole = U.scaled_dot_product_attention(q, k, v, is_causal=True, context_length=48)
    torch.testing.assert_close(whole, U.scaled_dot_product_attention(q, k, v, is_causal=True))
    for n in (1, 7, 48):
        step = U.scaled_dot_product_attention(
            q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], context_length=48
        )
        torch.testing.assert_close(step[:, :, 0], whole[:, :, n - 1], rtol=1e-5, atol=1e-5)


def test__attention_by_default__scales_with_the_number_of_keys():
    """The result is the published one; this shows the purpose of `context_length`."""
    q, k, v = (t.detach() for t in leaves(0, *((1, 2, 48, 16),) * 3))
    whole = U.scaled_dot_product_attention(q, k, v, is_causal=True)
    step = U.scaled_dot_product_attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True)
    assert float((whole[:, :, :8] / step).mean()) == pytest.approx(
        math.sqrt(math.log(8) / 8 * 48 / math.log(48)), rel=0.05
    )


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (64, 8)])
@pytest.mark.parametrize("mult", [0.25, 1.0, 2.0])
def test__routed_outputs__combine_at_unit_scale(experts, top_k, mult):
    logits, outputs = leaves(0, (4096, experts), (4096, top_k, 8))
    weights, indices = U.moe_route(logits, top_k, mult)
    combined = (weights.unsqueeze(-1) * outputs).sum(-2)
    assert float(combined.std()) == pytest.approx(1, rel=0.1)
    assert torch.equal(indices, logits.topk(top_k).indices)
    torch.testing.assert_close(
        weights / weights.sum(-1, keepdim=True), (mult * logits.topk(top_k).values).softmax(-1)
    )


def test__a_loss__has_the_value_of_torch_and_the_gradient_of_a_sum():
    """A token's gradient does not depend on the number of tokens."""
    (x,) = leaves(0, (64, 32))
    target = torch.arange(64) % 32
    for n in (1, 16, 64):
        loss = U.cross_entropy(x[:n], target[:n])
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x[:n], target[:n]))
        (g,) = torch.autograd.grad(loss, x)
        (one,) = torch.autograd.grad(U.cross_entropy(x[0], target[0]), x)
        torch.testing.assert_close(g[0], one[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test__a_loss_over_many_tokens__stays_in_the_range_of_its_dtype(dtype):
    """The gradient is the gradient of a sum, which is never formed."""
    (x,) = leaves(0, (16384, 32))
    x = x.detach().to(dtype).requires_grad_()
    loss = U.cross_entropy(x, torch.arange(16384) % 32)
    (g,) = torch.autograd.grad(loss, x)
    assert loss.dtype == g.dtype == dtype
    assert loss.isfinite()
    assert float(g.float().square().mean().sqrt()) == pytest.approx(1, rel=0.1)
