"""Gradients go straight through a cache to the tokens of the call, and no graph stays in it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from assertions import assert_each
from torch import Tensor

import scaledtensor as sct

KINDS: list[dict[str, Any]] = [
    {"format": f} | more
    for f in ("fp32", "e4m3fn", "int8", "e2m1fn")
    for more in ({}, {"max_tokens": 40}, {"window": 6})
]


def tokens(count: int, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, count, 16, generator=rng, requires_grad=True) for _ in "kv"]


def test__gradients__go_to_the_tokens_of_the_call_and_to_no_others() -> None:
    def check(options: dict[str, Any]) -> None:
        cache, old, new = sct.KVCache(**options), tokens(20, 0), tokens(3, 1)
        cache.update(0, *old)
        first = cache.tokens() if "max_tokens" in options else -3
        for x, made in zip(new, cache.update(0, *new), strict=True):
            weights = torch.randn_like(made)
            (grad,) = torch.autograd.grad((made * weights).sum(), x)
            rows = slice(first, first + 3) if first > 0 else slice(-3, None)
            assert torch.equal(grad, weights[:, :, rows])
            made.mul_(2)  # as with every other result
        assert cache.tokens() == 23
        assert not any(t.requires_grad for s in cache.layers[0].stores() for t in s.tensors())

    assert_each(KINDS, check)


def test__values_are_the_same__with_and_without_gradients() -> None:
    def check(options: dict[str, Any]) -> None:
        one, two = sct.KVCache(**options), sct.KVCache(**options)
        for count in (20, 1):
            x = tokens(count, count)
            with torch.no_grad():
                want = two.update(0, *x)
            got = one.update(0, *x)
            assert all(map(torch.equal, got, want))
            assert [t.requires_grad for t in (*got, *want)] == [True, True, False, False]

    assert_each(KINDS, check)


def test__only_keys_that_need_gradients__get_them() -> None:
    k, v = tokens(4, 0)
    got, other = sct.KVCache().update(0, k, v.detach())
    assert got.requires_grad
    assert not other.requires_grad


def test__no_graph__stays_in_a_cache() -> None:
    """A loop without `no_grad` frees the graph of each step."""
    held: list[weakref.ref[Tensor]] = []

    def check(options: dict[str, Any]) -> None:
        cache = sct.KVCache(**options)
        for step in range(5):
            k, v = (x * 2 for x in tokens(3, step))
            cache.update(0, k, v)
            held.extend((weakref.ref(k), weakref.ref(v)))
        del k, v
        gc.collect()
        assert not any(r() is not None for r in held)

    assert_each(KINDS, check)


def test__a_compiled_update__has_the_gradients_of_eager_code() -> None:
    def loss(cache: Any, k: Tensor, v: Tensor) -> Tensor:
        k, v = cache.update(0, k, v)
        return (k * k + v.sin()).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for f in (loss, compiled):
        cache = sct.KVCache("e4m3fn", max_tokens=12)
        cache.update(0, *tokens(3, 0))
        x = tokens(2, 1)
        found.append(torch.autograd.grad(f(cache, *x), x))
    assert all(map(torch.equal, *found))


def test__a_model__trains_its_projections_through_a_cache() -> None:
    """In FP32 the gradients equal the gradients with transformers' own cache."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    ids = torch.randint(96, (2, 12))

    def gradients(cache: Any) -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, past_key_values=cache, use_cache=True).loss.backward()
        return [p.grad for p in model.parameters()]

    want = gradients(transformers.DynamicCache())
    for options in ({}, {"max_tokens": 12}):
        got = gradients(sct.KVCache("fp32", **options))
        assert all(map(torch.equal, got, want))
    for grad, exact in zip(gradients(sct.KVCache("e4m3fn")), want, strict=True):
        assert float((grad - exact).norm() / exact.norm()) < 0.08
