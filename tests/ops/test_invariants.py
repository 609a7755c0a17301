"""Every operator keeps the meaning, holds the range, and moves only scales."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from all_cases import CASES, Case, Shapes
from assertions import (
    TOLERANCE,
    assert_each,
    assert_holds,
    assert_in_range,
    assert_shifted,
    dequantized,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import scaledtensor as sct

DTYPES = [torch.float32, torch.bfloat16]
seeds = st.integers(0, 2**31)
# A shift is never 0. The least one comes first, as few examples are drawn and the simplest is among
# them.
shifts = st.integers(0, 79).map(lambda k: k - 40 + (k >= 40))
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass
class Run:
    """One forward and backward pass."""

    inputs: list[Tensor]
    out: Tensor
    grad: Tensor | None
    gradients: list[Tensor]


def draw(case: Case, shapes: Shapes, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Return Gaussian inputs, each with its own power of two."""
    rng = torch.Generator().manual_seed(seed)
    spread = torch.randint(-case.scales, case.scales + 1, (len(shapes),), generator=rng).tolist()
    return [
        (torch.randn(s, generator=rng) * 2.0**k).to(dtype)
        for s, k in zip(shapes, spread, strict=True)
    ]


def run(case: Case, plain: list[Tensor], seed: int, shift: int = 0) -> Run:
    """Run forward and, with a Gaussian gradient times 2**shift, backward."""
    inputs = [sct.scaled(x).requires_grad_(case.differentiable) for x in plain]
    out = case.run(*inputs)
    if not case.differentiable:
        return Run(inputs, out, None, [])
    rng = torch.Generator().manual_seed(seed + 1)
    grad = torch.randn(out.shape, generator=rng).to(out.dtype) * 2.0**shift
    if isinstance(out, sct.ScaledTensor):
        grad = sct.scaled(grad)
    return Run(inputs, out, grad, list(torch.autograd.grad(out, inputs, grad)))


@every_dtype
@every_case
@settings(max_examples=2)
@given(seed=seeds)
def test__value_and_gradients__are_those_of_the_plain_operator(case, dtype, seed):
    got = run(case, draw(case, case.shapes[0], seed, dtype), seed)
    plain = [dequantized(x).requires_grad_(case.differentiable) for x in got.inputs]
    want = case.run(*plain)
    tolerance = TOLERANCE[dtype] * case.tolerance
    assert_holds(got.out, want, tolerance)
    if case.differentiable:
        expected = torch.autograd.grad(want, plain, dequantized(got.grad))
        for i, (gradient, reference) in enumerate(zip(got.gradients, expected, strict=True)):
            assert isinstance(gradient, sct.ScaledTensor) or i in case.plain_gradients
            assert_holds(gradient, reference, 4 * tolerance)


@every_case
def test__value__is_the_same_without_gradients(case):
    """Inputs are made before the mode, as parameters are, and inside of it."""
    plain = draw(case, case.shapes[0], 0, torch.float32)

    def check(way):
        mode, outside = way
        inputs = [sct.scaled(x) for x in plain]
        with mode():
            inputs = inputs if outside else [sct.scaled(x) for x in plain]
            assert_holds(
                case.run(*inputs),
                case.run(*(dequantized(x) for x in inputs)),
                TOLERANCE[torch.float32] * case.tolerance,
            )

    assert_each(itertools.product([torch.no_grad, torch.inference_mode], [True, False]), check)


RANGES = [(c, s) for c in CASES for s in c.shapes]
ENOUGH = 2048


@pytest.mark.parametrize(("case", "shapes"), RANGES, ids=lambda p: getattr(p, "name", str(p)))
@settings(max_examples=2)
@given(seed=seeds, shift=shifts)
def test__gaussian_inputs__stay_in_range(case, shapes, seed, shift):
    out, gradients = sampled(case, shapes, seed, shift)
    if isinstance(out[0], sct.ScaledTensor):
        (assert_median if case.heavy else assert_in_range)(out, *case.forward, what="result")
    check = assert_median if case.heavy_grad else assert_in_range
    for i, samples in enumerate(gradients):
        if i not in case.plain_gradients:
            check(samples, *case.backward.get(i, (0.5, 2.0)), what=f"gradient {i}")


def sampled(
    case: Case, shapes: Shapes, seed: int, shift: int
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return results and gradients of many samples of one population, as many as make a large
    number."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [math.prod(s) for s in shapes]
    n = min(case.samples, math.ceil(ENOUGH / min(sizes)), math.ceil(2**22 / max(sizes)))

    def population(shape, power):
        return sct.scaled(torch.randn((n, *shape), generator=rng) * 2.0**power)

    powers = exponents(case, len(shapes), rng, shift)
    pools = [population(s, k).unbind() for s, k in zip(shapes, powers, strict=True)]
    results, gradients = [], []
    for i in range(n):
        inputs = [x[i].requires_grad_(case.differentiable) for x in pools]
        out = case.run(*inputs)
        results.append(out)
        if case.differentiable:
            if i == 0:
                seeds_of_grad = population(out.shape, -shift).unbind()
            grad = seeds_of_grad[i]
            grad = grad if isinstance(out, sct.ScaledTensor) else grad.dequantize()
            gradients.append(torch.autograd.grad(out, inputs, grad))
    return results, [list(g) for g in zip(*gradients, strict=True)]


def exponents(case: Case, inputs: int, rng: torch.Generator, shift: int) -> list[float]:
    """Return exponents of the inputs' scales: moderate, then moved along the symmetries."""
    powers = torch.randint(-case.scales, case.scales + 1, (inputs,), generator=rng).tolist()
    for symmetry in case.symmetries:
        *weights, degree = symmetry
        steepest = max(map(abs, [*weights, degree, *(degree - w for w in weights)]))
        powers = [p + w * int(shift / steepest) for p, w in zip(powers, weights, strict=True)]
    return powers


def assert_median(samples: list[Tensor], low: float, high: float, what: str) -> None:
    """Without a variance, about half of the elements are above 1/4, and half are below 4."""
    middle = float(torch.cat([s.qdata.detach().flatten() for s in samples]).abs().nanmedian())
    assert low / 2 <= middle <= high * 2, f"{what}: median |qdata| = {middle:.3f}"


DIFFERENTIABLE = [case for case in CASES if case.differentiable]


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.name)
@settings(max_examples=2)
@given(seed=seeds, shift=shifts)
def test__power_of_two_on_the_gradient__moves_only_scales(case, seed, shift):
    def check(dtype):
        plain = draw(case, case.shapes[0], seed, dtype)
        before, after = run(case, plain, seed), run(case, plain, seed, shift)
        assert_shifted(before.out, after.out, 0)
        for x, y in zip(before.gradients, after.gradients, strict=True):
            assert_shifted(x, y, shift)

    assert_each(DTYPES, check)


HOMOGENEOUS = [(c, s) for c in CASES for s in c.symmetries]


@pytest.mark.parametrize(
    ("case", "symmetry"), HOMOGENEOUS, ids=lambda p: getattr(p, "name", str(p))
)
@settings(max_examples=2)
@given(seed=seeds, shift=shifts)
def test__power_of_two_on_homogeneous_inputs__moves_only_scales(case, symmetry, seed, shift):
    shift = int(shift / max(map(abs, symmetry)))
    *weights, degree = symmetry

    def check(dtype):
        plain = draw(case, case.shapes[0], seed, dtype)
        moved = [x * math.ldexp(1, w * shift) for x, w in zip(plain, weights, strict=True)]
        before, after = run(case, plain, seed), run(case, moved, seed)
        assert_shifted(before.out, after.out, degree * shift)
        for x, y, w in zip(before.gradients, after.gradients, weights, strict=False):
            assert_shifted(x, y, (degree - w) * shift)

    assert_each(DTYPES, check)


@every_case
def test__results__share_no_scale_with_an_input_unless_they_are_views(case):
    got = run(case, draw(case, case.shapes[0], 0, torch.float32), 0)
    if not isinstance(got.out, sct.ScaledTensor):
        return
    for x in got.inputs:
        alias = got.out.qdata.untyped_storage().data_ptr() == x.qdata.untyped_storage().data_ptr()
        assert (got.out.scale is x.scale) == alias
        assert (got.out.rms is x.rms) == alias
