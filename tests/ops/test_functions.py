"""Gaussian integrals, functions with custom slopes, fused losses, and samples."""

import math

import pytest
import torch
import torch.nn.functional as F
from assertions import (
    assert_holds,
    assert_in_range,
    assert_second_derivative,
    dequantized,
    gradient,
)
from tensors import gaussian
from torch import Tensor

import scaledtensor as sct
from scaledtensor.ops.algebra import gaussian_rms

# --- moments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-30, -3, 0, 3, 20])
def test__gaussian_rms__meets_closed_forms(power):
    r = torch.tensor(2.0**power)
    r2 = float(r.double().square())
    bell = 2 / math.pi**0.5 * (1 + 4 * r2) ** -0.25
    assert float(gaussian_rms("erfc_slope", r)) == pytest.approx(bell, rel=0.01)
    erf = 2 / math.pi * math.asin(2 * r2 / (1 + 2 * r2))
    assert float(gaussian_rms("erfc", r)) == pytest.approx((1 + erf) ** 0.5, rel=0.01)
    if power > 5:
        assert float(gaussian_rms("frac", r)) == pytest.approx(3**-0.5, rel=0.2)


def test__gaussian_rms__reads_no_element_and_is_the_same_compiled():
    def f(r: Tensor) -> Tensor:
        return gaussian_rms("atan_slope", r)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for r in gaussian(16).exp():
        assert float(compiled(r)) == float(f(r))


def test__gaussian_rms__of_zero__is_that_of_the_value_at_zero():
    zero = torch.zeros(())
    assert float(gaussian_rms("atan", zero)) == 0
    assert float(gaussian_rms("erfc", zero)) == pytest.approx(1, rel=1e-4)


# --- slopes ----------------------------------------------------------------------------------

SPELLINGS = {
    "atan": torch.atan,
    "arctan": lambda x: x.arctan(),
    "asinh": lambda x: x.asinh(),
    "sinc": torch.special.sinc,
    "erfc": torch.erfc,
    "erfinv": lambda x: torch.erfinv(x * 0.2),
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "i1e": torch.special.i1e,
    "log_ndtr": torch.special.log_ndtr,
    "ndtri": lambda x: torch.special.ndtri(x.sigmoid()),
    "erfcx": torch.special.erfcx,
    "entr": lambda x: torch.special.entr(x.abs() + 0.1),
    "tanhshrink": torch.nn.Tanhshrink(),
    "softsign": torch.nn.Softsign(),
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "logaddexp2": lambda x: torch.logaddexp2(x, x[:1]),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.full(x.shape, 0.25, dtype=x.dtype), pos_weight=x.new_full((6,), 2.0)
    ),
}
TWICE = {k: v for k, v in SPELLINGS.items() if k not in ("i0e", "i1", "i1e")}
"""torch differentiates i0 and i1, but not all functions in their derivatives."""


@pytest.mark.parametrize("f", TWICE.values(), ids=TWICE)
def test__second_derivative__is_that_of_the_plain_function(f):
    assert_second_derivative(f, sct.scaled(gaussian(4, 6)), 2.0**-10)


COMPILED = SPELLINGS | {
    "elu": F.elu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "glu": F.glu,
    "softshrink": F.softshrink,
    "prelu": lambda x: F.prelu(x, x.new_tensor([0.25])),
    "lgamma": torch.lgamma,
    "remainder": lambda x: torch.remainder(x, 0.75),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.ones(4, 6)),
    "multi_margin": lambda x: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3]), reduction="none"),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), torch.full((4, 6), 1 / 6)),
    "cdist": lambda x: torch.cdist(x, x[:2]),
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.11 has no such function.
    COMPILED["linear_cross_entropy"] = lambda x: F.linear_cross_entropy(
        x, x.detach()[:3], torch.tensor([0, 1, 2, 0])
    )


@pytest.mark.parametrize("f", COMPILED.values(), ids=COMPILED)
def test__compiled__is_as_eager(f):
    torch.compiler.reset()
    x = sct.scaled(gaussian(4, 6)).requires_grad_()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = gradient(compiled, x), gradient(f, x)
    assert_holds(got, dequantized(want), 2.0**-20)
    assert float(got.scale) == float(want.scale)


# --- samples ---------------------------------------------------------------------------------

IN_PLACE = {
    "exponential": lambda x: x.exponential_(0.3),
    "geometric": lambda x: x.geometric_(0.2),
    "log_normal": lambda x: x.log_normal_(0.5, 0.5),
    "normal": lambda x: x.normal_(1, 2),
    "uniform": lambda x: x.uniform_(-1, 3),
    "random": lambda x: x.random_(2, 9),
    "random_to": lambda x: x.random_(9),
    "bernoulli": lambda x: x.bernoulli_(0.25),
    "bernoulli_of": lambda x: x.bernoulli_(torch.full((4096,), 0.25)),
}
SAMPLES = {
    "normal_of": lambda x: torch.normal(x * 0.5, x.abs()),
    "normal_std": lambda x: torch.normal(x, 0.5),
    "normal_mean": lambda x: torch.normal(0.5, x.abs()),
    "bernoulli_shares": lambda x: torch.bernoulli(x.sigmoid()),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "poisson": lambda x: torch.poisson(x.abs() * 4),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.5),
}


def seeded(f, x: Tensor) -> Tensor:
    torch.manual_seed(12)
    return f(x)


@pytest.mark.parametrize("f", SAMPLES.values(), ids=SAMPLES)
def test__samples__are_those_of_a_plain_tensor_in_range(f):
    x = sct.scaled(gaussian(4096))
    y = seeded(f, x)
    assert_holds(y, seeded(f, x.dequantize()), 2.0**-16)
    assert_in_range([y])


@pytest.mark.parametrize("f", IN_PLACE.values(), ids=IN_PLACE)
def test__samples_in_place__are_those_of_a_plain_tensor_and_of_the_rms_expected(f):
    x = sct.scaled(torch.zeros(4096))
    y = seeded(f, x)
    assert y is x
    assert_holds(y, seeded(f, torch.zeros(4096)), 2.0**-16)
    assert_in_range([y])


def test__cauchy__has_a_median_and_no_variance():
    y = seeded(lambda x: x.cauchy_(0, 4), sct.scaled(torch.zeros(4096)))
    assert 0.5 < float(y.qdata.abs().median()) < 2


def test__rrelu__passes_gradients_by_the_slopes_it_drew():
    x = sct.scaled(gaussian(4096)).requires_grad_()
    y = F.rrelu(x, training=True)
    slopes = dequantized(y) / dequantized(x)
    g = gaussian(4096, seed=1)
    (grad,) = torch.autograd.grad(y, x, sct.scaled(g))
    assert_holds(grad, g * slopes, 2.0**-16)
    assert float(slopes.min()) >= 0.12
    assert float(slopes.max()) < 1.01


# --- the rest --------------------------------------------------------------------------------


def test__nextafter__is_the_next_float32():
    x, y = sct.scaled(gaussian(64)), gaussian(64, seed=1)
    assert torch.equal(torch.nextafter(x, y).dequantize(), torch.nextafter(x.dequantize(), y))


def test__nan_to_num__replaces_by_finite_numbers():
    plain = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    y = torch.nan_to_num(sct.scaled(plain.bfloat16()), nan=2.0)
    assert dequantized(y).isfinite().all()
    assert dequantized(y)[:2].tolist() == [1.0, 2.0]
    z = torch.nan_to_num(sct.scaled(plain), 0.0, 5.0, -5.0)
    assert dequantized(z).tolist() == [1.0, 0.0, 5.0, -5.0]


def test__bce_with_logits__with_targets_to_learn__has_both_gradients():
    x, t = (sct.scaled(gaussian(4, 6, seed=s)).requires_grad_() for s in (0, 1))
    plain = [dequantized(v).requires_grad_() for v in (x, t)]
    F.binary_cross_entropy_with_logits(x, t).backward()
    F.binary_cross_entropy_with_logits(*plain).backward()
    for got, want in zip((x, t), plain, strict=True):
        assert_holds(got.grad, want.grad, 2.0**-15)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test__nll_gradient__is_scaled_by_the_tokens_that_count(share):
    """Half of the tokens are ignored, so the gradient of the others is twice as large. It stays in
    range."""
    x = sct.scaled(gaussian(256, 64)).requires_grad_()
    target = torch.randint(64, (256,), generator=torch.Generator().manual_seed(0))
    target[int(256 * share) :] = -100
    (grad,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    counted = grad.qdata[: int(256 * share)]
    assert 0.5 <= float(counted.square().mean().sqrt()) <= 2


PREDICATES = {
    "all": lambda x: (x.all(1), x.any(0), (x > 0).all()),
    "allclose": lambda x: torch.tensor(torch.allclose(x, x)),
    "infinities": lambda x: (x.isposinf(), x.isneginf(), x.isfinite()),
    "isin": lambda x: torch.isin(x, x[0]),
    "xor": lambda x: torch.logical_xor(x, x > 0),
    "argsort": lambda x: x.argsort(stable=True, dim=-1),
    "bincount": lambda x: torch.bincount(torch.arange(6), x[0].abs()),
    "count": lambda x: (x.count_nonzero(), x.count_nonzero(0)),
}


@pytest.mark.parametrize("f", PREDICATES.values(), ids=PREDICATES)
def test__questions__have_plain_answers(f):
    x = sct.scaled(gaussian(4, 6) * 2.0**40)
    got, want = (torch.utils._pytree.tree_leaves(f(v)) for v in (x, x.dequantize()))
    for a, b in zip(got, want, strict=True):
        assert type(a) is Tensor
        torch.testing.assert_close(a, b)
