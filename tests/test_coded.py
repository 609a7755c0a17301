"""CodedTensor: kept in any format under scales of any granularity, read exactly."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import PerAxis, PerBlock, PerTensor, formats
from scaledtensor.errors import (
    DTypeError,
    FormatError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from scaledtensor.formats.custom import custom
from scaledtensor.scale import is_power_of_two

NAMES = ["e2m1fn", "e2m3fn", "e3m4", "e4m3fn", "e5m2", "mxint8", "bf16"]
CUTS = [PerTensor(), PerAxis(0), PerAxis(-1), PerBlock((32,)), PerBlock((1, 16)), PerBlock((4, 8))]
SCALES = ["rms", "amax", "one", "floor", "rceil", "ceil", "even"]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mx(*shape: int, fmt: str = "e2m1fn") -> sct.CodedTensor:
    x = sct.scaled(gaussian(*shape), fmt, "rceil", PerBlock((1, 32)))
    assert isinstance(x, sct.CodedTensor)
    return x


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test__value__is_codes_times_scale_to_the_bit(name, cut, scale):
    plain = gaussian(6, 70) * 2.0 ** torch.arange(-3, 3)[:, None]
    x = sct.scaled(plain, name, scale, cut)
    if not isinstance(x, sct.CodedTensor):
        assert isinstance(cut, PerTensor)
        return
    values = formats.decode(x.codes, x.format, torch.float64)
    whole = formats.granularity.expand_scale(x.scale, cut, x.shape).double()
    assert torch.equal(x.dequantize().double(), (values * whole).float().double())
    assert torch.equal(x.widened().dequantize(), x.dequantize())
    assert scale == "amax" or is_power_of_two(x.scale).all()
    assert x.shape == plain.shape
    assert x.dtype is torch.float32


@pytest.mark.parametrize("scale", ["rms", "amax", "rceil"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test__error__is_that_of_the_format(cut, scale):
    """Blocks differ by 2^12 in size: only their own scales keep the small ones."""
    plain = gaussian(8, 64) * 2.0 ** (4 * torch.arange(8)[:, None].div(2, rounding_mode="floor"))
    x = sct.scaled(plain, "e4m3", scale, cut)
    error = (x.dequantize() - plain).norm() / plain.norm()
    assert error < 0.04
    if isinstance(cut, PerBlock):
        smallest = (x.dequantize() - plain)[0].norm() / plain[0].norm()
        assert smallest < 0.04


@settings(max_examples=30)
@given(st.integers(0, 5), st.integers(1, 70), st.sampled_from(NAMES), st.sampled_from(CUTS))
def test__any_shape__comes_back(rows, columns, name, cut):
    x = sct.scaled(gaussian(rows, columns), name, "rceil", cut)
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


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test__a_product__is_that_of_the_value_and_has_gradients(cut):
    w = nn.Parameter(sct.scaled(gaussian(24, 32), "e2m1fn", "rceil", cut))
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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test__any_operator__reads_the_value(mode):
    x = mx(8, 40)
    plain = x.dequantize()
    with mode():
        for f in (torch.relu, lambda t: t[2:, ::3], lambda t: t.sum(-1), lambda t: t * t + 1):
            torch.testing.assert_close(f(x).dequantize(), f(plain))
    assert x.tolist() == plain.tolist()
    assert torch.equal(torch.empty(8, 40).copy_(x), plain)


def test__compiled__is_as_eager():
    w, x = nn.Parameter(mx(24, 32)), sct.scaled(gaussian(4, 32, seed=1))

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


def test__writing_into_codes__is_refused_and_changes_nothing():
    x = mx(4, 32)
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


@pytest.mark.parametrize("verb", [sct.drop, lambda x: x.rescale(2.0)])
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
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "to": lambda x: x.to("cpu", copy=True),
}


def saved(x: object) -> object:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("again", [*COPIES.values(), saved], ids=[*COPIES, "save"])
@pytest.mark.parametrize("fmt", ["e2m1fn", "e4m3fn", "fp16", FORM], ids=str)
def test__a_copy__is_the_same_bit_for_bit(fmt, again):
    x = sct.scaled(gaussian(4, 33), fmt, "amax", PerBlock((1, 32)), recipe="unit")
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
        assert torch.equal(*(getattr(t, name).flatten().view(torch.uint8) for t in (x, y)))


def test__a_module__moves_saves_and_loads_its_codes():
    model = nn.Linear(32, 8, bias=False)
    model.weight = nn.Parameter(mx(8, 32), requires_grad=False)
    state = saved(model.state_dict())
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


# --- bad input -------------------------------------------------------------------------------

CODES = torch.zeros(4, 32, dtype=torch.uint8)


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
        (lambda: sct.scaled(gaussian(4, 8), "e2m1fn", "best"), ScaleError, "rceil"),
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
