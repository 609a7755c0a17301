"""Models of `transformers` with random weights and tiny configurations, and batches for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 128
CLASSES = 8

#: Gradients that are zero by symmetry. A key's bias shifts all logits of a query alike; so does the
#: bias of the keys of relative positions.
ZERO_BY_SYMMETRY = ("key.bias", "k_proj.bias", "k_lin.bias", "k_head.bias", "pos_key_proj.bias")

# --- batches ---------------------------------------------------------------------------------

Batch = dict[str, Any]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(seed: int) -> Batch:
    """Four sequences of 32 tokens; each token is a target."""
    ids = torch.randint(2, VOCABULARY, (4, 32), generator=_generator(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def images(seed: int) -> Batch:
    """Four images of 32 x 32, each with a class."""
    rng = _generator(seed)
    labels = torch.randint(CLASSES, (4,), generator=rng)
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=rng), "labels": labels}


def spectra(seed: int) -> Batch:
    """Four spectrograms of 16 bands at 64 times, and 16 tokens of speech."""
    rng = _generator(seed)
    labels = torch.randint(2, VOCABULARY, (4, 16), generator=rng)
    return {"input_features": torch.randn(4, 16, 64, generator=rng), "labels": labels}


def spectra_by_time(seed: int) -> Batch:
    """The same with times before bands."""
    batch = spectra(seed)
    return batch | {"input_features": batch["input_features"].mT}


def waves(seed: int) -> Batch:
    """Four waves of 800 samples, and 6 tokens of speech."""
    rng = _generator(seed)
    labels = torch.randint(2, VOCABULARY, (4, 6), generator=rng)
    return {"input_values": torch.randn(4, 800, generator=rng), "labels": labels}


def captions(seed: int) -> Batch:
    """Four images with a sentence each; a sentence is identified by its largest token."""
    pixels = images(seed)["pixel_values"]
    return {"input_ids": text(seed)["input_ids"], "pixel_values": pixels, "return_loss": True}


def padded(batch: Batch) -> Batch:
    """The same batch; the first five tokens of its first sequence are masked, and the loss ignores
    them."""
    mask = batch["attention_mask"].clone()
    mask[0, :5] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask, "labels": labels}


# --- models ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Options of a configuration, and the batch of a seed."""

    options: dict[str, Any]
    batch: Callable[[int], Batch] = text


WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = WIDTHS | SPECIAL | {"vocab_size": VOCABULARY}
GROUPED = {"num_key_value_heads": 2}
OF_HEADS = GROUPED | {"head_dim": 16}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OF_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
OF_BART = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 128))
} | {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
OF_SPEECH = OF_BART | {"attention_dropout": 0.0, "activation_dropout": 0.0}
OF_IMAGES = {"image_size": 32, "num_labels": CLASSES}
OF_PATCHES = WIDTHS | UNDROPPED | OF_IMAGES | {"patch_size": 8}
OF_EXPERTS = SIZES | GROUPED | {"num_experts_per_tok": 2}
OF_MAMBA = SPECIAL | {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "state_size": 8,
    "num_hidden_layers": 3,
}

#: A class of `transformers` -> its configuration and its batches.
MODELS: dict[str, Subject] = {
    # decoders
    "GPT2LMHeadModel": Subject(OF_GPT2),
    "LlamaForCausalLM": Subject(SIZES | GROUPED),
    "MistralForCausalLM": Subject(SIZES | GROUPED),
    "Qwen2ForCausalLM": Subject(SIZES | GROUPED),
    "Qwen3ForCausalLM": Subject(SIZES | OF_HEADS),
    "GemmaForCausalLM": Subject(SIZES | OF_HEADS),
    "Gemma2ForCausalLM": Subject(SIZES | OF_HEADS),
    "Gemma3ForCausalLM": Subject(SIZES | OF_HEADS),
    "OlmoForCausalLM": Subject(SIZES | GROUPED),
    "Olmo2ForCausalLM": Subject(SIZES | GROUPED),
    "PhiForCausalLM": Subject(
        SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    ),
    "Phi3ForCausalLM": Subject(SIZES | GROUPED),
    "StableLmForCausalLM": Subject(SIZES | GROUPED),
    "CohereForCausalLM": Subject(SIZES | GROUPED),
    "Glm4ForCausalLM": Subject(SIZES | OF_HEADS),
    "GraniteForCausalLM": Subject(SIZES | GROUPED),
    "GPTNeoXForCausalLM": Subject(SIZES),
    "FalconForCausalLM": Subject(SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "BloomForCausalLM": Subject(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "n_layer": 3,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    ),
    "MptForCausalLM": Subject(
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "expansion_ratio": 2,
            "max_seq_len": 64,
        }
    ),
    "OPTForCausalLM": Subject(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "ffn_dim": 128,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
            "dropout": 0.0,
            "max_position_embeddings": 64,
        }
    ),
    "GPTJForCausalLM": Subject(OF_GPT2 | {"rotary_dim": 8}),
    "GPTBigCodeForCausalLM": Subject(OF_GPT2),
    # experts
    "MixtralForCausalLM": Subject(OF_EXPERTS | {"num_local_experts": 4}),
    "Qwen2MoeForCausalLM": Subject(
        OF_EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    ),
    "Qwen3MoeForCausalLM": Subject(
        OF_EXPERTS | {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16}
    ),
    "OlmoeForCausalLM": Subject(OF_EXPERTS | {"num_experts": 4}),
    "GptOssForCausalLM": Subject(OF_EXPERTS | {"num_local_experts": 4, "head_dim": 16}),
    "DeepseekV3ForCausalLM": Subject(
        SIZES
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 32, "kv_lora_rank": 16, "num_key_value_heads": 4}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    ),
    # recurrences and convolutions over time
    "MambaForCausalLM": Subject(OF_MAMBA),
    "Mamba2ForCausalLM": Subject(
        OF_MAMBA | {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
    ),
    "RwkvForCausalLM": Subject(SIZES | {"attention_hidden_size": 64, "context_length": 64}),
    "RecurrentGemmaForCausalLM": Subject(
        SIZES
        | {"num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 16, "head_dim": 16}
    ),
    "Lfm2ForCausalLM": Subject(SIZES | GROUPED | {"full_attn_idxs": [1]}),
    # encoders
    "BertForMaskedLM": Subject(SIZES | UNDROPPED),
    "RobertaForMaskedLM": Subject(SIZES | UNDROPPED | {"max_position_embeddings": 64}),
    "ElectraForMaskedLM": Subject(SIZES | UNDROPPED | {"embedding_size": 64}),
    "DistilBertForMaskedLM": Subject(
        {
            "vocab_size": VOCABULARY,
            "dim": 64,
            "hidden_dim": 128,
            "n_layers": 3,
            "n_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        }
    ),
    "AlbertForMaskedLM": Subject(SIZES | UNDROPPED | {"embedding_size": 32}),
    "DebertaV2ForMaskedLM": Subject(
        SIZES
        | UNDROPPED
        | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16}
        | {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
    ),
    "ModernBertForMaskedLM": Subject(
        SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2}
    ),
    "LongformerForMaskedLM": Subject(
        SIZES | UNDROPPED | {"attention_window": 8, "max_position_embeddings": 64}
    ),
    # encoders with decoders
    "T5ForConditionalGeneration": Subject(OF_T5),
    "MT5ForConditionalGeneration": Subject(OF_T5),
    "BartForConditionalGeneration": Subject(OF_BART | {"max_position_embeddings": 64}),
    "PegasusForConditionalGeneration": Subject(OF_BART | {"max_position_embeddings": 64}),
    # images
    "ViTForImageClassification": Subject(OF_PATCHES, images),
    "DeiTForImageClassification": Subject(OF_PATCHES, images),
    "BeitForImageClassification": Subject(OF_PATCHES | {"drop_path_rate": 0.0}, images),
    "Dinov2ForImageClassification": Subject(OF_PATCHES, images),
    "SwinForImageClassification": Subject(
        UNDROPPED
        | OF_IMAGES
        | {"patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": 4, "drop_path_rate": 0.0},
        images,
    ),
    "ConvNextForImageClassification": Subject(
        OF_IMAGES | {"hidden_sizes": [16, 32, 64], "depths": [2, 2, 2], "num_stages": 3}, images
    ),
    "ResNetForImageClassification": Subject(
        OF_IMAGES
        | {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
        images,
    ),
    "CLIPModel": Subject(
        {
            "text_config": SIZES | {"eos_token_id": 2},
            "vision_config": WIDTHS | {"image_size": 32, "patch_size": 8},
            "projection_dim": 32,
        },
        captions,
    ),
    # speech
    "WhisperForConditionalGeneration": Subject(
        OF_SPEECH
        | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        spectra,
    ),
    "Speech2TextForConditionalGeneration": Subject(
        OF_SPEECH
        | {"input_feat_per_channel": 16, "input_channels": 1, "conv_channels": 32}
        | {"max_source_positions": 64, "max_target_positions": 32},
        spectra_by_time,
    ),
    "Wav2Vec2ForCTC": Subject(
        WIDTHS
        | {"vocab_size": VOCABULARY, "pad_token_id": 0}
        | {"conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8]}
        | {"num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
        | {f"{part}_dropout": 0.0 for part in ("hidden", "activation", "attention", "feat_proj")}
        | {"final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False},
        waves,
    ),
}


#: Classes that the project promises by name. For the others nobody wrote special rules.
NAMED = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3ForCausalLM", "GemmaForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"),
    *("BertForMaskedLM", "RobertaForMaskedLM", "T5ForConditionalGeneration"),
    *("ViTForImageClassification", "WhisperForConditionalGeneration", "MambaForCausalLM"),
)


def build(name: str, **options: Any) -> nn.Module:
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**MODELS[name].options | options))
    return model.train()


def batch(name: str, seed: int) -> dict[str, Tensor]:
    return MODELS[name].batch(seed)
