"""Casts of numpy arrays equal torch's, in the types of ml_dtypes, on the caller's memory."""

import ml_dtypes
import numpy as np
import pytest
import torch
from assertions import assert_each
from formats_oracle import ALL, OWN, REFERENCED, ml_encode, raw
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scaledtensor import formats
from scaledtensor.errors import DTypeError, FormatError, ShapeError
from scaledtensor.formats import BF16, E2M1FN, E3M2FN, E4M3FN, E5M2, PerAxis, PerBlock, PerTensor
from scaledtensor.formats import numpy as fnp

FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
PAIRS = zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True)
TORCH = {np.dtype(ours): theirs for ours, theirs in PAIRS}
arrays = st.sampled_from((np.float64, np.float32, np.float16)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


def bits(array):
    return array.view(f"u{array.dtype.itemsize}").astype(np.int64)


def type_of(fmt):
    return fmt.ml_dtype or f"u{fmt.storage_dtype.itemsize}"


def torch_of(array):
    return torch.tensor(array.astype(np.float64)).to(TORCH[array.dtype])


@given(arrays, st.sampled_from(ALL + OWN), st.sampled_from(["saturate", "saturate_finite", "ieee"]))
def test__encode__is_that_of_torch_in_the_type_of_ml_dtypes(x, fmt, overflow):
    codes = fnp.encode(x, fmt, overflow=overflow)
    want = formats.encode(torch.from_numpy(x.copy()), fmt, overflow=overflow)
    assert codes.dtype == type_of(fmt)
    assert codes.shape == x.shape
    assert np.array_equal(bits(codes), raw(want).numpy())


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test__every_type_of_floats__is_taken_and_given(fmt):
    def check(dtype):
        x = np.linspace(0.01, 40, 100).astype(dtype)
        codes = fnp.encode(x, fmt)
        if dtype is not np.float64 and fmt in REFERENCED:
            assert np.array_equal(bits(codes), ml_encode(torch_of(x), fmt, "saturate").numpy())
        values = fnp.decode(codes, fmt, dtype)
        assert values.dtype == dtype
        if fmt.ml_dtype is not None:
            assert np.array_equal(values, codes.astype(np.float32).astype(dtype))
        rounded = fnp.fake_quantize(x, fmt)
        assert rounded.dtype == dtype
        assert np.array_equal(bits(rounded), bits(values))

    assert_each(FLOATS, check)


def test__codes_and_their_bytes__are_both_read():
    codes = np.arange(16, dtype=np.uint8)
    values = fnp.decode(codes, E2M1FN)
    assert np.array_equal(values, fnp.decode(codes.view(E2M1FN.ml_dtype), E2M1FN))
    assert np.array_equal(values, codes.view(E2M1FN.ml_dtype).astype(np.float32))


@pytest.mark.parametrize("fmt", ALL + OWN, ids=repr)
def test__pack__comes_back(fmt):
    codes = fnp.encode(np.linspace(0.1, 9, 35, dtype=np.float32).reshape(5, 7), fmt)
    packed = fnp.pack(codes, fmt)
    if fmt.bits < 8:
        assert packed.dtype == np.uint8
        assert packed.shape == (5, -(-7 * fmt.bits // 8))
    back = fnp.unpack(packed, fmt, (5, 7))
    assert back.dtype == codes.dtype
    assert np.array_equal(bits(back), bits(codes))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("fmt", "granularity", "scale_format", "type_"),
    [
        (E4M3FN, 32, "e8m0", ml_dtypes.float8_e8m0fnu),
        (E5M2, PerAxis(0), "fp32", np.float32),
        (E3M2FN, PerTensor(), "pow2", np.float32),
        (E2M1FN, (1, 16), "nvfp4", None),
    ],
)
def test__blocks__are_those_of_torch(fmt, granularity, scale_format, type_, dtype):
    x = np.random.default_rng(0).standard_normal((5, 70)).astype(dtype)
    codes, scale = fnp.quantize_blocks(x, fmt, granularity, scale_format)
    want, want_scale = formats.quantize_blocks(torch_of(x), fmt, granularity, scale_format)
    assert codes.dtype == fmt.ml_dtype
    assert np.array_equal(bits(codes), raw(want).numpy())
    if type_ is None:
        assert scale.block.dtype == ml_dtypes.float8_e4m3fn
        assert scale.tensor.dtype == np.float32
        assert np.array_equal(bits(scale.block), raw(want_scale.block).numpy())
        assert scale.tensor == want_scale.tensor.numpy()
        wide = np.repeat(scale.block.astype(np.float64) * scale.tensor, 16, 1)[:, :70]
    else:
        assert scale.dtype == type_
        assert np.array_equal(bits(scale), raw(want_scale).numpy())
        wide = scale.astype(np.float64)
        wide = np.repeat(wide, 32, 1)[:, :70] if granularity == 32 else wide
    back = fnp.dequantize_blocks(codes, scale, fmt, granularity, np.float64)
    assert np.array_equal(back, codes.astype(np.float64) * wide)
    assert fnp.dequantize_blocks(codes, scale, fmt, granularity, dtype).dtype == dtype


def test__memory__is_shared_where_torch_can():
    codes = fnp.encode(np.float32([1, 2, 3]), E4M3FN)
    packed = fnp.pack(codes, E4M3FN)
    assert np.shares_memory(packed, codes)
    assert np.shares_memory(fnp.unpack(packed, E4M3FN, (3,)), codes)
    x = np.float32([0.3, 5])
    fnp.fake_quantize(x, E4M3FN)
    assert np.array_equal(x, np.float32([0.3, 5]))


def test__awkward_arrays__are_read_as_what_they_mean():
    x = np.linspace(-3, 3, 60, dtype=np.float32).reshape(6, 10)
    frozen = x.copy()
    frozen.flags.writeable = False
    record = np.zeros(6, dtype=[("a", "u1"), ("x", "f4")])
    record["x"] = x[:, 0]
    awkward = [x[::-1], x[:, ::-2], x.T, x.astype(">f4"), frozen, np.broadcast_to(x[0], (4, 10))]
    for array in [*awkward, record["x"], np.float32(0.3), x[:0], x[0].tolist()]:
        plain = np.array(array, dtype=np.asarray(array).dtype.newbyteorder("="))
        got, want = fnp.encode(array, E4M3FN), fnp.encode(plain, E4M3FN)
        assert np.array_equal(bits(got), bits(want))
        assert got.shape == plain.shape


def test__a_generator_of_numpy__drives_stochastic_rounding():
    x = np.full(4000, 1.03, np.float32)

    def draw(seed, function=fnp.encode, *args):
        generator = np.random.default_rng(seed)
        return function(x, E4M3FN, *args, rounding="stochastic", generator=generator)

    for function, args in ((fnp.encode, ()), (fnp.fake_quantize, ())):
        one, again, other = (draw(seed, function, *args) for seed in (0, 0, 1))
        assert np.array_equal(bits(one), bits(again))
        assert not np.array_equal(bits(one), bits(other))
    assert abs(draw(0, fnp.fake_quantize).mean() - 1.03) < 0.004
    codes, scale = draw(0, fnp.quantize_blocks, 32)
    again, _ = draw(0, fnp.quantize_blocks, 32)
    assert np.array_equal(bits(codes), bits(again))
    assert abs(fnp.dequantize_blocks(codes, scale, E4M3FN, 32).mean() - 1.03) < 0.004


@pytest.mark.parametrize(
    "bad", [np.arange(3), np.array([True]), np.array([1j]), np.array([None]), np.array(["1"])]
)
def test__what_is_no_float__is_refused_with_what_is_allowed(bad):
    calls = [fnp.encode, fnp.fake_quantize, lambda x, fmt: fnp.quantize_blocks(x, fmt, 2)]
    for call in calls:
        with pytest.raises(DTypeError, match="allowed are float64, float32, float16, bfloat16"):
            call(bad, E4M3FN)


def test__longdouble__is_refused():
    with pytest.raises(DTypeError, match="allowed are float64"):
        fnp.encode(np.ones(2, dtype=np.longdouble), E4M3FN)


def test__what_does_not_fit__is_refused():
    codes = fnp.encode(np.float32([1, 2, 3]), E2M1FN)
    with pytest.raises(DTypeError, match="codes of E4M3FN are arrays of float8_e4m3fn or uint8"):
        fnp.decode(codes, E4M3FN)
    with pytest.raises(DTypeError, match="codes of E2M1FN are"):
        fnp.pack(np.zeros(3), E2M1FN)
    with pytest.raises(DTypeError, match="packed codes of E2M1FN are uint8, got float32"):
        fnp.unpack(np.zeros(2, np.float32), E2M1FN, (3,))
    with pytest.raises(ShapeError, match=r"shape \(2,\); got \(3,\)"):
        fnp.unpack(np.zeros(3, np.uint8), E2M1FN, (3,))
    with pytest.raises(DTypeError, match="cannot decode to int32"):
        fnp.decode(codes, E2M1FN, np.int32)
    with pytest.raises(DTypeError, match="scales are arrays of float8_e8m0fnu or float32"):
        fnp.dequantize_blocks(codes, np.uint8([127]), E2M1FN, 32)
    with pytest.raises(DTypeError):
        fnp.dequantize_blocks(codes, np.float64(1), E2M1FN, PerTensor())
    with pytest.raises(ShapeError, match="have shape"):
        fnp.dequantize_blocks(codes, np.float32([1, 1]), E2M1FN, PerBlock((32,)))
    with pytest.raises(FormatError, match="unknown format 'e1'"):
        fnp.encode(np.float32([1]), "e1")
    with pytest.raises(DTypeError, match=r"numpy.random.Generator, got int"):
        fnp.encode(np.float32([1]), BF16, generator=3)


def test__names__are_formats_by_name():
    x = np.float32([0.3, 7])
    assert np.array_equal(bits(fnp.encode(x, "E4M3FN")), bits(fnp.encode(x, E4M3FN)))
