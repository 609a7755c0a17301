"""Granularities: the shapes of scales, their expansion, and refusals."""

import copy
import pickle

import pytest
import torch
from blocks_oracle import grid, members
from hypothesis import given
from hypothesis import strategies as st

from scaledtensor.errors import ShapeError
from scaledtensor.formats import PerAxis, PerBlock, PerTensor
from scaledtensor.formats.layouts import (
    as_granularity,
    expand_scale,
    from_blocks,
    scale_shape,
    to_blocks,
)


@st.composite
def granularities_and_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    options = [st.just(PerTensor())]
    options.append(
        st.lists(st.sampled_from([-1, 1, 2, 3, 4]), min_size=1, max_size=4).map(PerBlock)
    )
    if shape:
        options.append(st.integers(-len(shape), len(shape) - 1).map(PerAxis))
    return draw(st.one_of(options)), shape


@given(granularities_and_shapes())
def test__scale_shape__counts_the_blocks_of_each_dimension(case):
    granularity, shape = case
    counts = grid(granularity, shape)[1]
    assert list(scale_shape(granularity, shape)) == ([] if granularity == PerTensor() else counts)


@given(granularities_and_shapes())
def test__expand_scale__gives_every_element_the_scale_of_its_block(case):
    granularity, shape = case
    scale = torch.arange(float(len(members(granularity, shape)))).view(
        scale_shape(granularity, shape)
    )
    wide = expand_scale(scale, granularity, shape)
    assert wide.shape == shape
    for number, indices in enumerate(members(granularity, shape).values()):
        assert all(wide[index] == number for index in indices)


@given(granularities_and_shapes())
def test__blocks__hold_every_element_once_and_zeros(case):
    granularity, shape = case
    x = torch.rand(shape) + 1
    blocks = to_blocks(x, granularity)
    assert torch.equal(from_blocks(blocks, granularity, shape), x)
    assert int((blocks != 0).sum()) == x.numel()


def test__a_matrix__has_the_scales_one_expects():
    shape = (256, 100)
    assert scale_shape(PerTensor(), shape) == ()
    assert scale_shape(PerAxis(0), shape) == scale_shape(PerAxis(-2), shape) == (256, 1)
    assert scale_shape(PerAxis(1), shape) == scale_shape(PerAxis(-1), shape) == (1, 100)
    assert scale_shape(PerBlock((1, 32)), shape) == (256, 4)
    assert scale_shape(PerBlock((128, 128)), shape) == (2, 1)
    assert scale_shape(PerBlock((1, -1)), shape) == (256, 1)
    assert scale_shape(PerBlock((32,)), (7, *shape)) == (7, 256, 4)
    assert scale_shape(PerBlock((128, 128)), (100,)) == (1,)
    assert scale_shape(PerBlock((128, 128)), ()) == ()


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1), PerAxis(-2)])
def test__expand_scale__is_a_view_where_broadcasting_is_enough(granularity):
    scale = torch.rand(scale_shape(granularity, (3, 4)))
    assert expand_scale(scale, granularity, (3, 4)).data_ptr() == scale.data_ptr()


def test__to_blocks__is_a_view_where_no_block_is_ragged():
    x = torch.rand(8, 64)
    assert to_blocks(x, PerBlock((4, 32))).data_ptr() == x.data_ptr()
    assert to_blocks(x.t(), PerBlock((32, 4))).data_ptr() == x.data_ptr()


def test__granularities__are_values():
    assert PerBlock([1, 32]) == PerBlock((1, 32))
    assert len({PerBlock([1, 32]), PerBlock((1, 32)), PerTensor(), PerTensor(), PerAxis(0)}) == 3
    assert repr(PerBlock((1, 32))) == "PerBlock(block=(1, 32))"
    for each in (PerTensor(), PerAxis(-1), PerBlock((1, 32))):
        assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each
    with pytest.raises(AttributeError):
        PerAxis(0).dim = 1


def test__as_granularity__takes_sizes_for_blocks():
    assert as_granularity(32) == PerBlock((32,))
    assert as_granularity((1, 32)) == as_granularity([1, 32]) == PerBlock((1, 32))
    assert as_granularity(PerAxis(1)) == PerAxis(1)


@pytest.mark.parametrize("block", [(), (0,), (1, -3), (1.5,), ("a",), (True,), 32, None, "32"])
def test__an_impossible_block__is_refused(block):
    with pytest.raises(ShapeError, match=r"PerBlock takes a tuple|positive ints"):
        PerBlock(block)


@pytest.mark.parametrize("dim", [1.0, "0", None, True, (0,)])
def test__an_impossible_axis__is_refused(dim):
    with pytest.raises(ShapeError, match="one dimension, an int"):
        PerAxis(dim)


@pytest.mark.parametrize("given_", ["row", 0, -1, 1.5, None, True, PerTensor, torch.ones(2)])
def test__what_is_no_granularity__is_refused(given_):
    with pytest.raises(ShapeError):
        as_granularity(given_)


def test__a_dimension_that_is_not_there__is_refused():
    with pytest.raises(ShapeError, match="its dimensions are -2 to 1"):
        scale_shape(PerAxis(2), (3, 4))
    with pytest.raises(ShapeError, match="0-dim"):
        scale_shape(PerAxis(0), ())


def test__a_scale_of_another_shape__is_refused():
    with pytest.raises(ShapeError, match=r"have shape \(3, 2\); got \(3, 1\)"):
        expand_scale(torch.ones(3, 1), PerBlock((1, 2)), (3, 4))
