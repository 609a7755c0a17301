"""Casts under scales of blocks by the loop in C++: the bits of `quantize_blocks`."""

import pytest
import torch
from assertions import assert_each
from tensors import gaussian

from scaledtensor import Dynamic, Static, native
from scaledtensor.formats import FORMATS
from scaledtensor.ops.products import quantize
from scaledtensor.ops.products.quantize import factors, quantized
from scaledtensor.quantization import inputs
from scaledtensor.recipes.casts import Amax, Cast, Microscale, TwoLevel

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())

SCALES = [
    *(Amax(), Amax(power_of_two=True), TwoLevel()),
    *(Microscale(mode) for mode in ("rceil", "floor", "ceil", "even")),
]
BLOCKS = [(0, 0), (1, 0), (1, 16), (1, 32)]


def casts():
    for fmt in FORMATS.values():
        if fmt.bits <= 8 and fmt.has_zero:
            yield from (
                Cast(fmt, scale, block)
                for scale in SCALES
                for block in BLOCKS
                if not (isinstance(scale, TwoLevel) and block[1] == 0)
            )


def hard_rows(k):
    """Rows of Gaussian numbers of many sizes, of zeros, of both extremes, and of any bits."""
    rows = torch.cat(
        [gaussian(2, k, seed=i) * 2.0**e for i, e in enumerate((-140, -40, 0, 60, 126))]
    )
    bits = torch.randint(-(2**31), 2**31, (6, k), generator=torch.Generator().manual_seed(3))
    drawn = bits.int().view(torch.float32).nan_to_num(1.0, 3e38, -3e38)
    ties = torch.arange(k).float()[None] / 16 - k / 32
    extremes = torch.tensor([3.4028234663852886e38, 1e-45, -0.0, -1e-45]).repeat(k)[None, :k]
    return torch.cat(
        [rows, drawn, ties, ties * 2.0**-130, extremes, torch.zeros(2, k), rows[:1] * 0]
    )


def same(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*map(_bits, (a, b)))


def _bits(x):
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("k", [64, 75])
def test__every_cast__has_the_bits_of_the_reference(k, monkeypatch):
    x = hard_rows(k)

    def check(cast):
        for held in (x, x.bfloat16().clamp(-3e38, 3e38), x[4:5].contiguous()):
            made = inputs._by_loop(held, cast, None)
            coded = quantized(held, torch.ones(()), cast, -1)
            wanted = factors(coded, cast, -1)
            assert made is not None
            assert all(map(same, made, wanted)), held.dtype

    for dtype in (torch.float32, torch.bfloat16):  # of machines with and without BF16 units
        monkeypatch.setattr(quantize, "product_dtype", lambda device, dtype=dtype: dtype)
        assert_each(casts(), check)


def test__a_given_scale__saturates_as_the_reference_does():
    x = hard_rows(64)

    def check(name):
        config = Static(name)
        for scale in (1.0, 0.37, 2.0**-100, 3e38):
            held = torch.tensor(scale)
            made = inputs._by_loop(x, config.input, held)
            wanted = factors(inputs.coded_input(x, config, held), config.input, -1)
            assert made is not None
            assert all(map(same, made, wanted)), scale

    assert_each(["e4m3fn", "e5m2", "int8", "e4m3fnuz"], check)


def test__other_elements_and_casts__are_left_to_the_reference():
    cast = Dynamic().input
    for bad in (torch.inf, torch.nan, -torch.inf):
        x = gaussian(3, 64)
        x[1, 5] = bad
        assert inputs._by_loop(x, cast, None) is None
        values, _ = inputs.factored(x, Dynamic(), None)
        assert values.isnan().any() or values.isinf().any()
    x = gaussian(3, 64)
    assert inputs._by_loop(x.mT, cast, None) is None
    assert inputs._by_loop(x.double(), cast, None) is None
    assert inputs._by_loop(x[:0], cast, None) is None
    assert inputs._by_loop(x, Cast(FORMATS["e4m3fn"], Amax(margin=1), (1, 0)), None) is None
    assert inputs._by_loop(x, Cast(FORMATS["e4m3fn"], Amax(), (1, 0), "stochastic"), None) is None
    assert inputs._by_loop(x, Cast(FORMATS["e4m3fn"], Amax(), (2, 32)), None) is None


def test__threads__change_no_bit():
    x, threads = gaussian(300, 512), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = inputs.factored(x, Dynamic(), None)
        torch.set_num_threads(2)
        assert all(map(same, inputs.factored(x, Dynamic(), None), one))
    finally:
        torch.set_num_threads(threads)
