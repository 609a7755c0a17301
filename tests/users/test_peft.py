"""Programs in the style of PEFT put adapters on a scaled model, or scale a model with adapters."""

import copy
from typing import Any

import pytest
import torch

import scaledtensor as sct

pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5")

from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TEXT = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))
ORDERS = ["peft, then scale_model", "scale_model, then peft"]


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def adapted(order: str, recipe: str = "unit") -> Any:
    torch.manual_seed(1)
    if order.startswith("peft"):
        return sct.scale_model(get_peft_model(llama(), lora()), recipe)
    return get_peft_model(sct.scale_model(llama(), recipe), lora())


def trained(model: Any, steps: int = 3) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(input_ids=TEXT, labels=TEXT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TEXT).logits.dequantize()


@pytest.mark.parametrize("recipe", ["unit", "delayed"])
@pytest.mark.parametrize("order", ORDERS)
def test__an_adapter__is_a_plain_file__that_loads_into_any_model(order, recipe, tmp_path):
    model = trained(adapted(order, recipe))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    on_plain = PeftModel.from_pretrained(llama(), tmp_path)
    on_plain.save_pretrained(tmp_path / "plain")
    want = load_file(tmp_path / "plain/adapter_model.safetensors")
    assert stored.keys() == want.keys()
    assert all(torch.equal(stored[name], want[name]) for name in want)
    assert any(x.any() for name, x in stored.items() if "lora_B" in name)
    again = trained(adapted(order, recipe), 1)
    found = again.load_adapter(tmp_path, "default", is_trainable=True)
    assert not found.missing_keys
    assert not found.unexpected_keys
    trainable = [p for p in model.parameters() if p.requires_grad]
    loaded = [p for p in again.parameters() if p.requires_grad]
    for p, q in zip(trainable, loaded, strict=True):
        assert type(p) is type(q)
        assert torch.equal(p.detach().dequantize(), q.detach().dequantize())


def test__from_pretrained__says_what_the_saved_model_says(tmp_path):
    for i, order in enumerate(ORDERS):
        model = trained(adapted(order))
        model.save_pretrained(tmp_path / str(i))
        if order.startswith("peft"):
            fresh = sct.scale_model(PeftModel.from_pretrained(llama(), tmp_path / str(i)))
        else:
            fresh = PeftModel.from_pretrained(sct.scale_model(llama()), tmp_path / str(i))
        assert torch.equal(logits(fresh), logits(model))


@pytest.mark.parametrize("order", ORDERS)
def test__merged__it_is_saved_as_any_scaled_model(order, tmp_path):
    merged = trained(adapted(order)).merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded.lm_head.weight, sct.ScaledTensor)
    assert torch.equal(logits(loaded), logits(merged))


def test__adapters_of_transformers_itself__are_saved_too(tmp_path):
    model = sct.scale_model(llama())
    model.add_adapter(lora())
    trained(model).save_pretrained(tmp_path)
    fresh = sct.scale_model(llama())
    fresh.load_adapter(str(tmp_path))
    assert torch.equal(logits(fresh), logits(model))


@pytest.mark.users
@pytest.mark.parametrize("order", ORDERS)
def test__trainer__saves_and_resumes_adapters(order, tmp_path):
    from transformers import Trainer, TrainingArguments, set_seed

    def go(folder: Any, resume: Any = None) -> Any:
        set_seed(0)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=6, save_steps=3, logging_steps=1, use_cpu=True,
            report_to=[], disable_tqdm=True, learning_rate=1e-2, bf16=True,
        )  # fmt: skip
        data = [{"input_ids": x, "labels": x} for x in TEXT.repeat(8, 1)]
        trainer = Trainer(adapted(order), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    straight = go(tmp_path / "one")
    resumed = go(tmp_path / "two", str(tmp_path / "one" / "checkpoint-3"))
    # The file of an adapter has no scale of its weights, so the last bits may differ.
    assert resumed == pytest.approx(straight, rel=1e-3)


# --- a quantised base ------------------------------------------------------------------------


def quantised(order: str, config: Any) -> Any:
    torch.manual_seed(1)
    if order == "peft first":
        model = get_peft_model(llama(), lora())
        return sct.quantize_(model, config, lambda module, fqn: "lora_" not in fqn)
    return get_peft_model(sct.quantize_(llama(), config), lora())


@torch.no_grad()
def plain_logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TEXT).logits


@pytest.mark.parametrize("order", ["peft first", "quantize_ first"])
def test__adapters__train_on_a_quantised_base(order, tmp_path):
    for config in (sct.WeightOnly("nvfp4"), sct.Dynamic("mxfp8")):
        model = quantised(order, config)
        held = {n: p for n, p in model.named_parameters() if isinstance(p, sct.QuantizedTensor)}
        assert len(held) == 15
        codes = {name: p.qdata.clone() for name, p in held.items()}
        before = plain_logits(model)
        y = plain_logits(trained(model))
        assert not torch.equal(y, before)
        assert all(torch.equal(p.qdata, codes[name]) for name, p in held.items())
        model.save_pretrained(tmp_path)
        assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
        again = PeftModel.from_pretrained(sct.quantize_(llama(), config), tmp_path)
        assert torch.equal(plain_logits(again), y)
        # Codes take no adapter. The plain value of the base does.
        with pytest.raises(sct.errors.UnsupportedError, match="unscale_model"):
            model.merge_and_unload()
        unscaled = sct.unscale_model(again)
        want = plain_logits(unscaled)
        torch.testing.assert_close(plain_logits(unscaled.merge_and_unload()), want)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test__a_merge__is_an_error_on_codes__and_exact_on_the_plain_base(kind):
    targets = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    if kind == "ia3":
        config = IA3Config(feedforward_modules=[], **targets)
    else:
        config = LoraConfig(r=4, use_dora=kind == "dora", **targets)
    torch.manual_seed(1)
    model = trained(get_peft_model(sct.quantize_(llama(), sct.WeightOnly()), config))
    want = plain_logits(model)
    for safe in (False, True):
        with pytest.raises(sct.errors.UnsupportedError, match=r"unscale_model\(model\)"):
            copy.deepcopy(model).merge_and_unload(safe_merge=safe)
    merged = sct.unscale_model(model).merge_and_unload()
    torch.testing.assert_close(plain_logits(merged), want, rtol=1e-4, atol=1e-4)


def test__adapters_that_change_the_base__are_an_error():
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(sct.errors.UnsupportedError, match=r"unscale_model\(model\)"):
        get_peft_model(sct.quantize_(llama(), sct.WeightOnly()), config)


def test__a_quantised_module_to_save__is_an_error__and_a_filter_leaves_it_out():
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(sct.errors.UnsupportedError, match="filter_fn"):
        get_peft_model(sct.quantize_(llama(), sct.WeightOnly()), config)
    base = sct.quantize_(llama(), sct.WeightOnly(), lambda module, fqn: fqn != "lm_head")
    model = get_peft_model(base, config)
    before = plain_logits(model)
    assert not torch.equal(plain_logits(trained(model)), before)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("more", [{"use_dora": True}, {"trainable_token_indices": [1, 2]}])
def test__parameters_that_peft_computes_from_scaled_weights__are_saved_as_values(
    more, order, tmp_path
):
    """DoRA's magnitudes are norms of a scaled weight, and so are ScaledTensors themselves."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
    if order.startswith("peft"):
        model = sct.scale_model(get_peft_model(llama(), config))
    else:
        model = get_peft_model(sct.scale_model(llama()), config)
    trained(model).save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(llama(), tmp_path).eval()
    with torch.no_grad():
        want = plain(input_ids=TEXT).logits
    assert (logits(model).float() - want).norm() <= 0.1 * want.norm()


def test__parameters_that_peft_computes_from_scaled_weights__are_loaded_from_their_parts(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    config = LoraConfig(r=4, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(get_peft_model(sct.scale_model(llama()), config))
    held = [p for name, p in model.named_parameters() if "magnitude" in name]
    saved = [p.detach().dequantize() for p in held]
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for p in held:
            p.mul_(2.0)
    accelerator.load_state(tmp_path)
    assert len(held) == 2
    for p, value in zip(held, saved, strict=True):
        assert isinstance(p, sct.ScaledTensor)
        assert torch.equal(p.detach().dequantize(), value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("init", ["olora", "pissa"])
def test__adapters_that_write_to_the_data_of_weights__train(init, order, tmp_path):
    config = LoraConfig(
        r=4, init_lora_weights=init, target_modules=["q_proj"], task_type="CAUSAL_LM"
    )
    if order.startswith("peft"):
        model = sct.scale_model(get_peft_model(llama(), config))
    else:
        base = sct.scale_model(llama())
        want = logits(base)
        model = get_peft_model(base, config)
        assert (logits(model) - want).norm() < 0.1 * want.norm()  # the adapter is a part of W
    before = model(input_ids=TEXT, labels=TEXT).loss
    model = trained(model)
    assert model(input_ids=TEXT, labels=TEXT).loss < before
    model.save_pretrained(tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
