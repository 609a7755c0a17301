"""`encode` agrees with ml_dtypes, and with exact arithmetic where ml_dtypes rounds twice."""

import math

import pytest
import torch
from formats_oracle import (
    ALL,
    BYTES,
    REFERENCED,
    SHORT,
    SIGNED,
    assert_codes,
    assert_nan_codes,
    every_16_bit,
    ml_encode,
    near_ties,
    raw,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from scaledtensor import formats
from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats import (
    BF16,
    E2M1FN,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FP16,
    FP32,
    decode,
    encode,
    fake_quantize,
)
from scaledtensor.testing.reference import reference_code

OVERFLOWS = ("saturate", "saturate_finite", "ieee")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIALS = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-45])


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", REFERENCED, ids=repr)
def test__every_16_bit_input__encodes_as_ml_dtypes(fmt, dtype, overflow):
    x = every_16_bit(dtype)
    assert_codes(encode(x, fmt, overflow=overflow), ml_encode(x, fmt, overflow), fmt, x)


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("fmt", REFERENCED, ids=repr)
def test__float32_around_every_tie__encodes_as_ml_dtypes(fmt, overflow):
    x = torch.cat((near_ties(fmt, torch.float32), SPECIALS))
    assert_codes(encode(x, fmt, overflow=overflow), ml_encode(x, fmt, overflow), fmt, x)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64), st.sampled_from(OVERFLOWS))
def test__any_float32__encodes_as_ml_dtypes(values, overflow):
    x = torch.tensor(values, dtype=torch.float32)
    for fmt in REFERENCED:
        assert_codes(encode(x, fmt, overflow=overflow), ml_encode(x, fmt, overflow), fmt, x)


@pytest.mark.parametrize("fmt", [*BYTES, FP16], ids=repr)
def test__float64__is_rounded_once(fmt):
    x = near_ties(fmt, torch.float64)
    if fmt is FP16:
        x = x[::211]
    want = [reference_code(v, fmt) for v in x.tolist()]
    assert raw(encode(x, fmt)).tolist() == want


@pytest.mark.parametrize("fmt", SIGNED, ids=repr)
def test__float64_beyond_float32__overflows_and_underflows(fmt):
    x = torch.tensor([1e300, -1e300, 1e-300, -1e-300, math.inf], dtype=torch.float64)
    back = decode(encode(x, fmt), fmt, torch.float64)
    assert back.tolist() == [fmt.max, fmt.min, 0.0, 0.0, fmt.max]


@pytest.mark.parametrize("fmt", [BF16, FP32], ids=repr)
def test__float64__reaches_the_wide_formats_in_one_rounding(fmt):
    step = fmt.eps
    x = torch.tensor([1 + step / 2 + 2**-52, 1 + step / 2, 1 + 1.5 * step], dtype=torch.float64)
    assert encode(x, fmt).double().tolist() == [1 + step, 1.0, 1 + 2 * step]


def test__saturate__clips_finite_and_infinite_alike():
    x = torch.tensor([465.0, math.inf, -math.inf, 1e30])
    assert decode(encode(x, E4M3FN), E4M3FN).tolist() == [448.0, 448.0, -448.0, 448.0]
    assert decode(encode(x, FP32), FP32).tolist() == [465.0, FP32.max, -FP32.max, x[3].item()]


def test__saturate_finite__keeps_what_is_not_finite():
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf])
    for values in (x, x.repeat(500)):  # The cast runs in few operators, and in C++.
        codes = [encode(values, f, overflow="saturate_finite") for f in (E4M3FN, E5M2, E2M1FN)]
        e4m3, e5m2, e2m1 = (
            decode(c, f)[:4] for c, f in zip(codes, (E4M3FN, E5M2, E2M1FN), strict=True)
        )
        assert e4m3[:2].tolist() == [448, -448]
        assert e4m3[2:].isnan().all()
        assert e5m2.tolist() == [57344, -57344, torch.inf, -torch.inf]
        assert e2m1.tolist() == [6, -6, 6, -6]


def test__ieee__goes_to_inf_nan_or_max():
    x = torch.tensor([1e30])
    assert decode(encode(x, E5M2, overflow="ieee"), E5M2).isinf().all()
    assert decode(encode(x, E4M3FN, overflow="ieee"), E4M3FN).isnan().all()
    assert decode(encode(x, E2M1FN, overflow="ieee"), E2M1FN).tolist() == [6.0]


@pytest.mark.parametrize("fmt", ALL, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test__nan__stays_nan_or_is_the_documented_zero(fmt, dtype):
    x = torch.tensor([math.nan, math.nan], dtype=dtype).copysign(torch.tensor([1.0, -1.0]))
    x = x.repeat(17)  # vectors and their remainder
    codes = raw(encode(x, fmt))
    if fmt.has_nan:
        assert_nan_codes(codes, fmt, x)
    else:
        assert set(codes.tolist()) <= {0, *[1 << (fmt.bits - 1)] * fmt.has_signed_zero}


def test__one_nan__leaves_its_neighbours_alone():
    x = torch.tensor([1.0, math.nan, 2.0])
    for fmt in SIGNED:
        assert decode(encode(x, fmt), fmt)[::2].tolist() == [1.0, min(2.0, fmt.max)]


def test__e8m0__takes_zero_and_negatives_to_nan():
    x = torch.tensor([0.0, -0.0, -1.0, math.nan, 1.0, 1.49, 1.5, 3.0, math.inf])
    assert raw(encode(x, E8M0FNU)).tolist() == [255] * 4 + [127, 127, 128, 129, 254]
    assert raw(encode(x, E8M0FNU, overflow="ieee"))[-1] == 255


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
def test__shape_and_strides__do_not_matter(fmt):
    x = torch.randn(6, 8).abs() + 0.1
    want = raw(encode(x, fmt))
    assert torch.equal(raw(encode(x.t(), fmt)), want.t())
    assert torch.equal(raw(encode(x[1::2, 3::2], fmt)), want[1::2, 3::2])
    assert torch.equal(raw(encode(x[0].expand(4, 8), fmt)), want[0].expand(4, 8))
    for shape in ((), (0,), (3, 0, 2)):
        y = fake_quantize(torch.ones(shape), fmt)
        assert y.shape == shape
        assert torch.equal(y, torch.ones(shape))


@pytest.mark.parametrize("fmt", [E4M3FN, E8M0FNU, E2M1FN, FP32], ids=repr)
def test__a_tensor_above_the_piece_size__is_the_sum_of_its_parts(fmt):
    x = torch.rand(3, (1 << 19) + 1) + 0.5
    codes = encode(x, fmt)
    assert codes.shape == x.shape
    assert torch.equal(raw(codes), torch.stack([raw(encode(row, fmt)) for row in x]))
    assert torch.equal(decode(codes, fmt), torch.stack([decode(row, fmt) for row in codes]))


@pytest.mark.parametrize("dtype", DTYPES)
def test__fake_quantize__keeps_dtype_and_is_idempotent(dtype):
    x = torch.randn(100).to(dtype)
    for fmt in BYTES:
        y = fake_quantize(x, fmt)
        assert y.dtype is dtype
        assert torch.equal(fake_quantize(y, fmt), y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
def test__other_dtypes__are_refused(dtype):
    with pytest.raises(DTypeError, match=r"float32, bfloat16, float16, float64"):
        encode(torch.zeros(2, dtype=dtype), E4M3FN)


def test__unknown_names__are_refused():
    with pytest.raises(FormatError, match=r"'up'; allowed are 'nearest_even', 'nearest_away'"):
        formats.encode(torch.zeros(2), E4M3FN, rounding="up")
    with pytest.raises(
        FormatError, match=r"'wrap'; allowed are 'saturate', 'saturate_finite', 'ieee'"
    ):
        formats.fake_quantize(torch.zeros(2), E4M3FN, overflow="wrap")
