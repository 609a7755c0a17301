"""Folders of other libraries open as quantised models in transformers, without these libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import scaledtensor as sct
from scaledtensor.errors import RecipeError, UnsupportedError
from scaledtensor.quantization.configs import Config, Dynamic, WeightOnly

pytest.importorskip("transformers", minversion="5")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scaledtensor.integrations.transformers import ScaledConfig

IDS = torch.arange(1, 9).view(2, 4)


def llama(config: Config | None, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    tokens = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    told = LlamaConfig(num_attention_heads=2, **sizes, **tokens, **more)
    made = LlamaForCausalLM._from_config(told, dtype=dtype)
    if config is not None:
        sct.quantize_(made, config, lambda module, name: name != "lm_head")
    return made


@pytest.mark.parametrize(
    ("family", "config", "dtype"),
    [
        ("compressed-tensors", WeightOnly("int4", 64), torch.float32),
        ("compressed-tensors", WeightOnly("mxfp4"), torch.bfloat16),
        ("fine-grained-fp8", Dynamic("fp8_block"), torch.float32),
        ("modelopt", WeightOnly("nvfp4"), torch.float32),
        ("torchao", WeightOnly("int8"), torch.float32),
    ],
)
def test__a_folder__opens_as_a_quantised_model(
    family: str, config: Config, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = llama(config, dtype, tie_word_embeddings=True).eval()
    sct.exchange.save(saved, tmp_path / "theirs", family)
    how = ScaledConfig()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", quantization_config=how)
    layer = opened.model.layers[0].mlp.up_proj
    assert layer.weight.config == config
    assert layer.weight.dtype == dtype
    assert not layer.weight.requires_grad
    assert torch.equal(opened(IDS).logits, saved(IDS).logits)
    # Both models save their codes as this library does, and both can be exported again.
    for name, model in (("quantised", saved), ("opened", opened)):
        model.save_pretrained(tmp_path / name)
        told = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert told["recipe"] == json.loads(config.to_json())
        own = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(own(IDS).logits, saved(IDS).logits)
        sct.exchange.save(own, tmp_path / f"{name} again", family)
    tensors = sct.exchange.load(tmp_path / "opened again")
    assert tensors.keys() == sct.exchange.load(tmp_path / "theirs").keys()


def test__a_plain_checkpoint__is_quantised_when_it_is_loaded(tmp_path: Path) -> None:
    llama(None).save_pretrained(tmp_path)
    config = WeightOnly("nvfp4", roles=("linear",))
    how = ScaledConfig(config)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how)
    assert opened.model.layers[0].mlp.up_proj.weight.config == config
    assert torch.equal(opened(IDS).logits, llama(config)(IDS).logits)
    assert type(opened.lm_head.weight) is torch.nn.Parameter


def test__a_folder_that_does_not_fit__is_refused(tmp_path: Path) -> None:
    sct.exchange.save(llama(Dynamic("e4m3fn")), tmp_path)
    with pytest.raises(RecipeError, match="quantization_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ScaledConfig("unit"))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    # transformers prints the CheckpointError in its report.
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ScaledConfig())


def test__a_model_whose_checkpoints_have_other_names__is_refused(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    made = MixtralForCausalLM(MixtralConfig(vocab_size=32, **sizes, **heads))
    sct.quantize_(made, {"*.self_attn.*": WeightOnly("int8")})
    with pytest.raises(UnsupportedError, match=r"MixtralForCausalLM.*other names"):
        sct.exchange.save(made, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("after", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [None, "compressed-tensors"])
def test__dtype_of_from_pretrained__is_the_dtype_of_results_and_codes_stay(
    family: str | None, before: torch.dtype, after: torch.dtype, tmp_path: Path
) -> None:
    config = WeightOnly("int4", 64)
    saved, wanted = llama(config, before).eval(), llama(config, after).eval()
    wanted.load_state_dict(saved.state_dict())
    more: dict[str, Any] = {}
    if family is None:
        saved.save_pretrained(tmp_path)
    else:
        sct.exchange.save(saved, tmp_path, family)
        more["quantization_config"] = ScaledConfig()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=after, **more)
    assert {p.dtype for p in opened.parameters()} == {after}
    layer, source = opened.model.layers[0].mlp.up_proj, saved.model.layers[0].mlp.up_proj
    assert torch.equal(layer.weight.qdata, source.weight.qdata)
    with torch.no_grad():
        assert torch.equal(opened(IDS).logits, wanted(IDS).logits)


class KeepsFloat32(LlamaForCausalLM):
    _keep_in_fp32_modules_strict = frozenset({"up_proj"})


def test__a_module_that_the_model_keeps_in_float32__stays_so(tmp_path: Path) -> None:
    llama(WeightOnly("int4", 64)).save_pretrained(tmp_path)
    opened = KeepsFloat32.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer = opened.model.layers[0].mlp
    assert (layer.up_proj.weight.dtype, layer.gate_proj.weight.dtype) == (
        torch.float32,
        torch.bfloat16,
    )
