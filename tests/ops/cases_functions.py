"""Activations, elementary functions and losses."""

from typing import Any

import torch
import torch.nn.functional as F
from op_cases import LINEAR, case, coin, each, fixed, ints
from torch import Tensor

ONE, TWO = (each((3, 5), (2**12,), of=n) for n in (1, 2))
WIDE = ONE

HEAVY: dict[str, Any] = {
    "heavy": True,
    "heavy_grad": True,
    "reason": "poles: the function has no second moment",
}
HEAVY_GRAD: dict[str, Any] = {
    "heavy_grad": True,
    "reason": "poles: the derivative has no second moment",
}

# --- activations -----------------------------------------------------------------------------

case("elu", F.elu, ONE)
case("elu_alpha", lambda x: F.elu(x, 0.5), ONE)
case("selu", F.selu, ONE)
case("celu", lambda x: F.celu(x, 2.0), ONE)
case("softplus", F.softplus, ONE)
case("softplus_beta", lambda x: F.softplus(x, beta=3, threshold=5), ONE)
case("logsigmoid", F.logsigmoid, ONE)
case("mish", F.mish, ONE)
case("hardswish", F.hardswish, ONE)
case("hardsigmoid", F.hardsigmoid, ONE)
case("hardtanh", lambda x: F.hardtanh(x, -0.5, 2.0), ONE)
case("glu", F.glu, each((3, 8), (1, 2), (64, 256)))
case("softmin", lambda x: F.softmin(x, -1), each((3, 8), (64, 256)), tolerance=4, scales=1)
case("softsign", F.softsign, ONE)
case("tanhshrink", F.tanhshrink, ONE, tolerance=2)
case("hardshrink", F.hardshrink, WIDE, scales=1)
case("softshrink", F.softshrink, WIDE, scales=1)
case("threshold", lambda x: F.threshold(x, 0.1, -20.0), WIDE, scales=2)
case("threshold_0", lambda x: F.threshold(x, 0.5, 0.0), WIDE, scales=1)
case(
    "prelu",
    F.prelu,
    [((3, 4, 5), (4,)), ((64, 4, 256), (4,)), ((512, 8), (1,))],
    (1, 0, 1),
    scales=2,
)
case("rrelu_eval", lambda x: F.rrelu(x, training=False), ONE, LINEAR)

# --- trigonometric, hyperbolic and their inverses ----------------------------------------------


def inside(x: Tensor) -> Tensor:
    """Return numbers in (-1, 1)."""
    return F.softsign(x)


def positive(x: Tensor) -> Tensor:
    return x.abs() + 0.5


def above_zero(x: Tensor) -> Tensor:
    return x.abs() + 2.0**-6


case("tan", torch.tan, ONE, scales=2, **HEAVY)
case("asin", lambda x: torch.asin(inside(x)), ONE, scales=1, tolerance=2)
case("acos", lambda x: torch.acos(inside(x)), ONE, scales=1, tolerance=2)
case("atan", torch.atan, ONE, scales=10)
case("sinh", torch.sinh, ONE, scales=0)
case("cosh", torch.cosh, ONE, scales=0)
case("asinh", torch.asinh, ONE, scales=10)
case("acosh", lambda x: torch.acosh(positive(x) + 1), ONE, scales=2, tolerance=4)
case("atanh", lambda x: torch.atanh(inside(x)), ONE, scales=1, tolerance=4)
case("sinc", torch.sinc, ONE, tolerance=4)
case("deg2rad", torch.deg2rad, ONE, LINEAR)
case("rad2deg", torch.rad2deg, ONE, LINEAR)
case("angle", torch.angle, ONE, (1, 0), differentiable=False)

# --- exponential and error functions -----------------------------------------------------------

case("exp2_of", torch.exp2, ONE, scales=0)
case("erfc", torch.erfc, ONE, tolerance=2)
case("erfinv", lambda x: torch.erfinv(inside(x)), ONE, scales=1, tolerance=4)
case("logit", lambda x: torch.logit(x.sigmoid()), ONE, scales=0, tolerance=16)
case("logit_eps", lambda x: torch.logit(x.sigmoid(), 0.1), ONE, scales=0, tolerance=16)
case("logaddexp", torch.logaddexp, TWO)
case("logaddexp2", torch.logaddexp2, TWO)
case("logaddexp_broadcast", torch.logaddexp, [((4, 8), (8,)), ((256, 64), (64,))], samples=64)
case(
    "xlogy",
    lambda x, y: torch.xlogy(x, above_zero(y)),
    TWO,
    (1, 0, 1),
    scales=1,
    tolerance=4,
    **HEAVY_GRAD,
)
case("xlogy_number", lambda x: torch.xlogy(x, 3.0), ONE, LINEAR)
case("xlog1py", lambda x, y: torch.special.xlog1py(x, positive(y)), TWO, (1, 0, 1), scales=1)
case("entr", lambda x: torch.special.entr(above_zero(x)), ONE, scales=1, tolerance=4)
case(
    "pow_tensor",
    lambda x, y: positive(x) ** y,
    TWO,
    scales=0,
    tolerance=4,
    backward={1: (0.25, 2)},
    reason="the logarithm of a base near 1 is smaller than that of a Gaussian",
)

# --- rounding, signs, remainders ---------------------------------------------------------------

STEP: dict[str, Any] = {"differentiable": False, "scales": 0}
case("floor", torch.floor, ONE, **STEP)
case("ceil", torch.ceil, ONE, **STEP)
case("round", torch.round, ONE, **STEP)
case("trunc", torch.trunc, ONE, **STEP)
case("round_decimals", lambda x: torch.round(x, decimals=1), ONE, **STEP)
case("frac", torch.frac, ONE)
case("fmod", torch.fmod, TWO, (1, 1, 1), differentiable=False)
case("fmod_number", lambda x: torch.fmod(x, 0.75), ONE)
case("remainder", torch.remainder, TWO, (1, 1, 1), differentiable=False)
case("remainder_number", lambda x: torch.remainder(x, 0.75), ONE)
case("remainder_of_number", lambda x: torch.remainder(0.75, positive(x)), ONE, **STEP)
QUOTIENT: dict[str, Any] = {
    **STEP,
    "heavy": True,
    "forward": (0, 2),
    "reason": "1/z of a Gaussian has no variance; and what is rounded is zero or 1 by half",
}
case("div_floor", lambda x, y: x.div(y, rounding_mode="floor"), TWO, (1, 1, 0), **QUOTIENT)
case("div_trunc", lambda x, y: x.div(y, rounding_mode="trunc"), TWO, (1, 1, 0), **QUOTIENT)
case("floor_divide", lambda x, y: x // y, TWO, (1, 1, 0), **QUOTIENT)
case("copysign", torch.copysign, TWO, (1, 0, 1), differentiable=False)
case("copysign_number", lambda x: torch.copysign(x, -1.0), ONE, LINEAR)
case("fmax", torch.fmax, TWO, (1, 1, 1))
case("fmin", torch.fmin, TWO, (1, 1, 1))
case("heaviside", torch.heaviside, TWO, (1, 0, 0), **STEP)
case("nan_to_num", torch.nan_to_num, ONE, LINEAR)
case("hypot", lambda x, y: torch.hypot(positive(x), y), TWO, scales=1)
case("atan2", torch.atan2, TWO, (1, 1, 0), differentiable=False)
case("atan2_positive", lambda x, y: torch.atan2(x, positive(y)), TWO, scales=0, tolerance=2)
case("ldexp", lambda x: torch.ldexp(x, ints(x.shape, 5) - 2), ONE, LINEAR)
case("frexp", lambda x: torch.frexp(x)[0], ONE, differentiable=False, forward=(0.4, 2),
     reason="all mantissas are in [1/2, 1), so that one element may be 1/2")  # fmt: skip

# --- special functions -------------------------------------------------------------------------

case("lgamma", lambda x: torch.lgamma(above_zero(x)), ONE, scales=1, tolerance=4, **HEAVY_GRAD)
case("digamma", lambda x: torch.digamma(above_zero(x)), ONE, scales=0, tolerance=4, **HEAVY)
case("polygamma", lambda x: torch.polygamma(1, above_zero(x)), ONE, scales=0, tolerance=4, **HEAVY)
case(
    "mvlgamma",
    lambda x: torch.mvlgamma(positive(x) + 1, 2),
    ONE,
    scales=0,
    tolerance=8,
    backward={0: (0.1, 2)},
    reason="a sum of digammas, each of which crosses zero in the midst of these arguments",
)
for name, scales in (("i0", 0), ("i1", 0), ("i0e", 4), ("i1e", 4), ("log_ndtr", 2)):
    case(name, getattr(torch.special, name), ONE, scales=scales, tolerance=4)
case("erfcx", lambda x: torch.special.erfcx(x.abs()), ONE, scales=1, tolerance=4)
case("ndtri", lambda x: torch.special.ndtri(x.sigmoid()), ONE, scales=0, tolerance=16)
BESSEL = (
    *("airy_ai", "bessel_j0", "bessel_j1", "modified_bessel_i0", "modified_bessel_i1"),
    "spherical_bessel_j0",
)
for name in BESSEL:
    f = getattr(torch.special, name)
    case(name, f, ONE, scales=0, tolerance=16, differentiable=False)
for name in ("bessel_y0", "modified_bessel_k0", "scaled_modified_bessel_k0"):
    f = getattr(torch.special, name)
    case(name, lambda x, f=f: f(above_zero(x)), ONE, **{**STEP, "tolerance": 16})
for name in ("bessel_y1", "modified_bessel_k1", "scaled_modified_bessel_k1"):
    f = getattr(torch.special, name)
    case(name, lambda x, f=f: f(above_zero(x)), ONE, **STEP, tolerance=16, heavy=True,
         reason="1 / x at zero")  # fmt: skip
case("igamma", lambda x, y: torch.igamma(positive(x), positive(y)), TWO, **STEP, tolerance=4)
case("zeta", lambda x: torch.special.zeta(positive(x) + 1, 2.0), ONE, **STEP, tolerance=4)
case("hermite", lambda x: torch.special.hermite_polynomial_he(x, 3), ONE, **STEP, tolerance=8)

# --- losses ------------------------------------------------------------------------------------

PAIRS = each((3, 8), (1,), (2**12,), of=2)
LOGITS = each((3, 8), (1, 2), (256, 64))
REDUCTIONS = ("mean", "sum", "none")


def soft(shape: Any, like: Tensor) -> Tensor:
    """Return targets 0, 1 and some between."""
    made = coin(shape).to(torch.float32)
    return torch.where(coin(shape, 0.25), 0.75, made).to(like.dtype)


def weights(n: int, like: Tensor) -> Tensor:
    return (fixed((n,), like).abs() + 0.5).to(like.dtype)


for how in REDUCTIONS:
    by: dict[str, Any] = {"reduction": how}
    case(f"l1_{how}", lambda x, y, by=by: F.l1_loss(x, y, **by), PAIRS, (1, 1, 1), tolerance=4,
         plain_gradients=() if how == "none" else (0, 1), scales=3)  # fmt: skip
    case(f"smooth_l1_{how}", lambda x, y, by=by: F.smooth_l1_loss(x, y, **by, beta=0.5), PAIRS,
         tolerance=4)  # fmt: skip
    case(f"huber_{how}", lambda x, y, by=by: F.huber_loss(x, y, **by, delta=2.0), PAIRS,
         tolerance=4)  # fmt: skip
    case(f"bce_{how}", lambda x, by=by: F.binary_cross_entropy(x.sigmoid(), soft(x.shape, x), **by),
         WIDE, tolerance=8, scales=0)  # fmt: skip
    case(
        f"bce_with_logits_{how}",
        lambda x, by=by: F.binary_cross_entropy_with_logits(x, soft(x.shape, x), **by),
        WIDE,
        tolerance=4,
    )
    case(
        f"soft_margin_{how}",
        lambda x, by=by: F.soft_margin_loss(x, 2.0 * coin(x.shape) - 1, **by),
        WIDE,
        tolerance=4,
    )
    case(
        f"multi_margin_{how}",
        lambda x, by=by: F.multi_margin_loss(x, ints(x.shape[:1], x.shape[1]), **by),
        LOGITS,
        tolerance=4,
        scales=2,
    )
    case(
        f"nll_{how}",
        lambda x, by=by: F.nll_loss(F.log_softmax(x, 1), ints(x.shape[:1], x.shape[1]), **by),
        LOGITS,
        tolerance=4,
    )


def weighted_bce(x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        x, soft(x.shape, x), weight=weights(x.shape[0], x)[:, None], pos_weight=x.new_tensor(3.0)
    )


case("bce_with_logits_weights", weighted_bce, each((3, 8), (64, 64)), tolerance=4)
case(
    "multi_margin_2",
    lambda x: F.multi_margin_loss(x, ints(x.shape[:1], x.shape[1]), p=2, margin=0.5),
    LOGITS,
    tolerance=4,
    scales=2,
)


def multilabel(x: Tensor) -> Tensor:
    target = torch.full(x.shape, -1)
    target[:, : x.shape[1] // 4] = torch.arange(x.shape[1] // 4) * 2
    return F.multilabel_margin_loss(x, target)


case("multilabel_margin", multilabel, each((3, 8), (256, 64)), tolerance=4, scales=2)
case(
    "multilabel_soft_margin",
    lambda x: F.multilabel_soft_margin_loss(x, coin(x.shape).to(x.dtype)),
    each((3, 8), (256, 64)),
    tolerance=8,
    scales=1,
    backward={0: (0.3, 2)},
    reason="a difference of two log-sigmoids, whose gradients a sum takes for independent",
)


def cross_entropy_of(n: int, **options: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        target = ints((x.shape[0], *x.shape[2:]), x.shape[1])
        weight = weights(x.shape[1], x) if n else None
        return F.cross_entropy(x, target, weight=weight, **options)

    return run


IMAGES = each((2, 5, 3, 4), (4, 32, 8, 8))
case("cross_entropy_weights", cross_entropy_of(1), LOGITS[:1] + LOGITS[2:], tolerance=8)
case("cross_entropy_images", cross_entropy_of(0), IMAGES, tolerance=4)
case(
    "cross_entropy_images_weights",
    cross_entropy_of(1, label_smoothing=0.1),
    IMAGES,
    tolerance=8,
)
case(
    "cross_entropy_shares",
    lambda x: F.cross_entropy(x, fixed(x.shape, x).softmax(1)),
    LOGITS[:1] + LOGITS[2:],
    tolerance=8,
    scales=0,
    backward={0: (0.2, 2)},
    reason="softmax minus targets near it: nearly equal, and smaller than either",
)
case(
    "kl_div",
    lambda x: F.kl_div(F.log_softmax(x, 1), fixed(x.shape, x).softmax(1), reduction="batchmean"),
    LOGITS[:1] + LOGITS[2:],
    tolerance=16,
    scales=0,
    backward={0: (0.2, 2)},
    reason="softmax minus targets near it: nearly equal, and smaller than either",
)
case(
    "poisson_nll",
    lambda x: F.poisson_nll_loss(x, ints(x.shape, 3).to(x.dtype)),
    ONE,
    tolerance=8,
    scales=0,
    plain_gradients=(0,),
)
case(
    "gaussian_nll",
    lambda x: F.gaussian_nll_loss(x, fixed(x.shape, x), torch.full_like(fixed(x.shape, x), 2.0)),
    ONE,
    tolerance=8,
    plain_gradients=(0,),
)
case(
    "hinge_embedding",
    lambda x: F.hinge_embedding_loss(x, 2.0 * coin(x.shape) - 1),
    WIDE,
    tolerance=4,
    scales=1,
    plain_gradients=(0,),
)
case(
    "cosine_embedding",
    lambda x, y: F.cosine_embedding_loss(x, y, 2.0 * coin(x.shape[:1]) - 1),
    each((3, 8), (64, 64), of=2),
    tolerance=16,
    scales=1,
    backward={0: (0.2, 2), 1: (0.2, 2)},
    reason="half of the pairs are past the margin and have no gradient",
)
case(
    "triplet_margin",
    lambda x, y, z: F.triplet_margin_loss(x, y, z),
    each((3, 8), (64, 64), of=3),
    tolerance=8,
    scales=0,
    backward={0: (0.2, 2), 1: (0.2, 2), 2: (0.2, 2)},
    reason="triplets that keep the margin have no gradient",
)
case(
    "pairwise_distance",
    F.pairwise_distance,
    each((3, 8), (64, 64), of=2),
    tolerance=4,
    scales=2,
)
POINTS = [((3, 4), (5, 4)), ((2, 64, 16), (2, 32, 16))]
for p in (1.0, 2.0, 3.0, float("inf")):
    case(
        f"cdist_{p:.0f}", lambda x, y, p=p: torch.cdist(x, y, p), POINTS, (1, 1, 1), tolerance=4,
        scales=0,
    )  # fmt: skip
case("pdist", F.pdist, each((4, 3), (64, 16)), LINEAR, tolerance=4)


def ctc(x: Tensor) -> Tensor:
    steps, batch, classes = x.shape
    targets = 1 + ints((batch, steps // 2), classes - 1)
    lengths = torch.full((batch,), steps // 2)
    return F.ctc_loss(F.log_softmax(x, -1), targets, torch.full((batch,), steps), lengths)


case("ctc", ctc, each((6, 2, 5), (32, 8, 32)), tolerance=16, scales=1)


def bags(mode: str) -> Any:
    def run(w: Tensor) -> Tensor:
        return F.embedding_bag(ints((4 * w.shape[0], 3), w.shape[0]), w, mode=mode)

    return run


for mode in ("sum", "mean", "max"):
    case(f"embedding_bag_{mode}", bags(mode), each((9, 5), (64, 32)), LINEAR, tolerance=4)
if hasattr(F, "linear_cross_entropy"):  # torch 2.11 has no such function.
    case(
        "linear_cross_entropy",
        lambda x, w: F.linear_cross_entropy(x, w, ints(x.shape[:1], w.shape[0])),
        [((3, 8), (5, 8)), ((64, 32), (48, 32))],
        tolerance=8,
        scales=1,
    )
