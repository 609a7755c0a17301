"""Sentinels are numbers that are no data: the fill of a mask, and the start of a running
maximum."""

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_holds, assert_in_range
from tensors import gaussian

import scaledtensor as sct

FILLS = [float("-inf"), -1e4, -1e9, torch.finfo(torch.float32).min]
SPELLINGS = {
    "full_like": torch.full_like,
    "new_full": lambda x, fill: x.new_full(x.shape, fill),
    "fill_": lambda x, fill: torch.empty_like(x).fill_(fill),
    "fill": lambda x, fill: torch.ops.aten.fill(x, fill),
}


def leaf(*shape, seed=0, scale=1.0):
    return sct.scaled(gaussian(*shape, seed=seed) * scale).requires_grad_()


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test__a_tensor_of_fills__moves_no_scale(spelling, fill):
    x = leaf(8, 16)
    mask = torch.ones(8, 16, dtype=torch.bool).triu(1)
    y = torch.where(mask, SPELLINGS[spelling](x, fill), x)
    assert_in_range([y[~mask]], 0.5, 2)
    hidden = x.dequantize().masked_fill(mask, fill)
    assert_holds(F.softmax(y, -1), F.softmax(hidden, -1), 2.0**-16)
    grad = torch.autograd.grad(F.softmax(y, -1), x, leaf(8, 16, seed=1).detach())[0]
    assert (grad.dequantize()[mask] == 0).all()


ROWS = torch.arange(4)
EACH = ROWS[:, None].expand(4, 16)
#: Programs that put rows of fills beside the eight rows of `x`, or in place of its first four.
TABLES = {
    "cat": lambda x, fills: torch.cat([fills, x]),
    "stack": lambda x, fills: torch.stack([fills, x[:4]]).flatten(0, 1),
    "scatter": lambda x, fills: x.scatter(0, EACH, fills),
    "index_put": lambda x, fills: x.index_put((ROWS,), fills),
    "index_copy": lambda x, fills: x.index_copy(0, ROWS, fills),
    "slice_scatter": lambda x, fills: x.slice_scatter(fills, 0, 0, 4),
    "masked_scatter": lambda x, fills: x.masked_scatter((torch.arange(8) < 4)[:, None], fills),
    "where": lambda x, fills: torch.where((torch.arange(8) < 4)[:, None], fills.repeat(2, 1), x),
    "a slice": lambda x, fills: _with_rows(x, fills),
    "scatter into fills": lambda x, fills: fills.repeat(2, 1).scatter(0, EACH + 4, x[4:]),
    "extreme": lambda x, fills: fills.repeat(2, 1).scatter_reduce(0, EACH + 4, x[4:], "amax"),
}


def _with_rows(x, fills):
    x = x.clone()
    x[:4] = fills
    return x


@pytest.mark.parametrize("size", [2.0**-10, 1.0, 2.0**10])
@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("spelling", TABLES)
def test__a_plain_table_of_fills__moves_no_scale(spelling, fill, fmt, size):
    plain = gaussian(8, 16) * size
    x = sct.scaled(plain, fmt)
    y = TABLES[spelling](x, torch.full((4, 16), fill))
    rest = x[4:] if y.shape[0] == 8 and spelling != "stack" else x[: y.shape[0] - 4]
    assert_in_range([y[4:]], 0.25, 2)
    assert_holds(y[4:], rest.dequantize(), 2.0**-8)
    assert (y[:4] < -4 * size).all()
    assert y[:4].isinf().all() == (fill == FILLS[0])
    if fill != FILLS[0]:  # a row without a place to look at is uniform, and not NaN
        assert_holds(F.softmax(y[:4], -1), torch.full((4, 16), 1 / 16), 1e-6)


@pytest.mark.parametrize("spelling", TABLES)
def test__compiled__a_plain_table_of_fills_moves_no_scale(spelling):
    x, fills = leaf(8, 16).detach(), torch.full((4, 16), FILLS[-1])
    y = torch.compile(TABLES[spelling], fullgraph=True)(x, fills)
    assert_holds(y, TABLES[spelling](x, fills).dequantize(), 0)
    assert_in_range([y[4:]], 0.25, 2)


@pytest.mark.parametrize("spelling", ["cat", "where"])
def test__batch_invariant__a_plain_table_of_fills_stays_finite(spelling):
    """Code whose results do not depend on the batch measures nothing."""
    x = sct.scaled(gaussian(8, 16) * 2.0**-10, "bf16")
    fills = torch.full((4, 16), FILLS[-1])
    with sct.ops.batch_invariant():
        y = TABLES[spelling](x, fills)
        assert_holds(F.softmax(y[:4], -1), torch.full((4, 16), 1 / 16), 1e-6)
    assert (y[:4] < -1e30).all()
    assert not y[:4].isinf().any()


@pytest.mark.parametrize("size", [2.0**-10, 1.0, 2.0**10])
@pytest.mark.parametrize("fill", [*FILLS[2:], torch.finfo(torch.float32).max, 1e30])
def test__a_fill__is_equal_to_its_number(fill, size):
    x = leaf(8, 16, scale=size).detach()
    mask = x > 0
    y = x.masked_fill(mask, fill)
    assert ((y == fill) == mask).all()
    assert ((y != fill) == ~mask).all()
    assert ((y <= fill if fill < 0 else y >= fill) == mask).all()
    assert not (y < fill if fill < 0 else y > fill).any()
    assert ((y == torch.tensor(fill)) == mask).all()


def test__a_fill_beside_zeros__has_a_value():
    y = torch.full_like(torch.zeros_like(leaf(4)), -1e9)
    assert_holds(y, torch.full((4,), -1e9), 1e-6)


@pytest.mark.parametrize("start", [-1e38, float("-inf")])
@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**20])
def test__a_running_maximum__has_the_scale_of_what_runs(start, size):
    xs = [leaf(64, seed=i, scale=size) for i in range(4)]
    best = torch.zeros_like(xs[0]) + start
    for x in xs:
        best = torch.maximum(best, x)
        assert_in_range([best], 0.25, 4)
    assert_holds(best, torch.stack([x.dequantize() for x in xs]).amax(0), 2.0**-16)
    lowest = torch.minimum(torch.full_like(xs[0], -start), xs[0])
    assert_holds(lowest, xs[0].dequantize(), 0)


@pytest.mark.parametrize("width", [0.1, 0.5, 1.0, 1.5, 4.0])
def test__a_state_that_decays__stays_in_range(width):
    """The exponent of a decay is never positive, so no moment of a Gaussian tells its size."""
    h = leaf(1024)
    for i in range(64):
        rate = -leaf(1024, seed=2 * i, scale=width).abs()
        h = rate.exp() * h + leaf(1024, seed=2 * i + 1)
    assert_in_range([h], 0.4, 2.5)


def test__exp__of_what_overflows_is_infinite_there_alone():
    x = torch.tensor([1.0, 100.0, -1.0])
    assert_holds(sct.scaled(x).exp(), x.exp(), 2.0**-16)


def test__exp__of_what_underflows_is_zero():
    assert_holds(sct.scaled(torch.full((4,), -1e4)).exp(), torch.zeros(4), 0)


@pytest.mark.parametrize("bias", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("function", [F.softplus, lambda x: F.logsigmoid(-x)], ids=["+", "-"])
def test__a_time_step__stays_in_range_whatever_its_bias(function, bias):
    x = (leaf(1024) + bias).detach().requires_grad_()
    y = function(x)
    grad = torch.autograd.grad(y, x, leaf(1024, seed=1).detach())[0]
    assert_in_range([y], 0.5, 2)
    assert_in_range([grad], 0.5, 2)
