"""Assertions of the tests. Each function states one promise about values and scales."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tensors import gaussian
from torch import Tensor

from scaledtensor import ScaledTensor, scaled
from scaledtensor.scales.powers import is_power_of_two
from scaledtensor.testing.rules import TOLERANCE, bits, rms
from scaledtensor.testing.rules import exact as dequantized

__all__ = [
    "TOLERANCE",
    "assert_each",
    "assert_holds",
    "assert_in_range",
    "assert_second_derivative",
    "assert_shifted",
    "dequantized",
    "gradient",
    "rms",
]


def assert_each(
    cases: Iterable[Any], check: Callable[[Any], None], name: Callable[[Any], str] = str
) -> None:
    """`check(case)` passes for every case. The failure lists all cases that do not pass."""
    failed, last = [], None
    for case in cases:
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name(case)}: {type(error).__name__}: {error}")
            last = error
    if last is not None:
        raise AssertionError("\n".join(failed)) from last


def assert_holds(x: Tensor, expected: Tensor, tolerance: float) -> None:
    """`x` has the value `expected`, and a scale that is an exact power of two."""
    if isinstance(x, ScaledTensor):
        assert x.scale.shape == x.rms.shape == ()
        assert x.scale.dtype == x.rms.dtype == torch.float32
        assert is_power_of_two(x.scale)
        assert float(x.rms) >= 0
        assert math.isfinite(float(x.rms))
        assert not x.nonnegative or not (x.qdata < 0).any()
    assert x.shape == expected.shape
    got, want = dequantized(x), expected.detach().double()
    finite = want[want.isfinite()]
    spread = finite.square().mean().sqrt() if finite.numel() else torch.zeros(())
    torch.testing.assert_close(
        got, want, rtol=tolerance, atol=tolerance * float(spread), equal_nan=True
    )


def assert_shifted(x: Tensor, y: Tensor, k: int) -> None:
    """`y` is `x` times 2**k, by its scale alone: the elements are the same bits."""
    assert type(x) is type(y)
    if not isinstance(x, ScaledTensor):
        assert torch.equal(torch.ldexp(x, torch.tensor(k)), y)
        return
    assert x.format == y.format  # type: ignore[attr-defined]
    assert torch.equal(bits(x.qdata), bits(y.qdata))  # type: ignore[attr-defined]
    assert math.ldexp(float(x.scale), k) == float(y.scale)  # type: ignore[attr-defined]


def assert_in_range(x: "list[Tensor]", low: float = 0.5, high: float = 2.0, what: str = "") -> None:
    """RMS(qdata), pooled over samples, is in [low, high]."""
    assert all(isinstance(s, ScaledTensor) for s in x), what
    assert is_power_of_two(torch.stack([s.scale for s in x])).all(), what  # type: ignore[attr-defined]
    measured = rms(*(s.qdata.detach() for s in x))  # type: ignore[attr-defined]
    assert low <= measured <= high, f"{what}: RMS(qdata) = {measured:.3f}, not in [{low}, {high}]"


def gradient(f: Callable[[Tensor], Tensor], x: Tensor, create_graph: bool = False) -> Tensor:
    """Return the gradient of `f` at `x`, for a Gaussian gradient of the result."""
    out = f(x)
    seed = gaussian(*out.shape, seed=1)
    seed = scaled(seed) if isinstance(out, ScaledTensor) else seed.to(out.dtype)
    return torch.autograd.grad(out, x, seed, create_graph=create_graph)[0]


def assert_second_derivative(f: Callable[[Tensor], Tensor], x: Tensor, tolerance: float) -> None:
    """Both derivatives of `f` at a ScaledTensor equal the derivatives at the plain tensor."""
    x, plain = x.requires_grad_(), dequantized(x).requires_grad_()
    first, reference = gradient(f, x, True), gradient(f, plain, True)
    assert_holds(first, reference, 2.0**-15)
    (second,) = torch.autograd.grad(first.sum(), x)
    (expected,) = torch.autograd.grad(reference.sum(), plain)
    torch.testing.assert_close(dequantized(second), expected, rtol=tolerance, atol=tolerance)
