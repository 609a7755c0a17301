"""The casts are the same functions under torch.compile and under tracing."""

import pytest
import torch
import torch._dynamo.testing
from formats_oracle import ALL, OWN, ROUNDINGS, SHORT, all_codes, every_16_bit, raw, same
from tensors import gaussian
from torch._subclasses.fake_tensor import FakeTensorMode

from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import (
    BF16,
    E2M1FN,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E8M0FNU,
    FP32,
    INT8,
    decode,
    encode,
    fake_quantize,
)

MODES = ("saturate", "saturate_finite", "ieee")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _assert_compiled_alike(run, x):
    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert got.dtype is want.dtype
        real = ~x.isnan()
        assert torch.equal(raw(got)[real], raw(want)[real])


#: One format of every kind of specials and of storage.
KINDS = [E4M3FN, E5M2, E4M3FNUZ, E2M1FN, INT8, E8M0FNU, BF16, FP32, OWN[2], OWN[6], OWN[7]]


def _every_encode(formats):
    return lambda x: [encode(x, fmt, overflow=mode) for fmt in formats for mode in MODES]


def test__encode__eager_equals_compiled():
    _assert_compiled_alike(_every_encode(KINDS), every_16_bit(torch.bfloat16))


@pytest.mark.slow
def test__every_format__encodes_alike_compiled():
    for x in (every_16_bit(torch.bfloat16), every_16_bit(torch.bfloat16).float()):
        _assert_compiled_alike(_every_encode([*ALL, *OWN]), x)


def test__every_rounding__eager_equals_compiled():
    x = every_16_bit(torch.bfloat16).double() * (1 + 2**-40)

    def run(x):
        cases = [(x, E4M3FN), (x.float(), E5M2), (x.float(), INT8), (x.float(), E8M0FNU)]
        return [encode(y, f, rounding=r, overflow="ieee") for y, f in cases for r in ROUNDINGS]

    _assert_compiled_alike(run, x)


@pytest.mark.parametrize("overflow", MODES)
def test__fake_quantize__eager_equals_compiled(overflow):
    x = every_16_bit(torch.bfloat16).float()
    formats = [fmt for fmt in (*KINDS, *OWN) if fmt.bits <= 12]

    def run(x):
        return [fake_quantize(x, fmt, overflow=overflow) for fmt in formats]

    for got, want, fmt in zip(torch.compile(run, fullgraph=True)(x), run(x), formats, strict=True):
        alike = same(got, want) | (x.isnan() & (got == 0) & (want == 0))
        assert alike.all(), fmt


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


@pytest.mark.parametrize("dynamic", [None, True])
def test__a_format_that_is_an_argument__is_a_constant(dynamic):
    """The second compilation works too. torch 2.15 made symbols of its integers, for which no code
    can be written."""
    torch.compiler.reset()
    x = gaussian(4, 24)

    def run(x, fmt):
        return decode(encode(x, fmt), fmt) + fake_quantize(x, fmt)

    cast = torch.compile(run, fullgraph=True, dynamic=dynamic)
    for fmt in (E4M3FN, E5M2, E2M1FN):
        assert torch.equal(cast(x, fmt), run(x, fmt))


def test__a_users_own_region__takes_any_shape_without_recompiling():
    """The cast is fused with its neighbours inside a compiled function, in one graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def region(x, w):
        y = fake_quantize(torch.nn.functional.gelu(x @ w), E4M3FN)
        codes = encode(y * 2, E2M1FN, rounding="nearest_away")
        noise = fake_quantize(y, OWN[0], rounding="stochastic")
        return y, decode(codes, E2M1FN, y.dtype), noise.float().isfinite()

    w = torch.randn(24, 40)
    for rows in (3, 16, 33, 130):
        x = torch.randn(rows, 24)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=1 << 20)
        y, z, finite = region(x, w)
        assert y.shape == z.shape == (rows, 40)
        assert torch.equal(fake_quantize(y, E4M3FN), y)
        assert torch.equal(z, fake_quantize(y * 2, E2M1FN, rounding="nearest_away"))
        assert finite.all()
    assert counter.frame_count == 1


def test__large_tensors_of_any_strides__compile_to_the_same_values():
    formats = (BF16, E4M3FNUZ)

    def run(x):
        codes = [encode(x, fmt) for fmt in formats]
        pairs = zip(codes, formats, strict=True)
        return [*codes, *(decode(c, fmt, torch.float16) for c, fmt in pairs)]

    x = torch.randn(3, 300, 400).bfloat16()
    for view in (x.permute(2, 0, 1), x[:, ::2].transpose(0, 1)):
        for got, want in zip(torch.compile(run, fullgraph=True)(view), run(view), strict=True):
            assert torch.equal(raw(got), raw(want))


def test__a_generator__is_refused_with_the_way_around():
    @torch.compile(fullgraph=True, backend="eager")
    def run(x, generator):
        return encode(x, E4M3FN, rounding="stochastic", generator=generator)

    with pytest.raises(Exception, match=UnsupportedError.__name__):
        run(torch.zeros(4), torch.Generator())


@pytest.mark.parametrize("fmt", ALL, ids=repr)
def test__fake_and_meta_tensors__have_the_dtypes_of_real_ones(fmt):
    with FakeTensorMode():
        fake = torch.empty(3, 4)
        assert encode(fake, fmt).dtype is fmt.storage_dtype
        assert decode(encode(fake, fmt), fmt, torch.bfloat16).shape == (3, 4)
    meta = torch.empty(3, 4, device="meta")
    assert fake_quantize(meta, fmt).device.type == "meta"
    assert decode(encode(torch.ones(2), fmt), fmt).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", [E4M3FN, BF16, E2M1FN], ids=lambda f: f.name)
def test__part_of_an_intermediate__is_rounded_as_itself(fmt, rounding):
    """Inductor may copy a view into a buffer of its own size: pytorch issue 197431."""
    x = torch.arange(1.0, 65).view(8, 8)
    key = torch.tensor([1, 2], dtype=torch.int32) if rounding == "stochastic" else None

    def run(x):
        return fake_quantize((x * 0.3)[:, :4], fmt, rounding=rounding, generator=key)

    assert torch.equal(torch.compile(run, fullgraph=True)(x), run(x))
