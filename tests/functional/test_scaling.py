"""Constants for the forward and backward pass act on every kind of tensor, in every mode."""

import math

import pytest
import torch
from assertions import dequantized
from tensors import gaussian

import scaledtensor as sct
import scaledtensor.functional as U
from scaledtensor.errors import ScaleError
from scaledtensor.functional.scaling import scale

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def both(x):
    """Multiply by 3 forward and 5 backward around a function with the derivative 2x."""
    return (U.scale_bwd(U.scale_fwd(x, 3.0), 5.0) ** 2).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test__a_factor__is_in_one_direction_and_keeps_dtype_and_shape(dtype):
    x = gaussian(4, 3).to(dtype).requires_grad_()
    for function, forward, backward in ((U.scale_fwd, 3.0, 1.0), (U.scale_bwd, 1.0, 3.0)):
        y = function(x, 3.0)
        (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert y.dtype == g.dtype == dtype
        assert torch.equal(y, x * forward)
        assert torch.equal(g, torch.full_like(x, backward))


def test__a_factor_of_one__costs_nothing():
    x = gaussian(4)
    assert U.scale_fwd(x, 1.0) is x
    assert U.scale_bwd(x, 1) is x
    assert scale(x, 1.0, 1.0) is x
    assert U.scale_bwd(x, 3.0) is x  # No gradient is needed.
    assert U.scale_bwd(x.requires_grad_(), 3.0) is not x


@pytest.mark.parametrize("c", [0.0, -1.0, math.nan, math.inf, "2", None, 1j])
def test__a_factor_that_is_no_scale__is_refused(c):
    for function in (U.scale_fwd, U.scale_bwd):
        with pytest.raises(ScaleError, match="positive finite"):
            function(gaussian(4), c)


def test__a_power_of_two__moves_into_the_scale_of_a_scaled_tensor():
    x = sct.scaled(gaussian(8, 8)).requires_grad_()
    seed = sct.scaled(gaussian(8, 8))
    y = U.scale_bwd(U.scale_fwd(x, 2.0**-7), 2.0**9)
    (g,) = torch.autograd.grad(y, x, seed)
    assert torch.equal(y.qdata, x.qdata)
    assert torch.equal(g.qdata, seed.qdata)
    assert float(y.scale) == float(x.scale) * 2.0**-7
    assert float(g.scale) == float(seed.scale) * 2.0**9


def test__derivatives_of_derivatives__follow():
    x = gaussian(5).requires_grad_()
    (first,) = torch.autograd.grad(both(x), x, create_graph=True)
    torch.testing.assert_close(first, 2 * 3 * x * 5)
    (second,) = torch.autograd.grad(first.sum(), x)
    # The derivative of 30 x comes through the same two factors.
    torch.testing.assert_close(second, torch.full_like(x, 2 * 5 * 5.0))


def test__transforms__see_the_same_gradient():
    x = gaussian(4, 5)
    for f in (torch.func.grad(both), torch.compile(torch.func.grad(both), backend="aot_eager")):
        torch.testing.assert_close(f(x), 30 * x)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(both))(x), 30 * x)
    torch.testing.assert_close(torch.func.vjp(both, x)[1](torch.ones(()))[0], 30 * x)
    # Both modes have one derivative: the transpose of the backward pass.
    tangent = torch.func.jvp(both, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, (30 * x).sum())
    assert torch.func.hessian(both)(x[0]).shape == (5, 5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test__without_gradients__the_value_is_the_same(mode):
    with mode():
        for x in (gaussian(4), sct.scaled(gaussian(4))):
            assert torch.equal(dequantized(U.scale_fwd(x, 2.0)), 2 * dequantized(x))
            assert U.scale_bwd(x, 2.0) is x


@pytest.mark.parametrize("wrap", [lambda x: x, sct.scaled], ids=["plain", "scaled"])
def test__compiled__is_one_graph(wrap):
    f = torch.compile(
        lambda x: U.scale_bwd(U.scale_fwd(x, 3.0), 5.0), fullgraph=True, backend="aot_eager"
    )
    x, seed = wrap(gaussian(4, 4)).requires_grad_(), wrap(gaussian(4, 4))
    y = f(x)
    (g,) = torch.autograd.grad(y, x, seed)
    torch.testing.assert_close(dequantized(y), 3 * dequantized(x))
    torch.testing.assert_close(dequantized(g), 5 * dequantized(seed))


def test__sizes_that_a_compiler_keeps_symbolic__are_in_the_constants():
    compiled = torch.compile(U.linear, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.config.error_on_recompile, before = True, torch._dynamo.config.error_on_recompile
    try:
        for batch in (3, 8, 50):
            x, w = gaussian(batch, 16), gaussian(7, 16).requires_grad_()
            y, expected = compiled(x, w), U.linear(x, w)
            torch.testing.assert_close(y, expected)
            seed = gaussian(batch, 7)
            a, b = (torch.autograd.grad(out, w, seed)[0] for out in (y, expected))
            torch.testing.assert_close(a, b)
    finally:
        torch._dynamo.config.error_on_recompile = before


def test__autocast__multiplies_in_its_dtype():
    x, w = gaussian(8, 16).requires_grad_(), gaussian(4, 16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = U.linear(x, w)
    assert y.dtype == torch.bfloat16
    for g, leaf in zip(torch.autograd.grad(y.float().sum(), (x, w)), (x, w), strict=True):
        assert g.dtype == leaf.dtype


# --- the batch that gradients are summed over ------------------------------------------------


def weight_gradient(x):
    w = torch.ones(4, 16, requires_grad=True)
    return torch.autograd.grad(U.linear(x, w).sum(), w)[0]


def test__global_batch__makes_sums_over_parts_the_gradient_of_the_whole():
    """Two processes and two steps of accumulation sum to the result of one process."""
    x = gaussian(32, 16)
    with U.global_batch(2 * 2):
        parts = sum(weight_gradient(part) for part in x.chunk(4))
    torch.testing.assert_close(parts, weight_gradient(x))


def test__global_batch__is_a_setting_and_a_block():
    x = gaussian(8, 16)
    one = weight_gradient(x)
    try:
        U.global_batch(4)
        torch.testing.assert_close(weight_gradient(x), one / 2)
        with U.global_batch(16):
            torch.testing.assert_close(weight_gradient(x), one / 4)
        torch.testing.assert_close(weight_gradient(x), one / 2)
    finally:
        U.global_batch(1)
    torch.testing.assert_close(weight_gradient(x), one)


def test__global_batch__reaches_compiled_code():
    f = torch.compile(weight_gradient, backend="aot_eager")
    x = gaussian(8, 16)
    one = f(x)
    with U.global_batch(4):
        torch.testing.assert_close(f(x), one / 2)


@pytest.mark.parametrize("factor", [0, -1, math.inf, math.nan, True, "8", None])
def test__global_batch__refuses_what_is_no_factor(factor):
    with pytest.raises(ScaleError, match="global_batch"):
        U.global_batch(factor)
