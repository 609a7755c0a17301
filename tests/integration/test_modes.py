"""Each mode of training gives the same run as without it, to the bit if possible.

docs/modes.md has the table of modes. torch.func, export and compile have files of their own.
"""

import copy
import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_holds, assert_in_range, assert_shifted, dequantized
from modes_models import (
    EXACT,
    UNIT,
    Checkpointed,
    Recipe,
    assert_identical,
    assert_near,
    assert_sane,
    gpt,
    gradients,
    gradients_of,
    lora_gpt,
    loss_of,
    plain_gpt,
    tokens,
)
from plain_models import STYLES
from small_models import LoRA
from tensors import gaussian
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError

STYLED = pytest.mark.parametrize("style", [STYLES["unet"], STYLES["lstm"]], ids=["unet", "lstm"])


# --- activation checkpointing ----------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test__checkpointing__changes_no_bit(reentrant: bool, dropout: float) -> None:
    kept, again = gpt(dropout=dropout), gpt(dropout=dropout)
    again.blocks = nn.ModuleList(Checkpointed(b, reentrant) for b in again.blocks)
    losses = []
    for model in (kept, again):
        torch.manual_seed(1)
        losses.append(loss_of(model, tokens()))
        losses[-1].backward()
    assert torch.equal(*losses)
    found = {name.replace(".block.", "."): g for name, g in gradients(again).items()}
    assert_identical(found, gradients(kept))
    assert_sane(found)


@STYLED
def test__checkpointing_other_models__changes_no_bit(style: Any) -> None:
    torch.manual_seed(0)
    model = sct.scale_model(style.build())
    style.loss(model).backward()
    want = gradients(model)
    model.zero_grad()
    style.loss(lambda x: checkpoint(model, x, use_reentrant=False)).backward()
    assert_identical(gradients(model), want)


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test__autocast__changes_the_appearance_alone(cached: bool) -> None:
    """The elements have the recipe's formats already, so bfloat16 only shows in `.dtype`."""
    model, t, outputs = gpt(), tokens(), []
    want = loss_of(model, t)
    want.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        module.register_forward_hook(lambda _, args, out: outputs.append(out))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        logits, _ = model(t[:, :-1])
        assert all(isinstance(x, sct.ScaledTensor) for x in outputs if isinstance(x, Tensor))
        assert logits.dtype == torch.bfloat16
        assert_in_range([logits], 0.1, 10)
        loss = loss_of(model, t)
    loss.backward()
    assert torch.equal(loss, want)
    assert_identical(gradients(model), expected)
    assert all(g.dtype == torch.float32 for g in gradients(model).values())


@STYLED
def test__autocast_of_other_models__has_the_same_loss(style: Any) -> None:
    torch.manual_seed(0)
    model = sct.scale_model(style.build())
    want = style.loss(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = style.loss(model)
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=0.01, atol=0)
    assert_sane(gradients(model))


def test__autocast_to_float16__keeps_loss_and_range() -> None:
    """Elements are FP16 then. Scales keep their range, so no loss scaling is needed."""
    model, t = gpt(), tokens()
    want = loss_of(model, t)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model, t)
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-3, atol=0)
    assert_sane(gradients(model))


def test__autocast__keeps_operands_of_two_bytes() -> None:
    """Autocast keeps its own copies of the FP8 operands, so leaving it out saves memory."""
    model, kept = sct.scale_model(nn.Linear(8, 8)), []
    x = torch.randn(4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    assert [t.format.name for t in kept] == ["e4m3fn", "bf16"]
    assert_holds(kept[1], kept[0].dequantize(), 0)


# --- loss scaling ----------------------------------------------------------------------------


def trained(
    model: nn.Module, scaler: torch.amp.GradScaler | None, autocast: bool, clip: float, steps: int
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, tokens(seed=step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return optimizer


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("clip", [0.5, math.inf])
def test__a_grad_scaler__trains_to_the_same_bits(autocast: bool, clip: float) -> None:
    first, second = gpt(), gpt()
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    plain, scaled = (
        trained(first, None, autocast, clip, 5),
        trained(second, scaler, autocast, clip, 5),
    )
    assert scaler.get_scale() == 2.0**18
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert_shifted(p, q, 0)
        assert_shifted(p.grad, q.grad, 0)
        for name, x in plain.state[p].items():
            assert_shifted(x, scaled.state[q][name], 0)


@pytest.mark.parametrize("factor", [2.0**16, 2.0**-100, 3.0, 1e-3])
@pytest.mark.parametrize("part", [False, True])
def test__unscaling__moves_the_scale(factor: float, part: bool) -> None:
    p = nn.Parameter(sct.scaled(gaussian(64)))
    whole = sct.scaled(gaussian(2, 64, seed=1))
    p.grad = whole[0] if part else whole[0].clone()
    before, elements = dequantized(p.grad).clone(), p.grad.qdata.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=factor)
    scaler.scale(torch.ones(()))  # A scaler exists from its first loss on.
    scaler.unscale_(torch.optim.SGD([p], lr=1.0))
    assert_holds(p.grad, before / factor, 2.0**-22)
    if not part:
        assert_in_range([p.grad])
        assert math.frexp(factor)[0] != 0.5 or torch.equal(p.grad.qdata, elements)
        assert float(p.grad.rms) == pytest.approx(float(dequantized(p.grad).norm()) / 8, rel=0.5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test__an_infinite_gradient__skips_the_step_and_lowers_the_factor(bad: float) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    before = copy.deepcopy(model)
    scaler.scale(loss_of(model, tokens())).backward()
    model.head.weight.grad[3, 4] = bad
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert_shifted(p, q, 0)


# --- gradient accumulation -------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [2, 8])
@pytest.mark.parametrize(("recipe", "tolerance"), [(UNIT, 0.15), (EXACT, 1e-5)])
def test__accumulating__is_one_batch(recipe: Recipe, tolerance: float, pieces: int) -> None:
    model, t = gpt(recipe), tokens(8)
    whole = gradients_of(model, t)
    model.zero_grad()
    for part in t.chunk(pieces):
        (loss_of(model, part) / pieces).backward()
    assert_near(gradients(model), whole, tolerance)
    assert_sane(gradients(model))


# --- empty batches ---------------------------------------------------------------------------


def test__an_empty_batch__adds_zero() -> None:
    model, t = gpt(), tokens()
    want = gradients_of(model, t)
    model.zero_grad()
    logits, _ = model(t[:0, :-1])
    assert isinstance(logits, sct.ScaledTensor)
    assert logits.shape == (0, 8, 16)
    logits.square().sum().backward()
    for name, g in gradients(model).items():
        assert isinstance(g, sct.ScaledTensor), name
        assert_holds(g, torch.zeros(g.shape), 0)
    loss_of(model, t).backward()
    assert_identical(gradients(model), want)


@STYLED
def test__an_empty_batch_of_other_models__gives_zeros(style: Any) -> None:
    torch.manual_seed(0)
    model = sct.scale_model(style.build())
    out = model(style.batch(0)[0][:0])
    assert isinstance(out, sct.ScaledTensor)
    out.square().sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()
    for name, g in gradients(model).items():
        assert isinstance(g, sct.ScaledTensor), name
        assert_holds(g, torch.zeros(g.shape), 0)


# --- frozen weights --------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Record the formats of the operands of every product of ScaledTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            a, b = args
            self.seen.append((a.format.name, b.format.name))
            self.sizes.append((a.shape[0], a.shape[1], b.shape[1]))
        return func(*args, **(kwargs or {}))


def test__a_frozen_layer__runs_two_products() -> None:
    torch.manual_seed(0)
    layer = sct.scale_model(nn.Linear(32, 48).requires_grad_(False))
    x = torch.randn(5, 32, requires_grad=True)
    with Products() as products:
        layer(x).square().sum().backward()
    assert products.seen == [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")]
    assert layer.weight.grad is None
    assert x.grad is not None
    with Products() as products:
        layer(x.detach())
    assert len(products.seen) == 1


def test__lora__runs_two_products_on_the_base_and_three_on_each_side_branch() -> None:
    torch.manual_seed(0)
    layer = sct.scale_model(LoRA(nn.Linear(32, 48)))
    x = sct.scaled(torch.randn(5, 32)).requires_grad_()
    with Products() as products:
        layer(x).square().sum().backward()
    base = [(5, 32, 48), (5, 48, 32)]
    down, up = [(5, 32, 4), (5, 4, 32), (4, 5, 32)], [(5, 4, 48), (5, 48, 4), (48, 5, 4)]
    assert sorted(products.sizes) == sorted([*base, *down, *up])
    assert_sane(gradients(layer))


def test__lora__trains_what_is_not_frozen() -> None:
    exact, reference = lora_gpt(EXACT), sct.unscale_model(lora_gpt())
    assert_near(gradients_of(exact, tokens()), gradients_of(reference, tokens()), 1e-5)
    model = lora_gpt()
    frozen = {n: copy.deepcopy(p) for n, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 8
    assert_sane(gradients_of(model, tokens()))
    trained(model, None, False, 1.0, 2)
    for name, p in model.named_parameters():
        assert (name in frozen) == (p.grad is None), name
        if name in frozen:
            assert_shifted(p, frozen[name], 0)


# --- no gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test__without_gradients__the_forward_pass_is_the_same(mode: Any) -> None:
    model, t = gpt(), tokens()
    want, _ = model(t[:, :-1])
    with mode():
        got, _ = model(t[:, :-1])
    assert_shifted(got, want, 0)
    assert not got.requires_grad
    assert got.is_inference() == (mode is torch.inference_mode)
    assert_identical(gradients_of(model, t), gradients_of(gpt(), t))


# --- copies ----------------------------------------------------------------------------------


def saved_and_loaded(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
def test__a_copy_of_model_and_optimizer__goes_on_to_the_same_bits(again: Any) -> None:
    model = gpt()
    optimizer = trained(model, None, False, 1.0, 2)
    pair = again((model, optimizer))
    for m, o in ((model, optimizer), pair):
        o.zero_grad()
        loss_of(m, tokens(seed=7)).backward()
        o.step()
    for p, q in zip(model.parameters(), pair[0].parameters(), strict=True):
        assert isinstance(q, nn.Parameter)
        assert p.qdata.data_ptr() != q.qdata.data_ptr()
        assert_shifted(p, q, 0)
        for name, x in optimizer.state[p].items():
            assert_shifted(x, pair[1].state[q][name], 0)


# --- double backward -------------------------------------------------------------------------


def penalised(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A gradient penalty (Gulrajani et al. 2017) and its gradients."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (slope.norm(dim=-1) - 1).square().mean()
    penalty.backward()
    return penalty.detach(), gradients(model)


@pytest.mark.parametrize(("recipe", "tolerance"), [(UNIT, 0.2), (EXACT, 1e-5)])
@pytest.mark.parametrize("entry", ["plain", "scaled"])
def test__a_gradient_penalty__is_that_of_float32(
    recipe: Recipe, tolerance: float, entry: str
) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(
        *(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Softmax(-1), nn.Linear(16, 8)),
        *(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)),
    )
    model, x = sct.scale_model(copy.deepcopy(reference), recipe), torch.randn(16, 16)
    held = sct.scaled(x, recipe=recipe) if entry == "scaled" else x.clone()
    penalty, got = penalised(model, held.requires_grad_())
    exact, want = penalised(reference, x.requires_grad_())
    torch.testing.assert_close(penalty, exact, rtol=tolerance, atol=0)
    assert_near(got, want, tolerance)
    assert_sane({name: g for name, g in got.items() if want[name].any()})


@pytest.mark.parametrize(("recipe", "tolerance"), [(UNIT, 0.25), ("current", 0.25), (EXACT, 1e-5)])
@pytest.mark.parametrize("frozen", [False, True])
def test__second_derivatives_of_linear_layers__ask_for_no_other_gradient(
    recipe: Any, tolerance: float, frozen: bool
) -> None:
    """The input of the first layer is data (Hessian-vector products, MAML), or its weight is
    frozen (a gradient penalty beside a frozen layer)."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    reference[0].weight.requires_grad_(not frozen)
    found = []
    for model in (sct.scale_model(copy.deepcopy(reference), recipe), reference):
        x = gaussian(64, 16).requires_grad_(frozen)
        wanted = [x] if frozen else list(model.parameters())
        first = torch.autograd.grad(model(x).square().mean(), wanted, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    got, want = found
    assert_near(got, want, tolerance)


def curvature(model: nn.Module, t: Tensor) -> dict[str, Tensor]:
    """Gradients of half the squared norm of the gradient."""
    first = torch.autograd.grad(loss_of(model, t), list(model.parameters()), create_graph=True)
    (sum(g.square().sum() for g in first) / 2).backward()
    return gradients(model)


@pytest.mark.parametrize(("recipe", "tolerance"), [(UNIT, 0.35), (EXACT, 1e-4)])
def test__a_transformer__is_differentiated_twice(recipe: Recipe, tolerance: float) -> None:
    """Uses the spelled-out attention, as torch's fused kernels have no second derivative."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        got, want = curvature(gpt(recipe), tokens()), curvature(plain_gpt(), tokens())
    assert_near(got, want, tolerance)
    assert_sane(got)


@pytest.mark.parametrize("make", [gpt, plain_gpt], ids=["scaled", "plain"])
def test__fused_attention__has_no_second_derivative_in_torch(make: Any) -> None:
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product_flash"):
        curvature(make(), tokens())


# --- what leaves as a plain tensor -----------------------------------------------------------


def test__sums_over_everything__are_plain_and_so_is_what_only_adds() -> None:
    torch.manual_seed(0)
    layer = sct.scale_model(nn.Linear(8, 4))
    factor = nn.Parameter(sct.scaled(torch.tensor(2.0)))
    out = layer(torch.randn(3, 8)) * factor
    for total in (out.sum(), out.mean(), out.norm(), out.square().mean()):
        assert type(total) is Tensor
        assert total.dtype == torch.float32
    out.square().sum().backward()
    assert type(factor.grad) is Tensor
    assert_sane(gradients(layer))
    layer.zero_grad()
    layer(torch.randn(3, 8)).sum().backward()
    assert_sane({"weight": layer.weight.grad})
    assert type(layer.bias.grad) is Tensor
    assert torch.equal(layer.bias.grad, torch.full((4,), 3.0))
    torch.optim.AdamW([*layer.parameters(), factor], lr=0.1).step()
    assert_in_range([layer.weight, layer.bias], 0.25, 4)


def test__the_page_of_modes__names_tests_that_exist() -> None:
    here = Path(__file__).parent
    rows = (
        (here / "../../docs/modes.md").read_text().split("|---")[-1].split("\n\n")[0].splitlines()
    )
    tests = {path.name for path in here.parent.rglob("test_*.py")}
    for row in rows[1:]:
        named = re.findall(r"`(\w+\.py)`", row.split("|")[-2])
        assert named, row
        assert tests.issuperset(named), row
    assert len(rows) > 15


# --- flex_attention --------------------------------------------------------------------------


def test__flex_attention__takes_the_values() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = sct.scaled(gaussian(1, 2, 8, 16))  # on a CPU it has no backward pass
    y = flex_attention(*[q.dequantize()] * 3)
    want = torch.nn.functional.scaled_dot_product_attention(*[gaussian(1, 2, 8, 16)] * 3)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match=r"(?i)flex_attention"):
        flex_attention(q, q, q)


# --- distributions, sequences of several lengths -----------------------------------------------


def test__a_categorical_distribution__takes_logits() -> None:
    torch.manual_seed(0)
    layer, x, chosen = nn.Linear(16, 5), gaussian(32, 16), torch.arange(32) % 5
    found = []
    for net in (layer, sct.scale_model(copy.deepcopy(layer))):
        logits = net(x)
        for made in (
            torch.distributions.Categorical(logits=logits),
            torch.distributions.Categorical(logits.softmax(-1), validate_args=False),
        ):
            net.zero_grad()
            (made.log_prob(chosen).sum() + made.entropy().sum()).backward(retain_graph=True)
            found.append(gradients(net))
    for got, want in zip(found[2:], found[:2], strict=True):
        assert_near(got, want, 0.1)


@pytest.mark.parametrize("batch_first", [False, True])
def test__packed_sequences__keep_their_scale(batch_first: bool) -> None:
    lengths = torch.tensor([3, 7, 2, 7])

    def packed(x: Tensor) -> tuple[Tensor, Tensor]:
        made = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
        return made.data, nn.utils.rnn.pad_packed_sequence(made, batch_first)[0]

    values = gaussian(*((4, 7, 8) if batch_first else (7, 4, 8)), power=3)
    x, held = values.clone().requires_grad_(), sct.scaled(values).requires_grad_()
    for run in (packed, torch.compile(packed, backend="aot_eager")):  # Dynamo skips the function
        got, want = run(held), packed(x)
        for made, exact in zip(got, want, strict=True):
            assert torch.equal(dequantized(made), exact.double())
        assert got[0].scale == held.scale  # torch pads with a plain tensor
    want[1].square().sum().backward()
    got[1].square().sum().backward()
    assert torch.equal(dequantized(held.grad), x.grad.double())


def test__a_nested_tensor__is_refused_by_name() -> None:
    x = sct.scaled(gaussian(6, 8))
    for made in (
        lambda: torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged),
        lambda: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6])),
        lambda: torch.nested.nested_tensor([x[:2], x[2:]]),
    ):
        with pytest.raises(UnsupportedError, match="nested tensor"):
            made()
