"""The kit finds planted faults and no others."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaledtensor.errors import DTypeError, FormatError, ShapeError, UnsupportedError
from scaledtensor.formats import FORMATS, decode, encode, fake_quantize
from scaledtensor.formats.rounding import OVERFLOWS
from scaledtensor.testing import check_cast, reference_code, reference_codes, reference_round

NAMES = ["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "e3m2fn", "mxint8", "e8m0fnu", "bf16"]
ROUNDINGS = ["nearest_even", "nearest_away", "toward_zero", "to_odd"]
ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", NAMES)
def test__our_casts__are_exact(name, rounding, overflow):
    how = {"rounding": rounding, "overflow": overflow}
    tried = check_cast(lambda x: encode(x, name, **how), name, **how, random=2000, dtypes=ALL)
    assert tried > 4 * 65_000
    values = check_cast(
        lambda x: fake_quantize(x, name, **how), name, **how, random=2000, dtypes=ALL[:1]
    )
    assert values > 100_000


def test__ml_dtypes__is_exact():
    def cast(x):
        codes = x.numpy().astype(ml_dtypes.float8_e4m3fn)
        return torch.from_numpy(codes.view(np.uint8))

    check_cast(cast, "e4m3fn", overflow="ieee", dtypes=[torch.float32], random=2000)


def e4m3(x, **how):
    return encode(x, "e4m3fn", **how)


FAULTS = {
    "FNUZ for OCP": (lambda x: encode(x, "e4m3fnuz").view(torch.uint8), "a value of the format"),
    "ties away": (lambda x: e4m3(x, rounding="nearest_away"), "a tie"),
    "double rounding": (lambda x: e4m3(x.bfloat16()), "just above a tie"),
    "no subnormals": (lambda x: e4m3(torch.where(x.abs() < 2**-6, 0 * x, x)), "a subnormal"),
    "overflows": (lambda x: e4m3(x, overflow="ieee"), "beyond max"),
    "loses NaN": (lambda x: e4m3(x.nan_to_num(nan=1.0)), "a NaN"),
    "loses the sign of zero": (lambda x: e4m3(torch.where(x == 0, 0.0, x)), "-0.0"),
    "keeps infinities": (lambda x: e4m3(x, overflow="saturate_finite"), "an infinity"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test__a_planted_fault__is_found_and_named(fault):
    cast, kind = FAULTS[fault]
    with pytest.raises(AssertionError, match=r"is not the cast to E4M3FN .* differs at") as raised:
        check_cast(cast, "e4m3fn", dtypes=[torch.float32], random=100)
    assert kind in str(raised.value)
    values = lambda x: decode(cast(x).view(torch.float8_e4m3fn), "e4m3fn")  # noqa: E731
    if fault != "loses the sign of zero":  # Comparing values ignores the sign of zero.
        with pytest.raises(AssertionError, match="is not the cast to E4M3FN"):
            check_cast(values, "e4m3fn", dtypes=[torch.float32], random=100)


def test__the_first_difference__is_named_by_bit_pattern():
    def cast(x):
        codes = e4m3(x).view(torch.uint8)
        return torch.where(x == 1.0625, codes + 1, codes)

    with pytest.raises(AssertionError) as raised:
        check_cast(cast, "e4m3fn", dtypes=[torch.bfloat16])
    assert str(raised.value).endswith(
        "it differs at 1 of 65,536 inputs of bfloat16, for example\n"
        "  0x3f88 (1.0625), a tie: got code 0x39 (1.125), the exact answer is code 0x38 (1.0)"
    )


@settings(max_examples=50)
@given(st.floats(), st.sampled_from(NAMES), st.sampled_from(ROUNDINGS), st.sampled_from(OVERFLOWS))
def test__the_references__agree(value, name, rounding, overflow):
    code = reference_code(value, name, rounding, overflow)
    codes = reference_codes(torch.tensor([value], dtype=torch.float64), name, rounding, overflow)
    rounded = reference_round(value, name, rounding, overflow)
    if code is None:
        assert math.isnan(rounded)
        return
    assert code == codes.item()
    fmt = FORMATS[name]
    width = torch.int16 if fmt.bits > 8 else torch.uint8
    held = torch.tensor([code]).to(torch.int32).to(width).view(fmt.storage_dtype)
    (expected,) = decode(held, name, torch.float64).tolist()
    assert rounded == expected or (math.isnan(rounded) and math.isnan(expected))


def test__stochastic__takes_a_draw():
    draws = [Fraction(i, 8) for i in range(8)]
    found = [reference_round(1.03125, "e4m3fn", "stochastic", draw=draw) for draw in draws]
    assert found == [1.0] * 6 + [1.125] * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_cast(e4m3, "e4m3fn", rounding="up"), FormatError, "'up' is unknown"),
        (lambda: check_cast(e4m3, "fp32"), UnsupportedError, "up to 16 bits"),
        (lambda: check_cast(e4m3, "e4m3fn", rounding="stochastic"), UnsupportedError, "no one"),
        (lambda: check_cast(e4m3, "e4m3fn", dtypes=[torch.int8]), DTypeError, "got torch.int8"),
        (lambda: check_cast(lambda x: e4m3(x)[1:], "e4m3fn"), ShapeError, "the cast returned"),
        (lambda: check_cast(lambda x: e4m3(x).numpy, "e4m3fn"), DTypeError, "no tensor"),
        (lambda: check_cast(lambda x: x > 0, "e4m3fn"), DTypeError, "neither codes nor values"),
        (lambda: check_cast(lambda x: encode(x, "e5m2"), "e4m3fn"), DTypeError, "float8_e5m2"),
        (lambda: reference_code(1.0, "e4m3fn", "stochastic"), FormatError, "takes draw"),
        (lambda: reference_codes([1.0], "e4m3fn"), DTypeError, "got list"),
        (lambda: reference_round(1.0, "e9m9"), FormatError, "e9m9"),
    ],
)
def test__what_cannot_be__is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
