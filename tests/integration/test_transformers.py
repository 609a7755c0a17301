"""Models that do not know this library go through `scale_model` and match float32.

No operator may run without a rule (tests/conftest.py makes that an error).
"""

import copy
import statistics
from typing import Any

import pytest
import torch
from torch import nn

import scaledtensor as sct

pytest.importorskip("transformers")

from benchmarks.gradients import CurrentScaling, Errors, errors, results
from benchmarks.zoo import MODELS, NAMED, VOCABULARY, batch, build, padded, text

GENERATING = ["GPT2LMHeadModel", "LlamaForCausalLM"]
EAGER = {"attn_implementation": "eager"}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MODELS),
    ("GPT2LMHeadModel", EAGER),
    ("LlamaForCausalLM", EAGER),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("MistralForCausalLM", {"sliding_window": 8}),
    ("WhisperForConditionalGeneration", EAGER),
    ("MixtralForCausalLM", {"experts_implementation": "eager"}),
]

#: These errors are larger than the rounding of operands explains, for the reasons given.
SHORT = {
    "RwkvForCausalLM": "it subtracts a running maximum whose gradient is zero in the sum, of terms "
    "that a rule takes for independent: expected gradients grow, and those of keys underflow",
    "Mamba2ForCausalLM": "the gradients of eight decay rates sum terms that nearly cancel: the "
    "worst is 0.4 to 1.7 by the seed, beside 0.4 to 1.5 (medians of 12 seeds 0.59 and 0.54)",
    "CLIPModel": "a contrastive loss of random embeddings: differences of near-equal numbers, "
    "times 14, whose loss E4M3 operands do not hold within 1% either",
}


def unnamed_is_slow(name: str, *values: Any) -> Any:
    return pytest.param(name, *values, marks=[] if name in NAMED else [pytest.mark.slow])


def short(name: str, *values: Any) -> Any:
    marks = [pytest.mark.xfail(reason=SHORT[name])] if name in SHORT else []
    marks += [pytest.mark.slow] if name == "RwkvForCausalLM" else []  # 32 steps of 40 operators
    return pytest.param(name, *values, marks=marks)


def compared(name: str, options: dict[str, Any], pad: bool, seed: int = 0) -> tuple[Errors, Errors]:
    """Return our errors, and the errors of a float32 model with operands in E4M3 by their amax.

    ReLU's kinks, normalisations after a small branch and the choice of experts magnify the rounding
    of operands to three mantissa bits. A dozen of the models here have a gradient that no scale of
    a tensor holds within 0.25.
    """
    torch.manual_seed(seed)
    reference, inputs = build(name, **options), batch(name, seed + 1)
    inputs = padded(inputs) if pad else inputs
    model = sct.scale_model(copy.deepcopy(reference))
    truth = results(reference, inputs)
    ours = errors(results(model, inputs), truth)
    for fqn, p in model.named_parameters():
        assert p.grad is None or isinstance(p.grad, sct.ScaledTensor), fqn
    reference.zero_grad()
    with CurrentScaling():
        return ours, errors(results(reference, inputs), truth)


@pytest.mark.parametrize(
    ("name", "options", "pad"),
    [
        short(name, options, pad)
        for name, options in VARIANTS
        for pad in (False, True)
        if MODELS[name].batch is text or not pad
    ],
    ids=str,
)
def test__loss_and_gradients__are_those_of_float32(
    name: str, options: dict[str, Any], pad: bool
) -> None:
    """Errors are within 0.25, or within the error of E4M3 operands. The worst gradient, perhaps of
    a few numbers, counts in the median over three seeds."""
    got, beside = compared(name, options, pad)
    assert got.loss < 0.01
    if got.worst >= 0.25:
        runs = [(got, beside), *(compared(name, options, pad, seed) for seed in (1, 2))]
        ours, floor = (statistics.median(r[way].worst for r in runs) for way in (0, 1))
        assert ours < 0.25 or ours < 1.25 * floor, got.of


@pytest.mark.parametrize(
    ("name", "options"), [unnamed_is_slow(*variant) for variant in VARIANTS], ids=str
)
def test__gradients_of_float32_elements__are_exact(name: str, options: dict[str, Any]) -> None:
    """Scales move but nothing is rounded, so any difference is a mistake of a rule."""
    torch.manual_seed(0)
    reference, inputs = build(name, **options), batch(name, 1)
    recipe = sct.recipes.Unit("fp32", "fp32", "fp32")
    model = sct.scale_model(copy.deepcopy(reference), recipe)
    got = errors(results(model, inputs), results(reference, inputs))
    assert got.loss < 1e-6
    assert got.worst < 1e-4, got.of


def trained(model: nn.Module, name: str, steps: int, foreach: bool) -> list[float]:
    """Return the losses of an unmodified AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    losses = []
    for _ in range(steps):
        loss = model(**batch(name, 1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", [unnamed_is_slow(name) for name in MODELS])
def test__training__falls_as_in_float32(name: str) -> None:
    """Five steps of AdamW lower the loss as in float32, within 5%, or within a fifth if batch norms
    or a contrastive loss magnify roundings."""
    torch.manual_seed(0)
    reference = build(name)
    model = sct.scale_model(copy.deepcopy(reference))
    want = trained(reference, name, 5, foreach=True)
    got = trained(model, name, 5, foreach=True)
    chaotic = name in ("ResNetForImageClassification", "CLIPModel")
    assert want[-1] < want[0]
    assert got[0] - got[-1] == pytest.approx(want[0] - want[-1], rel=0.2 if chaotic else 0.05)
    for fqn, p in model.named_parameters():
        assert isinstance(p, sct.ScaledTensor), fqn
        assert p.dequantize().isfinite().all(), fqn


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM", "MambaForCausalLM"])
def test__training__is_the_same_parameter_by_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = sct.scale_model(build(name))
    twin = copy.deepcopy(model)
    assert trained(model, name, 3, foreach=False) == trained(twin, name, 3, foreach=True)


@pytest.mark.parametrize("name", GENERATING)
def test__a_training_step_with_clipping_follows_float32(name: str) -> None:
    """AdamW and clipping are unmodified on both, and the losses of five steps stay within 1%."""
    torch.manual_seed(0)
    reference = build(name).train()
    model = sct.scale_model(copy.deepcopy(reference))
    losses = []
    for m in (reference, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
        run = []
        for _ in range(5):
            loss = m(**padded(batch(name, 1))).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("name", GENERATING)
def test__generation_with_a_cache_equals_generation_without(name: str) -> None:
    """No rule changes a value because of the number of keys."""
    torch.manual_seed(0)
    model = sct.scale_model(build(name).eval(), sct.recipes.Unit("fp32", "fp32", "fp32"))
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
