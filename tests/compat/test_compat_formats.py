"""`FPFormat`: the numbers of a format by its bits, and rounding to them."""

import pytest
import torch
from tensors import gaussian

from scaledtensor import errors, formats
from scaledtensor.compat.unit_scaling.formats import FPFormat, format_to_tuple, tuple_to_format

#: All values of E2M1 in the published library: no infinity and no NaN.
E2M1 = {0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3}


def test__a_format__says_what_it_is():
    fmt = FPFormat(2, 1)
    assert (fmt.bits, str(fmt), str(FPFormat(2, 1, "nearest"))) == (4, "E2M1-SR", "E2M1-RN")
    assert (fmt.max_absolute_value, fmt.min_absolute_normal) == (3, 0.5)
    assert fmt.min_absolute_subnormal == 0.25
    assert format_to_tuple(fmt) == (2, 1)
    assert tuple_to_format((2, 1)) == fmt


@pytest.mark.parametrize(("exponent", "mantissa"), [(2, 1), (3, 0), (3, 2), (4, 0), (6, 9), (7, 4)])
def test__its_numbers__are_the_published_ones(exponent, mantissa):
    published = pytest.importorskip("unit_scaling.formats")
    theirs, ours = published.FPFormat(exponent, mantissa), FPFormat(exponent, mantissa)
    for fact in ("bits", "max_absolute_value", "min_absolute_normal", "min_absolute_subnormal"):
        assert getattr(ours, fact) == getattr(theirs, fact)
    x = gaussian(4096) * 4
    x = torch.cat([x, torch.tensor([0.0, -0.0, ours.max_absolute_value * 1.5])])
    nearest = published.FPFormat(exponent, mantissa, "nearest").quantise(x)
    assert torch.equal(FPFormat(exponent, mantissa, "nearest").quantise(x), nearest)


def test__the_whole_range__is_reached():
    x = torch.linspace(-4, 4, 100)
    assert {*FPFormat(2, 1).quantise_fwd(x).abs().tolist()} == E2M1
    octaves = FPFormat(3, 0).quantise_fwd(torch.linspace(-10, 10, 1000)).abs()
    assert {*octaves.tolist()} == {0, 0.125, 0.25, 0.5, 1, 2, 4, 8}


@pytest.mark.parametrize("srbits", [0, 13])
def test__stochastic_rounding__is_unbiased(srbits):
    torch.manual_seed(0)
    y = FPFormat(2, 1, "stochastic", srbits).quantise(torch.full((10_000,), -1.35))
    assert {*y.tolist()} == {-1.5, -1.0}
    assert float(y.mean()) == pytest.approx(-1.35, abs=0.01)


def test__few_random_bits__are_few():
    torch.manual_seed(0)
    # This is 0.7 of a step, so 1/2 remains.
    y = FPFormat(2, 1, srbits=1).quantise(torch.full((10_000,), 1.35))
    assert float((y == 1.5).float().mean()) == pytest.approx(0.5, abs=0.02)


def test__each_direction__rounds_alone():
    torch.manual_seed(0)
    x = torch.linspace(-4, 4, 100).requires_grad_()
    seed = torch.linspace(-4, 4, 100)
    y = FPFormat(2, 1).quantise_fwd(x)
    y.backward(seed)
    assert {*y.abs().tolist()} == E2M1
    assert torch.equal(x.grad, seed)
    x.grad = None
    y = FPFormat(2, 1).quantise_bwd(x)
    y.backward(seed)
    assert torch.equal(y, x)
    assert {*x.grad.abs().tolist()} == E2M1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test__other_dtypes__stay_and_so_do_shapes(dtype):
    """The published function reads pairs of 16-bit numbers as one 32-bit number."""
    x = torch.randn(6, 4).to(dtype)
    y = FPFormat(4, 3, "nearest").quantise(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert torch.equal(y, formats.fake_quantize(x, formats.E4M3FN))
    if dtype.itemsize == 2:
        published = pytest.importorskip("unit_scaling.formats")
        assert published.FPFormat(4, 3, "nearest").quantise(x).shape == (6, 2)


def test__standard_formats__are_the_standards():
    names = {(4, 3): "e4m3fn", (5, 2): "e5m2", (5, 10): "fp16", (8, 7): "bf16", (8, 23): "fp32"}
    assert {bits: FPFormat(*bits).format.name for bits in names} == names
    x = torch.tensor([300.0, 1000.0])
    assert FPFormat(4, 3, "nearest").quantise(x).tolist() == [288, 448]


def test__ties__go_to_even():
    x = torch.tensor([1.25, 1.75, 2.5])
    assert FPFormat(2, 1, "nearest").quantise(x).tolist() == [1, 2, 2]
    published = pytest.importorskip("unit_scaling.formats")
    assert published.FPFormat(2, 1, "nearest").quantise(x).tolist() == [1, 1.5, 2]


def test__compiled__it_rounds_alike():
    fmt = FPFormat(3, 2, "nearest")
    x, seed = torch.randn(64, requires_grad=True), torch.randn(64)
    compiled = torch.compile(
        lambda x: fmt.quantise_bwd(fmt.quantise_fwd(x)), fullgraph=True, backend="aot_eager"
    )
    y = compiled(x)
    assert torch.equal(y, fmt.quantise(x))
    assert torch.equal(torch.autograd.grad(y, x, seed)[0], fmt.quantise(seed))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((1, 2), errors.FormatError, "2 to 8"),
        ((9, 2), errors.FormatError, "exponent_bits"),
        ((2, 1, "up"), errors.FormatError, "'stochastic', 'nearest'"),
        ((2, 1, "nearest", 3), errors.FormatError, "srbits"),
        ((8, 10), errors.UnsupportedError, "16 bits"),
    ],
)
def test__what_is_no_format__is_named(arguments, error, words):
    with pytest.raises(error, match=words):
        FPFormat(*arguments)
