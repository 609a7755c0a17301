"""`decode` agrees with ml_dtypes on all codes."""

import pytest
import torch
from formats_oracle import ALL, BYTES, OWN, SHORT, all_codes, ml_decode, same

from scaledtensor.errors import DTypeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, E8M0FNU, FP16, FP32, decode
from scaledtensor.testing.reference import ladder

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [*SHORT, *OWN], ids=repr)
def test__every_code__decodes_as_ml_dtypes(fmt, dtype):
    codes = all_codes(fmt)
    got = decode(codes, fmt, dtype)
    assert got.dtype is dtype
    # If dtype is too narrow for the format, the exact value is rounded once.
    assert same(got, ml_decode(codes, fmt).to(dtype)).all()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
def test__bfloat16__holds_every_operand_of_the_gemm(fmt):
    codes = all_codes(fmt)
    assert same(decode(codes, fmt, torch.bfloat16).float(), decode(codes, fmt)).all()


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
def test__reference__is_the_definition(fmt):
    values = torch.tensor([float(v) for v in ladder(fmt)])
    assert torch.equal(ml_decode(all_codes(fmt)[: len(values)], fmt), values)


@pytest.mark.parametrize("fmt", [*ALL, *OWN], ids=repr)
def test__value__is_what_decode_gives(fmt):
    if fmt is FP32:
        values = [0.0, 1.0, -2.5, FP32.max, FP32.min_normal, FP32.min_subnormal]
        codes = torch.tensor(values).view(torch.int32).tolist()
        assert [fmt.value(c % (1 << 32)) for c in codes] == values
        return
    codes = all_codes(fmt)
    values = torch.tensor([fmt.value(c) for c in range(fmt.num_codes)])
    assert same(values, ml_decode(codes, fmt)).all()
    assert same(values, fmt.values()).all()


@pytest.mark.parametrize("fmt", [*BYTES, *OWN, E8M0FNU], ids=repr)
def test__slices_and_strides__decode_alike(fmt):
    codes = all_codes(fmt)
    want = ml_decode(codes, fmt)
    # Odd starts and odd lengths have no whole pairs of codes.
    for cut in (slice(1, None), slice(1, -1), slice(0, 5), slice(3, 4), slice(None, None, 3)):
        assert same(decode(codes[cut], fmt), want[cut]).all()
    grid = codes.view(4, -1)
    assert same(decode(grid.t(), fmt), want.view(4, -1).t()).all()
    assert decode(codes[:0].view(0, 3), fmt).shape == (0, 3)
    assert decode(codes[:0][::2], fmt).shape == (0,)
    assert decode(codes[1], fmt).shape == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [(1 << 18) + 2, (1 << 18) + 7])
def test__large_tensors__decode_as_their_codes_do(count, dtype):
    codes = all_codes(E4M3FN).repeat(count // 256 + 1)[:count]
    want = decode(all_codes(E4M3FN), E4M3FN, dtype)[codes.view(torch.uint8).int()]
    assert same(decode(codes, E4M3FN, dtype), want).all()


def test__denormals_flushed__decode_is_still_exact():
    codes = all_codes(E4M3FN)
    want = ml_decode(codes, E4M3FN)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        got = decode(codes, E4M3FN)
    finally:
        torch.set_flush_denormal(False)
    assert same(got, want).all()


def test__wrong_dtypes__are_refused():
    with pytest.raises(DTypeError, match=r"codes of E4M3FN are torch.float8_e4m3fn, got torch.ui"):
        decode(torch.zeros(2, dtype=torch.uint8), E4M3FN)
    with pytest.raises(DTypeError, match=r"cannot decode to torch.int32; allowed are float32"):
        decode(torch.zeros(2), FP32, torch.int32)
    with pytest.raises(DTypeError, match="codes of FP16"):
        decode(torch.zeros(2, dtype=torch.bfloat16), FP16)
    assert decode(torch.ones(2, dtype=torch.bfloat16), BF16, torch.float64).dtype is torch.float64
