"""`unit_scale` works on models of `transformers` that do not know it."""

import copy
import gc
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import scaledtensor as sct
from scaledtensor.models import interpose

pytest.importorskip("transformers")

from benchmarks.zoo import MODELS, batch, build

Seen = dict[str, list[tuple[str, float]]]


class Probe(TorchFunctionMode):
    """Record the RMS of every function's result and of its gradient; of the elements, if they are
    scaled."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wanted = isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad
        if wanted and result.numel() > 256:
            name = func.__name__
            self.seen["forward"].append((name, rms(result)))
            result.register_hook(lambda g: self.seen["backward"].append((name, rms(g))))
        return result


class Watch:
    """This mode sees what the model's code sees, the results of every other transform."""

    order: ClassVar[int] = -1
    mark: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.seen: Seen = {"forward": [], "backward": []}

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> TorchFunctionMode:
        return Probe(self.seen)


def rms(x: Tensor) -> float:
    with torch._C.DisableTorchFunction():  # Modes are off too: this is no call of the model's.
        q = x.qdata if isinstance(x, sct.ScaledTensor) else x
        return float(q.detach().double().square().mean().sqrt())


def watched(model: nn.Module, inputs: dict[str, Any]) -> Seen:
    watch = Watch()
    interpose.interpose(model, watch)
    model(**inputs).loss.backward()
    return watch.seen


def out_of_range(seen: list[tuple[str, float]], low: float, high: float) -> list[tuple[str, float]]:
    return [(name, r) for name, r in seen if not low <= r <= high]


def unit(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    model, inputs = build(name), batch(name, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sct.unit_scale(model, inputs)
    gc.collect()  # A graph of the measured run would hold the parameters.
    return model, inputs


NAMED = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "ViTForImageClassification",
)


@pytest.mark.parametrize("name", NAMED)
def test__elements_under_carried_scales__stay_near_one(name: str) -> None:
    model, inputs = unit(name)
    seen = watched(sct.scale_model(model), inputs)
    for direction, found in seen.items():
        assert len(found) > 80
        assert not out_of_range(found, 0.25, 4.0), direction


#: Parts of formulas that models write out; their values have a meaning: gelu and RMS norm.
PARTS = {"GPT2LMHeadModel": ("add", "mul", "pow"), "LlamaForCausalLM": ("pow",)}


@pytest.mark.parametrize("name", NAMED)
def test__plain_activations_and_gradients__are_of_unit_scale(name: str) -> None:
    model, inputs = unit(name)
    for direction, found in watched(model, inputs).items():
        whole = [seen for seen in found if seen[0] not in PARTS.get(name, ())]
        # In Llama's rotary embedding, two halves of gradients are at 0.2499.
        assert not out_of_range(whole, 0.24, 4.0), direction


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        pytest.param("GPT2LMHeadModel", marks=pytest.mark.slow),
        pytest.param("ViTForImageClassification", marks=pytest.mark.slow),
    ],
)
def test__compiled__it_is_the_same(name: str) -> None:
    torch.compiler.reset()
    model, inputs = unit(name)
    model.loss_type = model.loss_type or "ForCausalLM"  # Otherwise it logs, which no graph holds.
    names = [n for n, _ in model.named_parameters()]
    out = model(**inputs).loss
    expected = torch.autograd.grad(out, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    got = torch.autograd.grad(compiled, list(model.parameters()))
    torch.testing.assert_close(compiled, out)
    for fqn, a, b in zip(names, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=fqn)


def test__compiled__bert_is_the_same_with_its_loss_outside() -> None:
    torch.compiler.reset()
    model, inputs = unit("BertForMaskedLM")
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    model(**inputs)  # This is another way of calling it, recorded now.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters, target = list(model.parameters()), torch.randn(4, 32, 128)
    found = []
    for run in (model, compiled):
        loss = (run(**inputs).logits * target).sum()
        found.append((loss, torch.autograd.grad(loss, parameters, allow_unused=True)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


def test__a_loss_module_made_in_forward__stays_out_of_the_graph() -> None:
    """Dynamo puts the function of `CrossEntropyLoss()` into a graph past every mode. Such a model
    runs uncompiled, and its compilation works or gives a reason."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.CrossEntropyLoss()(self.linear(x), y)

    torch.compiler.reset()
    model, x, y = Model(), torch.randn(4, 16), torch.randint(8, (4,))
    sct.unit_scale(model, (x, y))
    model(x, y).backward()
    expected, model.linear.weight.grad = model.linear.weight.grad, None
    with pytest.raises(torch._dynamo.exc.Unsupported, match="did not call cross_entropy"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x, y)
    torch.compiler.reset()
    torch.compile(model, backend="aot_eager")(x, y).backward()
    assert torch.equal(model.linear.weight.grad, expected)


#: Sums of a branch and its start. Phi and GPT-J add two branches at once.
RESIDUALS = {"GPT2LMHeadModel": 6, "PhiForCausalLM": 3, "BertForMaskedLM": 6}


@pytest.mark.parametrize("name", RESIDUALS)
def test__residual_sums__are_found(name: str) -> None:
    model, _ = unit(name)
    (transform,) = interpose.transforms(model)
    (plan,) = transform.plans.values()
    assert len(plan.residuals) == RESIDUALS[name]


def test__generation__goes_on() -> None:
    model, _ = unit("LlamaForCausalLM")
    model.eval()
    ids = torch.randint(2, 100, (1, 5))
    out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 9)


FAST = ("T5ForConditionalGeneration", "MixtralForCausalLM", "WhisperForConditionalGeneration")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in MODELS]
)
def test__any_model__trains(name: str) -> None:
    model, inputs = unit(name)
    optimizer = sct.optim.AdamW(model.parameters(), lr=2**-6, weight_decay=0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test__the_original__is_untouched_by_a_transformed_copy() -> None:
    torch.manual_seed(0)
    model, inputs = build("GPT2LMHeadModel"), batch("GPT2LMHeadModel", 1)
    before = model(**inputs).loss
    sct.unit_scale(copy.deepcopy(model), inputs)
    assert torch.equal(model(**inputs).loss, before)
