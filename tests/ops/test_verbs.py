"""Casts and rescales are two verbs, and neither does the other's work."""

import pytest
import torch
from assertions import assert_holds, dequantized
from hypothesis import given
from hypothesis import strategies as st
from tensors import gaussian

import scaledtensor as sct
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP16, FP32

formats = st.sampled_from([FP32, BF16, FP16, E4M3FN, E5M2])
shifts = st.integers(-40, 40)
seeds = st.integers(0, 2**31)


@given(seeds, shifts, formats, formats)
def test__cast__never_changes_the_scale(seed, shift, source, target):
    x = sct.scaled(gaussian(16, seed=seed, power=shift), source)
    y = x.to_format(target)
    assert y.format is target
    assert y.scale is not x.scale
    assert torch.equal(y.scale, x.scale)
    assert torch.equal(y.rms, x.rms)
    wanted = sct.formats.encode(x.qdata.float(), target, overflow="saturate")
    assert torch.equal(y.qdata.float(), wanted.float())


@given(seeds, shifts, shifts, st.sampled_from([FP32, BF16]))
def test__rescale__never_changes_the_format_and_is_exact(seed, shift, move, fmt):
    x = sct.scaled(gaussian(16, seed=seed, power=shift), fmt)
    y = x.rescale(float(x.scale) * 2.0**move)
    assert y.format is x.format
    assert y.scale is not x.scale
    assert float(y.scale) == float(x.scale) * 2.0**move
    assert_holds(y, dequantized(x), 0)


@given(seeds, shifts)
def test__casts_and_rescales__pass_gradients_as_they_are(seed, shift):
    x = sct.scaled(gaussian(16, seed=seed)).requires_grad_()
    y = x.rescale(2.0**shift).to_format(E4M3FN).to_format(FP32)
    grad = sct.scaled(gaussian(16, seed=seed + 1, power=shift))
    assert_holds(torch.autograd.grad(y, x, grad)[0], dequantized(grad), 0)


@given(seeds, shifts)
def test__dequantize__is_exact(seed, shift):
    plain = gaussian(16, seed=seed, power=shift)
    x = sct.scaled(plain)
    assert torch.equal(x.dequantize(), plain)
    assert_holds(x, plain, 0)


@pytest.mark.parametrize("shift", [-40, 0, 40])
def test__drop__moves_the_scale_out_of_value_and_gradient(shift):
    x = sct.scaled(gaussian(16, power=shift)).requires_grad_()
    y = sct.drop(x)
    assert float(y.scale) == 1
    assert torch.equal(y.qdata, x.qdata)
    g = torch.autograd.grad(y, x, sct.scaled(gaussian(16, seed=1)))[0]
    assert_holds(g, gaussian(16, seed=1).double() / x.scale.double(), 0)
