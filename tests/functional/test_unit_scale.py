"""Unit-scaled functions hold unit scale: results and gradients, plain and scaled, eager and
compiled."""

import math

import pytest
import torch
from assertions import TOLERANCE, assert_in_range, dequantized
from torch import Tensor
from unit_cases import CASES, ELSEWHERE, Case, draw

import scaledtensor as sct
import scaledtensor.functional as U

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
BY_NAME = {c.name: c for c in CASES}
LOW, HIGH = 0.8, 1.25


def outputs(case: Case, tensors: list[Tensor], options: dict, call=None) -> list[Tensor]:
    torch.manual_seed(0)  # Dropout draws from it.
    out = (call or case.run)(*tensors, **options)
    return list(out) if isinstance(out, tuple) else [out]


def seed_gradients(outs: list[Tensor]) -> list[Tensor]:
    """Return a Gaussian gradient, or 1 for a loss."""
    rng = torch.Generator().manual_seed(7)
    drawn = [
        torch.randn(o.shape, generator=rng).to(o.dtype) if o.dim() else torch.ones_like(o)
        for o in outs
    ]
    return [
        sct.scaled(g.float()) if isinstance(o, sct.ScaledTensor) else g
        for g, o in zip(drawn, outs, strict=True)
    ]


def run(
    case: Case, tensors: list[Tensor], options: dict, call=None
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    outs = outputs(case, leaves, options, call)
    return outs, list(torch.autograd.grad(outs, leaves, seed_gradients(outs)))


def spread(x: Tensor, skewed: bool) -> float:
    x = x.detach().double()
    return float(x.square().mean().sqrt() if skewed else x.std(correction=0))


def assert_unit(x: Tensor, what: str, skewed: bool = False) -> None:
    # The standard deviation of n elements is known to 1 / sqrt(2n), and small parameters have few.
    slack = 1 + 3 / math.sqrt(2 * x.numel())
    measured = spread(x, skewed)
    assert LOW / slack <= measured <= HIGH * slack, f"{what}: {measured:.3f}"


def options_of(case: Case) -> list[dict]:
    free = {} if case.constraints is None else {"constraint": None}
    return [free | ({"mult": m} if case.mults else {}) for m in case.mults or (1.0,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_case
def test__without_a_constraint__output_and_gradients_are_at_unit_scale(case, dtype):
    for shapes in case.shapes:
        for options in options_of(case):
            tensors = [t.to(dtype) for t in draw(case, shapes)]
            outs, gradients = run(case, tensors, options)
            what = f"{case.name} {shapes} {options}"
            for x in outs:
                assert x.dtype == dtype
                if not case.unscaled:
                    assert_unit(x, f"output of {what}", case.skewed)
            for i, (g, t) in enumerate(zip(gradients, tensors, strict=True)):
                assert g.dtype == dtype
                assert g.shape == t.shape
                # The gradient of kl_div is -target, and the gradients of softmax and its relatives
                # have no mean.
                assert_unit(g, f"gradient {i} of {what}", case.skewed)


@every_case
def test__to_output_scale__holds_the_output(case):
    if "to_output_scale" not in (case.constraints or ()) or case.unscaled:
        return
    for shapes in case.shapes:
        for x in outputs(case, draw(case, shapes), {"constraint": "to_output_scale"}):
            assert_unit(x, case.name, case.skewed)


@every_case
def test__scaled_tensors__hold_the_range_under_every_constraint(case):
    constraints = (
        [{}] if case.constraints is None else [{"constraint": c} for c in (None, *case.constraints)]
    )
    shapes = case.shapes[0]
    for options in constraints:
        tensors = [sct.scaled(t) for t in draw(case, shapes)]
        outs, gradients = run(case, tensors, options)
        what = f"{case.name} {options}"
        for x in outs:
            if x.dim():
                assert_in_range([x], what=f"output of {what}")
        for i, g in enumerate(gradients):
            if case.plain_gradient:
                assert type(g) is Tensor
                continue
            assert_in_range([g], low=0.3 if case.sparse else 0.5, what=f"gradient {i} of {what}")


@every_case
def test__scaled_tensors__compute_what_plain_ones_do(case):
    """Function and gradients are the same for plain and scaled tensors."""
    if case.name == "dropout":  # The compiled code draws other masks.
        return
    plain = draw(case, case.shapes[0])
    expected = run(case, plain, {})
    found = run(case, [sct.scaled(t) for t in plain], {})
    for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        scale = float(b.detach().abs().max())
        torch.testing.assert_close(
            dequantized(a),
            b.detach().double(),
            rtol=1e-4,
            atol=64 * TOLERANCE[torch.float32] * scale,
        )


@every_case
def test__exact__is_the_true_gradient(case):
    """Compute the derivative by central differences in float64, along one direction."""
    if "exact" not in (case.constraints or ()):
        return
    options = {"constraint": "exact"} | ({"mult": 2.0} if case.mults else {})
    tensors = [t.double().requires_grad_() for t in draw(case, case.shapes[0])]
    if case.name in ("grouped_linear",):  # float64 has no kernel here.
        return
    outs = outputs(case, tensors, options)
    seeds = [torch.randn_like(o) for o in outs]
    gradients = torch.autograd.grad(outs, tensors, seeds)
    moves = [torch.randn_like(t) for t in tensors]
    step = 1e-6
    plus, minus = (
        outputs(case, [t.detach() + h * m for t, m in zip(tensors, moves, strict=True)], options)
        for h in (step, -step)
    )
    moved = sum(
        float(((p - m) / (2 * step) * s).sum()) for p, m, s in zip(plus, minus, seeds, strict=True)
    )
    expected = sum(float((g * m).sum()) for g, m in zip(gradients, moves, strict=True))
    assert moved == pytest.approx(expected, rel=1e-3, abs=1e-3)


COMPILED = [
    "gelu",
    "softmax",
    "linear",
    "matmul broadcast",
    "conv2d",
    "tanh",
    "moe_route",
    "smooth_l1_loss",
    "attention grouped",
    "cross_entropy",
    "residual_apply",
]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", COMPILED)
def test__compiled__is_eager(name, scaled):
    case = BY_NAME[name]
    tensors = draw(case, case.shapes[0])
    tensors = [sct.scaled(t) for t in tensors] if scaled else tensors
    torch.compiler.reset()
    call = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    eager, compiled = run(case, tensors, {}), run(case, tensors, {}, call)
    for a, b in zip([*eager[0], *eager[1]], [*compiled[0], *compiled[1]], strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(dequantized(b), dequantized(a), rtol=1e-5, atol=1e-5)


def test__every_function__has_a_case():
    text = {c.name.partition(" ")[0] for c in CASES}
    assert set(U.__all__) - set(ELSEWHERE) <= text | {"residual_split"}
    assert not set(ELSEWHERE) - set(U.__all__)
