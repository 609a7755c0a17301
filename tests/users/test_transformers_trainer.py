"""Programs in the style of transformers call `from_pretrained`, `save_pretrained` and Trainer, and
resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import value_of
from torch import nn

import scaledtensor as sct

pytest.importorskip("transformers", minversion="5")

from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from scaledtensor.integrations.transformers import ScaledConfig

TOKENS: dict[str, Any] = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, **TOKENS))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **SIZES, **TOKENS))


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(num_labels=4, **SIZES, **TOKENS))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **SIZES))


def mixtral() -> nn.Module:
    sizes = SIZES | {"num_hidden_layers": 1}
    config = MixtralConfig(num_key_value_heads=1, num_local_experts=2, **sizes, **TOKENS)
    return MixtralForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}


def examples(name: str, count: int = 64) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    if name == "vit":
        images = torch.randn(count, 3, 16, 16, generator=g)
        return [{"pixel_values": x, "labels": torch.tensor(i % 4)} for i, x in enumerate(images)]
    text = torch.randint(1, 64, (count, 16), generator=g)
    if name == "bert":
        return [{"input_ids": x, "labels": torch.tensor(i % 4)} for i, x in enumerate(text)]
    return [{"input_ids": x, "labels": x} for x in text]


def batch(name: str) -> dict[str, torch.Tensor]:
    rows = examples(name, 2)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def trained(model: nn.Module, name: str, steps: int = 2) -> nn.Module:
    """Train until scales no longer match the values, so that files must hold the scales."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model(**batch(name)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        return value_of(model(**batch(name)).logits)


# --- save_pretrained and from_pretrained -----------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test__what_save_pretrained_wrote__is_loaded_to_the_bit(name, tmp_path, assert_same_bits):
    torch.manual_seed(0)
    model = trained(sct.scale_model(MODELS[name]()), name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_bits(model, loaded)
    assert torch.equal(logits(loaded, name), logits(model, name))
    trained(loaded.train(), name, 1)
    held = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert held["quant_method"] == "scaledtensor"
    assert held["recipe"]["recipe"] == "unit"
    stored = load_file(tmp_path / "model.safetensors")
    names = {key.rpartition(".")[0] for key in stored if key.endswith(".qdata")}
    for fqn in names:
        assert {f"{fqn}.{part}" for part in ("scale", "rms", "facts")} <= stored.keys()


@pytest.mark.parametrize(
    "recipe", [sct.recipes.Delayed(), sct.recipes.Unit(master="bf16"), sct.recipes.MXFP8()], ids=str
)
def test__any_recipe__is_loaded_to_the_bit(recipe, tmp_path, assert_same_bits):
    torch.manual_seed(0)
    model = trained(sct.scale_model(gpt2(), recipe), "gpt2")
    model.save_pretrained(tmp_path)
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert_same_bits(model, loaded)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(logits(loaded, "gpt2"), logits(model, "gpt2"))


def test__a_plain_checkpoint__is_converted_while_it_is_loaded(tmp_path, assert_same_bits):
    torch.manual_seed(0)
    plain = llama()
    plain.save_pretrained(tmp_path / "plain")
    config = ScaledConfig(sct.recipes.Unit(overrides={"lm_head": None}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    assert_same_bits(model, sct.scale_model(plain, config.recipe))
    assert not isinstance(model.lm_head.weight, sct.ScaledTensor)
    trained(model.train(), "llama").save_pretrained(tmp_path / "codes")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    assert_same_bits(model, loaded)
    assert loaded.config.quantization_config.recipe == config.recipe


@pytest.mark.parametrize("make", [gpt2, mixtral])
@pytest.mark.parametrize("loaded", [False, True], ids=["scaled here", "loaded"])
def test__dequantize__writes_the_original_checkpoint(make, loaded, tmp_path):
    """Mixtral's files have other names than its model: one for each expert."""
    torch.manual_seed(0)
    plain = make()
    plain.save_pretrained(tmp_path / "plain")
    model = sct.scale_model(plain, sct.recipes.Delayed())
    if loaded:
        model.save_pretrained(tmp_path / "codes")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    model.hf_quantizer.quantization_config.dequantize = True
    model.save_pretrained(tmp_path / "again")
    want, got = (load_file(tmp_path / d / "model.safetensors") for d in ("plain", "again"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    model.hf_quantizer.quantization_config.dequantize = False
    model.save_pretrained(tmp_path / "codes")
    assert "lm_head.weight" not in load_file(tmp_path / "codes/model.safetensors")


def test__the_config_of_other_models__stays_as_it_is(tmp_path):
    model = llama()
    config = model.config
    sct.scale_model(model).save_pretrained(tmp_path / "codes")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(loaded.lm_head.weight) is nn.Parameter
    # A plain checkpoint whose config.json asks for this method is converted.
    (tmp_path / "plain/config.json").write_text((tmp_path / "codes/config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert isinstance(loaded.lm_head.weight, sct.ScaledTensor)


def test__a_config_with_dequantize__saves_plain_ones_from_the_start(tmp_path):
    torch.manual_seed(0)
    gpt2().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=ScaledConfig("unit", dequantize=True)
    )
    trained(model.train(), "gpt2").save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again.lm_head.weight) is nn.Parameter
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.dequantize())


def test__a_model__is_itself_again_after_dequantize(tmp_path):
    torch.manual_seed(0)
    model = trained(sct.scale_model(gpt2()), "gpt2")
    want = model.lm_head.weight.dequantize()
    model.save_pretrained(tmp_path / "codes")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "codes").dequantize()
    for found in (plain, sct.unscale_model(model)):
        assert type(found.lm_head.weight) is nn.Parameter
        assert torch.equal(found.lm_head.weight, want)
        found.save_pretrained(tmp_path / "plain")
        assert "lm_head.weight" not in load_file(tmp_path / "plain/model.safetensors")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        assert torch.equal(logits(loaded, "gpt2"), logits(found.eval(), "gpt2"))


def test__frozen_weights_in_8_bits__stay_so(tmp_path, assert_same_bits):
    torch.manual_seed(0)
    model = llama().eval().requires_grad_(False)
    model = sct.scale_model(model, sct.recipes.Unit(store_frozen=True))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_bits(model, loaded)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight.qdata"].element_size() == 1
    assert not loaded.lm_head.weight.requires_grad


def test__parts_in_several_files__are_put_together(tmp_path, assert_same_bits):
    torch.manual_seed(0)
    model = trained(sct.scale_model(gpt2()), "gpt2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_bits(model, AutoModelForCausalLM.from_pretrained(tmp_path))
    other = sct.scale_model(gpt2())
    sct.checkpoint.load_into(other, sct.checkpoint.load_safetensors(tmp_path))
    assert_same_bits(model, other)
    values = sct.checkpoint.load_safetensors(tmp_path, dequantized=True)
    want = model.transformer.wte.weight.dequantize()
    assert torch.equal(values["transformer.wte.weight"], want)


def test__generate__says_the_same_after_loading(tmp_path):
    torch.manual_seed(0)
    model = trained(sct.scale_model(llama()), "llama")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    start = examples("llama", 1)[0]["input_ids"][None, :4]
    options = {"attention_mask": torch.ones_like(start), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(start, **options), loaded.generate(start, **options))


@pytest.mark.users
def test__another_process__loads_what_this_one_saved(tmp_path):
    torch.manual_seed(0)
    model = trained(sct.scale_model(gpt2()), "gpt2")
    model.save_pretrained(tmp_path)
    torch.save(logits(model, "gpt2"), tmp_path / "want.pt")
    torch.save(batch("gpt2"), tmp_path / "batch.pt")
    program = """
import sys, torch
import conftest  # has torchvision load
import scaledtensor.integrations.transformers
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder)
found = model(**torch.load(folder + "/batch.pt")).logits.dequantize()
assert torch.equal(found, torch.load(folder + "/want.pt"))
"""
    subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        check=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
    )


# --- Trainer ---------------------------------------------------------------------------------


def run(
    name: str,
    folder: Path,
    steps: int,
    save: int,
    resume: Path | None = None,
    backend: str | None = None,
) -> Any:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        bf16=True,
        logging_steps=1,
        save_steps=save,
        eval_strategy="steps",
        eval_steps=save,
        torch_compile=backend is not None,
        torch_compile_backend=backend,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = sct.scale_model(MODELS[name]())
    data = examples(name)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def told(trainer: Any, key: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]


def check(
    name: str,
    folder: Path,
    steps: int,
    save: int,
    assert_same_bits: Any,
    backend: str | None = None,
) -> None:
    pytest.importorskip("accelerate")
    straight = run(name, folder / "one", steps, save, backend=backend)
    checkpoint = folder / "one" / f"checkpoint-{save}"
    resumed = run(name, folder / "two", steps, save, checkpoint, backend)
    assert len(told(straight, "loss")) == steps
    for key in ("loss", "grad_norm", "eval_loss"):
        assert told(straight, key) == told(resumed, key)
    assert_same_bits(straight.model, resumed.model)
    saved = folder / "one" / f"checkpoint-{steps}"
    assert_same_bits(straight.model, type(straight.model).from_pretrained(saved))


def test__trainer__saves_and_goes_on_as_if_nothing_had_happened(tmp_path, assert_same_bits):
    check("gpt2", tmp_path, 4, 2, assert_same_bits)


@pytest.mark.users
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test__trainer__goes_on_bit_for_bit_over_twenty_steps(name, backend, tmp_path, assert_same_bits):
    """The tenth step rebalances, between the checkpoint and the end."""
    check(name, tmp_path, 20, 7, assert_same_bits, backend)


class Own(nn.Module):
    """A model that transformers did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def test__trainer__saves_a_model_that_is_not_of_transformers(tmp_path, assert_same_bits):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"x": x, "labels": x} for x in torch.randn(8, 16)]

    def go(steps: int, resume: bool) -> Any:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, save_steps=2, use_cpu=True, report_to=[],
            disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(sct.scale_model(Own()), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    straight = go(4, False)
    go(2, False)
    for newer in tmp_path.glob("checkpoint-4"):
        newer.rename(tmp_path / "straight")
    assert_same_bits(straight, go(4, True))
