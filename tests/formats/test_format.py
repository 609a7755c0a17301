"""The record of a format: its derived numbers, its lookups and its refusals."""

import copy
import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from formats_oracle import ALL, REFERENCED

from scaledtensor import formats
from scaledtensor.errors import FormatError
from scaledtensor.formats import E4M3FN, E5M2, E8M0FNU, FORMATS, FP32, Format, from_dtype, get


@pytest.mark.parametrize("fmt", [f for f in REFERENCED if f.signed], ids=repr)
def test__derived_numbers__are_those_of_ml_dtypes(fmt):
    info = ml_dtypes.finfo(fmt.ml_dtype)
    assert fmt.bits == info.bits
    assert fmt.num_codes == 2**info.bits
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.eps == float(info.eps)


def test__e8m0__is_a_bare_exponent():
    assert (E8M0FNU.max, E8M0FNU.min_normal, E8M0FNU.bits) == (2.0**127, 2.0**-127, 8)
    assert not E8M0FNU.has_zero


@pytest.mark.parametrize("fmt", [f for f in REFERENCED if f.bits <= 8], ids=repr)
def test__nan_and_inf_codes__are_those_of_ml_dtypes(fmt):
    values = np.arange(fmt.num_codes, dtype=np.uint8).view(fmt.ml_dtype).astype(np.float32)
    assert [c for span in fmt.nan_codes for c in span] == np.flatnonzero(np.isnan(values)).tolist()
    assert fmt.has_nan == np.isnan(values).any()
    assert fmt.has_inf == np.isinf(values).any()
    assert fmt.has_zero == (values == 0).any()
    assert fmt.has_signed_zero == ((values == 0) & np.signbit(values)).any()


def test__fp32__has_as_many_nans_as_it_should():
    assert sum(map(len, FP32.nan_codes)) == 2**24 - 2


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test__identity__survives_copies(fmt):
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert copy.deepcopy(fmt) is fmt
    assert repr(fmt) == fmt.name.upper()
    assert getattr(formats, repr(fmt)) is fmt
    assert hash(fmt) == hash(dataclasses.replace(fmt))


def test__a_format_of_ones_own__pickles_by_value():
    own = dataclasses.replace(E4M3FN, name="own", bias=8)
    assert pickle.loads(pickle.dumps(own)) == own
    assert own.max == E4M3FN.max / 2


def test__get__takes_names_in_any_case_and_formats():
    assert get("E4M3fn") is get("e4m3fn") is get(E4M3FN) is E4M3FN
    for name in ("fp7", 3):
        with pytest.raises(FormatError, match=f"unknown format {name!r}; known are e4m3fn, e5m2"):
            get(name)


def test__from_dtype__inverts_storage():
    for fmt in ALL:
        if fmt.storage_dtype is not torch.uint8:  # Several formats share this dtype.
            assert from_dtype(fmt.storage_dtype) is fmt
    for dtype in (torch.uint8, torch.float64):
        with pytest.raises(FormatError, match=f"no format is stored as {dtype}"):
            from_dtype(dtype)


def test__table__cannot_be_changed():
    with pytest.raises(TypeError):
        FORMATS["e4m3fn"] = E5M2
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3FN.bias = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Own"}, "lower case"),
        ({"exponent_bits": 9}, "exponent_bits is 1 to 8, got 9"),
        ({"mantissa_bits": 24}, "mantissa_bits is 0 to 23, got 24"),
        ({"signed": False}, "the only unsigned format is E8M0"),
        ({"mantissa_bits": 0, "specials": E5M2.specials}, "need a mantissa bit"),
        ({"bias": 128}, "outside float32"),
        ({"bias": 7.0}, "bias of a format is an int, got 7.0"),
        ({"bias": -120}, "outside float32"),
        ({"mantissa_bits": 4}, "codes of 9 bits do not fit"),
        ({"mantissa_bits": 2}, "codes of 7 bits do not fit"),
    ],
)
def test__impossible_facts__are_refused(change, message):
    with pytest.raises(FormatError, match=message):
        dataclasses.replace(E4M3FN, **{"name": "own", **change})


def test__public_names__all_exist():
    assert all(hasattr(formats, name) for name in formats.__all__)
    assert Format.__name__ in formats.__all__
