"""Every rounding and overflow mode agrees with exact comparison, for built-in and custom
formats."""

import math

import pytest
import torch
from formats_oracle import (
    ALL,
    OWN,
    ROUNDINGS,
    SHORT,
    all_codes,
    assert_nan_codes,
    every_16_bit,
    ml_decode,
    near_ties,
    raw,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from scaledtensor.errors import FormatError
from scaledtensor.formats import (
    BF16,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FP16,
    FP32,
    INT8,
    MXINT8,
    custom,
    decode,
    encode,
    fake_quantize,
)
from scaledtensor.testing.reference import reference_code, reference_codes

OVERFLOWS = ("saturate", "saturate_finite", "ieee")
FORMATS = [*SHORT, *OWN]
EDGES = [0.0, math.inf, 3.4e38, 1e-45, 2.0**-126, 2.0**-127, 1.5 * 2.0**-127, 65519.99, 65520.0]
EDGES = torch.tensor([*EDGES, *(-e for e in EDGES)], dtype=torch.float64)


def assert_rounded(x, fmt, rounding, overflow):
    """Return the reference's codes and values of the numbers in x; NaN stays NaN."""
    codes = encode(x, fmt, rounding=rounding, overflow=overflow)
    values = fake_quantize(x, fmt, rounding=rounding, overflow=overflow)
    real = ~x.isnan()
    want = reference_codes(x[real], fmt, rounding, overflow)
    assert torch.equal(raw(codes)[real] & (fmt.num_codes - 1), want)
    assert torch.equal(raw(codes)[real], want)  # No bit above the code is set.
    assert values.dtype is x.dtype
    assert same(values, decode(codes, fmt, x.dtype))[real].all()
    if fmt.has_nan:
        assert_nan_codes(raw(codes)[~real], fmt, x[~real])
        assert values[~real].isnan().all()
    else:
        assert not values[~real].any()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test__every_16_bit_input__is_rounded_exactly(fmt, dtype, rounding):
    x = every_16_bit(dtype)
    for overflow in OVERFLOWS:
        assert_rounded(x, fmt, rounding, overflow)
        # The rounding follows the table above, by bits and by arithmetic here.
        assert_rounded(x.float()[::7], fmt, rounding, overflow)
        assert_rounded(x[1::7], fmt, rounding, overflow)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test__a_hair_from_every_tie__is_rounded_exactly(fmt, dtype, rounding):
    x = torch.cat((near_ties(fmt, dtype), EDGES.to(dtype)))
    for overflow in OVERFLOWS:
        assert_rounded(x, fmt, rounding, overflow)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test__the_two_references__agree(fmt):
    points = torch.cat((near_ties(fmt, torch.float32).double(), EDGES))
    points = points[:: max(1, len(points) // 97)]
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            want = [reference_code(v, fmt, rounding, overflow) for v in points.tolist()]
            assert reference_codes(points, fmt, rounding, overflow).tolist() == want


def small_formats():
    """Draw custom formats of every kind of specials, with biases that keep them within float32."""

    def build(e, m, shift, kind):
        has_inf, has_nan, signed_zero = kind
        try:
            bias = 2 ** (e - 1) + shift
            return custom(
                e, m, bias, has_inf=has_inf, has_nan=has_nan, signed_zero=signed_zero, name="own"
            )
        except FormatError:
            return None

    kinds = [(1, 1, 1), (0, 1, 1), (0, 1, 0), (1, 1, 0), (0, 0, 1)]
    made = st.builds(
        build, st.integers(1, 7), st.integers(0, 8), st.integers(-90, 60), st.sampled_from(kinds)
    )
    return made.filter(lambda fmt: fmt is not None)


@settings(max_examples=150, deadline=None)
@given(small_formats(), st.data())
def test__any_custom_format__rounds_any_number_exactly(fmt, data):
    values = data.draw(st.lists(st.floats(), min_size=1, max_size=8))
    scaled = [v * fmt.min_normal for v in (0.3, 1.1, 1.5, 2.5)] + [fmt.max * 1.06]
    x = torch.tensor(values + scaled, dtype=torch.float64)
    for y in (x, x.float()):
        real = ~y.isnan()
        for rounding in ROUNDINGS:
            for overflow in OVERFLOWS:
                got = raw(encode(y, fmt, rounding=rounding, overflow=overflow))[real].tolist()
                want = [reference_code(v, fmt, rounding, overflow) for v in y[real].tolist()]
                assert got == want, (rounding, overflow)


@settings(max_examples=100, deadline=None)
@given(small_formats())
def test__any_custom_format__reads_every_code_and_writes_it_back(fmt):
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    assert same(values, ml_decode(codes, fmt)).all()
    real = ~values.isnan()
    for rounding in ROUNDINGS:
        again = encode(values, fmt, rounding=rounding, overflow="ieee")
        assert torch.equal(raw(again)[real], raw(codes)[real])
    x = near_ties(fmt, torch.float32)
    for overflow in OVERFLOWS:
        assert torch.equal(
            raw(encode(x, fmt, overflow=overflow)), reference_codes(x, fmt, overflow=overflow)
        )
        values = decode(encode(x, fmt, overflow=overflow), fmt)
        assert same(fake_quantize(x, fmt, overflow=overflow), values).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test__fp32__leaves_float32_and_rounds_float64_once(rounding):
    x = torch.tensor([1.0, -2.5, 1e-45, -0.0, 3.4e38])
    assert torch.equal(encode(x, FP32, rounding=rounding), x)
    step = FP32.eps
    wide = [1.0, 1 + step / 2, 1 + step * 0.75, 1 + step * 1.5, 1 + 2**-50, 2**-149 * 1.5]
    wide = torch.tensor([*wide, *(-v for v in wide)], dtype=torch.float64)
    got = encode(wide, FP32, rounding=rounding).double()
    low = wide.float().double()
    low = torch.where(low.abs() > wide.abs(), torch.nextafter(low.float(), low.float() * 0), low)
    if rounding == "toward_zero":
        want = low.double()
    else:
        near = {"nearest_even": 0.5000001, "nearest_away": 0.5, "to_odd": 1e-9}[rounding]
        high = torch.nextafter(low.float(), wide.sign().float() * math.inf).double()
        odd = low.float().view(torch.int32) & 1 == 1
        share = (wide - low.double()) / (high - low.double())
        up = share >= near
        if rounding == "to_odd":
            up &= ~odd
        if rounding == "nearest_even":
            up |= (share == 0.5) & odd
        want = torch.where(up, high, low.double())
    assert torch.equal(got, want)
    huge = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert encode(huge, FP32, rounding=rounding).tolist() == [FP32.max, -FP32.max]


def test__overflow_toward_zero_and_to_odd__is_for_infinities_alone():
    """IEEE 754-2019, 7.4: rounding toward zero carries overflows to the largest finite number."""
    x = torch.tensor([1e30, -1e30, math.inf, -math.inf])
    for rounding in ("toward_zero", "to_odd"):
        for fmt in (E5M2, FP16, BF16, E4M3FN):
            got = fake_quantize(x, fmt, rounding=rounding, overflow="ieee")
            finite = [1e30] if fmt is BF16 else [fmt.max]
            if fmt is not BF16:
                assert got[:2].tolist() == [*finite, *(-v for v in finite)]
            assert not got[:2].isinf().any()
            assert got[2:].isinf().all() if fmt.has_inf else got[2:].isnan().all()


def test__to_odd_then_nearest__is_nearest_at_once():
    """Rounding to odd makes a second rounding exact (Boldo and Melquiond)."""
    wide = custom(8, 7)
    x = torch.randn(4096, dtype=torch.float64) * torch.randn(4096, dtype=torch.float64).exp()
    for fmt in (E4M3FN, E5M2, custom(4, 4, has_inf=False)):
        halfway = decode(encode(x, wide, rounding="to_odd"), wide)
        assert torch.equal(raw(encode(halfway, fmt)), raw(encode(x, fmt)))


def test__integers__use_their_most_negative_code_and_no_minus_zero():
    x = torch.tensor([-200.0, -128.4, -1.5, -0.5, -0.0, 0.5, 1.5, 127.5, math.inf, math.nan])
    codes = encode(x, INT8).view(torch.int8).tolist()
    assert codes == [-128, -128, -2, 0, 0, 0, 2, 127, 127, 0]
    assert fake_quantize(x / 64, MXINT8).tolist() == [c / 64 for c in codes]
    assert not fake_quantize(x, INT8).signbit()[4]


def test__e8m0__has_floor_and_odd_and_near_roundings():
    x = torch.tensor([1.0, 1.4, 1.5, 3.9, 2.0**-127 * 1.5, 1e-45, math.inf])
    expect = {
        "nearest_even": [127, 127, 128, 129, 1, 0, 254],
        "nearest_away": [127, 127, 128, 129, 1, 0, 254],
        "toward_zero": [127, 127, 127, 128, 0, 0, 254],
        "to_odd": [127, 127, 127, 129, 1, 0, 254],
    }
    for rounding, codes in expect.items():
        assert raw(encode(x, E8M0FNU, rounding=rounding)).tolist() == codes


@pytest.mark.parametrize("fmt", [E4M3FN, INT8, FP16, E8M0FNU, OWN[0], OWN[6]], ids=repr)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test__large_tensors_of_any_strides__are_their_small_parts(fmt, rounding):
    x = torch.rand(5, 1 << 15, 2) * 4 + 0.5
    for view in (x, x.permute(2, 0, 1), x[:, ::2], x.bfloat16(), x.bfloat16().transpose(0, 1)):
        codes = encode(view, fmt, rounding=rounding)
        values = fake_quantize(view, fmt, rounding=rounding)
        assert codes.shape == values.shape == view.shape
        for index in (0, -1):
            assert torch.equal(raw(codes[index]), raw(encode(view[index], fmt, rounding=rounding)))
            part = fake_quantize(view[index].double(), fmt, rounding=rounding)
            assert torch.equal(values[index].double(), part)


def test__no_gradient__flows_and_a_leaf_is_left_alone():
    x = torch.randn(8, requires_grad=True)
    for rounding in ROUNDINGS:
        y = fake_quantize(x, E4M3FN, rounding=rounding)
        assert not y.requires_grad
        assert not encode(x, E5M2, rounding=rounding).requires_grad
    assert x.requires_grad


def test__arguments_of_stochastic_rounding__are_refused_elsewhere():
    x = torch.zeros(2)
    with pytest.raises(FormatError, match="generator is for rounding 'stochastic' only, got it"):
        encode(x, E4M3FN, generator=torch.Generator())
    with pytest.raises(FormatError, match="random_bits is for rounding 'stochastic' only"):
        fake_quantize(x, E4M3FN, rounding="to_odd", random_bits=4)
    with pytest.raises(FormatError, match="allowed are 'nearest_even', 'nearest_away', 'toward_z"):
        fake_quantize(x, E4M3FN, rounding="up")


def test__names__are_those_of_all_formats():
    assert len({fmt.name for fmt in (*ALL, *OWN)}) == len(ALL) + len(OWN)
