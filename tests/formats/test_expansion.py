"""Groups widened to the range of a format follow the formula in float64 and keep their
guarantees."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError, ShapeError
from scaledtensor.formats import (
    BF16,
    E2M1FN,
    E4M3FN,
    E5M2,
    FP16,
    INT8,
    Expanded,
    Format,
    decode,
    dequantize_expanded,
    encode,
    quantize_expanded,
)

#: Error of float32 powers, relative to the distance between two values.
NEAR_A_TIE = 1e-3


def groups(sigma: float, count: int = 64, size: int = 128, seed: int = 0) -> Tensor:
    """Return log-normal magnitudes with signs, one group per row."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.exp(sigma * torch.randn(count, size, generator=rng, dtype=torch.float64))
    return (sizes * torch.randn(count, size, generator=rng).sign()).float()


def round_trip(x: Tensor, fmt=E4M3FN, group: int = 128) -> Tensor:
    return dequantize_expanded(quantize_expanded(x, fmt, group), fmt, group)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 4.0])
def test__codes__are_the_nearest_to_the_formula(fmt, sigma):
    x = groups(sigma)
    codes, amax, power = quantize_expanded(x, fmt)
    exact = x.double().abs()
    top, bottom = exact.amax(1), exact.amin(1)
    assert torch.equal(amax, top.float())
    p = torch.floor(16 * math.log2(fmt.max / (2 * fmt.min_subnormal)) / torch.log2(top / bottom))
    assert int((power - p.clamp(1, 255)).abs().max()) <= 1  # float32 logarithms lie next to a step.
    wide = fmt.max * (exact / top[:, None]) ** (power.double() / 16)[:, None]
    values = np.unique(np.abs(fmt.values().double().numpy()))
    values = values[np.isfinite(values)]
    found = decode(codes, fmt, torch.float32).double()
    assert torch.equal(found.sign(), x.double().sign())
    place = np.interp(wide.numpy(), values, np.arange(len(values)))
    error = np.abs(np.interp(found.abs().numpy(), values, np.arange(len(values))) - place)
    assert error.max() <= 0.5 + NEAR_A_TIE


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, INT8], ids=lambda f: f.name)
def test__values__are_the_inverse_of_the_formula(fmt):
    x = groups(1.0)
    made = quantize_expanded(x, fmt)
    ratio = decode(made.codes, fmt, torch.float32).double() / fmt.max
    want = ratio.abs() ** (16 / made.power.double())[:, None] * made.amax.double()[:, None]
    want = want * ratio.sign()
    found = dequantize_expanded(made, fmt)
    torch.testing.assert_close(found.double(), want, rtol=2.0**-18, atol=0)
    assert torch.equal(dequantize_expanded(made, fmt, dtype=torch.bfloat16), found.bfloat16())


def stands_out_of(group: Tensor) -> bool:
    sizes = group.abs().unique()
    return len(sizes) > 1 and bool(sizes[-1] > sizes[-2] * 2**6)


magnitudes = st.floats(2.0**-60, 2.0**60, width=32)
numbers = st.one_of(st.just(0.0), st.just(-0.0), magnitudes, magnitudes.map(lambda v: -v))


@settings(max_examples=300)
@given(st.lists(numbers, max_size=40), st.integers(1, 9), st.sampled_from([E4M3FN, E5M2, INT8]))
def test__any_finite_group__comes_back(given_, group, fmt):
    """A group keeps its signs, zeros and order. Its largest magnitude keeps every bit, or 16 digits
    if it stands out. No other element becomes zero."""
    x = torch.tensor(given_, dtype=torch.float32)
    y = round_trip(x, fmt, group)
    assert y.shape == x.shape
    assert bool(y.isfinite().all())
    assert torch.equal(y == 0, x == 0)
    assert torch.equal(y.sign(), x.sign())
    for a, b in zip(x.split(group), y.split(group), strict=True):
        if not len(a):  # of an empty tensor
            continue
        largest = a.abs().max()
        assert b.abs().max() == largest or stands_out_of(a)
        torch.testing.assert_close(b.abs().max(), largest, rtol=2.0**-16, atol=0)
        order = a.argsort(stable=True)
        assert bool((b[order].diff() >= 0).all())


@pytest.mark.parametrize("value", [1.0, 3.0, 1e-30, 2.0**-140, 3e38])
def test__a_group_of_one_magnitude__is_exact(value):
    x = torch.full((128,), value)
    x[::3] *= -1
    assert torch.equal(round_trip(x), x)
    x[5] = 0
    assert torch.equal(round_trip(x), x)


def test__nearly_one_magnitude__is_finer_than_the_format():
    x = torch.linspace(1.0, 1.1, 128)
    plain = decode(encode(x, E4M3FN), E4M3FN, torch.float32)
    assert float((round_trip(x) - x).abs().max()) < 0.0045
    assert float((plain - x).abs().max()) > 0.04


def test__zeros__come_back_as_zeros():
    made = quantize_expanded(torch.zeros(3, 50), E4M3FN)
    assert not made.codes.float().any()
    assert torch.equal(made.amax, torch.ones(2))
    assert not dequantize_expanded(made, E4M3FN).any()
    empty = quantize_expanded(torch.zeros(0, 4), E4M3FN)
    assert dequantize_expanded(empty, E4M3FN).shape == (0, 4)


def test__one_number_among_zeros__is_exact():
    x = torch.zeros(256)
    x[200] = -1.7e-9
    assert torch.equal(round_trip(x), x)


def test__infinities_and_nans__have_no_say_in_their_group():
    x = groups(1.0, count=2)
    plain = round_trip(x)
    x[0, 3], x[0, 4], x[0, 5] = math.inf, -math.inf, math.nan
    kept = [i for i in range(128) if i not in (3, 4, 5)]
    of_rest = x[:1, kept].abs().amax()
    y = round_trip(x)
    assert float(y[0, 3]) == of_rest == -float(y[0, 4])
    assert bool(y[0, 5].isnan())
    assert bool(y[0, kept].isfinite().all())
    assert torch.equal(y[1], plain[1])
    assert bool(round_trip(torch.full((4,), math.inf)).isfinite().all())
    for fmt in (E4M3FN, INT8):
        assert round_trip(torch.tensor([2.0, -math.inf]), fmt).tolist() == [2.0, -2.0]


def test__groups__are_of_consecutive_elements_of_any_shape():
    x = groups(1.0, count=3, size=100)
    whole = quantize_expanded(x, E4M3FN, 128)
    assert whole.codes.shape == (3, 100)
    assert whole.amax.shape == whole.power.shape == (3,)
    for row, codes in zip(x.flatten().split(128), whole.codes.flatten().split(128), strict=True):
        alone = quantize_expanded(row, E4M3FN, 128)
        assert torch.equal(alone.codes.view(torch.uint8), codes.view(torch.uint8))
    column = torch.as_strided(x, (100, 3), (1, 100))
    assert torch.equal(round_trip(column), round_trip(column.contiguous()))


@pytest.mark.parametrize("sigma", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, INT8, FP16], ids=lambda f: f.name)
def test__stochastic_rounding__has_the_values_as_its_mean(fmt, sigma):
    """The mean is right for the values, not for the widened numbers. If the power is not 1, only
    one of both can be right."""
    draws = 4000
    x = groups(sigma, count=1).expand(draws, 128)
    rng = torch.Generator().manual_seed(0)
    made = quantize_expanded(x, fmt, rounding="stochastic", generator=rng)
    error = (dequantize_expanded(made, fmt).double() - x.double()) / x.abs()
    deviation = error.std(0) / draws**0.5
    assert bool((error.mean(0).abs() <= 5 * deviation + 1e-6).all())
    assert float(deviation.mean()) > 0


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e30])
def test__16_bits__are_kept_under_a_power_of_two(fmt, size):
    x = groups(1.0) * size
    codes, scale, power = quantize_expanded(x, fmt)
    assert codes.dtype == fmt.storage_dtype
    assert bool((power == 16).all())
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    top = codes.float().abs().amax(1)
    assert bool(((top >= 2.0**14) & (top <= 2.0**15)).all())
    back = dequantize_expanded(Expanded(codes, scale, power), fmt)
    torch.testing.assert_close(back, x, rtol=2.0 ** -(fmt.mantissa_bits + 1), atol=0)
    assert not dequantize_expanded(quantize_expanded(torch.zeros(9), fmt), fmt).any()


def test__compiled__is_eager_up_to_ties():
    """Runs without Inductor; the tests below look at Inductor's code for either half."""
    torch._dynamo.reset()
    x = groups(1.0)
    found = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, round_trip(x), rtol=2.0**-3, atol=0)
    assert float((found == round_trip(x)).float().mean()) > 0.999


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, INT8, E2M1FN, FP16], ids=lambda f: f.name)
def test__compiled_codes__are_eagers_up_to_ties(fmt):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: quantize_expanded(x, fmt), fullgraph=True)
    for sigma in (1e-3, 0.05, 0.3, 1.0, 4.0, 15.0):
        x = groups(sigma)
        found, wanted = compiled(x), quantize_expanded(x, fmt)
        assert torch.equal(found.amax, wanted.amax)
        assert torch.equal(found.power, wanted.power)
        apart = found.codes.view(torch.uint8) != wanted.codes.view(torch.uint8)
        assert float(apart.float().mean()) <= (0 if fmt is FP16 else 1e-3)
        one, other = (decode(c, fmt, torch.float32) for c in (found.codes, wanted.codes))
        step = 0.5 if fmt is E2M1FN else 0.26  # Two neighbouring codes differ by this.
        torch.testing.assert_close(one, other, rtol=step, atol=fmt.min_subnormal)
    if fmt in (E4M3FN, E5M2, INT8):
        assert_eagers_of_anything(compiled, fmt)


def assert_eagers_of_anything(compiled: Callable[[Tensor], Expanded], fmt: Format) -> None:
    """The kernels agree also for groups of zeros, of one number, of infinities and NaNs, and of
    very large numbers."""
    x = groups(1.0)
    x[0] = 0
    x[1, 1:] = 0
    x[2] = -3.0
    x[3] = torch.linspace(1.0, 1.0001, 128)
    x[4, 3:6] = torch.tensor([math.inf, -math.inf, math.nan])
    x[5] = math.nan
    x[6] = -math.inf
    x[7, :3] = torch.tensor([2.0**40, -(2.0**-50), 2.0**-45])
    x[8] *= 2.0**-120
    x[9] *= 2.0**120
    x[10, ::2] = 0
    x[11, 0] = -0.0
    made, eager = compiled(x), quantize_expanded(x, fmt)
    assert torch.equal(made.amax, eager.amax)
    assert torch.equal(made.power, eager.power)
    apart = made.codes.view(torch.uint8).int() - eager.codes.view(torch.uint8).int()
    assert int((apart != 0).sum()) <= 2
    assert int(apart.abs().max()) <= 1
    values = dequantize_expanded(made, fmt)
    assert torch.equal(values == 0, (x == 0) | (x.isnan() & (fmt is INT8)))
    assert torch.equal(values.isnan(), x.isnan() & (fmt is not INT8))
    finite = x.isfinite()
    assert torch.equal(values.sign()[finite], x.sign()[finite])
    assert bool((values[~x.isnan()].abs() <= made.amax.max()).all())


def test__values__are_eagers_compiled():
    torch._dynamo.reset()
    found = torch.compile(dequantize_expanded, fullgraph=True)
    for sigma in (1e-3, 1.0, 15.0):
        made = quantize_expanded(groups(sigma), E4M3FN)
        wanted = dequantize_expanded(made, E4M3FN)
        torch.testing.assert_close(found(made, E4M3FN), wanted, rtol=2.0**-18, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: quantize_expanded(x, "e8m0fnu"), FormatError, "e8m0fnu"),
        (lambda x: quantize_expanded(x, "fp32"), FormatError, "8 bits or fewer"),
        (lambda x: quantize_expanded(x, "e5m2", rounding="to_odd"), FormatError, "to_odd"),
        (lambda x: quantize_expanded(x.int(), "e5m2"), DTypeError, "int32"),
        (lambda x: quantize_expanded(x, "e5m2", 0), ShapeError, "got 0"),
        (lambda x: quantize_expanded(x, "e5m2", True), ShapeError, "got True"),
        (
            lambda x: dequantize_expanded(quantize_expanded(x, "e5m2"), "e4m3fn"),
            DTypeError,
            "codes of e4m3fn are torch.float8_e4m3fn",
        ),
        (
            lambda x: dequantize_expanded(quantize_expanded(x, "e5m2"), "e5m2", 64),
            ShapeError,
            r"have 4 .* got \(2,\)",
        ),
        (
            lambda x: dequantize_expanded(
                Expanded(*quantize_expanded(x, "e5m2")[:2], torch.ones(3, dtype=torch.uint8)),
                "e5m2",
            ),
            ShapeError,
            r"\(3,\)",
        ),
    ],
)
def test__bad_input__says_what_is_allowed(call, error, says):
    with pytest.raises(error, match=says):
        call(torch.ones(200))
