"""Hooks, parametrizations, meta devices and exported programs act on a module."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_holds, assert_in_range, assert_shifted
from modes_models import (
    EXACT,
    assert_identical,
    assert_near,
    assert_sane,
    distance,
    gpt,
    gradients,
    gradients_of,
    loss_of,
    plain_gpt,
    tokens,
)
from plain_models import STYLES
from small_models import GPT
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import scaledtensor as sct
from scaledtensor.errors import DTypeError

# --- hooks -----------------------------------------------------------------------------------


def test__hooks_that_look__see_scaled_tensors_and_change_no_bit() -> None:
    model, t = gpt(), tokens()
    want = gradients_of(gpt(), t)
    seen: dict[str, list[Tensor]] = {"forward": [], "before": [], "backward": []}
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, args, out: seen["forward"].append(out))
            module.register_full_backward_pre_hook(lambda m, out: seen["before"].extend(out))
            module.register_full_backward_hook(lambda m, into, out: seen["backward"].extend(into))
    assert_identical(gradients_of(model, t), want)
    for found in seen.values():
        given = [x for x in found if x is not None]
        assert len(given) > 20
        for x in given:
            assert_in_range([x], 0.05, 20)


def test__hooks_that_change__change_the_value() -> None:
    """The hooks act as in float32: they halve inputs, double outputs, and multiply gradients by
    four and then by a third."""

    def hooked(model: nn.Module) -> nn.Module:
        first, second = model.blocks
        first.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        second.register_forward_pre_hook(lambda m, args, kw: ((args[0] + 1,), kw), with_kwargs=True)
        first.register_forward_hook(lambda m, args, out: out * 2)
        second.register_full_backward_pre_hook(lambda m, out: (out[0] * 4,))
        first.register_full_backward_hook(lambda m, into, out: (into[0] / 3,))
        return model

    model, reference, t = hooked(gpt(EXACT)), hooked(plain_gpt()), tokens()
    torch.testing.assert_close(loss_of(model, t), loss_of(reference, t), rtol=1e-5, atol=0)
    assert_near(gradients_of(model, t), gradients_of(reference, t), 1e-5)
    assert_sane(gradients_of(hooked(gpt()), t))


def test__hooks_of_tensors__see_the_gradient() -> None:
    model, t = gpt(), tokens()
    seen: dict[str, Tensor] = {}
    model.head.weight.register_hook(lambda g: seen.setdefault("tensor", g))
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.update(after=p.grad))
    x = model.token_embedding(t[:, :-1])
    x.retain_grad()
    model.head(model.norm(x)).square().sum().backward()
    assert_shifted(seen["tensor"], model.head.weight.grad, 0)
    assert seen["after"] is model.head.weight.grad
    assert_in_range([x.grad, seen["tensor"]], 0.1, 10)


# --- parametrizations ------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


PARAMETRIZE: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm by columns": lambda m: parametrizations.weight_norm(m, dim=1),
    "weight_norm of all": lambda m: parametrizations.weight_norm(m, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
}


def through(layer: nn.Module) -> Tensor:
    torch.manual_seed(1)
    layer.zero_grad()
    out = layer(torch.randn(32, 16))
    (out - torch.randn(32, 16)).square().mean().backward()
    return out


@pytest.mark.parametrize("name", PARAMETRIZE)
def test__a_parametrization_of_a_scaled_layer__is_that_of_a_plain_one(name: str) -> None:
    torch.manual_seed(0)
    reference = nn.Linear(16, 16)
    exact, model = (sct.scale_model(copy.deepcopy(reference), r) for r in (EXACT, "unit"))
    for layer in (reference, exact, model):
        torch.manual_seed(2)
        PARAMETRIZE[name](layer)
    want = through(reference)
    assert_holds(through(exact), want, 1e-4)
    assert_near(gradients(exact), gradients(reference), 1e-3)
    assert_holds(through(model), want, 0.2)
    assert distance(gradients(model), gradients(reference)) < 0.15
    # The gradient of a 0-dim parameter is a sum over everything, and sums end as plain float32.
    assert_sane({key: g for key, g in gradients(model).items() if g.dim()})
    assert_in_range([model.weight], 0.25, 4)
    assert model.weight.recipe == sct.recipes.Unit()


@pytest.mark.parametrize("dim", [0, 1])
def test__weight_norm__has_elements_near_one(dim: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 128)
    nn.init.normal_(layer.weight, std=2.0**-9)
    sct.scale_model(parametrizations.weight_norm(layer, dim=dim))
    assert_in_range([layer.weight])
    # The gradient is random, like the gradient of a layer.
    layer.weight.backward(sct.scaled(torch.randn(128, 256) * 2.0**20))
    assert_in_range(list(gradients(layer).values()))


def test__removing_a_parametrization__leaves_a_scaled_parameter() -> None:
    layer = sct.scale_model(nn.Linear(8, 8))
    parametrizations.weight_norm(layer)
    kept = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(layer.weight, nn.Parameter)
    assert_holds(layer.weight, kept.dequantize(), 2.0**-20)
    assert layer.weight.recipe == sct.recipes.Unit()
    plain = sct.unscale_model(layer).weight
    assert type(plain) is nn.Parameter
    assert_holds(plain, kept.dequantize(), 2.0**-20)


# --- the meta device -------------------------------------------------------------------------


def on_meta() -> GPT:
    with torch.device("meta"):
        return plain_gpt()


FILLED: dict[str, Callable[[], nn.Module]] = {
    "scaled, empty, loaded": lambda: sct.scale_model(on_meta()).to_empty(device="cpu"),
    "scaled, assigned": lambda: sct.scale_model(on_meta()),
    "plain, assigned": on_meta,
}


@pytest.mark.parametrize("name", FILLED)
def test__a_model_made_on_meta__trains_like_the_one_it_is_loaded_from(name: str) -> None:
    source, t = gpt(), tokens()
    state = {key: x.clone() for key, x in source.state_dict().items()}
    model = FILLED[name]()
    model.load_state_dict(state, assign="assigned" in name)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert_identical(gradients_of(model, t), gradients_of(source, t))
    for m in (model, source):
        torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True).step()
    for p, q in zip(model.parameters(), source.parameters(), strict=True):
        assert_shifted(p, q, 0)
        assert p.recipe == q.recipe


def test__a_model_on_meta__has_shapes() -> None:
    model = sct.scale_model(on_meta())
    logits, loss = model(
        torch.zeros(2, 8, dtype=torch.long, device="meta"),
        torch.zeros(2, 8, dtype=torch.long, device="meta"),
    )
    assert isinstance(logits, sct.ScaledTensor)
    assert (logits.shape, logits.device.type, logits.scale.device.type) == (
        (2, 8, 16),
        *["meta"] * 2,
    )
    loss.backward()
    assert model.head.weight.grad.scale.device.type == "meta"


def test__an_assigned_checkpoint__brings_format_scale_and_recipe() -> None:
    model, source = gpt(), gpt(sct.recipes.Unit(master="bf16", gradient="e4m3fn"))
    model.load_state_dict(source.state_dict(), assign=True)
    for p, q in zip(model.parameters(), source.parameters(), strict=True):
        assert_shifted(p, q, 0)
        assert p.recipe == q.recipe
    assert_identical(gradients_of(model, tokens()), gradients_of(source, tokens()))


@pytest.mark.parametrize("recipe", ["unit", sct.recipes.Current(store_frozen=True)], ids=str)
def test__an_assigned_plain_checkpoint__becomes_what_the_recipe_keeps(recipe) -> None:
    def plain() -> nn.Module:
        made = plain_gpt()
        made.head.requires_grad_(False)
        return made

    source = plain()
    model = sct.scale_model(plain().to("meta"), recipe)
    model.load_state_dict(source.state_dict(), assign=True)
    sct.scale_model(source, recipe)
    for p, q in zip(model.parameters(), source.parameters(), strict=True):
        assert_shifted(p, q, 0)
        assert (p.recipe, p.format, p.requires_grad) == (q.recipe, q.format, q.requires_grad)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        model.load_state_dict({"head.weight": torch.zeros(2, 2)}, assign=True, strict=False)


# --- exported programs -----------------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self, model: nn.Module, plain: bool = False) -> None:
        super().__init__()
        self.model, self.plain = model, plain

    def forward(self, t: Tensor) -> Tensor:
        out, _ = self.model(t)
        return out.dequantize() if self.plain else out


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, t: Tensor, targets: Tensor) -> Tensor:
        return self.model(t, targets)[1]


@pytest.mark.parametrize("strict", [False, True])
def test__an_exported_model__gives_the_same_bits_for_any_batch(strict: bool) -> None:
    model = Logits(gpt(layers=1))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(
        model, (tokens(4, 8),), strict=strict, dynamic_shapes=({0: batch},)
    ).module()
    for t in (tokens(4, 8), tokens(2, 8)):
        got, want = program(t), model(t)
        assert_shifted(got, want, 0)
        assert_in_range([got], 0.1, 10)


def test__an_exported_loss__trains_to_the_same_bits() -> None:
    """The program contains the casts of operands for autograd, and the casts of gradients."""
    model, t = gpt(layers=1), tokens()
    want = gradients_of(copy.deepcopy(model), t)
    program = torch.export.export(Loss(model), (t[:, :-1], t[:, 1:])).module()
    program(t[:, :-1], t[:, 1:]).backward()
    got = {name.removeprefix("model."): g for name, g in gradients(program).items()}
    assert_identical(got, want)
    with pytest.raises(DTypeError, match=r"exported for dtype torch.bfloat16; got torch.float32"):
        torch.ops.aten._assert_tensor_metadata(sct.scaled(torch.ones(2)), dtype=torch.bfloat16)


def test__an_exported_program__is_saved_and_loaded() -> None:
    model, file = Logits(gpt(layers=1)), io.BytesIO()
    torch.export.save(torch.export.export(model, (tokens(4, 8),)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    assert_shifted(program(tokens(4, 8, 1)), model(tokens(4, 8, 1)), 0)


def test__decomposing_an_exported_program__needs_plain_results() -> None:
    """torch then flattens tensor subclasses, and rebuilds parameters but no results."""
    model, t = gpt(layers=1), tokens(4, 8)
    program = torch.export.export(Logits(model, plain=True), (t,)).run_decompositions()
    assert torch.equal(program.module()(t), Logits(model)(t).dequantize())
    assert all(type(x) in (Tensor, nn.Parameter) for x in program.state_dict.values())
    taken_apart = torch.export.export(Logits(model), (t,)).run_decompositions().module()
    with pytest.raises(ValueError, match="leaves"):
        taken_apart(t)


def test__an_exported_convnet__gives_the_same_bits() -> None:
    style = STYLES["unet"]
    torch.manual_seed(0)
    model, (x, _) = sct.scale_model(style.build()).eval(), style.batch(0)
    got = torch.export.export(model, (x,)).module()(x)
    assert_shifted(got, model(x), 0)


# --- data ------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset[Any]):
    """Return samples of a dozen binades, and their number."""

    def __init__(self, *how: Any) -> None:
        rng = torch.Generator().manual_seed(0)
        self.samples = [
            sct.scaled(torch.randn(2, 32, generator=rng) * 2.0 ** (3 * i), *how) for i in range(4)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.samples[i], i


@pytest.mark.parametrize(
    "how",
    [("fp32",), ("e4m3fn",), ("e2m1fn", "floor", sct.PerBlock((1, 32)))],
    ids=lambda how: how[0],
)
def test__workers_of_a_data_loader__give_the_batches_of_its_own_process(how: Any) -> None:
    data = Samples(*how)
    batches = [
        next(iter(torch.utils.data.DataLoader(data, batch_size=size, num_workers=workers)))
        for size in (4, None)
        for workers in (0, 2)
    ]
    for (alone, i), (of_worker, j) in (batches[:2], batches[2:]):
        assert type(alone) is type(of_worker)
        assert isinstance(of_worker, (sct.ScaledTensor, sct.CodedTensor))
        assert alone.format == of_worker.format
        assert torch.equal(alone.scale, of_worker.scale)
        assert torch.equal(alone.dequantize(), of_worker.dequantize())
        assert torch.equal(torch.as_tensor(i), torch.as_tensor(j))
    values = torch.stack([x.dequantize() for x in data.samples])
    assert_holds(batches[1][0], values, 2.0**-8)


# --- transformers ----------------------------------------------------------------------------


def test__resized_token_embeddings__stay_scaled_and_a_new_head_is_wrapped_by_itself() -> None:
    transformers = pytest.importorskip("transformers")
    t = tokens()[:, :8] % 40
    for tied in (True, False):
        config = transformers.LlamaConfig(  # Resizing writes the new size into it.
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=50,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=tied,
        )
        model = sct.scale_model(transformers.LlamaForCausalLM(config))
        # torch expects gradients of the old size while a graph of that size lives.
        with torch.no_grad():
            want = model(t).logits
        model.resize_token_embeddings(60)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        assert isinstance(embedding, sct.ScaledTensor)
        assert embedding.recipe == sct.recipes.Unit()
        assert (head.weight is embedding) == tied
        if not tied:  # transformers makes a new module
            sct.scale_model(head)
        got = model(t, labels=t)
        assert_holds(got.logits[..., :50], want.dequantize(), 0.05)
        got.loss.backward()
        assert all(isinstance(p.grad, sct.ScaledTensor) for p in model.parameters())
