"""Under torch.compile, and under tracing, the casts are the same functions."""

import pytest
import torch
from formats_oracle import ALL, SHORT, all_codes, every_16_bit, raw, same
from torch._subclasses.fake_tensor import FakeTensorMode

from scaledtensor.formats import E4M3FN, E8M0FNU, FP32, decode, encode, fake_quantize

MODES = ("saturate", "ieee")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _encode_all(x):
    return [encode(x, fmt, overflow=mode) for fmt in ALL for mode in MODES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test__encode__eager_equals_compiled(dtype):
    x = every_16_bit(torch.bfloat16).to(dtype)
    if dtype is torch.float64:
        x = x * (1 + 2**-40)
    real = ~x.isnan()
    for got, want in zip(
        torch.compile(_encode_all, fullgraph=True)(x), _encode_all(x), strict=True
    ):
        assert got.dtype is want.dtype
        assert torch.equal(raw(got)[real], raw(want)[real])


def test__decode__eager_equals_compiled():
    codes = [all_codes(fmt) for fmt in SHORT]

    def run(codes):
        pairs = list(zip(codes, SHORT, strict=True))
        return [decode(c, f, d) for c, f in pairs for d in (torch.float32, torch.bfloat16)]

    for got, want in zip(torch.compile(run, fullgraph=True)(codes), run(codes), strict=True):
        assert same(got, want).all()


def test__fake_quantize__is_not_elided_when_fused():
    x = torch.randn(4096) * torch.randn(4096).exp()

    def run(x):
        return [fake_quantize(x, fmt) * 1 for fmt in ALL if fmt is not E8M0FNU]

    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert torch.equal(got, want)


def test__new_shapes_and_formats__compile_once_each():
    counter = torch._dynamo.testing.CompileCounter()
    cast = torch.compile(fake_quantize, fullgraph=True, backend=counter, dynamic=True)
    for n in (16, 17, 400):
        cast(torch.randn(n), E4M3FN)
    assert counter.frame_count == 1
    cast(torch.randn(8), FP32)
    assert counter.frame_count == 2


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test__fake_and_meta_tensors__have_the_dtypes_of_real_ones(fmt):
    with FakeTensorMode():
        fake = torch.empty(3, 4)
        assert encode(fake, fmt).dtype is fmt.storage_dtype
        assert decode(encode(fake, fmt), fmt, torch.bfloat16).shape == (3, 4)
    meta = torch.empty(3, 4, device="meta")
    assert fake_quantize(meta, fmt).device.type == "meta"
    assert decode(encode(torch.ones(2), fmt), fmt).tolist() == [1.0, 1.0]
