"""Products with codes: the order of additions to the bit, and results that do not depend on the
other rows, the threads, the vectors of the CPU, or on the form in which a weight is stored."""

import platform
from itertools import product

import numpy as np
import pytest
import torch
from assertions import assert_each
from tensors import gaussian

from scaledtensor import native
from scaledtensor.errors import ShapeError
from scaledtensor.formats import FORMATS, FP32, custom, decode, encode, pack
from scaledtensor.native.products import coded_product, dot_rows

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())

#: E3M0 has four bits, and its values are powers of two.
CODED = [f for f in FORMATS.values() if f.bits <= 8 and f.signed] + [
    custom(3, 0, has_inf=False, has_nan=False)
]
#: (M, N, K). One to four rows and more, rows of whole and of broken chunks, of one block and more.
SHAPES = [(1, 5, 96), (2, 6, 40), (3, 9, 7), (4, 3, 64), (17, 53, 299), (131, 50, 600)]


def stored(fmt, n, k, seed=1):
    """Codes of Gaussian numbers as `pack` stores them, and their values."""
    codes = encode(gaussian(n, k, seed=seed, power=4 if fmt.is_integer else 0), fmt)
    return pack(codes, fmt), decode(codes, fmt)


def spread(scale, block, k):
    """The scales of blocks, one for each element of a row."""
    return scale.float().repeat_interleave(block, 1)[:, :k]


def in_order(x, w, factor=1.0):
    """The formula of `products.cpp` in NumPy. Each product has to be a float32, so that a fused
    multiply-add rounds nothing but the sum."""
    x, w = (np.pad(a, ((0, 0), (0, -a.shape[1] % 8))) for a in (x.numpy(), w.numpy()))
    lane = np.zeros((len(x), len(w), 8), np.float32)
    for k in range(0, x.shape[1], 8):
        terms = x[:, None, k : k + 8] * w[None, :, k : k + 8]
        exact = x[:, None, k : k + 8].astype(np.float64) * w[None, :, k : k + 8]
        assert (terms == exact).all()
        lane = lane + terms
    s = lane[..., :4] + lane[..., 4:]
    total = ((s[..., 0] + s[..., 2]) + (s[..., 1] + s[..., 3])) + np.float32(0)
    return torch.from_numpy(total * np.float32(factor))


def halves(*shape, seed=0):
    """Gaussian bfloat16 numbers, in float32."""
    return gaussian(*shape, seed=seed, dtype=torch.bfloat16).float()


def test__coded_product__adds_in_the_order_of_the_formula():
    def check(case):
        fmt, (m, n, k) = case
        x, (codes, values) = halves(m, k), stored(fmt, n, k)
        y = coded_product(x, codes, fmt, shape=(n, k))
        assert torch.equal(y, in_order(x, values))
        block, dtype = (16, torch.float8_e4m3fn) if fmt.bits == 4 else (32, torch.float8_e8m0fnu)
        scale = gaussian(n, -(-k // block), seed=2).abs().add(0.01).to(dtype)
        y = coded_product(x, codes, fmt, scale, block, 0.3, (n, k))
        assert torch.equal(y, in_order(x, values * spread(scale, block, k), 0.3))

    assert_each(product(CODED, SHAPES[:5]), check)
    x, w = halves(5, 70), halves(9, 70, seed=3)
    assert torch.equal(coded_product(x, w.bfloat16(), FORMATS["bf16"]), in_order(x, w))
    assert torch.equal(coded_product(x, w, FP32), in_order(x, w))


def test__coded_product__has_the_bits_of_the_values_in_float32__and_of_each_row_alone():
    def check(case):
        fmt, (m, n, k) = case
        x, (codes, values) = gaussian(m, k), stored(fmt, n, k)
        y = coded_product(x, codes, fmt, shape=(n, k))
        assert torch.equal(y, coded_product(x, values, FP32))
        alone = [coded_product(row[None], codes, fmt, shape=(n, k)) for row in x[:9]]
        assert torch.equal(y[:9], torch.cat(alone))
        assert torch.equal(y, dot_rows(x[None], values[None])[0])
        block = 16 if fmt.bits == 4 else 128
        scale = gaussian(n, -(-k // block), seed=2)
        scaled = coded_product(x, codes, fmt, scale, block, shape=(n, k))
        want = coded_product(x, values * spread(scale, block, k), FP32)
        assert torch.equal(scaled, want)
        half = coded_product(x.bfloat16(), codes, fmt, scale, block, shape=(n, k))
        wide = coded_product(x.bfloat16().float(), codes, fmt, scale, block, shape=(n, k))
        assert torch.equal(half, wide.bfloat16())

    assert_each(product(CODED, SHAPES), check)


def test__a_product__is_near_the_product_in_float64():
    def check(case):
        fmt, (m, n, k) = case
        x, (codes, values), scale = gaussian(m, k), stored(fmt, n, k), gaussian(n, 1, seed=2)
        y = coded_product(x, codes, fmt, scale, whole=torch.tensor(0.7), shape=(n, k))
        wide = values.double() * scale.double() * 0.7
        bound = (k / 8 + 6) * 2.0**-24 * (x.double().abs() @ wide.abs().mT)
        assert ((y - x.double() @ wide.mT).abs() <= bound).all()

    assert_each(product(CODED, SHAPES), check)


def test__a_result__does_not_depend_on_zeros_behind_threads_or_the_mode_of_a_thread():
    k = 300
    x = gaussian(20, k, power=-60)
    values = gaussian(4096, k, seed=1, power=-75)  # most products are subnormal
    few, many = (coded_product(part, values, FP32) for part in (x[:1], x))
    assert torch.equal(few, many[:1])
    assert few.abs().max() < 2.0**-126
    longer = torch.nn.functional.pad(x, (0, 77)), torch.nn.functional.pad(values, (0, 77))
    assert torch.equal(coded_product(*longer, FP32), many)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(coded_product(x, values, FP32), many)
        assert torch.equal(coded_product(x[:1], values, FP32), few)
        if torch.set_flush_denormal(True):
            assert torch.equal(coded_product(x, values, FP32), many)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def test__dot_rows__reads_strided_stacks():
    qkv = gaussian(2, 40, 3 * 24).view(2, 40, 3, 24)
    a, b = qkv[:, :, 0], qkv[:, :, 1]
    got = dot_rows(a, b)
    assert all(torch.equal(got[i], coded_product(a[i].clone(), b[i].clone(), FP32)) for i in (0, 1))
    half = dot_rows(a.bfloat16(), b.bfloat16())
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), got, rtol=2.0**-6, atol=0.3)
    expanded = b[:1].expand(2, -1, -1)
    assert torch.equal(dot_rows(a, expanded)[1], dot_rows(a[1:], b[:1])[0])
    assert dot_rows(a.mT, b.mT) is None
    with pytest.raises(ShapeError, match=r"\(B, M, K\) and \(B, N, K\)"):
        dot_rows(a, b[..., :8])


def test__special_codes_and_numbers__give_what_the_values_give():
    """NaN and infinity in codes, in scales and in x, and numbers near the ends of float32."""

    def check(case):
        fmt, m = case
        codes = torch.arange(256).to(torch.uint8).view(4, 64)
        codes = codes & (2**fmt.bits - 1)
        values = decode(codes.view(fmt.storage_dtype), fmt)
        packed = pack(codes.view(fmt.storage_dtype), fmt)
        for x in (
            gaussian(m, 64),
            gaussian(m, 64, power=104),
            gaussian(m, 64, power=-130),
            gaussian(m, 64).index_fill(1, torch.tensor(3), float("inf")),
        ):
            y = coded_product(x, packed, fmt, shape=(4, 64))
            torch.testing.assert_close(
                y, coded_product(x, values, FP32), rtol=0.0, atol=0.0, equal_nan=True
            )

    assert_each(product(CODED, (1, 2, 4, 6)), check)
    codes, values = stored(FORMATS["e2m1fn"], 3, 320)
    for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        every = torch.arange(60, dtype=torch.uint8).view(3, 20)
        for raw in (every, every + 64, every + 128, every + 196):
            scale = raw.view(dtype)
            got = coded_product(
                torch.ones(1, 320), codes, FORMATS["e2m1fn"], scale, 16, 1, (3, 320)
            )
            want = coded_product(torch.ones(1, 320), values * spread(scale, 16, 320), FP32)
            torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def test__scales__are_for_the_tensor_rows_squares_and_blocks_of_a_whole_row():
    fmt, (m, n, k) = FORMATS["e4m3fn"], (3, 300, 300)
    x, (codes, values) = gaussian(m, k), stored(fmt, n, k)
    plain = coded_product(x, codes, fmt)
    rows = gaussian(n, seed=2)
    assert torch.equal(coded_product(x, codes, fmt, torch.tensor(3.0)), plain * 3.0)
    assert torch.equal(coded_product(x, codes, fmt, rows), plain * rows)
    assert torch.equal(coded_product(x, codes, fmt, rows[:, None], whole=0.3), plain * (rows * 0.3))
    of_values = coded_product(x, codes, fmt, rows[:, None], block=k)
    assert torch.equal(of_values, coded_product(x, values * rows[:, None], FP32))
    squares = gaussian(3, 3, seed=3)
    got = coded_product(x, codes, fmt, squares, 128, rows=128)
    each = squares.repeat_interleave(128, 0)[:n]
    assert torch.equal(got, coded_product(x, values * spread(each, 128, k), FP32))


def test__a_product_that_the_loop_does_not_serve__is_none_and_wrong_shapes_raise():
    fmt, x = FORMATS["e4m3fn"], gaussian(2, 96)
    codes, values = stored(fmt, 8, 96)
    scale = torch.ones(8, 4)
    assert coded_product(x.double(), codes, fmt) is None
    assert coded_product(x.half(), codes, fmt) is None
    assert coded_product(x.to("meta"), codes, fmt) is None
    assert coded_product(gaussian(96, 2).mT, codes, fmt) is None
    assert coded_product(x, codes.view(torch.uint8), fmt) is None
    assert coded_product(x, values.half(), FORMATS["fp16"]) is None
    assert coded_product(x, codes, fmt, scale, 24) is None
    assert coded_product(x, codes, fmt, scale.double(), 24) is None
    with native.left_out():
        assert coded_product(x, codes, fmt) is None
        assert dot_rows(x[None], x[None]) is None
    wrong = [
        lambda: coded_product(x[:, :64].contiguous(), codes, fmt, shape=(8, 96)),
        lambda: coded_product(x, codes[:, :64].contiguous(), fmt),
        lambda: coded_product(x[0], codes, fmt),
        lambda: coded_product(x, codes, fmt, scale, 32),
        lambda: coded_product(x, codes, fmt, torch.ones(7)),
    ]
    for call in wrong:
        with pytest.raises(ShapeError, match="got"):
            call()
    assert coded_product(x[:0], codes, fmt).shape == (0, 8)
    empty = coded_product(torch.empty(2, 0), torch.empty(3, 0), FP32)
    assert torch.equal(empty, torch.zeros(2, 3))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="vectors of another kind")
def test__a_cpu_without_these_vectors__gives_the_same_bits(monkeypatch):
    """Other CPUs run the C++ source without AVX2."""
    own = [source for source in native._SOURCES if source.name == "products.cpp"]
    monkeypatch.setattr(native, "_SOURCES", own)
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O1"))
    monkeypatch.setattr(native, "_of_cpu", lambda: ("-mfma",))
    plain = native._opened(native._compiler(), build=True)
    plain.scaledtensor_product.argtypes = native._FUNCTIONS["scaledtensor_product"]

    def check(case):
        fmt, (m, n, k) = case
        x, (codes, _) = gaussian(m, k), stored(fmt, n, k)
        scale = gaussian(n, -(-k // 16), seed=2)
        want = coded_product(x, codes, fmt, scale, 16, shape=(n, k))
        with monkeypatch.context() as patch:
            patch.setattr(native, "_found", (plain, "without AVX2"))
            assert torch.equal(coded_product(x, codes, fmt, scale, 16, shape=(n, k)), want)

    assert_each(product(CODED, SHAPES[:5]), check)
