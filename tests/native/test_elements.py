"""The loops in C++ give the results of the operators of PyTorch that they replace."""

import pytest
import torch
from tensors import bits, gaussian
from torch._dynamo.testing import CompileCounterWithBackend

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.formats import BF16
from scaledtensor.native.elements import (
    column_sums,
    converted,
    magnitudes,
    rounded_rows,
    scale,
    scaled,
    squares,
    total,
    within,
)
from scaledtensor.ops.results import store

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())


EVERY_UPPER_HALF = (torch.arange(1 << 16, dtype=torch.int32) << 16)[:, None]
LOWER = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
NUMBERS = (EVERY_UPPER_HALF | LOWER).view(torch.float32)


def same(a, b):
    known = ~(a.isnan() & b.isnan())
    return torch.equal(a[known], b[known]) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("ratio", [1.0, 2.0**-3, 2.0**100])
def test__scaled__is_a_product_and_a_conversion(ratio):
    """The test has every upper half of a float32, with lower halves on, below and above each
    tie. All bfloat16 numbers are among them."""
    narrow = NUMBERS.bfloat16()
    assert same(scaled(NUMBERS, ratio, torch.bfloat16), (NUMBERS * ratio).bfloat16())
    assert same(scaled(narrow, ratio, torch.float32), narrow.float() * ratio)


@pytest.mark.parametrize("power", [-149, -140, -126, -100, -7, -1, 0, 1, 9, 100, 126, 127])
@pytest.mark.parametrize("arrangement", ["in order", "apart"])
def test__scaled__adds_to_the_exponents_of_bfloat16(power, arrangement):
    """The test has every bfloat16 number: in order, where most blocks have one exponent, and apart,
    where each block has all kinds of numbers."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if arrangement == "apart":
        numbers = numbers.view(256, 256).t().contiguous()
    factor = torch.tensor(2.0, dtype=torch.float64).pow(power).float()
    got, want = scaled(numbers, float(factor), torch.bfloat16), numbers * factor
    assert same(got, want)
    assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])


def test__scaled__keeps_the_layout_and_leaves_what_it_does_not_read():
    x = gaussian(32, 16, 32, 4)
    for dense in (x, x.mT, x.permute(0, 2, 3, 1), x[8:24]):
        got = scaled(dense, 0.3, torch.bfloat16)
        assert got.stride() == dense.stride()
        assert torch.equal(got, (dense * torch.tensor(0.3)).bfloat16())
    for gaps in (x[:, 1:, 1:], x[..., ::2], x[:1].expand(32, -1, -1, -1)):
        assert scaled(gaps, 0.5, torch.bfloat16) is None
    assert scaled(x[0], 0.5, torch.bfloat16) is None
    for dtype in (torch.float32, torch.float16):
        assert scaled(x, 0.5, dtype) is None
    narrow = x.bfloat16()
    assert torch.equal(scaled(narrow.mT, 0.5, torch.bfloat16), narrow.mT * 0.5)
    for factor, given in ((0.3, narrow), (0.5, narrow[0]), (0.5, narrow[:, 1:, 1:])):
        assert scaled(given, factor, torch.bfloat16) is None
    assert scaled(x.double(), 0.5, torch.float32) is None
    with native.left_out():
        assert scaled(x, 0.5, torch.bfloat16) is None


@pytest.mark.parametrize("dtypes", [(0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "part",
    [
        lambda x: x[:, 1:],
        lambda x: x.mT[:, 1:],
        lambda x: x[..., 8:].unflatten(-1, (2, 12)).transpose(1, 2),
        lambda x: x[:1, :, 4:].transpose(0, 2),
        lambda x: x[:, :, None, :16],
    ],
    ids=["rows", "columns", "heads", "turned", "inserted"],
)
def test__scaled__reads_rows_with_gaps_between_them(part, dtypes):
    source, target = ((torch.float32, torch.bfloat16)[n] for n in dtypes)
    x = part(gaussian(40, 1000, 32).to(source))
    got, want = scaled(x, 0.5, target), (x * 0.5).to(target)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("power", [-149, -130, -7, 0, 1, 100, 127])
def test__scale__is_scaled_in_place(power):
    """The test has every bfloat16 number."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for x in (numbers, numbers.view(256, 256).t().contiguous()):
        factor = float(torch.tensor(2.0, dtype=torch.float64).pow(power))
        want, place = scaled(x, factor, torch.bfloat16), x.clone()
        assert scale(place, factor)
        assert same(place, want)
        assert torch.equal(place.signbit()[~place.isnan()], want.signbit()[~want.isnan()])


def test__scale__leaves_what_it_does_not_read():
    x = gaussian(256, 256).bfloat16()
    for factor, given in ((0.3, x), (0.5, x.float()), (0.5, x.t()), (0.5, x[0])):
        before = given.clone()
        assert not scale(given, factor)
        assert torch.equal(given, before)
    with native.left_out():
        assert not scale(x, 0.5)


@pytest.mark.parametrize("columns", [32, 96, 128, 544])
def test__column_sums__have_the_bits_of_torch(columns):
    """Compiled code runs torch's sum. It adds 16 rows at a time, and 32 above 2^19 rows."""
    for rows in (*range(1, 36), 255, 256, 257, 1000, 4096, 70001):
        x = gaussian(rows, columns).bfloat16()
        assert torch.equal(column_sums(x), x.sum(0, dtype=torch.float32))
    x[1, 0], x[3, -1] = torch.inf, torch.nan
    assert same(column_sums(x), x.sum(0, dtype=torch.float32))


def test__column_sums__of_a_million_rows__have_the_bits_of_torch():
    x = gaussian(2**20 + 3, 32).bfloat16()
    assert torch.equal(column_sums(x), x.sum(0, dtype=torch.float32))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test__column_sums__have_the_bits_of_torch_for_every_number_of_threads(threads):
    x, before = gaussian(4096, 704).bfloat16(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(column_sums(x), x.sum(0, dtype=torch.float32))
    finally:
        torch.set_num_threads(before)


def test__column_sums__leave_what_they_do_not_read():
    x = gaussian(8, 64).bfloat16()
    for given in (x.float(), x.mT, x[:, 1:33], x[:, :48].contiguous(), x[:0], torch._neg_view(x)):
        assert column_sums(given) is None
    with native.left_out():
        assert column_sums(x) is None


@pytest.mark.parametrize("shape", [(40, 32), (5, 7, 32), (2, 3, 5, 64)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test__a_sum_of_bfloat16__has_the_bits_of_its_operators(shape, keepdim):
    x, dims = sct.scaled(gaussian(*shape), "bf16"), tuple(range(len(shape) - 1))
    alone = x.sum(dims, keepdim=keepdim)
    with native.left_out():
        assert bits(alone) == bits(x.sum(dims, keepdim=keepdim))
    want = x.dequantize().sum(dims, keepdim=keepdim)
    torch.testing.assert_close(alone.dequantize(), want)


def test__a_sum_over_no_dimension__is_over_all():
    x = sct.scaled(gaussian(40), "bf16")
    torch.testing.assert_close(x.sum([]), x.dequantize().sum())


@pytest.mark.parametrize("shape", [(1, 1 << 15), (4, 8, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test__converted__has_the_bits_and_strides_of_a_conversion(shape, dtype):
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    x = gaussian(*shape).mul_(2.0 ** gaussian(*shape).mul(30).round()).to(dtype)
    x.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    for given in (x, x.transpose(0, -1), x.mT):
        made = converted(given, other)
        assert same(made, given.to(other))
        assert made.stride() == given.to(other).stride()
    assert converted(x, dtype) is x
    x = torch._neg_view(x)
    assert same(converted(x, other), x.to(other))


@pytest.mark.parametrize("first", [1.0, 4.0, 2.0**-3, 2.0**-120])
@pytest.mark.parametrize("second", [1.0, -1.0, 2.0**-5, 2.0**40])
def test__total__has_the_bits_of_torch(first, second):
    x, y = (gaussian(1 << 16, seed=seed).bfloat16() for seed in (0, 1))
    x[:4] = torch.tensor([torch.inf, torch.nan, 1e-38, -0.0])
    y[:4] = torch.tensor([1.0, 1.0, 1e-39, 0.0])
    want = torch.add(x * first, y, alpha=second)
    assert same(total(x, first, y, second), want)


def test__total__leaves_what_it_does_not_read():
    x = gaussian(1 << 8, 1 << 8).bfloat16()
    for a, b, first, second in (
        (x.float(), x, 1.0, 1.0),
        (x, x.float(), 1.0, 1.0),
        (x, x.mT, 1.0, 1.0),
        (x, x[0], 1.0, 1.0),
        (x, x, 0.75, 1.0),
        (x, x, 1.0, 3.0),
        (x[0], x[0], 1.0, 1.0),
        (torch._neg_view(x), x, 1.0, 1.0),
    ):
        assert total(a, first, b, second) is None
    with native.left_out():
        assert total(x, 1.0, x, 1.0) is None


@pytest.mark.parametrize("alpha", [1, -1, 0.5])
def test__a_sum_of_two__has_the_bits_of_its_operators(alpha):
    x, y = (sct.scaled(gaussian(64, 512, seed=seed) * 3**seed, "bf16") for seed in (0, 2))
    for a, b in ((x, y), (y, x), (x, x)):
        alone = torch.add(a, b, alpha=alpha)
        with native.left_out():
            assert bits(alone) == bits(torch.add(a, b, alpha=alpha))


@pytest.mark.parametrize("ratio", [1.0, 2.0**-3, 2.0**100])
def test__rounded_rows__round_as_a_conversion_does(ratio):
    """The test has the same numbers."""
    want = store(NUMBERS * ratio, BF16)
    assert same(rounded_rows(NUMBERS.clone(), ratio), want)
    narrow = NUMBERS.bfloat16()
    assert same(rounded_rows(narrow, ratio), narrow * ratio)
    held = NUMBERS.clone()
    assert rounded_rows(held, ratio, in_place=True) is held
    assert same(held, want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 6, 96, 40_000])
def test__rounded_rows__add_as_the_operators_do(columns, dtype):
    x, bias = (gaussian(3, columns) * 100).to(dtype), gaussian(columns, seed=1)
    got = rounded_rows(x, 0.25, bias, 0.5, 4.0)
    want = store((store(x * 0.25, BF16) * 0.5).float() + bias * 4.0, BF16)
    assert torch.equal(got, want)
    assert rounded_rows(x.expand(2, 3, columns)[:, 0], 0.25) is None
    assert rounded_rows(x, 0.25, bias.double()) is None
    with native.left_out():
        assert rounded_rows(x, 0.25) is None


COUNTS = [1, 15, 16, 17, 1023, 1024, 1041, 70_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [2.0**-40, 1.0, 2.0**39])
def test__magnitudes__are_the_largest_and_the_sum_of_squares(dtype, count, size):
    x = (gaussian(count) * size).to(dtype)
    largest, summed = magnitudes(x)
    wide = x.double()
    assert largest == wide.abs().max()
    assert summed == pytest.approx(float(wide.square().sum()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 5, 1023, 1029, 2049])
@pytest.mark.parametrize("other", [torch.inf, -torch.inf, torch.nan])
def test__magnitudes__show_what_is_not_finite(dtype, place, other):
    x = gaussian(2050, dtype=dtype)
    x[place] = other
    largest, _ = magnitudes(x)
    assert not torch.tensor(largest).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [*COUNTS, 2**15 - 1, 2**15 + 1, 2**17 + 9])
@pytest.mark.parametrize("size", [2.0**-70, 1.0, 2.0**100])
def test__squares__are_those_of_float64_with_any_number_of_threads(dtype, count, size):
    x = (gaussian(count) * size).to(dtype)
    found = squares(x)
    assert found == pytest.approx(float(x.double().square().sum()), rel=1e-13)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert squares(x) == found
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.permute(1, 0)[None],
        lambda x: x[:, None].expand(6, 5, 8),
        lambda x: x[:1].expand(7, 8),
        lambda x: x[0, 0].expand(3, 4),
        lambda x: x[:0],
        lambda x: x[2, 3],
        lambda x: x[:, 2:5],
        lambda x: x[1:, ::2].t(),
        lambda x: x[:, :4, None].expand(6, 4, 2).mT,
    ],
)
def test__statistics__are_read_in_any_order(view):
    x = view(gaussian(6, 8))
    want = pytest.approx(float(x.double().square().sum()), rel=1e-13)
    largest = float(x.abs().max()) if x.numel() else 0.0
    assert squares(x) == want
    assert magnitudes(x) == (largest, pytest.approx(float(squares(x)), rel=1e-6))
    assert within(x, 0.5) == int((x.abs() <= 0.5).sum())


def test__squares_of_other_tensors__are_left_to_torch():
    x = gaussian(6, 8)
    for other in (x.double(), x.half(), x.to("meta")):
        assert squares(other) is None
    x[3, 3] = torch.nan
    assert squares(x) != squares(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [*COUNTS, 4096, 4097])
@pytest.mark.parametrize("limit", [0.0, 2.0**-9, 0.5, 1.0, 2.0**127])
def test__within__counts_magnitudes_up_to_a_limit(dtype, count, limit):
    x = gaussian(count, dtype=dtype)
    x[::3] = torch.tensor([0.0, -0.0, limit, -limit]).repeat(count)[: x[::3].numel()]
    assert within(x, limit) == int((x.abs() <= limit).sum())


def test__statistics__leave_what_they_do_not_read():
    x = gaussian(8, 8)
    for other in (x.double(), x.to("meta"), x.half()):
        assert magnitudes(other) is None
        assert within(other, 1.0) is None
    with native.left_out():
        assert magnitudes(x) is None
        assert within(x, 1.0) is None


def test__sizes_that_change__are_one_graph():
    """Tracing does not ask whether a tensor has the sizes that a loop takes."""
    counter = CompileCounterWithBackend("aot_eager")

    def run(x):
        return (x + x * 4.0).float().sum(0) + x.sum(0)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for shape in ((8, 32), (33, 48), (2048, 64)):
        x = sct.scaled(gaussian(*shape), "bf16")
        assert bits(compiled(x)) == bits(run(x))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3
