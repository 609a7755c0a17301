"""`batch_invariant`: training, prefill and decoding give the same logits to the bit."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from assertions import assert_each
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor.errors import RecipeError, UnsupportedError
from scaledtensor.recipes import MXFP8, Unit

VOCABULARY, WIDTH, HEADS, LENGTH = 53, 40, 4, 17

Cache = list[Any]
"""Keys and values of each layer."""


class Layer(nn.Module):
    """A layer of a Llama: two key heads for four query heads, rotary positions, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, HEADS // 2 * size) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 100, bias=False) for _ in range(2))
        self.down = nn.Linear(100, WIDTH, bias=False)

    def forward(self, x: Tensor, turned: Callable[[Tensor], Tensor], cache: Cache | None) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = turned(q), turned(k)
        if cache is not None:
            if cache:
                k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
            cache[:] = k, v
        n, keys = q.shape[2], k.shape[2]
        mask = None
        if n > 1 and n < keys:
            mask = torch.ones(n, keys, dtype=torch.bool).tril(keys - n)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=n == keys and n > 1, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cache: list[Cache] | None = None) -> Tensor:
        start = cache[0][0].shape[2] if cache and cache[0] else 0
        places = torch.arange(start, start + tokens.shape[1])
        rates = 100.0 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        angles = (places.unsqueeze(1) * rates).repeat(1, 2)

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * angles.cos().to(x.dtype) + torch.cat((-b, a), -1) * angles.sin().to(x.dtype)

        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, turned, None if cache is None else cache[i])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def plain(x: Tensor) -> Tensor:
    x = x.detach()
    return x.dequantize() if isinstance(x, sct.ScaledTensor) else x


def trained(model: Policy, steps: int = 3) -> Policy:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        tokens = (torch.arange(LENGTH + 1) * 3 + torch.randint(VOCABULARY, (6, 1))) % VOCABULARY
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return model


class Rollout(NamedTuple):
    tokens: Tensor
    logits: Tensor
    """The logits from which each token after the prompt was drawn."""


@torch.inference_mode()
def rollout(model: Policy, prompt: Tensor, length: int) -> Rollout:
    """Sample with a cache: the prompt in one prefill, and then one token at a time."""
    cache: list[Cache] = [[] for _ in model.layers]
    tokens, step, found = prompt, prompt, []
    for _ in range(length - prompt.shape[1]):
        logits = plain(model(step, cache))[:, -1]
        found.append(logits)
        step = torch.multinomial(logits.float().softmax(-1), 1)
        tokens = torch.cat((tokens, step), 1)
    return Rollout(tokens, torch.stack(found, 1))


def divergence(model: Policy) -> tuple[float, float]:
    """KL(rollout, training forward) and the largest difference of a logit.

    The rollouts are made one by one and in threes; one training forward reads all of them.
    """
    prompts = torch.arange(4 * 5).view(4, 5) % VOCABULARY
    model.eval()
    parts = [rollout(model, prompts[:1], LENGTH), rollout(model, prompts[1:], LENGTH)]
    tokens = torch.cat([part.tokens for part in parts])
    drawn = torch.cat([part.logits for part in parts])
    model.train()
    logits = plain(model(tokens))[:, 4:-1]
    p, q = (x.float().log_softmax(-1) for x in (drawn, logits))
    return float((p.exp() * (p - q)).sum(-1).mean()), float((drawn - logits).abs().max())


def _bfloat16(model: Policy) -> Policy:
    return model.to(torch.bfloat16)


def _scaled(recipe: Any) -> Callable[[Policy], Policy]:
    return lambda model: sct.scale_model(model, recipe)


def _quantised(config: Any) -> Callable[[Policy], Policy]:
    def convert(model: Policy) -> Policy:
        trained(model).requires_grad_(False)
        sct.quantize_(model, config)
        return model

    return convert


#: Name -> the function that converts a policy, and whether the policy is trained after that.
POLICIES: dict[str, tuple[Callable[[Policy], Policy], bool]] = {
    "float32": (lambda model: model, True),
    "bfloat16": (_bfloat16, True),
    "unit": (_scaled(Unit()), True),
    "mxfp8": (_scaled(MXFP8()), True),
    "weights in FP8": (_quantised(sct.WeightOnly("e4m3fn")), False),
    "weights in INT4": (_quantised(sct.WeightOnly("int4", granularity=4)), False),
    "tokens in FP8": (_quantised(sct.Dynamic("e4m3fn")), False),
}


def test__policy__and_its_rollout_diverge_by_exactly_nothing() -> None:
    def check(name: str) -> None:
        convert, trains = POLICIES[name]
        torch.manual_seed(0)
        with sct.batch_invariant(context_length=LENGTH):
            model = convert(Policy())
            if trains:
                trained(model)
            assert divergence(model) == (0.0, 0.0)

    assert_each(POLICIES, check)


def test__policy__and_its_rollout_diverge_without_the_setting() -> None:
    for name in ("float32", "bfloat16", "unit"):
        convert, _ = POLICIES[name]
        torch.manual_seed(0)
        kl, difference = divergence(trained(convert(Policy())))
        assert math.isfinite(kl)
        assert difference > 0, name


def test__training__in_the_setting_learns_as_without_it() -> None:
    weights = []
    for on in (True, False):
        torch.manual_seed(0)
        with sct.batch_invariant(on):
            weights.append(dict(trained(Policy()).named_parameters()))
    for name, w in weights[0].items():
        torch.testing.assert_close(w, weights[1][name], rtol=1e-2, atol=1e-4)


def test__prefill_in_parts__has_the_same_bits() -> None:
    def check(name: str) -> None:
        convert, _trains = POLICIES[name]
        torch.manual_seed(0)
        with sct.batch_invariant():
            model = convert(Policy())
            tokens = torch.randint(VOCABULARY, (3, LENGTH))
            whole = plain(model(tokens))
            with torch.no_grad():
                for cuts in ((1, 2, 11), (10,), tuple(range(1, LENGTH))):
                    cache: list[Cache] = [[] for _ in model.layers]
                    parts = torch.tensor_split(tokens[1:], cuts, 1)
                    made = torch.cat([plain(model(part, cache)) for part in parts], 1)
                    assert torch.equal(made, whole[1:]), cuts
                assert torch.equal(plain(model(tokens[:, :7])), whole[:, :7])

    assert_each(("float32", "bfloat16", "unit", "weights in FP8"), check)


def test__scaled_attention__over_plain_values_is_refused() -> None:
    q = sct.scaled(torch.randn(1, 2, 3, 8), "bf16")
    with sct.batch_invariant(), pytest.raises(UnsupportedError, match="DynamicCache"):
        F.scaled_dot_product_attention(q, q, torch.randn(1, 2, 3, 8))


def test__configs__that_measure_a_batch_are_refused() -> None:
    model = Policy().requires_grad_(False)
    sct.quantize_(model, sct.Dynamic("e4m3fn", input_granularity="tensor"))
    with sct.batch_invariant(), pytest.raises(RecipeError, match="input_granularity='token'"):
        model(torch.zeros(1, 4, dtype=torch.long))


# --- models of transformers --------------------------------------------------------------------


def _language_models() -> dict[str, nn.Module]:
    library = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    llama = library.LlamaConfig(
        vocab_size=97,
        hidden_size=72,
        intermediate_size=150,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    gpt2 = library.GPT2Config(
        vocab_size=97,
        n_positions=64,
        n_embd=72,
        n_layer=2,
        n_head=6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return {
        "llama": library.LlamaForCausalLM(llama),
        "gpt2": library.GPT2LMHeadModel(gpt2),
    }


def _generated(model: Any, tokens: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    made = model.generate(
        tokens,
        attention_mask=how.pop("attention_mask", torch.ones_like(tokens)),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )
    return made.sequences, torch.stack([plain(x) for x in made.logits], 1)


def _check_generation(model: Any) -> None:
    tokens = torch.randint(1, 97, (5, 13))
    model.eval()
    sequences, logits = _generated(model, tokens)
    static: dict[str, Any] = {"cache_implementation": "static"}
    if isinstance(next(model.parameters()), sct.ScaledTensor):
        with pytest.raises(UnsupportedError, match="DynamicCache"):
            _generated(model, tokens, **static)
        static = {}
    for how in ({"use_cache": False}, static):
        other, same = _generated(model, tokens, **how)
        assert torch.equal(other, sequences), how
        assert torch.equal(same, logits), how
    for i in (0, 3):
        other, same = _generated(model, tokens[i : i + 1])
        assert torch.equal(other, sequences[i : i + 1])
        assert torch.equal(same, logits[i : i + 1])
    model.train()
    trained_on = plain(model(sequences).logits)
    assert torch.equal(trained_on[:, 12:-1], logits)
    model.eval()
    padded, mask = F.pad(tokens, (3, 0)), F.pad(torch.ones_like(tokens), (3, 0))
    padded[0, :3] = mask[0, :3] = 5  # one prompt is longer
    mask[0, :3] = 1
    other, same = _generated(model, padded, attention_mask=mask)
    assert torch.equal(other[1:, 3:], sequences[1:])
    assert torch.equal(same[1:], logits[1:])


def test__transformers__generate_the_logits_of_training() -> None:
    def check(case: tuple[str, str]) -> None:
        name, kind = case
        model: Any = _language_models()[name]
        if kind == "bfloat16":
            model = model.to(torch.bfloat16)
        elif kind == "unit":
            sct.scale_model(model, Unit())
        with sct.batch_invariant():
            _check_generation(model)

    kinds = ("float32", "bfloat16", "unit")
    assert_each([(name, kind) for name in ("llama", "gpt2") for kind in kinds], check)
