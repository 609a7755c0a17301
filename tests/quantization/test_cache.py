"""A cache holds keys and values in few bits, and returns them decoded."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_each
from torch import Tensor

import scaledtensor as sct
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.text import draw_batch
from scaledtensor.errors import DTypeError, FormatError, ScaledTensorError, ScaleError, ShapeError

#: Format -> the largest relative error of Gaussian keys and values: half a step over sqrt(3), or
#: the amax of a block over the steps of the format.
ERRORS = {
    "fp32": 0.0,
    "bf16": 0.002,
    "e4m3fn": 0.028,
    "e5m2": 0.055,
    "int8": 0.008,
    "e2m3fn": 0.03,
    "e2m1fn": 0.11,
    "int4": 0.1,
}
HEADS, DIM = 3, 64


def gaussians(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, tokens, DIM)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def filled(cache: Any, k: Tensor, v: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """The results of the last update: a prompt, then token by token."""
    found = cache.update(0, k[:, :, :prompt], v[:, :, :prompt])
    for t in range(prompt, k.shape[2]):
        found = cache.update(0, k[:, :, t : t + 1], v[:, :, t : t + 1])
    return found


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test__every_format__decodes_within_its_error_however_the_tokens_came() -> None:
    k, v = gaussians(100)

    def check(case: tuple[str, str | None, torch.dtype]) -> None:
        name, scale, dtype = case
        keys, values = k.to(dtype), v.to(dtype)
        bound = ERRORS[name] * (1.5 if scale == "unit" else 1) + (dtype is not torch.float32) / 256
        got = filled(sct.KVCache(name, scale=scale), keys, values, 70)
        for x, want in zip(got, (k, v), strict=True):
            assert x.dtype is dtype
            assert x.is_contiguous()
            assert error(x.float(), want) <= bound
        with torch.inference_mode():
            fixed = filled(sct.KVCache(name, scale=scale, max_tokens=110), keys, values, 70)
        for x, other in zip(got, fixed, strict=True):
            assert other.shape[2] == 110
            assert torch.equal(x, other[:, :, :100])
        cache = sct.KVCache(name, scale=scale, window=20)
        narrow = filled(cache, keys, values, 70)
        for x, other in zip(got, narrow, strict=True):
            assert torch.equal(x[:, :, -20:], other)
        assert len(cache) == 1
        assert cache.tokens() == 100

    options = [(name, None, torch.float32) for name in ERRORS]
    options += [(name, "unit", torch.bfloat16) for name in ("int8", "e2m1fn")]
    options += [("e4m3fn", "amax", torch.float16), ("e4m3fn", 0.25, torch.bfloat16)]
    assert_each(options, check)


def test__tokens_in_groups__do_not_depend_on_the_calls() -> None:
    """E4M3FN with a number as scale measures nothing; INT8 and FP4 measure each group."""
    k, v = gaussians(100)

    def check(options: dict[str, Any]) -> None:
        whole = sct.KVCache(**options).update(0, k, v)
        for prompt in (1, 33, 96):
            assert all(map(torch.equal, whole, filled(sct.KVCache(**options), k, v, prompt)))

    cases: list[dict[str, Any]] = [{"format": "e4m3fn", "scale": 1.0}]
    cases += [{"format": f} for f in ("int8", "e2m1fn", "int4")]
    assert_each(cases, check)


def test__outlier_channels__are_a_matter_of_keys() -> None:
    """Keys have scales for channels, so two channels of 20 times the size harm no other channel.
    Scales for tokens, as values have, lose the other channels (KIVI, section 3.2)."""
    k, _ = gaussians(128)
    size = torch.ones(DIM)
    size[[5, 40]] = 20.0
    as_keys, as_values = sct.KVCache("int8").update(0, k * size, k * size)
    others = size == 1
    lost = [error(x[..., others], k[..., others]) for x in (as_keys, as_values)]
    assert lost[0] < 0.008
    assert lost[1] > 0.03


def test__bytes__are_those_of_codes_and_scales() -> None:
    k, v = gaussians(1024, batch=1)
    numbers = k.numel() + v.numel()

    def check(case: tuple[str, float]) -> None:
        name, wanted = case
        cache = sct.KVCache(name, max_tokens=1024)
        cache.update(0, k, v)
        assert cache.nbytes / numbers == pytest.approx(wanted, rel=0.05)
        grown = sct.KVCache(name)
        filled(grown, k, v, 900)
        assert grown.nbytes <= 1.4 * cache.nbytes  # a quarter more, of whole groups

    # A scale of a byte for a token of 64 channels is 0.016 bytes.
    assert_each([("fp32", 4), ("e4m3fn", 1.01), ("int8", 1.12), ("e2m1fn", 0.59)], check)


def test__a_window__bounds_the_memory() -> None:
    k, v = gaussians(2000, batch=1)
    cache = sct.KVCache("e4m3fn", window=32)
    full, _ = cache.update(0, k[:, :, :1500], v[:, :, :1500])
    assert full.shape[2] == 1500  # its first queries still see the first tokens
    after = cache.nbytes
    for t in range(1500, 2000):
        assert cache.mask(1).shape == (1, 32)
        got, _ = cache.update(0, k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert got.shape[2] == 32
    assert cache.nbytes < 1.1 * after < 2 * 400 * HEADS * DIM


def test__reset_crop_and_the_batch() -> None:
    k, v = gaussians(64)
    more, other = gaussians(8, seed=1)

    def check(options: dict[str, Any]) -> None:
        cache = sct.KVCache(**options)
        cache.update(0, k, v)
        first = [x[:, :, :64].clone() for x in cache.update(0, more, other)]
        cache.crop(-8)
        assert cache.tokens() == 64
        cache.crop(100)
        assert cache.tokens() == 64
        again = cache.update(0, more, other)
        for x, want in zip(again, first, strict=True):
            assert torch.equal(x[:, :, :64], want)
        cache.crop(40)
        got, _ = cache.update(0, more, other)
        assert error(got[:, :, :40], k[:, :, :40]) < 0.15
        assert error(got[:, :, 40:48], more) < 0.15
        turned = copy.deepcopy(cache)
        turned.reorder(torch.tensor([1, 0]))
        cache.crop(-8)
        turned.crop(-8)
        for x, want in zip(turned.update(0, more.flip(0), other.flip(0)),
                           cache.update(0, more, other), strict=True):  # fmt: skip
            assert torch.equal(x, want.flip(0))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        cache.crop(-8)
        turned.batch_select_indices(torch.tensor([True, False]))
        assert turned.layers[0].stores()[0].codes.shape[0] == 1
        cache.reset()
        assert cache.tokens() == 0
        for x, want in zip(cache.update(0, k, v), first, strict=True):
            assert torch.equal(x[:, :, :64], want)

    cases: list[dict[str, Any]] = [{"format": f} for f in ("e4m3fn", "int8", "e2m1fn")]
    cases += [case | {"max_tokens": 80} for case in cases]
    assert_each(cases, check)


def test__numbers_beyond_the_range__saturate_and_are_counted() -> None:
    k, v = gaussians(16)
    cache = sct.KVCache("e4m3fn")
    cache.update(0, k, v)
    assert cache.saturated == 0
    far = k[:, :, :1].clone()
    far[0, 0, 0, :3] = 1e6
    got, _ = cache.update(0, far, v[:, :, :1])
    assert cache.saturated == 3
    assert 200 < float(got[0, 0, -1, 0]) < 1e6
    assert error(got[1], torch.cat((k, far), 2)[1]) < 0.03  # the other sequence has other scales
    for name in ("e4m3fn", "int8", "e2m1fn"):
        bad = v.clone()
        bad[0, 0, 3, 5] = float("nan")
        _, got = sct.KVCache(name).update(0, k, bad)
        assert got[0, 0, 3, 5].isnan()  # in a format without NaN its block is NaN
        assert got[1].isfinite().all()
        _, got = sct.KVCache(name).update(0, k, torch.zeros_like(v))
        assert not got.any()


def test__wrong_arguments__raise_and_change_nothing() -> None:
    k, v = gaussians(4)
    made: list[tuple[type[ScaledTensorError], dict[str, Any]]] = [
        (FormatError, {"format": "fp7"}),
        (FormatError, {"keys": "e8m0fnu"}),
        (ScaleError, {"scale": "mean"}),
        (ScaleError, {"scale": -1.0}),
        (ShapeError, {"format": "int8", "block": 0}),
        (ShapeError, {"max_tokens": 0}),
        (ShapeError, {"window": [8, -1]}),
    ]
    for kind, options in made:
        with pytest.raises(kind):
            sct.KVCache(**options)
    with pytest.raises(ShapeError, match="divides 64"):
        sct.KVCache("int4", block=24).update(0, k, v)
    cache = sct.KVCache("int8", max_tokens=6)
    cache.update(0, k, v)
    calls: list[tuple[type[ScaledTensorError], str, tuple[Any, ...]]] = [
        (ShapeError, "exceed max_tokens=6", (0, k, v)),
        (ShapeError, "For another batch", (0, k[:1, :, :1], v[:1, :, :1])),
        (ShapeError, "the same batch, heads and tokens", (0, k, v[:, :, :2])),
        (ShapeError, r"\(batch, heads, tokens, head_dim\)", (0, k[0], v[0])),
        (ShapeError, "number from 0", (-1, k, v)),
        (DTypeError, "float32", (0, k.int(), v.int())),
        (DTypeError, "dtype of its first tokens", (0, *(x[:, :, :1].bfloat16() for x in (k, v)))),
    ]
    for kind, message, given in calls:
        with pytest.raises(kind, match=message):
            cache.update(*given)
        assert cache.tokens() == 4
    with pytest.raises(ShapeError, match="cannot remove 5"):
        cache.crop(-5)


def attended(cache: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = cache.mask(q.shape[2])
    k, v = cache.update(0, k, v)
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("name", ["e4m3fn", pytest.param("e2m1fn", marks=pytest.mark.slow)])
@torch.no_grad()
def test__a_cache_of_fixed_memory__compiles_in_one_graph(name: str) -> None:
    """The graph of one token serves every position."""
    torch._dynamo.reset()
    compiled = torch.compile(attended, fullgraph=True, backend="eager")
    eager, traced = (sct.KVCache(name, max_tokens=24) for _ in "ab")
    k, v = gaussians(24, batch=1)
    attended(eager, k[:, :, :18], k[:, :, :18], v[:, :, :18])
    attended(traced, k[:, :, :18], k[:, :, :18], v[:, :, :18])
    for t in range(18, 24):
        x = [y[:, :, t : t + 1] for y in (k, k, v)]
        with torch._dynamo.config.patch(error_on_recompile=t > 18):
            torch.testing.assert_close(compiled(traced, *x), attended(eager, *x))
    assert traced.tokens() == 24
    for store, other in zip(traced.layers[0].stores(), eager.layers[0].stores(), strict=True):
        assert all(map(torch.equal, store.tensors(), other.tensors()))


# --- a small model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[GPT, Tensor]:
    """A GPT that has learned the order of words in a text, and held-out windows of the text."""
    torch.manual_seed(0)
    words = [torch.randint(20, (n,)) for n in (3, 4, 5, 6) * 3]
    order = torch.arange(1500) % len(words)  # one word in ten is another one
    order = torch.where(torch.rand(1500) < 0.1, torch.randint(len(words), (1500,)), order)
    text = torch.cat([torch.cat((words[i], torch.tensor([20]))) for i in order.tolist()])
    model, rng = GPT(GPTConfig(21, 48, 2, 2, 64)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        _, loss = model(*draw_batch(text[:6000], 48, 16, rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.8
    return model.eval(), text[6000 : 6000 + 48 * 20 + 1]


@torch.no_grad()
def test__a_trained_model__has_the_loss_and_the_tokens_of_a_cache_in_fp32(
    trained: tuple[GPT, Tensor],
) -> None:
    model, text = trained
    x, y = text[:-1].view(20, 48), text[1:].view(20, 48)
    exact, want = model(x, y)
    tokens = model.generate(x[:, :8], 30, temperature=0)

    def check(case: tuple[str, float]) -> None:
        name, bound = case
        cache = sct.KVCache(name)
        prompt, loss = model(x, y, cache=cache)
        assert abs(float(loss - want)) < bound
        cache.reset()
        one = [model(x[:, t : t + 1], cache=cache)[0] for t in range(48)]
        loss = F.cross_entropy(torch.cat(one, 1).flatten(0, 1), y.flatten())
        assert abs(float(loss - want)) < bound
        if name == "fp32":
            torch.testing.assert_close(prompt, exact, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(torch.cat(one, 1), exact, atol=1e-4, rtol=1e-4)
        if name in ("fp32", "e4m3fn", "int8"):
            found = model.generate(x[:, :8], 30, temperature=0, cache=sct.KVCache(name))
            assert torch.equal(found, tokens)

    assert_each([("fp32", 1e-5), ("e4m3fn", 0.005), ("int8", 0.002), ("e2m1fn", 0.05)], check)


@torch.no_grad()
def test__a_full_context__starts_anew(trained: tuple[GPT, Tensor]) -> None:
    model, text = trained
    rng = torch.Generator().manual_seed(0)
    cache = sct.KVCache("e4m3fn")
    made = model.generate(text[None, :60], 50, 1.0, rng, top_k=3, cache=cache)
    assert made.shape == (1, 110)
    assert cache.tokens() <= 48
