"""A `KVCache` is a cache of transformers: `generate` with every way of decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_each
from tensors import prompts

import scaledtensor as sct
from scaledtensor.__main__ import main
from scaledtensor.errors import UnsupportedError

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "gpt2": transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "mistral": transformers.MistralConfig(**SIZES, **WINDOW),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **WINDOW, **LAYERS),
}
GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}


PADDING = slice(5)  # of the second prompt


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


@torch.no_grad()
def test__generate__takes_a_cache_for_each_kind_of_model() -> None:
    """In FP32 transformers' own cache gives the same tokens: greedy, by beams, with windows. The
    logits of the 8-bit formats are near."""

    def check(name: str) -> None:
        model, inputs = model_of(name), prompts(PADDING)
        plain = model.generate(**inputs, **GREEDY)
        beams = model.generate(**inputs, **GREEDY, num_beams=3)
        for options in ({}, {"config": model.config}, {"max_tokens": 30}):
            cache = sct.KVCache("fp32", **options)
            assert isinstance(cache, transformers.Cache)
            assert isinstance(cache, sct.KVCache)
            assert torch.equal(plain, model.generate(**inputs, **GREEDY, past_key_values=cache))
            assert cache.tokens() == cache.get_seq_length() == 12 + 11
            cache = sct.KVCache("fp32", **options)
            found = model.generate(**inputs, **GREEDY, num_beams=3, past_key_values=cache)
            assert torch.equal(beams, found)
        exact = model(**inputs).logits
        for format, bound in (("e4m3fn", 0.08), ("int8", 0.03), ("e2m1fn", 0.3)):
            cache = sct.KVCache(format, config=model.config)
            got = model(**inputs, past_key_values=cache).logits
            assert 0 < float((got - exact)[0].norm() / exact[0].norm()) < bound, format
            model.generate(**inputs, **GREEDY, past_key_values=sct.KVCache(format))

    assert_each(CONFIGS, check)


def test__assisted_decoding__takes_rejected_tokens_back() -> None:
    def check(name: str) -> None:
        model, ids = model_of(name), prompts(PADDING)["input_ids"][:1]
        want = model.generate(ids, **GREEDY)
        for options in ({}, {"config": model.config}):
            cache = sct.KVCache("fp32", **options)
            found = model.generate(ids, **GREEDY, prompt_lookup_num_tokens=3, past_key_values=cache)
            assert torch.equal(found, want)

    assert_each(("llama", "mistral"), check)


@torch.no_grad()
def test__a_scaled_and_a_quantized_model__take_a_cache() -> None:
    for change in (sct.scale_model, lambda m: sct.quantize_(m, sct.WeightOnly("e4m3fn"))):
        model = change(model_of("llama"))
        want = model(**prompts(PADDING)).logits
        got = model(**prompts(PADDING), past_key_values=sct.KVCache("int8")).logits
        assert float((got - want)[0].norm() / want[0].norm()) < 0.05
        assert model.generate(
            **prompts(PADDING), **GREEDY, past_key_values=sct.KVCache()
        ).shape == (2, 24)


def test__a_model_with_other_layers__is_refused_by_name() -> None:
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(UnsupportedError, match="linear_attention"):
        sct.KVCache(config=config)


def test__the_command_generate__reads_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *map(str, range(93))])}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)
    folder = tmp_path / "model"
    model_of("llama").save_pretrained(folder)
    assert main(["generate", str(folder)]) == 2
    assert "cannot be loaded by transformers" in capsys.readouterr().err
    tokenizer.save_pretrained(folder)
    capsys.readouterr()
    told = []
    for cache, weights in (("none", "none"), ("e4m3fn", "none"), ("int8", "e4m3fn")):
        options = ["--cache", cache, "--weights", weights, "--tokens", "8", "--top-k", "4"]
        assert main(["generate", str(folder), "--prompt", "7 8 9", *options]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("7 8 9 ")
        assert "prefill: 3 tokens" in err
        told.append([int(n.replace(",", "")) for n in err.split() if n.replace(",", "").isdigit()])
    sizes = [numbers[-2:] for numbers in told]  # bytes of weights and of the cache
    assert sizes[2][0] < sizes[1][0] == sizes[0][0]
    assert min(cache for _, cache in sizes) > 0
