"""Custom formats: their properties, and the descriptions that are refused."""

import copy
import pickle

import pytest
import torch
from formats_oracle import ALL, OWN

from scaledtensor.errors import FormatError, UnsupportedError
from scaledtensor.formats import (
    E2M1FN,
    E3M4,
    E4M3,
    FP32,
    INT4,
    INT8,
    MXINT8,
    Format,
    Specials,
    custom,
    get,
)


def test__a_custom_format__is_described_by_its_facts():
    fmt = custom(5, 1)
    assert (fmt.bits, fmt.num_codes, fmt.bias, fmt.max) == (7, 128, 15, 1.5 * 2.0**15)
    assert (fmt.min_normal, fmt.min_subnormal, fmt.eps) == (2.0**-14, 2.0**-15, 0.5)
    assert (fmt.has_inf, fmt.has_nan, fmt.has_signed_zero) == (True, True, True)
    assert fmt.storage_dtype is torch.uint8
    assert fmt.ml_dtype is None
    assert repr(fmt) == "E5M1"


@pytest.mark.parametrize("has_inf", [True, False])
@pytest.mark.parametrize("has_nan", [True, False])
@pytest.mark.parametrize("signed_zero", [True, False])
def test__flags__are_what_the_codes_show(has_inf, has_nan, signed_zero):
    flags = {"has_inf": has_inf, "has_nan": has_nan, "signed_zero": signed_zero}
    if not has_nan and (has_inf or not signed_zero):
        with pytest.raises(FormatError, match=r"no encoding has .*; allowed are: has_inf"):
            custom(3, 2, **flags)
        return
    fmt = custom(3, 2, **flags)
    values = fmt.values()
    assert values.isinf().any() == has_inf == fmt.has_inf
    assert values.isnan().any() == has_nan == fmt.has_nan
    assert ((values == 0) & values.signbit()).any() == signed_zero == fmt.has_signed_zero
    assert fmt.bias == 3 + (not signed_zero)
    finite = values[values.isfinite()]
    assert (finite.max(), finite.min()) == (fmt.max, fmt.min)
    assert finite[finite > 0].min() == fmt.min_subnormal
    assert finite.abs().unique().numel() == fmt.max_code + 1


def test__ieee_p3109__has_one_zero_one_nan_and_two_infinities():
    fmt = custom(4, 3, signed_zero=False)
    assert fmt.specials is Specials.P3109
    assert fmt.values()[[0x00, 0x40, 0x7E, 0x7F, 0xFF]].tolist() == [
        0,
        1,
        224,
        torch.inf,
        -torch.inf,
    ]
    assert fmt.values()[0x80].isnan()


@pytest.mark.parametrize("fmt", OWN, ids=repr)
def test__equality_pickle_and_copy__go_by_the_facts(fmt):
    for twin in (pickle.loads(pickle.dumps(fmt)), copy.deepcopy(fmt)):
        assert twin == fmt
        assert hash(twin) == hash(fmt)
    assert repr(fmt) == fmt.name.upper()
    assert get(fmt) is fmt
    assert fmt not in ALL


def test__the_facts_of_a_built_in_format__give_that_format():
    assert custom(4, 3) is E4M3
    assert custom(3, 4, 3) is E3M4
    assert custom(2, 1, has_inf=False) != E2M1FN  # The built-in format has no NaN.
    assert custom(4, 3, bias=9).name == "e4m3b9"
    assert custom(4, 3, bias=-2).name == "e4m3bminus2"


def test__more_than_8_bits__are_stored_in_16():
    assert custom(6, 9).storage_dtype is torch.int16
    assert custom(4, 4).storage_dtype is torch.int16
    with pytest.raises(UnsupportedError, match="17 bits: codes are stored in 8 or 16 bits"):
        custom(8, 8)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"exponent_bits": 0}, "exponent_bits is 1 to 8, got 0"),
        ({"exponent_bits": 9, "mantissa_bits": 2}, "exponent_bits is 1 to 8, got 9"),
        ({"mantissa_bits": -1}, "mantissa_bits is 0 to 23, got -1"),
        ({"mantissa_bits": 0}, "IEEE specials need a mantissa bit"),
        ({"mantissa_bits": 2.0}, r"mantissa_bits is a whole number, got 2\.0"),
        ({"bias": True}, "bias is a whole number, got True"),
        ({"bias": 128}, "bias 128 puts values outside float32; here it is -105 to 127"),
        ({"bias": -106}, "bias -106 puts values outside float32; here it is -105 to 127"),
        ({"exponent_bits": 8, "has_inf": False}, "take at most 7, or IEEE specials"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "has_inf": False}, "no code is left"),
        ({"name": "E5"}, "lower case"),
        ({"name": "e4m3fn"}, "'e4m3fn' is a built-in format"),
    ],
)
def test__impossible_facts__are_refused_with_what_is_allowed(facts, message):
    with pytest.raises(FormatError, match=message):
        custom(**{"exponent_bits": 4, "mantissa_bits": 3, **facts})


def test__integers__are_fixed_point_in_twos_complement():
    assert (INT8.min, INT8.max, INT8.eps) == (-128, 127, 1)
    assert (MXINT8.min, MXINT8.max, MXINT8.eps) == (-2, 127 / 64, 1 / 64)
    assert (INT4.min, INT4.max, INT4.bits) == (-8, 7, 4)
    assert INT4.values().tolist() == [*range(8), *range(-8, 0)]
    assert {INT8.has_nan, INT8.has_inf, INT8.has_signed_zero, INT8.has_subnormals} == {False}
    with pytest.raises(FormatError, match="an integer has no exponent_bits, got 1"):
        Format("own", 1, 6, 0, Specials.INTEGER, torch.uint8)
    with pytest.raises(FormatError, match="mantissa_bits is 1 to 23, got 0"):
        Format("own", 0, 0, 0, Specials.INTEGER, torch.uint8)
    int6 = Format("int6", 0, 5, -4, Specials.INTEGER, torch.uint8)
    assert int6.values()[[1, 31, 32, 63]].tolist() == [1, 31, -32, -1]


def test__values_of_fp32__are_too_many():
    with pytest.raises(UnsupportedError, match="fp32 has 4294967296 codes"):
        FP32.values()


@pytest.mark.parametrize("fmt", [*ALL, *OWN], ids=repr)
def test__policy__says_what_the_format_has(fmt):
    text = fmt.policy
    assert ("No infinity" in text) != fmt.has_inf
    assert ("No NaN" in text) != fmt.has_nan
    assert ("-0 has a code" in text) == fmt.has_signed_zero
    assert ("Subnormals down" in text) == fmt.has_subnormals
