"""Operators keep these tensors for their backward pass under a recipe with `saved`."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_shifted, dequantized
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import GPT
from tensors import gaussian, parts, value_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError
from scaledtensor.recipes import Unit
from scaledtensor.tensors.memo import NOTHING

SAVED, PLAIN = Unit(saved="e4m3fn"), Unit()
E4M3 = 2.0**-4
"""Largest relative error of an E4M3 code under the scale of its group."""


class Case(NamedTuple):
    f: Callable[..., Tensor]
    bytes: float
    """Bytes kept for each element of x, without parameters. Numbers per row are extra."""
    operands: int = 1
    tolerance: float = 2 * E4M3
    """Error of the gradient relative to its RMS: the condition of the slope, times 1/16."""


CODES = 1 + 1 / 16
NAMES = ("x", "y", "z")
CASES = {
    "gelu": Case(F.gelu, CODES),
    "gelu_tanh": Case(nn.GELU("tanh"), CODES),
    "silu": Case(F.silu, CODES),
    "silu_module": Case(nn.SiLU(), CODES),
    "mish": Case(F.mish, CODES),
    "hardswish": Case(F.hardswish, CODES),
    "softplus": Case(F.softplus, CODES),
    "elu": Case(nn.ELU(), CODES),
    "glu": Case(F.glu, CODES),
    "relu": Case(F.relu, 1, tolerance=0),
    "relu_method": Case(lambda x: x.relu(), 1, tolerance=0),
    "relu_module": Case(nn.ReLU(), 1, tolerance=0),
    "leaky_relu": Case(nn.LeakyReLU(0.1), 1, tolerance=0),
    "tanh": Case(torch.tanh, CODES),
    "tanh_method": Case(lambda x: x.tanh(), CODES),
    "sigmoid": Case(F.sigmoid, CODES),
    "sigmoid_method": Case(lambda x: x.sigmoid(), CODES),
    "softmax": Case(lambda x: F.softmax(x, -1), CODES),
    "softmax_rows": Case(lambda x: x.softmax(1), CODES),
    "softmax_module": Case(nn.Softmax(-1), CODES),
    "layer_norm": Case(lambda x: F.layer_norm(x, x.shape[-1:]), CODES),
    "layer_norm_2d": Case(lambda x: torch.layer_norm(x, x.shape[-2:]), CODES),
    "rms_norm": Case(lambda x: F.rms_norm(x, x.shape[-1:]), CODES),
    "group_norm": Case(lambda x: F.group_norm(x.mT, 4).mT, CODES),
    "square": Case(torch.square, CODES),
    "pow": Case(lambda x: x**3, CODES),
    "mul": Case(lambda x, y: x * y, 2 * CODES, 2),
    "mul_function": Case(torch.mul, 2 * CODES, 2),
    "mul_method": Case(lambda x, y: x.mul(y), 2 * CODES, 2),
    "twice": Case(lambda x: x * x, CODES),
    "norm_by_hand": Case(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6), CODES),
    "swiglu": Case(lambda x, y: F.silu(x) * y, 3 * CODES, 2),
    "attention": Case(
        lambda x, y, z: attention(x, y, z, is_causal=True), 3 * CODES, 3, tolerance=4 * E4M3
    ),
    "attention_masked": Case(
        lambda x, y, z: attention(x, y, z, attn_mask=MASK), 3 * CODES, 3, tolerance=4 * E4M3
    ),
}
MASK = torch.ones(8, 8, dtype=torch.bool).tril(2)


def attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2).flatten(2)


def activations(recipe: Unit, count: int, shape=(4, 8, 64)) -> tuple[list[Tensor], list[Tensor]]:
    """Return leaves, and activations made of them. A leaf belongs to its owner and is not
    copied."""
    leaves = [
        sct.scaled(gaussian(*shape, seed=i), "bf16", recipe=recipe).requires_grad_()
        for i in range(count)
    ]
    return leaves, [x + 0 for x in leaves]


def kept(run: Callable[[], Tensor], *owned: Tensor) -> tuple[Tensor, dict[int, tuple[int, Tensor]]]:
    """Return the result of `run`, and the bytes of every storage that autograd keeps for it."""
    found = {}
    own = {p.untyped_storage().data_ptr() for t in owned for p in parts(t)}

    def pack(t: Tensor) -> Tensor:
        for part in parts(t):
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = (storage.nbytes(), part.detach())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return out, found


def gradients(case: Case, recipe: Unit, k: int = 0, call=None) -> tuple[Tensor, list[Tensor]]:
    leaves, made = activations(recipe, case.operands)
    out = (case.f if call is None else call)(*made)
    # The backward pass does not start from a ScaledTensor, as a checkpoint would run again with
    # `__torch_function__` off.
    plain = value_of(out)
    (plain * gaussian(*out.shape, seed=9) * 2.0**k).sum().backward()
    return out, [x.grad for x in leaves]


# --- every function --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test__kept__is_a_byte_an_element_and_one_a_group(case):
    _, made = activations(SAVED, case.operands)
    _, found = kept(lambda: case.f(*made))
    n = made[0].numel()
    total = sum(size for size, _ in found.values())
    assert n * case.bytes <= total <= n * case.bytes + 24 * 32 + 64
    assert not any(t.numel() >= n / 2 and t.itemsize > 1 for _, t in found.values())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test__forward__is_the_same_to_the_bit__and_the_gradient_near(case):
    (got, near), (want, true) = gradients(case, SAVED), gradients(case, PLAIN)
    assert got.format == want.format
    assert got.scale == want.scale
    assert torch.equal(got.qdata, want.qdata)
    for a, b in zip(near, true, strict=True):
        spread = float(dequantized(b).square().mean().sqrt())
        error = (dequantized(a) - dequantized(b)).square().mean().sqrt()
        assert float(error) <= case.tolerance / 2 * spread
        assert (error > 0) == (case.tolerance > 0), "nothing was rounded"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test__a_loss_times_a_power_of_two__changes_scales_alone(case):
    for a, b in zip(gradients(case, SAVED)[1], gradients(case, SAVED, -18)[1], strict=True):
        assert_shifted(a, b, -18)


#: Other spellings of the same calls. For relu, all three are compiled.
RESPELLED = {
    *("silu_module", "tanh_method", "sigmoid_method", "softmax_rows", "softmax_module"),
    *("mul_function", "mul_method"),
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in RESPELLED])
def test__compiled__is_as_eager(name):
    case = CASES[name]
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *xs: case.f(*xs).dequantize(), fullgraph=True, backend="aot_eager"
    )
    (got, a), (want, b) = gradients(case, SAVED, call=compiled), gradients(case, SAVED)
    torch.testing.assert_close(dequantized(got), dequantized(want))
    for x, y in zip(a, b, strict=True):
        spread = float(dequantized(y).square().mean().sqrt())
        torch.testing.assert_close(dequantized(x), dequantized(y), rtol=2**-7, atol=spread * 2**-7)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test__checkpointed__is_as_without(case, reentrant):
    def call(*xs):
        return checkpoint(case.f, *xs, use_reentrant=reentrant)

    for a, b in zip(gradients(case, SAVED, call=call)[1], gradients(case, SAVED)[1], strict=True):
        assert_shifted(a, b, 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test__a_second_derivative__is_refused(case):
    leaves, made = activations(SAVED, case.operands)
    with pytest.raises(UnsupportedError, match="saved"):
        torch.autograd.grad(case.f(*made).sum(), leaves, create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test__without_gradients__nothing_is_copied(case, mode):
    with mode():
        _, made = activations(SAVED, case.operands)
        got = case.f(*made)
        want = case.f(*activations(PLAIN, case.operands)[1])
    assert torch.equal(got.qdata, want.qdata)
    assert all(x.memo.copies is None for x in made)


# --- copies ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2).flatmap(
        lambda lead: st.integers(2, 70).map(lambda n: (*lead, n))
    ),
    power=st.integers(-30, 30),
    seed=st.integers(0, 99),
    zeros=st.booleans(),
)
def test__a_copy__is_within_a_16th_of_every_element_of_any_shape(shape, power, seed, zeros):
    """The gradient goes through the product, where one factor's gradient is the other's copy."""
    x, y = (gaussian(*shape, seed=seed + i) * 2.0**power for i in (0, 1))
    y = y * (gaussian(*shape, seed=seed + 2) > 0) if zeros else y
    a, b = (sct.scaled(t, "fp32", recipe=SAVED).requires_grad_() for t in (x, y))
    made = b + 0
    (grad,) = torch.autograd.grad((a + 0) * made, a, sct.scaled(torch.ones(shape), "fp32"))
    got, want = dequantized(grad), dequantized(made)
    groups = F.pad(want.abs(), (0, -shape[-1] % 16)).unflatten(-1, (-1, 16)).amax(-1)
    # This is half a subnormal step.
    least = groups.repeat_interleave(16, -1)[..., : shape[-1]] * 2.0**-16
    assert ((got - want).abs() <= want.abs() * E4M3 + least).all()
    assert not got[want == 0].any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test__a_bad_element__spoils_no_other(bad):
    leaf = sct.scaled(torch.ones(2, 40), "bf16", recipe=SAVED).requires_grad_()
    x = gaussian(2, 40)
    clean = sct.scaled(x, "bf16", recipe=SAVED)
    spoilt = clean.clone()
    spoilt.qdata[1, 20] = bad
    (a,), (b,) = (
        torch.autograd.grad((leaf + 0) * t, leaf, sct.scaled(torch.ones(2, 40), "bf16"))
        for t in (clean, spoilt)
    )
    others = torch.ones(2, 40, dtype=torch.bool)
    others[1, 16:32] = False
    assert torch.equal(a.qdata[others], b.qdata[others])
    others[1, 16:32] = True
    others[1, 20] = False
    torch.testing.assert_close(
        dequantized(a)[others], dequantized(b)[others], rtol=2 * E4M3, atol=2.0**-12
    )
    assert bool(b.qdata[1, 20].isnan()) == math.isnan(bad)


def test__softmax__has_rows_of_gradients_that_sum_to_zero():
    """A gradient that is equal along a row gives zero, if rows sum to 1. Copies of rows would
    not."""
    leaves, (x,) = activations(SAVED, 1)
    y = F.softmax(x * 2, -1)
    (grad,) = torch.autograd.grad(y, leaves, sct.scaled(torch.ones(y.shape), "bf16"))
    assert float(dequantized(grad).abs().max()) < 2.0**-9


def test__a_tensor_of_two_operators__is_kept_once__and_again_where_it_has_changed():
    _, (x,) = activations(SAVED, 1)
    out, found = kept(lambda: F.gelu(x) + F.layer_norm(x, (64,)) + x * x)
    codes = [t for _, t in found.values() if t.dtype == torch.float8_e4m3fn]
    assert len(codes) == 1
    del out, found, codes

    _, (x,) = activations(SAVED, 1)
    out = F.gelu(x) + F.layer_norm(x, (64,)) + x * x
    assert all(part() is not None for part in x.memo.copies[2:])
    del out
    assert all(part() is None for part in x.memo.copies[2:]), (
        "a copy that nothing needs stays alive"
    )

    first, x.memo = x.memo.copies, NOTHING
    with torch.no_grad():
        F.gelu(x)
        assert x.memo.copies is None
    y = F.gelu(x)
    with torch.no_grad():
        x.mul_(2)
    z = F.layer_norm(x, (64,))
    assert x.memo.copies[1] != first[1]
    del y, z


def test__parameters_and_numbers_a_row__are_kept_as_they_are():
    weight = nn.Parameter(sct.scaled(gaussian(64), recipe=SAVED))
    _, (x,) = activations(SAVED, 1)
    row = x.mean(-1, keepdim=True)
    for run in (lambda: F.rms_norm(x, (64,), weight), lambda: x * weight, lambda: x * row):
        _, found = kept(run)
        wide = [t for _, t in found.values() if t.itemsize > 1 and t.numel() > 1]
        assert all(t.numel() <= 64 for t in wide)
        assert weight.memo.copies is None


def test__an_expanded_factor__is_copied_as_what_it_holds():
    _, (x, y) = activations(SAVED, 2)
    few = y[:1, :1].expand_as(x)
    _, found = kept(lambda: x * few)
    assert sum(size for size, _ in found.values()) < x.numel() * CODES + 200


@pytest.mark.parametrize("form", ["e5m2", "e3m2fn", "int8"])
def test__other_formats__are_kept_a_byte_an_element(form):
    recipe = Unit(saved=form)
    _, made = activations(recipe, 1)
    out, found = kept(lambda: F.gelu(*made))
    assert sum(size for size, _ in found.values()) <= made[0].numel() * CODES + 64
    want, true = gradients(CASES["gelu"], PLAIN)
    _, near = gradients(CASES["gelu"], recipe)
    assert torch.equal(out.qdata, want.qdata)
    torch.testing.assert_close(
        dequantized(near[0]), dequantized(true[0]), rtol=0.5, atol=0.25, check_dtype=False
    )


def test__float16__does_not_leave_its_range():
    recipe = Unit(activation="fp16", saved="e4m3fn")
    leaf = sct.scaled(torch.ones(16), "fp16", recipe=recipe).requires_grad_()
    x = sct.scaled(torch.ones(16), "fp16", recipe=recipe)
    x.qdata[0] = 65504.0
    (grad,) = torch.autograd.grad((leaf + 0) * x, leaf, sct.scaled(torch.ones(16), "fp16"))
    assert dequantized(grad).isfinite().all()


# --- what stays as it was --------------------------------------------------------------------

OTHERS = {
    "in_place": lambda x: F.relu(x, inplace=True),
    "dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "number": lambda x: x * 3,
    "root": lambda x: x.abs().sqrt(),
    "other_power": lambda x: x.abs() ** 1.5,
    "dropout": lambda x: attention(x, x, x, dropout_p=0.0, scale=0.5),
    "grouped": lambda x: F.scaled_dot_product_attention(
        x.unflatten(-1, (4, -1)).transpose(1, 2),
        *(x.unflatten(-1, (2, -1)).transpose(1, 2)[..., :16] for _ in range(2)),
        enable_gqa=True,
    ),
}


@pytest.mark.parametrize("f", OTHERS.values(), ids=OTHERS)
def test__what_is_not_covered__is_as_without(f):
    (_, (x,)), (_, (y,)) = activations(SAVED, 1), activations(PLAIN, 1)
    assert torch.equal(dequantized(f(x)), dequantized(f(y)))


# --- a model ---------------------------------------------------------------------------------


def gpt(recipe: Unit) -> nn.Module:
    torch.manual_seed(0)
    return sct.scale_model(GPT(64, 64, 2, 2, 128), recipe)


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, 64, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    return x, y


def test__a_gpt__keeps_at_most_0_66_of_bfloat16():
    torch.manual_seed(0)
    half = GPT(64, 64, 2, 2, 128).bfloat16()
    totals = []
    for model in (gpt(SAVED), half):
        _, found = kept(lambda model=model: model(*batch())[1], *model.parameters(), *batch())
        totals.append(sum(size for size, _ in found.values()))
    assert totals[0] <= 0.66 * totals[1]


def test__a_gpt__keeps_at_most_0_66_of_bfloat16_compiled():
    """AOTAutograd's partitioner chooses the kept tensors, which Inductor then runs."""
    torch.manual_seed(0)
    half = GPT(64, 64, 1, 2, 128).bfloat16()
    ours = sct.scale_model(copy.deepcopy(half).float(), SAVED)
    totals = []
    for model in (ours, half):
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        _, found = kept(lambda f=compiled: f(*batch())[1], *model.parameters(), *batch())
        totals.append(sum(size for size, _ in found.values()))
    assert totals[0] <= 0.66 * totals[1]


def test__a_gpt__has_gradients_of_the_same_elements_whatever_the_scale_of_the_loss():
    models = [gpt(SAVED), gpt(SAVED)]
    for model, k in zip(models, (0, -18), strict=True):
        (model(*batch())[1] * 2.0**k).backward()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert_shifted(a.grad, b.grad, -18)


@pytest.mark.parametrize("k", [0, -18])
def test__a_gpt__has_the_same_loss_and_near_gradients(k):
    models = [gpt(SAVED), gpt(PLAIN)]
    losses = [model(*batch())[1] for model in models]
    assert torch.equal(*losses)
    for loss in losses:
        (loss * 2.0**k).backward()
    near, true = (
        torch.cat([dequantized(p.grad).flatten() for p in m.parameters()]) for m in models
    )
    assert 0 < float((near - true).norm()) <= E4M3 * float(true.norm())


def test__a_gpt__copies_and_pickles_with_its_activations_alive():
    model = gpt(SAVED)
    loss = model(*batch())[1]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(*batch())[1], loss)
    loss.backward()
