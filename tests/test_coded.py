"""A CodedTensor is kept in any format under scales of any granularity, and read exactly."""

import copy
import pickle
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import gaussian, saved_and_loaded
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import PerAxis, PerBlock, PerTensor, formats
from scaledtensor.errors import (
    DTypeError,
    FormatError,
    ModelError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from scaledtensor.formats.custom import custom
from scaledtensor.scales.powers import is_power_of_two

NAMES = ["e2m1fn", "e2m3fn", "e3m4", "e4m3fn", "e5m2", "mxint8", "bf16"]
CUTS = [PerTensor(), PerAxis(0), PerAxis(-1), PerBlock((32,)), PerBlock((1, 16)), PerBlock((4, 8))]
SCALES = ["rms", "amax", "one", "floor", "rceil", "ceil", "even", "nvfp4"]
# NVFP4's scales need a format of 8 bits or fewer.
WAYS = [(n, s) for n in NAMES for s in SCALES if (n, s) != ("bf16", "nvfp4")]


def mx(*shape: int, fmt: str = "e2m1fn") -> sct.CodedTensor:
    x = sct.scaled(gaussian(*shape), fmt, "rceil", PerBlock((1, 32)))
    assert isinstance(x, sct.CodedTensor)
    return x


def nv(*shape: int, fmt: str = "e2m1fn") -> sct.CodedTensor:
    x = sct.scaled(gaussian(*shape), fmt, "nvfp4", PerBlock((1, 16)))
    assert isinstance(x, sct.CodedTensor)
    return x


def exact(x: sct.CodedTensor) -> Tensor:
    """Return codes * scale * tensor_scale, which fits a float64."""
    values = formats.decode(x.codes, x.format, torch.float64)
    blocks = formats.layouts.expand_scale(x.scale.double(), x.granularity, x.shape)
    return values * blocks * x.tensor_scale.double()


@pytest.mark.parametrize(("name", "scale"), WAYS)
def test__value__is_codes_times_scale_to_the_bit(name, scale):
    plain = gaussian(6, 70) * 2.0 ** torch.arange(-3, 3)[:, None]

    def check(cut):
        x = sct.scaled(plain, name, scale, cut)
        if not isinstance(x, sct.CodedTensor):
            assert isinstance(cut, PerTensor)
            assert scale != "nvfp4"
            return
        assert torch.equal(x.dequantize(), exact(x).float())
        assert torch.equal(x.widened().dequantize(), x.dequantize())
        assert torch.equal(x.to(torch.float64).dequantize(), exact(x))
        if scale == "nvfp4":
            assert x.scale.dtype is torch.float8_e4m3fn
        else:
            assert scale == "amax" or is_power_of_two(x.scale).all()
            assert x.tensor_scale == 1
        assert x.shape == plain.shape
        assert x.dtype is torch.float32

    assert_each(CUTS, check)


@pytest.mark.parametrize("scale", ["rms", "amax", "rceil", "nvfp4"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test__error__is_that_of_the_format(cut, scale):
    """Blocks differ by 2^12 in size, so only their own scales keep the small ones."""
    plain = gaussian(8, 64) * 2.0 ** (4 * torch.arange(8)[:, None].div(2, rounding_mode="floor"))
    x = sct.scaled(plain, "e4m3", scale, cut)
    error = (x.dequantize() - plain).norm() / plain.norm()
    assert error < 0.04
    if isinstance(cut, PerBlock):
        smallest = (x.dequantize() - plain)[0].norm() / plain[0].norm()
        assert smallest < 0.04


@settings(max_examples=30)
@given(
    st.integers(0, 5),
    st.integers(1, 70),
    st.sampled_from(CUTS),
    st.sampled_from([way for way in WAYS if way[1] in ("rceil", "nvfp4")]),
)
def test__any_shape__comes_back(rows, columns, cut, way):
    x = sct.scaled(gaussian(rows, columns), *way, cut)
    assert x.dequantize().shape == (rows, columns)
    again = pickle.loads(pickle.dumps(x))
    assert torch.equal(again.dequantize(), x.dequantize())


@pytest.mark.parametrize(("name", "share"), [("e2m1fn", 1 / 2), ("e2m3fn", 3 / 4), ("e4m3fn", 1)])
def test__bytes__are_those_of_the_format(name, share):
    x = mx(16, 64, fmt=name)
    assert x.qdata.nbytes == 16 * 64 * share
    assert x.scale.shape == (16, 2)


def test__chosen_scales__are_kept():
    scale = 2.0 ** torch.arange(-2, 2).float()[:, None]
    x = sct.scaled(gaussian(4, 8), "e2m1fn", scale, PerAxis(0))
    assert torch.equal(x.scale, scale)
    assert x.scale is not scale
    assert (sct.scaled(gaussian(4, 8), "e2m1fn", 0.5, PerAxis(0)).scale == 0.5).all()


def test__codes_and_scales_of_quantize_blocks__are_taken_as_they_are():
    plain = gaussian(4, 96)
    codes, scales = formats.quantize_blocks(plain, formats.E2M1FN, (1, 32))
    x = sct.CodedTensor(codes, scales, "e2m1fn", PerBlock((1, 32)))
    want = formats.dequantize_blocks(codes, scales, formats.E2M1FN, (1, 32))
    assert torch.equal(x.dequantize(), want)
    assert torch.equal(x.codes, codes)


def test__two_levels__are_kept_and_read_by_exact_arithmetic():
    codes, scale = formats.quantize_blocks(gaussian(4, 40), formats.E2M1FN, (1, 16), "nvfp4")
    x = sct.CodedTensor(codes, scale, "e2m1fn", PerBlock((1, 16)), dtype=torch.float64)
    assert torch.equal(x.codes, codes)
    for held, level in ((x.scale, scale.block), (x.tensor_scale, scale.tensor)):
        assert torch.equal(held.float(), level.float())
        assert held.dtype is level.dtype
        assert held.data_ptr() != level.data_ptr()
    tensor = Fraction(scale.tensor.item())
    values = formats.decode(codes, formats.E2M1FN).tolist()
    for row, got, blocks in zip(values, x.tolist(), scale.block.tolist(), strict=True):
        for i, (value, read) in enumerate(zip(row, got, strict=True)):
            assert Fraction(read) == Fraction(value) * Fraction(blocks[i // 16]) * tensor


def test__a_value_of_30_bits__is_rounded_once_where_it_is_read_as_float32():
    """3 * 15 * (1 + 2^-23) is 45 + 45 2^-23, while float32 steps by 32 2^-23 there."""
    codes = formats.encode(torch.tensor([3.0, 1.0]), formats.E2M1FN)
    block = torch.tensor(15.0).to(torch.float8_e4m3fn)
    scale = formats.TwoLevelScale(block, torch.tensor(1 + 2.0**-23))
    x = sct.CodedTensor(codes, scale, "e2m1fn")
    assert x.to(torch.float64).tolist() == [45 + 45 * 2.0**-23, 15 + 15 * 2.0**-23]
    for read in (x.dequantize(), x.widened().dequantize(), (x * 1).dequantize()):
        assert read.tolist() == [45 + 32 * 2.0**-23, 15 + 16 * 2.0**-23]
    y = sct.CodedTensor(codes, scale._replace(tensor=torch.tensor(2.0**-100)), "e2m1fn")
    assert y.widened().to(torch.float64).tolist() == [45 * 2.0**-100, 15 * 2.0**-100]


@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1fn"])
def test__two_levels_of_one_block__are_both_kept(fmt):
    plain = gaussian(8, 32)
    x = sct.scaled(plain, fmt, "nvfp4")
    assert isinstance(x, sct.CodedTensor)
    assert x.scale.shape == x.tensor_scale.shape == ()
    assert x.scale.float() == 448
    assert torch.equal(x.to(torch.float64).dequantize(), exact(x))
    torch.testing.assert_close(x.dequantize().abs().max(), plain.abs().max(), rtol=2**-22, atol=0)


def test__two_levels__cost_one_byte_a_block():
    x = nv(16, 64)
    assert x.qdata.nbytes + x.scale.nbytes == 16 * 64 * 4.5 / 8


def test__a_nan__marks_its_block_where_the_format_has_none():
    plain = gaussian(4, 64)
    plain[2, 20] = float("nan")
    back = sct.scaled(plain, "e2m1fn", "nvfp4", PerBlock((1, 16))).dequantize()
    assert back[2, 16:32].isnan().all()
    assert back.isnan().sum() == 16


def test__zero_and_nan_blocks__stay_by_themselves():
    plain = gaussian(4, 64)
    plain[1], plain[2, 5], plain[3, 40] = 0, float("nan"), float("inf")
    for scale in SCALES:
        back = sct.scaled(plain, "e4m3fn", scale, PerBlock((1, 32))).dequantize()
        assert (back[1] == 0).all()
        assert back.isnan().sum() == 1
        assert back[3].isfinite().all()
        assert ((back - plain)[0].norm() / plain[0].norm()) < 0.05


# --- operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["rceil", "nvfp4"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test__a_product__is_that_of_the_value_and_has_gradients(cut, scale):
    w = nn.Parameter(sct.scaled(gaussian(24, 32), "e2m1fn", scale, cut))
    x = sct.scaled(gaussian(4, 32, seed=1)).requires_grad_()
    plain_w = w.detach().dequantize().requires_grad_()
    plain_x = x.detach().dequantize().requires_grad_()
    out, want = F.linear(x, w), F.linear(plain_x, plain_w)
    torch.testing.assert_close(out.dequantize(), want)
    seed = gaussian(4, 24, seed=2)
    out.backward(sct.scaled(seed))
    want.backward(seed)
    for got, expected in ((w.grad, plain_w.grad), (x.grad, plain_x.grad)):
        assert type(got) is sct.ScaledTensor
        torch.testing.assert_close(got.dequantize(), expected)


@pytest.mark.parametrize("make", [mx, nv])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test__any_operator__reads_the_value(mode, make):
    x = make(8, 40)
    plain = x.dequantize()
    with mode():
        for f in (torch.relu, lambda t: t[2:, ::3], lambda t: t.sum(-1), lambda t: t * t + 1):
            torch.testing.assert_close(f(x).dequantize(), f(plain))
    assert x.tolist() == plain.tolist()
    assert torch.equal(torch.empty(8, 40).copy_(x), plain)


@pytest.mark.parametrize("make", [mx, nv])
def test__compiled__is_as_eager(make):
    w, x = nn.Parameter(make(24, 32)), sct.scaled(gaussian(4, 32, seed=1))

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w)).square().sum()

    torch.compiler.reset()
    results = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        w.grad = None
        value = f(x, w)
        value.backward()
        results.append((value, w.grad.qdata, w.grad.scale))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("make", [mx, nv])
def test__writing_into_codes__is_refused_and_changes_nothing(make):
    x = make(4, 32)
    before = x.dequantize()
    with torch.no_grad():
        for write in (
            lambda: x.add_(1),
            lambda: x.copy_(gaussian(4, 32)),
            lambda: x.zero_(),
            lambda: torch.mul(x, x, out=x),
            lambda: torch._foreach_mul_([x], 2.0),
        ):
            with pytest.raises(UnsupportedError, match="widened"):
                write()
    assert torch.equal(x.dequantize(), before)


@pytest.mark.parametrize(
    "verb", [sct.drop, lambda x: x.rescale(2.0), lambda x: torch.ops.scaledtensor.expect(x, 2.0)]
)
def test__verbs_of_one_scale__are_refused(verb):
    with pytest.raises(UnsupportedError, match="widened"):
        verb(mx(4, 32))


def test__to_format__reads_and_rounds():
    x = mx(4, 32, fmt="e4m3fn").to_format("bf16")
    assert type(x) is sct.ScaledTensor
    assert x.format is formats.BF16


# --- Python ----------------------------------------------------------------------------------

FORM = custom(exponent_bits=3, mantissa_bits=1)
COPIES = {
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "to": lambda x: x.to("cpu", copy=True),
}


@pytest.mark.parametrize("again", [*COPIES.values(), saved_and_loaded], ids=[*COPIES, "save"])
@pytest.mark.parametrize(
    ("fmt", "scale"),
    [(fmt, scale) for fmt in ("e2m1fn", "e4m3fn", FORM) for scale in ("amax", "nvfp4")]
    + [("fp16", "amax")],
    ids=str,
)
def test__a_copy__is_the_same_bit_for_bit(fmt, scale, again):
    x = sct.scaled(gaussian(4, 33), fmt, scale, PerBlock((1, 32)), recipe="unit")
    y = again(x)
    assert type(y) is sct.CodedTensor
    assert (y.format, y.granularity, y.dtype, y.shape) == (
        x.format,
        x.granularity,
        x.dtype,
        x.shape,
    )
    assert y.recipe == x.recipe
    for name in x.INNER:
        before, after = (getattr(t, name) for t in (x, y))
        assert before.dtype is after.dtype
        assert torch.equal(*(t.flatten().view(torch.uint8) for t in (before, after)))


@pytest.mark.parametrize("again", [copy.deepcopy, torch.clone, COPIES["to"], saved_and_loaded])
def test__a_copy__shares_no_memory(again):
    x = nn.Parameter(nv(4, 32))
    y = again(x)
    for name in x.INNER:
        assert getattr(x, name).data_ptr() != getattr(y, name).data_ptr()


def test__assigned_data__brings_both_levels():
    x, y = nv(4, 32), sct.scaled(8 * gaussian(4, 32, seed=1), "e2m1fn", "nvfp4", PerBlock((1, 16)))
    assert x.tensor_scale != y.tensor_scale
    x.data = y
    assert torch.equal(exact(x), exact(y))
    assert torch.equal(x.dequantize(), y.dequantize())


def test__a_plain_parameter__keeps_nothing_of_its_codes():
    model = nn.Linear(32, 8, bias=False)
    model.weight = nn.Parameter(nv(8, 32))
    model.weight.mine = "tag"
    want = model.weight.detach().dequantize()
    with pytest.raises(ModelError, match="CodedTensor"):
        sct.scale_model(model)
    sct.unscale_model(model)
    assert vars(model.weight) == {"mine": "tag"}
    assert torch.equal(model.weight, want)


WRITES = {
    "assignment": lambda x: x.__setitem__(0, 1.0),
    "zero": lambda x: x[1:3].zero_(),
    "fill": lambda x: x.view(-1).fill_(7.0),
    "copy": lambda x: x[3].copy_(torch.ones(32)),
    "transposed": lambda x: x.t().mul_(2.0),
    "chunk": lambda x: x.chunk(2)[0].add_(1.0),
    "out": lambda x: torch.mul(x[1].detach(), 2.0, out=x[0]),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], 2.0),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test__writing_into_a_part__is_refused_and_changes_nothing(write, mode):
    x = nv(4, 32)
    before = x.dequantize()
    with mode(), pytest.raises(UnsupportedError, match=r"x\.widened"):
        WRITES[write](x)
    assert torch.equal(x.dequantize(), before)


def test__codes_of_the_same_kind__are_copied():
    x, y = nv(4, 32), sct.scaled(gaussian(4, 32, seed=5), "e2m1fn", "nvfp4", PerBlock((1, 16)))
    x.copy_(y)
    assert torch.equal(x.dequantize(), y.dequantize())
    for other in (mx(4, 32), torch.ones(4, 32), sct.scaled(torch.ones(4, 32))):
        with pytest.raises(UnsupportedError, match="made together"):
            x.copy_(other)
    assert torch.equal(x.dequantize(), y.dequantize())
    model = nn.Linear(32, 4, bias=False)
    model.weight = nn.Parameter(x, requires_grad=False)
    model.load_state_dict(saved_and_loaded(model.state_dict()))
    assert torch.ones(4, 32).copy_(x).equal(y.dequantize())


def test__plain_data__are_refused():
    p = nn.Parameter(nv(4, 32), requires_grad=False)
    with pytest.raises(UnsupportedError, match="plain tensor"):
        p.data = torch.ones(4, 32)


def test__it_is_no_scaled_tensor__and_operators_give_one():
    x, y = nv(4, 32), sct.scaled(gaussian(4, 32))
    assert not isinstance(x, sct.ScaledTensor)
    for made in (x + y, y + x, y * x, torch.cat([y, x]), F.linear(y, x), F.gelu(x)):
        assert type(made) is sct.ScaledTensor
    assert torch.equal((x + y).dequantize(), (x.widened() + y).dequantize())


def test__rebalance__is_refused():
    x = nv(4, 32)
    with pytest.raises(UnsupportedError, match="block scales"):
        sct.rebalance(x)
    assert sct.statistics(x).rms == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("make", [mx, nv])
def test__a_module__moves_saves_and_loads_its_codes(make):
    model = nn.Linear(32, 8, bias=False)
    model.weight = nn.Parameter(make(8, 32), requires_grad=False)
    state = saved_and_loaded(model.state_dict())
    other = nn.Linear(32, 8, bias=False)
    other.load_state_dict(state, assign=True)
    assert isinstance(other.weight, sct.CodedTensor)
    assert torch.equal(other.weight.dequantize(), model.weight.dequantize())
    other.to(torch.bfloat16)
    assert isinstance(other.weight, sct.CodedTensor)
    assert other.weight.dtype is torch.bfloat16
    assert torch.equal(
        other.weight.dequantize().float(), model.weight.dequantize().bfloat16().float()
    )


def test__appearance__is_the_dtype_alone():
    x = mx(4, 32)
    y = x.to(torch.float64)
    assert isinstance(y, sct.CodedTensor)
    assert torch.equal(y.qdata, x.qdata)
    assert torch.equal(y.dequantize(), x.dequantize().double())
    assert x.to(torch.int32).dtype is torch.int32


def test__repr__shows_format_and_granularity():
    text = repr(mx(2, 32))
    assert "format=e2m1fn" in text
    assert "PerBlock(block=(1, 32))" in text
    assert " * " not in text


def test__repr__shows_both_levels():
    x = nv(2, 32)
    assert f"PerBlock(block=(1, 16)) * {x.tensor_scale:.6g}, dtype" in repr(x)
    assert "scale=448 * " in repr(sct.scaled(gaussian(4), "e2m1fn", "nvfp4"))


# --- bad input -------------------------------------------------------------------------------

CODES = torch.zeros(4, 32, dtype=torch.uint8)


def two_level(block: Tensor, tensor: Tensor, fmt: str = "e2m1fn") -> sct.CodedTensor:
    codes = CODES if fmt == "e2m1fn" else CODES.to(formats.get(fmt).storage_dtype)
    return sct.CodedTensor(codes, formats.TwoLevelScale(block, tensor), fmt, PerAxis(0))


BLOCK, ONE = torch.ones(4, 1).to(torch.float8_e4m3fn), torch.ones(())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sct.CodedTensor(gaussian(2), torch.ones(()), "e2m1fn"), DTypeError, "uint8"),
        (lambda: sct.CodedTensor([1], torch.ones(()), "e2m1fn"), DTypeError, "list"),
        (
            lambda: sct.CodedTensor(CODES, torch.ones(3, 1), "e2m1fn", PerAxis(0)),
            ShapeError,
            "4, 1",
        ),
        (lambda: sct.CodedTensor(CODES, torch.zeros(()), "e2m1fn"), ScaleError, "positive"),
        (lambda: sct.CodedTensor(CODES, -torch.ones(()), "e2m1fn"), ScaleError, "-1"),
        (lambda: sct.CodedTensor(CODES, 1.0, "e2m1fn"), ScaleError, "float"),
        (
            lambda: sct.CodedTensor(CODES, torch.ones((), dtype=torch.int32), "e2m1fn"),
            ScaleError,
            "int32",
        ),
        (
            lambda: sct.CodedTensor(CODES.view(torch.float8_e8m0fnu), torch.ones(()), "e8m0fnu"),
            FormatError,
            "scales",
        ),
        (lambda: two_level(BLOCK.float(), ONE), ScaleError, "float32 in place of"),
        (lambda: two_level(BLOCK, ONE.double()), ScaleError, "float64 in place of"),
        (lambda: two_level(BLOCK, 1.0), ScaleError, "float"),
        (lambda: two_level((0 * BLOCK.float()).to(BLOCK.dtype), ONE), ScaleError, "got 0.0"),
        (lambda: two_level((-BLOCK.float()).to(BLOCK.dtype), ONE), ScaleError, "got -1.0"),
        (lambda: two_level(BLOCK, 0 * ONE), ScaleError, "got 0.0"),
        (lambda: two_level(BLOCK, ONE / 0), ScaleError, "got inf"),
        (lambda: two_level(BLOCK, float("nan") * ONE), ScaleError, "got nan"),
        (lambda: two_level(BLOCK[:3], ONE), ShapeError, "4, 1"),
        (lambda: two_level(BLOCK, ONE[None]), ShapeError, "1,"),
        (lambda: two_level(BLOCK, ONE, "bf16"), FormatError, "8 bits or fewer"),
        (lambda: two_level(BLOCK.to("meta"), ONE), ScaleError, "meta"),
        (
            lambda: sct.CodedTensor(CODES, BLOCK, "e2m1fn", PerAxis(0)),
            ScaleError,
            "TwoLevelScale",
        ),
        (lambda: sct.scaled(gaussian(4, 8), None, "nvfp4"), FormatError, "8 bits or fewer"),
        (
            lambda: sct.scaled(gaussian(4, 8), "bf16", "nvfp4", PerBlock((1, 4))),
            FormatError,
            "8 bits or fewer",
        ),
        (lambda: sct.scaled(gaussian(4, 8), "e2m1fn", "best"), ScaleError, "rceil.*nvfp4"),
        (lambda: sct.scaled(gaussian(4, 8), "e2m1fn", 3.0, PerAxis(0)), ScaleError, "power of two"),
        (
            lambda: sct.scaled(gaussian(4, 8), "e2m1fn", torch.full((4, 1), 3.0), PerAxis(0)),
            ScaleError,
            "powers of two",
        ),
        (
            lambda: sct.scaled(gaussian(4, 8), "e2m1fn", torch.ones(2, 1), PerAxis(0)),
            ShapeError,
            "4, 1",
        ),
        (lambda: sct.scaled(gaussian(4, 8), "e2m1fn", "rms", PerAxis(2)), ShapeError, "dimensions"),
        (lambda: sct.scaled(gaussian(4, 8), "e2m1fn", "rms", "rows"), ShapeError, "PerAxis"),
        (lambda: sct.scaled(gaussian(4), "e8m0fnu"), FormatError, "scales"),
    ],
)
def test__bad_input__is_answered_with_what_is_allowed(call, error, words):
    with pytest.raises(error, match=words):
        call()
