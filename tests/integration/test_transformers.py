"""Models that know nothing of us, through `scale_model`, against the same in float32.

No operator may run without a rule (tests/conftest.py makes that an error).
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scaledtensor as sct

transformers = pytest.importorskip("transformers")

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def gpt2(**options: Any) -> nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        **no_dropout,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)
    return transformers.MistralForCausalLM(config)


def gemma() -> nn.Module:
    sizes = SIZES | {"pad_token_id": 0}
    config = transformers.GemmaConfig(**sizes, num_key_value_heads=2, head_dim=16)
    return transformers.GemmaForCausalLM(config)


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES))


def falcon() -> nn.Module:
    sizes = SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))


def bloom() -> nn.Module:
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        n_layer=3,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return transformers.BloomForCausalLM(config)


def bert() -> nn.Module:
    sizes = SIZES | {"pad_token_id": 0}
    config = transformers.BertConfig(
        **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


MODELS = {
    "gpt2": gpt2,
    "gpt2, eager attention": lambda: gpt2(attn_implementation="eager"),
    "llama": llama,
    "llama, eager attention": lambda: llama(attn_implementation="eager"),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "mistral": mistral,
    "gemma": gemma,
    "gpt-neox": neox,
    "falcon": falcon,
    "bloom": bloom,
    "bert": bert,
}

#: A key's bias shifts all logits of a query alike, so its true gradient is zero.
ZERO_BY_SYMMETRY = ("key.bias", "k_proj.bias")


def batch(padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (4, 32), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test__loss_and_gradients_are_those_of_float32(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    reference = MODELS[name]().train()
    model = sct.scale_model(copy.deepcopy(reference))
    inputs = batch(padded)
    expected, loss = reference(**inputs).loss, model(**inputs).loss
    assert abs(loss.item() / expected.item() - 1) < 0.01
    expected.backward()
    loss.backward()
    for (fqn, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        if p.grad is None or fqn.endswith(ZERO_BY_SYMMETRY):
            continue
        assert isinstance(q.grad, sct.ScaledTensor), fqn
        error = (q.grad.dequantize() - p.grad).norm() / p.grad.norm()
        assert error < 0.25, f"{fqn}: {error:.3f}"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test__a_training_step_follows_float32(name: str) -> None:
    """AdamW and clipping, unmodified, on both: the losses of five steps stay within 1%."""
    torch.manual_seed(0)
    reference = MODELS[name]().train()
    model = sct.scale_model(copy.deepcopy(reference))
    losses = []
    for m in (reference, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
        run = []
        for _ in range(5):
            loss = m(**batch(padded=True)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test__generation_with_a_cache_equals_generation_without(name: str) -> None:
    """No rule depends on the number of keys in a way that changes a value."""
    torch.manual_seed(0)
    model = sct.scale_model(MODELS[name]().eval(), sct.recipes.Unit("fp32", "fp32", "fp32"))
    ids = torch.randint(1, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    cached = model.generate(ids, attention_mask=mask, use_cache=True, **settings)
    assert torch.equal(
        cached, model.generate(ids, attention_mask=mask, use_cache=False, **settings)
    )
    assert torch.equal(
        cached, sct.unscale_model(model).generate(ids, attention_mask=mask, **settings)
    )
