"""Writes in place go into 8-bit tensors with a short range, and into expanded tensors."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scaledtensor as sct
from scaledtensor.errors import SaturationWarning

FORMATS = ["e4m3fn", "e5m2", "e4m3fnuz"]


def held(fmt: str, power: int = 0) -> sct.ScaledTensor:
    return sct.scaled(torch.tensor([1.0, 2.0, 3.0]) * 2.0**power, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test__a_whole_tensor__takes_another_scale_for_what_it_does_not_reach(fmt, factor):
    x = held(fmt)
    before = x.scale.item()
    x.mul_(factor)
    torch.testing.assert_close(
        x.dequantize(), torch.tensor([1.0, 2.0, 3.0]) * factor, rtol=0.1, atol=0
    )
    assert x.scale.item() != before


@pytest.mark.parametrize("fmt", FORMATS)
def test__a_sum_that_is_far_larger__is_held(fmt):
    torch.testing.assert_close(
        held(fmt).add_(1e6).dequantize(), torch.full((3,), 1e6), rtol=0.1, atol=0
    )


def test__what_is_in_reach__keeps_the_scale():
    x = held("e4m3fn")
    before = x.scale.clone()
    x.mul_(4.0).add_(1.0)
    assert torch.equal(x.scale, before)
    torch.testing.assert_close(x.dequantize(), torch.tensor([5.0, 9.0, 13.0]), rtol=0.07, atol=0)


@given(st.integers(-40, 40))
def test__whether_a_scale_moves__does_not_depend_on_it(k):
    plain, other = held("e4m3fn").mul_(1e6), held("e4m3fn", k).mul_(1e6)
    assert torch.equal(plain.qdata.view(torch.uint8), other.qdata.view(torch.uint8))
    assert other.scale == plain.scale * 2.0**k


@torch.no_grad()
def test__compiled__it_moves_as_well():
    def grow(x):
        x.mul_(1e6)
        return x + 0

    compiled = torch.compile(grow, backend="aot_eager", fullgraph=True)(held("e4m3fn"))
    eager = grow(held("e4m3fn"))
    assert torch.equal(compiled.dequantize(), eager.dequantize())
    assert torch.equal(compiled.scale, eager.scale)


def test__a_part_that_does_not_fit__is_told_of():
    x = held("e4m3fn")
    with pytest.warns(SaturationWarning, match=r"1 of 1 elements .* e4m3fn holds 896 at most"):
        x[0] = 1e6
    assert x.dequantize().tolist() == [896.0, 2.0, 3.0]


@pytest.mark.parametrize("fmt", ["e4m3fn", "bf16", "fp32"])
def test__a_part_that_fits__is_not(fmt):
    x = held(fmt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x[0] = 100.0
        x[1:].mul_(2)
    torch.testing.assert_close(x.dequantize(), torch.tensor([100.0, 4.0, 6.0]), rtol=0.07, atol=0)


@pytest.mark.parametrize("fmt", ["e4m3fn", "bf16", "fp32"])
def test__what_is_expanded__can_be_filled_as_in_torch(fmt):
    x = sct.scaled(torch.ones(2, 1), fmt)
    x.expand(2, 3).fill_(4.0)
    assert x.dequantize().tolist() == [[4.0], [4.0]]
    x.expand(2, 3)[0].fill_(2.0)
    assert x.dequantize().tolist() == [[2.0], [4.0]]
    x.expand(2, 3).zero_()
    assert x.dequantize().tolist() == [[0.0], [0.0]]
