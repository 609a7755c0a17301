"""Blocks under a shared scale agree with exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
import torch._dynamo.testing
from blocks_oracle import code, exponent, members, rounded, scales
from formats_oracle import OWN, is_nan_code, ml_decode, raw, same
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scaledtensor.errors import DTypeError, FormatError, ShapeError
from scaledtensor.formats import (
    BF16,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E3M4,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E8M0FNU,
    FORMATS,
    FP16,
    FP32,
    INT4,
    INT8,
    MXINT8,
    PerAxis,
    PerBlock,
    PerTensor,
    TwoLevelScale,
    decode,
    dequantize_blocks,
    encode,
    quantize_blocks,
    random_key,
)
from scaledtensor.formats.layouts import expand_scale, scale_shape

FORMATS_OF_ELEMENTS = (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN, E4M3FNUZ, E3M4, INT8, INT4, MXINT8)
SCALE_FORMATS = ("e8m0", "pow2", "fp32", "nvfp4")
MODES = ("floor", "rceil", "ceil", "even")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POWERS = [("e8m0", mode) for mode in MODES] + [("pow2", mode) for mode in MODES]
WAYS = [*POWERS, ("fp32", "rceil"), ("nvfp4", "rceil")]
GRANULARITIES = (PerTensor(), PerAxis(0), PerAxis(-1), PerBlock((1, 32)), PerBlock((3, 5)))


def scale_values(scale):
    """Return the exact effective scale of each block."""
    if isinstance(scale, TwoLevelScale):
        tensor = Fraction(scale.tensor.item())
        return [Fraction(v) * tensor for v in ml_decode(scale.block.flatten(), E4M3FN).tolist()]
    if scale.dtype is torch.float8_e8m0fnu:
        scale = ml_decode(scale, E8M0FNU)
    return [Fraction(v) for v in scale.flatten().tolist()]


def numbers(dtype):
    """Draw floats, many near powers of two and near multiples of the formats' maxima, some tiny and
    huge."""
    width = {torch.float64: 64, torch.float32: 32}.get(dtype, 16)
    high = 1e38 if width > 16 else 6e4
    anything = st.floats(width=width, allow_nan=False)
    near = st.builds(
        lambda m, k, ulps, sign: sign * math.ldexp(m * (1 + ulps * 2.0 ** (1 - width // 2)), k),
        st.sampled_from([1.0, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875]),
        st.integers(-20, 14),
        st.integers(-2, 2),
        st.sampled_from([-1.0, 1.0]),
    )
    return st.one_of(near, near, st.floats(-8, 8), anything, st.sampled_from([0.0, -0.0, high]))


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    values = draw(st.lists(numbers(dtype), min_size=math.prod(shape), max_size=math.prod(shape)))
    granularity = st.sampled_from([PerTensor(), PerBlock((2,)), PerBlock((1, 4)), PerBlock((2, 3))])
    if shape:
        dims = st.integers(-len(shape), len(shape) - 1).map(PerAxis)
        granularity = st.one_of(granularity, dims)
    return torch.tensor(values, dtype=torch.float64).view(shape).to(dtype), draw(granularity)


@settings(max_examples=150)
@given(tensors(), st.sampled_from([*FORMATS_OF_ELEMENTS, *OWN]), st.sampled_from(WAYS))
def test__codes_and_scales__are_those_of_exact_arithmetic(case, fmt, way):
    x, granularity = case
    assume(way[0] != "nvfp4" or fmt.bits <= 8)
    codes, scale = quantize_blocks(x, fmt, granularity, *way)
    blocks = list(members(granularity, x.shape).values())
    values = [[x[i].item() for i in block] for block in blocks]
    want, tensor = scales(values, fmt, *way)
    if tensor is not None:
        assert Fraction(scale.tensor.item()) == tensor
        want = [w * tensor for w in want]
    assert scale_values(scale) == want
    assert codes.shape == x.shape
    assert codes.dtype is fmt.storage_dtype
    for block, numbers_, one in zip(blocks, values, want, strict=True):
        for index, value in zip(block, numbers_, strict=True):
            assert int(raw(codes[index])) == code(value, one, fmt)


@settings(max_examples=100)
@given(tensors(), st.sampled_from([*FORMATS_OF_ELEMENTS, *OWN, BF16]), st.sampled_from(WAYS))
def test__dequantize__is_codes_times_scale_rounded_once(case, fmt, way):
    x, granularity = case
    assume(way[0] != "nvfp4" or fmt.bits <= 8)
    codes, scale = quantize_blocks(x, fmt, granularity, *way)
    exact = scale_values(scale)
    precision = {
        torch.float64: (53, -1074, Fraction(2) ** 1023 * 2 - 1),
        torch.float32: (24, -149, Fraction(FP32.max)),
        torch.bfloat16: (8, -133, Fraction(BF16.max)),
        torch.float16: (11, -24, Fraction(FP16.max)),
    }
    for dtype in DTYPES:
        back = dequantize_blocks(codes, scale, fmt, granularity, dtype)
        assert back.dtype is dtype
        assert back.shape == x.shape
        for number, block in enumerate(members(granularity, x.shape).values()):
            for index in block:
                value = ml_decode(codes[index][None], fmt).item()
                want = rounded(Fraction(value) * exact[number], *precision[dtype])
                assert back[index].item() == want


@pytest.mark.parametrize(("scale_format", "mode"), POWERS)
def test__scales__are_exact_next_to_every_power_of_two(scale_format, mode):
    least = -127 if scale_format == "e8m0" else -126
    exponents = torch.cat((torch.arange(0, 255, 4), torch.tensor([1, 2, 253, 254])))
    bits = (exponents.int() << 23)[:, None] + torch.arange(-3, 4).int()
    bits = torch.cat((bits, bits + 0x400000, bits + 0x600000, bits + 0x700000, bits + 0x780000))
    x = bits.clamp(0, 0x7F7FFFFF).view(torch.float32).reshape(-1, 1)
    for fmt in (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN):
        _, scale = quantize_blocks(x, fmt, 1, scale_format, mode)
        want = [exponent(Fraction(v), fmt, mode, least) for v in x.flatten().tolist()]
        assert scale_values(scale) == [Fraction(2) ** k for k in want]


@pytest.mark.parametrize("mode", MODES)
def test__float64__beyond_the_range_of_a_scale_clamps_it(mode):
    x = torch.tensor([[1e300], [-1e-300], [5e-324], [1.7e308]], dtype=torch.float64)
    codes, scale = quantize_blocks(x, E4M3FN, 1, "e8m0", mode)
    assert scale.float().flatten().tolist() == [2.0**127, 2.0**-127, 2.0**-127, 2.0**127]
    back = dequantize_blocks(codes, scale, E4M3FN, 1, torch.float64)
    assert back.flatten().tolist() == [448 * 2.0**127, -0.0, 0.0, 448 * 2.0**127]
    for scale_format in ("pow2", "fp32", "nvfp4"):
        _, other = quantize_blocks(x, E4M3FN, 1, scale_format)
        whole = other.tensor if scale_format == "nvfp4" else other
        assert (whole > 0).all()
        assert whole.isfinite().all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
def test__zeros__come_back_as_zeros_under_the_scale_one(scale_format, granularity):
    x = torch.zeros(7, 70)
    x[3] = -0.0
    codes, scale = quantize_blocks(x, E4M3FN, granularity, scale_format)
    assert scale_values(scale) == [1] * math.prod(scale_shape(granularity, x.shape))
    back = dequantize_blocks(codes, scale, E4M3FN, granularity)
    assert torch.equal(back, x)
    assert torch.equal(back.signbit(), x.signbit())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN], ids=repr)
def test__an_infinity__saturates_alone(fmt, way):
    x = torch.randn(4, 64, generator=torch.manual_seed(0))
    x[1, 5] = 0
    codes, scale = quantize_blocks(x, fmt, 32, *way)
    for value in (math.inf, -math.inf):
        x[1, 5] = value
        codes_, scale_ = quantize_blocks(x, fmt, 32, *way)
        assert scale_values(scale_) == scale_values(scale)
        unchanged = raw(codes_) == raw(codes)
        assert int((~unchanged).sum()) == 1
        assert decode(codes_[1, 5], fmt).item() == math.copysign(fmt.max, value)
    x[1, 5] = math.inf
    kept, _ = quantize_blocks(x, E5M2, 32, *way, overflow="ieee")
    assert decode(kept[1, 5], E5M2).item() == math.inf


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E4M3FNUZ], ids=repr)
def test__a_nan__stays_alone_where_the_format_has_one(fmt, scale_format):
    x = torch.randn(4, 64, generator=torch.manual_seed(0))
    x[1, 5] = 0
    codes, scale = quantize_blocks(x, fmt, 32, scale_format)
    x[1, 5] = math.nan
    codes_, scale_ = quantize_blocks(x, fmt, 32, scale_format)
    assert scale_values(scale_) == scale_values(scale)
    assert is_nan_code(raw(codes_[1, 5]), fmt)
    assert int((raw(codes_) != raw(codes)).sum()) == 1


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("fmt", [E2M1FN, E3M2FN], ids=repr)
def test__a_nan__takes_its_block_where_the_format_has_none(fmt, scale_format):
    x = torch.randn(4, 64, generator=torch.manual_seed(0))
    x[1, 5] = 0
    clean = dequantize_blocks(*quantize_blocks(x, fmt, 32, scale_format), fmt, 32)
    x[1, 5] = math.nan
    codes, scale = quantize_blocks(x, fmt, 32, scale_format)
    back = dequantize_blocks(codes, scale, fmt, 32)
    assert back[1, :32].isnan().all()
    back[1, :32] = clean[1, :32]
    assert torch.equal(back, clean)
    stored = {"e8m0": 0xFF, "nvfp4": 0x7F}
    if scale_format in stored:
        of_blocks = scale.block if scale_format == "nvfp4" else scale
        assert int(raw(of_blocks)[1, 0]) == stored[scale_format]


@pytest.mark.parametrize("way", WAYS)
def test__nothing_finite__in_a_block_has_the_scale_one(way):
    x = torch.full((1, 4), math.inf)
    codes, scale = quantize_blocks(x, E4M3FN, 4, *way)
    assert scale_values(scale) == [1]
    assert decode(codes, E4M3FN).tolist() == [[448.0] * 4]


@pytest.mark.parametrize("scale_format", ["e8m0", "pow2", "fp32"])
@pytest.mark.parametrize("fmt", FORMATS_OF_ELEMENTS, ids=repr)
def test__rceil__lets_nothing_overflow(fmt, scale_format):
    x = torch.randn(64, 32, generator=torch.manual_seed(0)).exp()
    saturated, scale = quantize_blocks(x, fmt, 32, scale_format, overflow="saturate")
    ieee, _ = quantize_blocks(x, fmt, 32, scale_format, overflow="ieee")
    assert torch.equal(raw(saturated), raw(ieee))
    top = expand_scale(scale.float(), PerBlock((32,)), x.shape).double() * fmt.max
    assert (x.double() <= top).all()


def _db(x, back):
    return 10 * math.log10(x.double().square().sum() / (x.double() - back).square().sum())


# These figures are published for Gaussians in blocks of 32; the phase of the Gaussian moves them by
# half a dB.
@pytest.mark.parametrize(
    ("mode", "db"), [("floor", 31.1), ("rceil", 31.7), ("ceil", 31.7), ("even", 31.5)]
)
def test__noise_on_gaussians__is_that_of_the_modes(mode, db):
    x = torch.randn(512, 512, generator=torch.manual_seed(0))
    back = dequantize_blocks(*quantize_blocks(x, E4M3FN, 32, mode=mode), E4M3FN, 32)
    assert abs(_db(x, back) - db) < 0.5


def test__finer_scales__lose_less():
    x = torch.randn(512, 512, generator=torch.manual_seed(0))

    def db(*args):
        granularity = args[0]
        return _db(x, dequantize_blocks(*quantize_blocks(x, E2M1FN, *args), E2M1FN, granularity))

    mx, nv, two = db((1, 32)), db((1, 16), "nvfp4"), db((1, 16), "fp32")
    assert 18 < mx < 19.5 < nv < two < 21
    assert db(PerTensor(), "fp32") < db((128, 128), "fp32") < db((1, 128), "fp32") < two


def test__options_of_encode__reach_the_elements():
    x = torch.tensor([[1.9, -1.9, 448.0, 0.3]])
    codes, _ = quantize_blocks(x, E4M3FN, 4)
    assert torch.equal(raw(codes), raw(encode(x, E4M3FN)))
    beyond = torch.tensor([[511.0, 1.0]])
    codes, scale = quantize_blocks(beyond, E4M3FN, 2, mode="floor", overflow="ieee")
    assert scale_values(scale) == [1]
    assert decode(codes, E4M3FN)[0, 0].isnan()
    with pytest.raises(FormatError, match="rounding"):
        quantize_blocks(x, E4M3FN, 4, rounding="up")
    with pytest.raises(FormatError, match="overflow"):
        quantize_blocks(x, E4M3FN, 4, overflow="wrap")


@pytest.mark.parametrize("way", WAYS)
def test__stochastic_rounding__draws_as_encode_does(way):
    x = torch.randn(330, 410, generator=torch.manual_seed(0), dtype=torch.float64)
    key = random_key(torch.manual_seed(1))
    for granularity in GRANULARITIES:
        options = {"rounding": "stochastic", "generator": key, "random_bits": 9}
        codes, scale = quantize_blocks(x, E2M1FN, granularity, *way, **options)
        wide = x / _wide(scale, granularity, x.shape)
        assert torch.equal(codes, encode(wide, E2M1FN, **options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test__a_large_tensor__is_its_parts(granularity, way):
    x = torch.randn(330, 410, generator=torch.manual_seed(0))
    codes, scale = quantize_blocks(x, E2M3FN, granularity, *way)
    wide = x.double() / _wide(scale, granularity, x.shape)
    assert torch.equal(codes, encode(wide, E2M3FN))
    back = dequantize_blocks(codes, scale, E2M3FN, granularity, torch.float64)
    assert torch.equal(back, decode(codes, E2M3FN).double() * _wide(scale, granularity, x.shape))


def _wide(scale, granularity, shape):
    if isinstance(scale, TwoLevelScale):
        return _wide(scale.block.float(), granularity, shape) * scale.tensor.double()
    return expand_scale(scale.float(), granularity, shape).double()


def test__strides__do_not_matter():
    x = torch.randn(40, 66)
    for view in (x.t(), x[:, ::2], x[1:, 3:], x.expand(2, 40, 66), x[0, 0]):
        got, scale = quantize_blocks(view, E4M3FN, (2, 32))
        want, scale_ = quantize_blocks(view.clone(), E4M3FN, (2, 32))
        assert torch.equal(raw(got), raw(want))
        assert torch.equal(raw(scale), raw(scale_))


def test__no_gradient__flows_and_no_input_changes():
    x = torch.randn(4, 64, requires_grad=True)
    before = x.detach().clone()
    codes, scale = quantize_blocks(x, E4M3FN, 32, "fp32")
    assert not codes.requires_grad
    assert not scale.requires_grad
    assert torch.equal(x, before)


COMPILED = [
    (torch.float32, E4M3FN, PerBlock((1, 32)), "e8m0", "rceil"),
    (torch.bfloat16, E2M1FN, PerBlock((1, 16)), "nvfp4", "rceil"),
    (torch.float32, E5M2, PerAxis(0), "pow2", "even"),
]
COMPILED_SLOWLY = [
    (torch.bfloat16, E2M1FN, PerBlock((1, 32)), "e8m0", "floor"),
    (torch.float32, E4M3FN, PerBlock((16, 16)), "fp32", "rceil"),
    (torch.bfloat16, E4M3FN, PerBlock((128, 128)), "pow2", "ceil"),
    (torch.float64, E3M2FN, PerAxis(-1), "fp32", "rceil"),
    (torch.float16, E2M3FN, PerTensor(), "e8m0", "rceil"),
]


@pytest.mark.parametrize(
    ("dtype", "fmt", "granularity", "scale_format", "mode"),
    [*COMPILED, *(pytest.param(*way, marks=pytest.mark.slow) for way in COMPILED_SLOWLY)],
)
def test__compiled__is_bit_for_bit_eager(dtype, fmt, granularity, scale_format, mode):
    torch._dynamo.reset()

    def run(x):
        codes, scale = quantize_blocks(x, fmt, granularity, scale_format, mode)
        back = dequantize_blocks(codes, scale, fmt, granularity, x.dtype)
        levels = scale if isinstance(scale, TwoLevelScale) else (scale,)
        return [codes, *levels, back]

    x = torch.randn(18, 71, generator=torch.manual_seed(0)) * 2.0 ** (torch.arange(71) // 5 - 7)
    x[0, :40] = 0
    x[1, 2], x[2, 3] = math.inf, math.nan
    x = x.to(dtype)
    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert got.dtype is want.dtype
        if got.dtype.itemsize == 1:
            assert torch.equal(raw(got), raw(want))
        else:  # The payload of a NaN may differ here.
            assert same(got, want).all()


def test__new_shapes__compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(quantize_blocks, fullgraph=True, backend=counter, dynamic=True)
    for n in (64, 96, 320):
        compiled(torch.randn(5, n), E4M3FN, PerBlock((1, 32)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test__what_is_no_float__is_refused(dtype):
    with pytest.raises(DTypeError, match="allowed are float32, bfloat16, float16, float64"):
        quantize_blocks(torch.zeros(4, dtype=dtype), E4M3FN, 4)


def test__unfit_options__are_refused_with_what_is_allowed():
    x = torch.randn(4, 32)
    with pytest.raises(FormatError, match="e8m0, pow2, fp32, nvfp4"):
        quantize_blocks(x, E4M3FN, 32, "fp16")
    with pytest.raises(FormatError, match="floor, rceil, ceil, even"):
        quantize_blocks(x, E4M3FN, 32, mode="nearest")
    with pytest.raises(FormatError, match="'floor' is a way to round to a power of two"):
        quantize_blocks(x, E4M3FN, 32, "fp32", "floor")
    with pytest.raises(FormatError, match="E8M0FNU is a format of scales"):
        quantize_blocks(x, E8M0FNU, 32)
    with pytest.raises(FormatError, match="8 bits or fewer"):
        quantize_blocks(x, BF16, 16, "nvfp4")
    with pytest.raises(FormatError, match=", ".join(FORMATS)):
        quantize_blocks(x, "e9m9", 32)
    with pytest.raises(ShapeError, match="PerBlock"):
        quantize_blocks(x, E4M3FN, "row")
    with pytest.raises(ShapeError, match="-2 to 1"):
        quantize_blocks(x, E4M3FN, PerAxis(2))


def test__what_does_not_belong_together__is_refused():
    codes, scale = quantize_blocks(torch.randn(4, 64), E4M3FN, 32)
    two = TwoLevelScale(scale.to(torch.float8_e4m3fn), torch.ones(()))
    with pytest.raises(ShapeError, match=r"\(4, 4\); got \(4, 2\)"):
        dequantize_blocks(codes, scale, E4M3FN, 16)
    with pytest.raises(ShapeError, match=r"\(\); got \(1,\)"):
        dequantize_blocks(codes, two._replace(tensor=torch.ones(1)), E4M3FN, 32)
    with pytest.raises(DTypeError, match="codes of E5M2 are"):
        dequantize_blocks(codes, scale, E5M2, 32)
    with pytest.raises(DTypeError, match=r"cannot dequantize to torch.int32"):
        dequantize_blocks(codes, scale, E4M3FN, 32, torch.int32)
    with pytest.raises(DTypeError, match=r"got torch.bfloat16"):
        dequantize_blocks(codes, scale.bfloat16(), E4M3FN, 32)
    with pytest.raises(DTypeError, match="got float"):
        dequantize_blocks(codes, 1.0, E4M3FN, PerTensor())
    with pytest.raises(DTypeError, match=r"float8_e8m0fnu and torch.float32"):
        dequantize_blocks(codes, two._replace(block=scale), E4M3FN, 32)
