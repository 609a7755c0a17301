"""A model with an encoder and a decoder takes two caches, and one cache refuses such a model."""

from typing import Any

import pytest
import torch
from assertions import assert_each
from tensors import prompts

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError

transformers = pytest.importorskip("transformers")

#: A pair of tokens comes once, so that tokens differ from step to step.
GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "no_repeat_ngram_size": 2,
}
CONFIGS: dict[str, Any] = {
    "t5": transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        decoder_start_token_id=0, tie_word_embeddings=False,
    ),
    "bart": transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.3,
        max_position_embeddings=64, forced_eos_token_id=None,
    ),
}  # fmt: skip


PADDING = slice(8, None)  # of the second prompt


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(CONFIGS[name]).eval()


def pair(*args: Any, **options: Any) -> Any:
    return transformers.EncoderDecoderCache(*(sct.KVCache(*args, **options) for _ in "ab"))


@torch.no_grad()
def test__two_caches__have_the_tokens_of_no_cache() -> None:
    def check(name: str) -> None:
        model, inputs = model_of(name), prompts(PADDING)
        for beams in (1, 3):
            ways = {**inputs, **GREEDY, "num_beams": beams}
            want = model.generate(**ways, use_cache=False)
            assert len(want[0].unique()) > 4
            for options in ({}, {"max_tokens": 12}):
                cache = pair("fp32", **options)
                assert torch.equal(model.generate(**ways, past_key_values=cache), want)
                assert cache.cross_attention_cache.tokens() == 12
                cache.reset()
                assert torch.equal(model.generate(**ways, past_key_values=cache), want)

    assert_each(CONFIGS, check)


@torch.no_grad()
def test__two_caches_in_few_bits__have_near_logits_in_each_step() -> None:
    def check(name: str) -> None:
        model, inputs = model_of(name), prompts(PADDING)
        words = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(4))
        exact = model(**inputs, decoder_input_ids=words).logits
        for format, bound in (("fp32", 1e-5), ("e4m3fn", 0.06), ("int8", 0.02), ("e2m1fn", 0.3)):
            cache = pair(format)
            steps = [
                model(**inputs, decoder_input_ids=words[:, t : t + 1], past_key_values=cache)
                for t in range(8)
            ]
            got = torch.cat([step.logits for step in steps], 1)
            assert float((got - exact).norm() / exact.norm()) < bound, format

    assert_each(CONFIGS, check)


def test__keys_and_values_of_a_layer__are_decoded() -> None:
    def check(options: dict[str, Any]) -> None:
        cache = sct.KVCache(**options)
        cache.update(0, *(torch.randn(1, 2, 40, 16) for _ in "kv"))
        k, v = cache.update(0, *(torch.randn(1, 2, 1, 16) for _ in "kv"))
        layer = cache.layers[0]
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)
        cache.reset()
        assert options.get("max_tokens") or layer.keys is layer.values is None

    limits: list[dict[str, Any]] = [{}, {"max_tokens": 50}, {"window": 7}]
    assert_each([{"format": f} | n for f in ("fp32", "e4m3fn", "int8") for n in limits], check)


def test__one_cache__refuses_an_encoder_and_a_decoder() -> None:
    two = r"give two, without `config`: EncoderDecoderCache\(sct.KVCache"

    def check(name: str) -> None:
        model, ids = model_of(name), prompts(PADDING)["input_ids"]
        with pytest.raises(UnsupportedError, match=two):
            sct.KVCache("fp32", config=model.config)
        with pytest.raises(UnsupportedError, match=two):
            model.generate(ids, **GREEDY, past_key_values=sct.KVCache("fp32"))

    assert_each(CONFIGS, check)


def test__a_loop_of_ones_own__updates_layers_in_any_order() -> None:
    x = torch.randn(1, 2, 3, 16)
    cache = sct.KVCache()
    for layer in (0, 0, 1, 1, 1, 0):
        cache.update(layer, x, x)
    for forget in (cache.reset, lambda: cache.crop(3)):
        cache.update(x, x, 0)
        cache.update(x, x, 1)
        forget()
        cache.update(x, x, 1)
    stage = sct.KVCache()  # the only layer of a stage of a pipeline
    for _ in range(3):
        stage.update(x, x, 5)
