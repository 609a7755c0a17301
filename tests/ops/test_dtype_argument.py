"""The argument `dtype` of a reduction is the dtype of its result, as torch has it."""

import pytest
import torch
from tensors import gaussian

import scaledtensor as sct

CALLS = {
    "sum": lambda x, dtype: x.sum(dtype=dtype),
    "sum along a dimension": lambda x, dtype: x.sum(1, dtype=dtype),
    "mean": lambda x, dtype: x.mean(dtype=dtype),
    "mean along a dimension": lambda x, dtype: x.mean(0, dtype=dtype),
    "nansum": lambda x, dtype: x.nansum(dtype=dtype),
    "cumsum": lambda x, dtype: x.cumsum(1, dtype=dtype),
    "cumprod": lambda x, dtype: x.cumprod(1, dtype=dtype),
    "prod": lambda x, dtype: x.prod(dtype=dtype),
    "prod along a dimension": lambda x, dtype: x.prod(1, dtype=dtype),
}
NORMS = {
    "norm": lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
    "norm along a dimension": lambda x, dtype: torch.linalg.vector_norm(x, 2, 1, dtype=dtype),
    "torch.norm": lambda x, dtype: torch.norm(x, 2, 1, dtype=dtype),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2}


def compared(call, source, dtype):
    x = sct.scaled(gaussian(6, 8).to(source))
    got, want = call(x, dtype), call(x.dequantize().double(), torch.float64)
    assert got.dtype == dtype
    value = got.dequantize() if isinstance(got, sct.ScaledTensor) else got
    torch.testing.assert_close(value.double(), want, rtol=TOLERANCE[dtype], atol=1e-6)
    return x, got


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test__a_reduction__appears_in_the_dtype_that_is_asked(name, source, dtype):
    compared(CALLS[name], source, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test__a_norm__appears_in_the_dtype_that_is_asked(name, dtype):
    assert torch.linalg.vector_norm(sct.scaled(gaussian(6, 8)), 0, 1, dtype=dtype).dtype == dtype
    _, got = compared(NORMS[name], torch.bfloat16, dtype)
    if isinstance(got, sct.ScaledTensor):
        assert got.format.name == "fp32"


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test__a_result_of_integers_or_complex_numbers__is_plain(name, dtype):
    x = sct.scaled(gaussian(6, 8) * 3)
    if name in ("mean", "mean along a dimension") and not dtype.is_complex:
        pytest.skip("torch's mean has no integers")
    if name == "nansum" and dtype.is_complex:
        pytest.skip("torch's nansum has no complex numbers")
    got, want = CALLS[name](x, dtype), CALLS[name](x.dequantize(), dtype)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want)


def gradients(name, compiled):
    call = {**CALLS, **NORMS}[name]

    def loss(x):
        return call(x, torch.float64).sum()

    x = sct.scaled(gaussian(6, 8).to(torch.bfloat16)).requires_grad_()
    plain = x.detach().dequantize().double().requires_grad_()
    (torch.compile(loss, fullgraph=True) if compiled else loss)(x).backward()
    loss(plain).backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.dequantize().double(), plain.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [*CALLS, *NORMS])
def test__gradients__come_back_in_the_dtype_of_the_tensor(name):
    gradients(name, compiled=False)


@pytest.mark.parametrize("name", ["cumsum", "torch.norm"])
def test__compiled_gradients__do_too(name):
    torch.compiler.reset()
    gradients(name, compiled=True)
