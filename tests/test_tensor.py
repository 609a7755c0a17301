"""A ScaledTensor is a tensor: it takes valid parts only, and torch's protocols keep its bits."""

import copy
import pickle

import numpy as np
import pytest
import torch
from assertions import assert_holds, dequantized
from hypothesis import given
from hypothesis import strategies as st
from tensors import bits, gaussian, saved_and_loaded
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import (
    DTypeError,
    FormatError,
    RecipeError,
    ScaleError,
    StorageError,
    UnsupportedError,
)
from scaledtensor.formats import FORMATS
from scaledtensor.scales.powers import is_power_of_two

NATIVE = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "bf16", "fp16", "fp32"]
UNIT = sct.recipes.Unit()
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
inf, nan = float("inf"), float("nan")


def assert_same(x: torch.Tensor, y: torch.Tensor) -> None:
    """Both tensors are the same bit for bit, in other memory."""
    assert isinstance(y, sct.ScaledTensor)
    for name in sct.ScaledTensor.INNER:
        a, b = getattr(x, name), getattr(y, name)
        assert (bits(a), a.stride()) == (bits(b), b.stride())
        assert a.data_ptr() != b.data_ptr()
    assert y.format is x.format
    assert y.recipe == x.recipe
    assert (y.dtype, y.nonnegative, y.requires_grad) == (x.dtype, x.nonnegative, x.requires_grad)
    assert isinstance(y, nn.Parameter) == isinstance(x, nn.Parameter)


# --- the constructor -------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", NATIVE)
def test__constructor__keeps_what_it_is_given(fmt):
    q = gaussian(3, 4).to(sct.formats.get(fmt).storage_dtype).t()
    x = sct.ScaledTensor(q, 0.25, fmt.upper(), recipe="unit")
    assert x.qdata.data_ptr() == q.data_ptr()
    assert (x.shape, x.stride(), x.device) == (q.shape, q.stride(), q.device)
    assert x.dtype == (q.dtype if q.dtype.itemsize > 1 else torch.float32)
    assert (x.format, x.recipe, float(x.scale)) == (sct.formats.get(fmt), UNIT, 0.25)
    assert_holds(x, q.double() * 0.25, 0)


@pytest.mark.parametrize(
    "scale",
    [
        *(0, 0.0, -1.0, nan, inf, 3.0, 1e39, 2.0**-127, True, None, "1", 1j, [1.0, 2.0]),
        *(torch.ones(2), torch.ones(0), torch.tensor(True), torch.tensor(3.0), torch.tensor(1j)),
        torch.ones((), device="meta"),
    ],
    ids=str,
)
def test__a_scale__is_one_power_of_two(scale):
    q = gaussian(4)
    with pytest.raises(ScaleError, match=r"got|power of two"):
        sct.ScaledTensor(q, scale, "fp32")
    with pytest.raises(ScaleError):
        sct.scaled(q, scale=scale)
    with pytest.raises(ScaleError):
        sct.scaled(q).rescale(scale)


def test__a_scale__is_copied():
    scale = torch.tensor(2.0)
    x = sct.ScaledTensor(torch.ones(2), scale, "fp32")
    y = sct.scaled(torch.ones(2), scale=scale)
    scale.fill_(8.0)
    assert float(x.scale) == float(y.scale) == 2.0


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127, 4, np.float32(4), torch.tensor([4])])
def test__a_scale__may_be_any_number_that_is_one(scale):
    x = sct.ScaledTensor(torch.ones(2), scale, "fp32")
    assert x.scale.shape == ()
    assert float(x.scale) == float(scale)


def test__power_of_two_false__allows_any_positive_scale():
    assert float(sct.ScaledTensor(torch.ones(2), 3.0, "fp32", power_of_two=False).scale) == 3.0
    with pytest.raises(ScaleError):
        sct.ScaledTensor(torch.ones(2), -3.0, "fp32", power_of_two=False)


@pytest.mark.parametrize(
    ("qdata", "error", "words"),
    [
        (torch.ones(2, dtype=torch.bfloat16), DTypeError, "fp32 is stored as torch.float32"),
        (torch.ones(2, dtype=torch.int32), DTypeError, "torch.int32"),
        (sct.scaled(torch.ones(2)), DTypeError, "ScaledTensor"),
        ([1.0], DTypeError, "list"),
        (torch.eye(2).to_sparse(), DTypeError, "sparse"),
    ],
    ids=["bf16", "int", "nested", "list", "sparse"],
)
def test__qdata__is_a_plain_dense_tensor_of_the_storage_dtype(qdata, error, words):
    with pytest.raises(error, match=words):
        sct.ScaledTensor(qdata, 1.0, "fp32")


@pytest.mark.parametrize("fmt", sorted(set(FORMATS) - set(NATIVE)))
def test__formats_without_a_torch_dtype__are_for_coded_tensors(fmt):
    q = torch.zeros(2).to(sct.formats.get(fmt).storage_dtype)
    x = sct.scaled(torch.ones(2))
    for call in (
        lambda: sct.ScaledTensor(q, 1.0, fmt),
        lambda: x.to_format(fmt),
    ):
        with pytest.raises(FormatError, match=fmt):
            call()


@pytest.mark.parametrize("fmt", ["e9m9", None, 8])
def test__an_unknown_format__is_answered_with_the_known_ones(fmt):
    with pytest.raises(FormatError, match="e4m3fn"):
        sct.ScaledTensor(torch.ones(2), 1.0, fmt)


def test__other_arguments__are_checked_too():
    with pytest.raises(DTypeError, match="int32"):
        sct.ScaledTensor(torch.ones(2), 1.0, "fp32", dtype=torch.int32)
    with pytest.raises(RecipeError, match="unit"):
        sct.ScaledTensor(torch.ones(2), 1.0, "fp32", recipe="nope")
    with pytest.raises(RecipeError, match="unit"):
        sct.scaled(torch.ones(2), recipe=3)


# --- scaled() --------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(-100, 100), st.sampled_from(FLOATS))
def test__rms__is_the_power_of_two_next_to_the_measured_rms(seed, shift, dtype):
    plain = (
        gaussian(33, seed=seed).double() * 2.0 ** (shift % 12 if dtype is torch.float16 else shift)
    ).to(dtype)
    x = sct.scaled(plain, "fp32")
    measured = plain.double().square().mean().sqrt()
    assert abs(float(torch.log2(measured / x.scale))) <= 0.5 + 1e-6
    assert float(x.rms) == pytest.approx(float(measured), rel=1e-6)
    assert x.dtype == dtype
    assert_holds(x, plain, 0 if dtype != torch.float64 else 2.0**-24)


@given(st.integers(0, 2**31), st.integers(-60, 60), st.sampled_from(NATIVE))
def test__amax__fills_the_format_and_never_overflows(seed, shift, fmt):
    plain = gaussian(33, seed=seed) * 2.0**shift
    x = sct.scaled(plain, fmt, "amax")
    filled = float(x.qdata.double().abs().max()) / x.format.max
    assert filled <= 1
    assert filled >= 1 - 2.0**-22 or float(x.scale) == 2.0**-126
    error = (dequantized(x) - plain).abs().max() / plain.abs().max()
    assert float(error) <= x.format.eps / 2 + 1e-7


def test__amax__rounds_its_scale_up_where_rounding_down_would_overflow():
    for amax in torch.linspace(4, 8, 200, dtype=torch.float64):
        assert sct.scaled(amax, "fp32", "amax").qdata.isfinite()


@pytest.mark.parametrize(("scale", "held"), [("one", 1.0), (8, 8.0), (torch.tensor(0.5), 0.5)])
def test__a_chosen_scale__is_the_scale(scale, held):
    x = sct.scaled(gaussian(5), "e4m3fn", scale)
    assert float(x.scale) == held
    assert torch.equal(x.qdata, sct.formats.encode(gaussian(5) / held, x.format))


@pytest.mark.parametrize("scale", ["rms", "amax", "one"])
@pytest.mark.parametrize("fmt", ["fp32", "e4m3fn"])
@pytest.mark.parametrize(
    "plain",
    [torch.zeros(3), torch.zeros(0, 2), torch.full((3,), nan), torch.tensor(5.0)],
    ids=["zeros", "empty", "nan", "0-dim"],
)
def test__degenerate_values__have_a_usable_scale(plain, fmt, scale):
    x = sct.scaled(plain, fmt, scale)
    assert 0 < float(x.scale) < inf
    assert scale == "amax" or is_power_of_two(x.scale)
    torch.testing.assert_close(x.dequantize(), plain, equal_nan=True)


@pytest.mark.parametrize("scale", ["rms", "amax"])
@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test__one_bad_element__does_not_spoil_the_others(scale, bad):
    plain = torch.cat([gaussian(15), torch.tensor([bad])])
    x = sct.scaled(plain, "bf16", scale)
    torch.testing.assert_close(x.dequantize(), plain, rtol=2.0**-8, atol=0, equal_nan=True)
    low = sct.scaled(plain, "e4m3fn", scale)
    torch.testing.assert_close(low.dequantize()[:15], plain[:15], rtol=2.0**-4, atol=2.0**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [None, inf])
def test__a_large_tensor__is_held_as_its_elements_are(dtype, bad):
    plain = (5 * gaussian(3, (1 << 17) + 1)).to(dtype)
    if bad is not None:
        plain[1, 2] = bad
    for view in (plain, plain.t(), plain[:, ::2]):
        x = sct.scaled(view, "bf16")
        finite = torch.where(view.isfinite(), view.double(), 0)
        assert float(x.rms) == pytest.approx(float(finite.square().mean().sqrt()), rel=2.0**-23)
        assert float(x.scale) == 4
        assert torch.equal(x.qdata, (view / 4).bfloat16())
        assert torch.equal(x.dequantize(), (view / 4).bfloat16().to(dtype) * 4)


@pytest.mark.parametrize(
    "given",
    [torch.arange(3), torch.ones(2) > 0, torch.ones(2) + 1j, [1.0], sct.scaled(torch.ones(1))],
)
def test__scaled__takes_real_floats_only(given):
    with pytest.raises(DTypeError):
        sct.scaled(given)


def test__scaled__says_what_to_do_about_float64_and_sparse():
    with pytest.raises(DTypeError, match="fp32"):
        sct.scaled(torch.ones(2, dtype=torch.float64))
    with pytest.raises(DTypeError, match="sparse"):
        sct.scaled(torch.eye(2).to_sparse())
    with pytest.raises(ScaleError, match="'rms', 'amax', 'one'"):
        sct.scaled(torch.ones(2), scale="max")


def test__scaled__makes_a_leaf():
    w = torch.ones(2, requires_grad=True)
    x = sct.scaled(w * 2)
    assert x.is_leaf
    assert not x.requires_grad


# --- conversions -----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", NATIVE)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test__to_dtype__keeps_the_scale_and_rounds_once(fmt, dtype):
    x = sct.scaled(gaussian(4, 5) * 64, fmt)
    y = x.to(dtype)
    assert (y.dtype, y.shape, y.stride()) == (dtype, x.shape, x.stride())
    assert torch.equal(y.dequantize() if dtype != torch.float64 else y, x.dequantize().to(dtype))
    if dtype != torch.float64:
        assert torch.equal(y.scale, x.scale)


def test__to_dtype__keeps_infinities():
    x = sct.scaled(torch.tensor([1.0, -inf, nan]))
    for y in (x.bfloat16(), x.half(), x.to_format("bf16"), x.to_format("fp16")):
        torch.testing.assert_close(y.float().dequantize(), x.dequantize(), equal_nan=True)
    assert x.to_format("e4m3fn").qdata[1].isnan()  # E4M3FN has only NaN for it.
    assert x.to_format("e5m2").qdata[1] == -inf


def test__to_device__moves_every_part():
    x = sct.scaled(gaussian(3), recipe=UNIT)
    y = x.to("meta")
    assert {y.device.type} | {getattr(y, n).device.type for n in y.INNER} == {"meta"}
    assert (y.format, y.recipe, y.shape) == (x.format, x.recipe, x.shape)
    assert "shape=(3,)" in repr(y)
    assert x.cpu() is x
    made = sct.ScaledTensor(torch.ones(3, device="meta"), 2.0, "fp32")
    assert made.scale.device.type == "meta"


def test__clone_and_detach__keep_everything_but_the_graph():
    x = sct.scaled(gaussian(3, 4).t(), recipe=UNIT).requires_grad_()
    assert_same(x.detach(), x.clone().detach())
    assert x.detach().qdata.data_ptr() == x.qdata.data_ptr()
    assert x.detach().scale is x.scale
    assert x.clone().requires_grad


def test__python_and_numpy__see_the_values():
    plain = gaussian(2, 3)
    x = sct.scaled(plain)
    assert x.tolist() == plain.tolist()
    assert x[0, 1].item() == float(x[0, 1]) == float(plain[0, 1])
    assert f"{x[0, 1]:.3f}" == f"{float(plain[0, 1]):.3f}"
    for dtype in (torch.float16, torch.float32, torch.float64):
        held = plain.to(dtype)
        seen = np.asarray(sct.scaled(held, "fp32"))
        assert seen.dtype == held.numpy().dtype
        np.testing.assert_allclose(seen, held.numpy(), rtol=1e-7)
    assert np.asarray(x, dtype=np.int64).dtype == np.int64
    with pytest.raises(ValueError, match="copy"):
        np.asarray(x, copy=False)
    with pytest.raises(RuntimeError, match="requires grad"):
        x.requires_grad_().numpy()
    np.testing.assert_array_equal(x.numpy(force=True), plain.numpy())
    with pytest.raises(RuntimeError, match="6 elements"):
        x.item()


def test__memory__is_that_of_the_elements():
    x = sct.scaled(gaussian(2, 3))
    assert x.qdata.data_ptr() != 0
    with pytest.raises(StorageError, match=r"dequantize\(\)"):  # 0 would look like one memory.
        x.data_ptr()
    values = x.numpy()
    values[:] = 0  # This is a copy.
    assert x.abs().min() > 0
    coded = sct.scaled(gaussian(2, 32), "e2m1fn", granularity=32)
    for held in (x, x.clone().requires_grad_(), nn.Parameter(x), coded):
        for export in (torch.from_dlpack, np.from_dlpack, lambda t: t.__dlpack__()):
            with pytest.raises(UnsupportedError, match=r"DLPack.*dequantize\(\)"):
                export(held)
    assert torch.equal(torch.from_dlpack(x.dequantize()), x.dequantize())


def test__data__can_be_assigned():
    x = sct.scaled(gaussian(3), recipe=UNIT)
    x.data = torch.full((2, 2), 8.0)
    assert (x.shape, float(x.scale), x.recipe) == ((2, 2), 8.0, UNIT)
    assert_holds(x, torch.full((2, 2), 8.0), 0)
    x.data = sct.scaled(torch.ones(2), "e4m3fn", 4.0)
    assert (x.format.name, float(x.scale)) == ("e4m3fn", 4.0)
    x.data.mul_(2)
    assert_holds(x, torch.full((2,), 2.0), 0)


def test__repr__shows_value_format_scale_and_graph():
    x = sct.scaled(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    facts = "format=bf16, scale=2**1, dtype=torch.bfloat16"
    assert repr(x) == f"ScaledTensor([1., 2.], {facts})"
    assert repr(x.requires_grad_()) == f"ScaledTensor([1., 2.], {facts}, requires_grad=True)"
    assert "grad_fn=<NegBackward0>" in repr(-x)
    assert "scale=3," in repr(sct.ScaledTensor(torch.ones(1), 3.0, "fp32", power_of_two=False))


# --- copies and files ------------------------------------------------------------------------


def samples() -> dict[str, torch.Tensor]:
    made = {fmt: sct.scaled(gaussian(3, 4), fmt, recipe=UNIT) for fmt in NATIVE}
    made["view"] = sct.scaled(gaussian(3, 4)).t()[1:]
    made["appearance"] = sct.scaled(gaussian(3), "fp32", dtype=torch.bfloat16)
    made["square"] = sct.scaled(gaussian(3)).square()
    made["amax"] = sct.scaled(gaussian(3), "e4m3fn", "amax")
    made["leaf"] = sct.scaled(gaussian(3)).requires_grad_()
    made["parameter"] = nn.Parameter(
        sct.scaled(gaussian(3), recipe=sct.recipes.Unit(gradient="e4m3fn"))
    )
    made["frozen"] = nn.Parameter(sct.scaled(gaussian(3)), requires_grad=False)
    return made


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
def test__a_copy__is_the_same_bit_for_bit(name, again):
    x = samples()[name]
    if name == "view" and again is copy.deepcopy:
        x = x.contiguous()
    assert_same(x, again(x))


def test__deepcopy__keeps_ties__and_the_gradient_of_what_is_no_parameter():
    """`nn.Parameter` drops its gradient, which a backward pass of the copy would add to."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    sct.scale_model(model)
    model(gaussian(2, 3)).square().sum().backward()
    twin = copy.deepcopy(model)
    assert twin[1].weight is twin[0].weight
    assert_same(model[0].weight, twin[0].weight)
    assert twin[0].weight.grad is None
    leaf = sct.scaled(gaussian(3)).requires_grad_()
    (2 * leaf).square().sum().backward()
    assert_same(leaf.grad, copy.deepcopy(leaf).grad)
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(model[0].weight * 2)


def test__a_parameter__is_a_scaled_tensor_and_a_parameter():
    x = sct.scaled(gaussian(3), recipe=UNIT)
    p = nn.Parameter(x)
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, sct.ScaledTensor)
    assert p.requires_grad
    assert (p.format, p.recipe) == (x.format, UNIT)
    assert p.qdata.data_ptr() == x.qdata.data_ptr()


# --- in place: identity, aliases, format -----------------------------------------------------

WRITES = {
    "copy_ scaled": lambda v, w: v.copy_(sct.scaled(w)),
    "copy_ plain": lambda v, w: v.copy_(w),
    "mul_": lambda v, w: v.mul_(3e3),
    "add_ plain": lambda v, w: v.add_(w),
    "zero_": lambda v, w: v.zero_(),
    "fill_": lambda v, w: v.fill_(7.0),
    "setitem": lambda v, w: v.__setitem__(slice(1, 3), 5.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "part", [lambda b: b[1], lambda b: b[:, 2], lambda b: b.t()[0], lambda b: b.view(-1)[3:7]]
)
@pytest.mark.parametrize("known_zero", [False, True])
def test__writing_to_a_view__is_seen_by_the_base_and_changes_nothing_else(write, part, known_zero):
    plain = gaussian(4, 4) * (0.0 if known_zero else 1.0)
    base = sct.scaled(plain.clone())
    before, scale = base.qdata.data_ptr(), float(base.scale)
    view = part(base)
    new = gaussian(4, seed=1) * 2.0**20
    write(view, new)
    write(part(plain), new)
    assert base.qdata.data_ptr() == before
    assert view.scale is base.scale
    assert known_zero or float(base.scale) == scale
    assert_holds(base, plain, 2.0**-22)
    assert_holds(part(base), part(plain), 2.0**-22)


@pytest.mark.parametrize("source", [lambda t: sct.scaled(t), lambda t: t, lambda t: t.double()])
@pytest.mark.parametrize("fmt", ["fp32", "bf16", "e4m3fn", "e5m2fnuz"])
def test__copy_into_a_whole_tensor__brings_the_scale_and_keeps_the_format(source, fmt):
    x = sct.scaled(gaussian(4, 4), fmt)
    view = x.view(16)
    new = gaussian(4, 4, seed=1) * 2.0**30
    out = x.copy_(source(new))
    assert out is x
    assert x.format.name == fmt
    assert float(x.scale) == float(sct.scaled(new).scale) == float(view.scale)
    assert_holds(x, new, x.format.eps)
    assert_holds(view, new.view(16), x.format.eps)


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test__copy_of_a_scaled_into_a_plain_tensor__writes_its_value(part):
    target, source = torch.zeros(4), sct.scaled(gaussian(4) * 2.0**20)
    target[part] = source[part]
    assert type(target) is torch.Tensor
    assert torch.equal(target[part], source[part].dequantize())


def test__a_tensor_known_to_be_zero__takes_the_scale_of_what_is_first_written():
    x = torch.zeros_like(sct.scaled(gaussian(4)))
    x.add_(sct.scaled(torch.full((4,), 2.0**-60)))
    assert float(x.scale) == 2.0**-60
    x.add_(sct.scaled(torch.full((4,), 2.0**-50)))
    assert float(x.scale) == 2.0**-60
    assert_holds(x, torch.full((4,), 2.0**-60 + 2.0**-50, dtype=torch.float64), 2.0**-23)


def test__in_place_through_a_view__is_differentiated():
    def run(x):
        y = x * 1.0
        y[1].mul_(3)
        y[:, 2].add_(x[:, 0])
        y.square().sum().backward()
        return x.grad

    plain = gaussian(4, 4).requires_grad_()
    assert_holds(run(sct.scaled(plain).requires_grad_()), run(plain), 2.0**-20)


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test__in_place_on_8_bits__rounds_into_format_and_scale(fmt):
    x = sct.scaled(gaussian(64), fmt)
    scale, expected = float(x.scale), dequantized(x) * 1.5
    assert x.mul_(1.5) is x
    assert (x.format.name, float(x.scale)) == (fmt, scale)
    assert torch.equal(x.qdata, sct.formats.encode((expected / scale).float(), x.format))


def test__plain_targets_and_out__receive_plain_values():
    x, plain = sct.scaled(gaussian(3) * 2.0**20), torch.ones(3)
    address = plain.data_ptr()
    plain.mul_(x)
    assert torch.equal(plain, x.dequantize())
    assert torch.add(x, 1.0, out=plain) is plain
    assert torch.equal(plain, x.dequantize() + 1)
    assert plain.data_ptr() == address
    out = sct.scaled(gaussian(3))
    scale = float(out.scale)
    assert torch.mul(x, 2.0, out=out) is out
    assert float(out.scale) == scale
    assert_holds(out, x.dequantize() * 2, 0)


class OtherClass(torch.Tensor):
    """fastai's TensorBase is such a class, and its losses begin with `as_subclass`."""


def test__as_another_subclass__has_the_value_and_passes_gradients():
    layer = sct.scale_model(torch.nn.Linear(4, 3))
    y = layer(torch.ones(2, 4))
    other = y.as_subclass(OtherClass)
    assert type(other) is OtherClass
    assert torch.equal(other.as_subclass(torch.Tensor), y.dequantize())
    torch.nn.functional.cross_entropy(other, torch.tensor([0, 1])).backward()
    assert layer.weight.grad.dequantize().abs().sum() > 0
    assert type(y.as_subclass(torch.Tensor)) is torch.Tensor
    assert y.as_subclass(sct.ScaledTensor) is y
