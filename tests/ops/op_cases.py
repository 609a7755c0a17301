"""Every operator once, in its users' spelling, with its promises.

A case has functions of Gaussian inputs and their shapes (the first for values, all for the range).
`symmetries` lists its homogeneity: (1, 0, 1) says that f(2^k x, y) = 2^k f(x, y). Each symmetry
holds for gradients too: with (w_1, .., w_n, w_out), the gradient of input i moves by 2^(k (w_out -
w_i)).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
HELD = (0.5, 2.0)


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[..., Tensor]
    shapes: tuple[Shapes, ...]
    symmetries: tuple[tuple[float, ...], ...] = ()
    forward: tuple[float, float] = HELD
    """Bound on RMS(qdata) of the result."""
    backward: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Bounds on gradients, by input, where they are not [1/2, 2]."""
    reason: str = ""
    """Reason for a bound looser than [1/2, 2], or the heavy tail that leaves no RMS to hold."""
    heavy: bool = False
    """The result has no finite second moment, so the median is held instead."""
    heavy_grad: bool = False
    differentiable: bool = True
    tolerance: float = 1.0
    """Factor on the tolerance of one operation, for cases of several operations or of
    cancellation."""
    plain_gradients: tuple[int, ...] = ()
    """Inputs with a plain gradient: it is expanded from a plain statistic's gradient, or the input
    is a statistic."""
    scales: int = 4
    """Inputs have scales 2^-scales to 2^scales, before a symmetry moves them."""
    samples: int = 32
    """Number of pooled samples of a small shape, at most. Moments beyond the second converge
    slowly."""


CASES: list[Case] = []


def case(
    name: str, run: Callable[..., Any], shapes: Any, *symmetries: Any, **promises: Any
) -> None:
    if (
        promises.keys() & {"forward", "backward", "heavy", "heavy_grad"}
    ) and "reason" not in promises:
        raise ValueError(f"{name}: a looser bound needs a reason")
    CASES.append(Case(name, run, tuple(shapes), symmetries, **promises))


def each(*shapes: tuple[int, ...], of: int = 1) -> list[Shapes]:
    """Return `of` inputs of one shape, for each shape."""
    return [(s,) * of for s in shapes]


def coin(shape: Any, p: float = 0.5) -> Tensor:
    """Return a fixed mask."""
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(7)) < p


def ints(shape: Any, below: int) -> Tensor:
    """Return fixed indices."""
    return torch.randint(below, tuple(shape), generator=torch.Generator().manual_seed(7))


def fixed(shape: Any, like: Tensor) -> Tensor:
    """Return a fixed plain Gaussian tensor."""
    made = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(7))
    return made.to(torch.bfloat16).to(like.dtype)


ELEMENTS = ((3, 5), (1,), (2**20,))
ONE, TWO, THREE = (each(*ELEMENTS, of=n) for n in (1, 2, 3))
ROWS = each((3, 8), (1, 2), (1024, 16), (64, 4096))
SOME: dict[str, Any] = {"samples": 64}
MANY: dict[str, Any] = {"samples": 512}
LINEAR, BILINEAR = (1, 1), ((1, 0, 1), (0, 1, 1))

HEAVY_NEAR_ZERO = "1/z of a Gaussian has no variance"

# --- arithmetic ------------------------------------------------------------------------------

case("add", torch.add, TWO, (1, 1, 1))
case("add_alpha", lambda x, y: torch.add(x, y, alpha=-0.3), TWO, (1, 1, 1))
case("add_scalar", lambda x: x + 0.7, ONE)
case("add_plain", lambda x: x + fixed(x.shape, x), ONE)
case("add_broadcast", lambda x, y: x + y, [((4, 8), (8,)), ((2**14, 64), (64,))], (1, 1, 1))
case("sub", torch.sub, TWO, (1, 1, 1))
case("rsub", lambda x: 1.5 - x, ONE)
case("mul", torch.mul, TWO, *BILINEAR)
case("mul_scalar", lambda x: x * -0.3, ONE, LINEAR)
case("mul_tiny_scalar", lambda x: 1e-8 * x, ONE, LINEAR)
case("mul_plain", lambda x: x * fixed(x.shape, x), ONE, LINEAR)
case("mul_self", lambda x: x * x, ONE, (1, 2), **MANY)
case("mul_broadcast", lambda x, y: x * y, [((4, 8), (8,)), ((2**14, 64), (64,))], *BILINEAR)
case(
    "mul_0_dim",
    lambda x, y: x * y,
    [((4, 8), ()), ((2**14, 64), ())],
    *BILINEAR,
    plain_gradients=(1,),
)
case("div_scalar", lambda x: x / 3, ONE, LINEAR)
case("div_bounded", lambda x, y: x / (1 + y.square()), TWO, (1, 0, 1), scales=0)
case(
    "div",
    torch.div,
    TWO,
    (1, 0, 1),
    (0, 1, -1),
    heavy=True,
    heavy_grad=True,
    reason=HEAVY_NEAR_ZERO,
)
case(
    "addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), THREE, (1, 1, 0, 1), (1, 0, 1, 1)
)
case(
    "addcdiv",
    lambda x, y, z: torch.addcdiv(x, y, z, value=0.5),
    THREE,
    (1, 1, 0, 1),
    heavy=True,
    heavy_grad=True,
    reason=HEAVY_NEAR_ZERO,
)
case("lerp", lambda x, y: torch.lerp(x, y, 0.3), TWO, (1, 1, 1))
case("neg", torch.neg, ONE, LINEAR)
case("abs", torch.abs, ONE, LINEAR)
case("sign", torch.sign, ONE, (1, 0), differentiable=False)
MASKED = "a boolean mask is data: how many gradients it stops is not known"
case("clamp", lambda x: x.clamp(-1.5, 1.0), ONE, backward={0: (0.25, 2)}, reason=MASKED, scales=2)
case("maximum", torch.maximum, TWO, (1, 1, 1))
case("minimum", torch.minimum, TWO, (1, 1, 1))
case("clamp_min_0", lambda x: x.clamp_min(0), ONE, LINEAR)
case("clamp_max", lambda x: x.clamp(max=0.5), ONE, backward={0: (0.25, 2)}, reason=MASKED)
case("square", torch.square, ONE, (1, 2), **MANY)
case("pow_2", lambda x: x**2, ONE, (1, 2), **MANY)
case("pow_3", lambda x: x**3, ONE, scales=6, **MANY)
case("pow_half", lambda x: x.abs() ** 0.5, ONE, heavy_grad=True, reason=HEAVY_NEAR_ZERO)
case("sqrt", lambda x: x.abs().sqrt(), ONE, heavy_grad=True, reason=HEAVY_NEAR_ZERO)
case(
    "rsqrt", lambda x: x.square().mean(-1, keepdim=True).rsqrt(), each((3, 16), (1024, 16)), (1, -1)
)
case(
    "rsqrt_elements",
    lambda x: x.abs().rsqrt(),
    ONE,
    heavy=True,
    heavy_grad=True,
    reason=HEAVY_NEAR_ZERO,
)
case(
    "reciprocal",
    torch.reciprocal,
    ONE,
    (1, -1),
    heavy=True,
    heavy_grad=True,
    reason=HEAVY_NEAR_ZERO,
)
case("exp", torch.exp, ONE, scales=0, **MANY)
case("exp2", lambda x: 2.0**x, ONE, scales=0, **MANY)
case("expm1", torch.expm1, ONE, scales=0, **MANY)
case("log", lambda x: x.abs().log(), ONE, heavy_grad=True, reason=HEAVY_NEAR_ZERO, tolerance=2)
case("log2", lambda x: x.abs().log2(), ONE, heavy_grad=True, reason=HEAVY_NEAR_ZERO, tolerance=2)
case(
    "log1p",
    lambda x: x.abs().log1p(),
    ONE,
    backward={0: (0.5, 8)},
    reason="1 / (1 + |x|) has most of its second moment near zero",
)
case("sin", torch.sin, ONE)
case("cos", torch.cos, ONE)
case("erf", torch.erf, ONE, **SOME)

# --- activation ------------------------------------------------------------------------------

case("relu", F.relu, ONE, LINEAR)
case("leaky_relu", lambda x: F.leaky_relu(x, 0.2), ONE, LINEAR, **SOME)
case("relu6", F.relu6, ONE, **MANY)
case("gelu", F.gelu, ONE, scales=10)
case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), ONE, scales=10)
case("silu", F.silu, ONE, scales=10)
case("tanh", torch.tanh, ONE, tolerance=4, **SOME)
case("sigmoid", torch.sigmoid, ONE, tolerance=4)
case("squared_relu", lambda x: F.relu(x).square(), ONE, (1, 2), **MANY)
case("swiglu", lambda x, y: F.silu(x) * y, TWO, (0, 1, 1), tolerance=2)
case("geglu", lambda x, y: F.gelu(x) * y, TWO, (0, 1, 1), tolerance=2)

# --- softmax ---------------------------------------------------------------------------------

case("softmax", lambda x: F.softmax(x, -1), ROWS, tolerance=2)
case(
    "softmax_sharp",
    lambda x: F.softmax(8 * x, -1),
    ROWS,
    tolerance=4,
    scales=1,
)
case("softmax_dim_0", lambda x: torch.softmax(x, 0), each((3, 8), (2, 1), (1024, 64)), tolerance=2)
case("log_softmax", lambda x: F.log_softmax(x, -1), ROWS, tolerance=4)
case("logsumexp", lambda x: torch.logsumexp(x, -1), ROWS, tolerance=2, samples=512)
case(
    "logsumexp_all",
    lambda x: x.logsumexp((0, 1), keepdim=True),
    each((3, 8), (1, 2), (64, 64)),
    tolerance=2,
)

# --- matrix products -------------------------------------------------------------------------

MATRICES = [((3, 5), (5, 4)), ((1, 1), (1, 1)), ((64, 1024), (1024, 16)), ((2**12, 64), (64, 64))]
BATCHED = [((2, 3, 5), (2, 5, 4)), ((1, 1, 1), (1, 1, 1)), ((8, 128, 64), (8, 64, 128))]


def transposed(shapes: Any) -> list[Shapes]:
    return [(a, (*b[:-2], b[-1], b[-2])) for a, b in shapes]


case("mm", torch.mm, MATRICES, *BILINEAR)
case("matmul", lambda a, b: a @ b, MATRICES, *BILINEAR)
case("bmm", torch.bmm, BATCHED, *BILINEAR)
case("linear", F.linear, transposed(MATRICES), *BILINEAR)
case(
    "linear_bias",
    F.linear,
    [((3, 5), (4, 5), (4,)), ((2**12, 64), (64, 64), (64,))],
    (1, 0, 1, 1),
    (0, 1, 1, 1),
)
case("mv", torch.mv, [((3, 5), (5,)), ((1024, 1024), (1024,))], *BILINEAR)
case("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), BATCHED, *BILINEAR)
case(
    "addmm",
    lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
    [((3, 4), (3, 5), (5, 4)), ((256, 64), (256, 512), (512, 64))],
    (1, 1, 0, 1),
    (1, 0, 1, 1),
)
case(
    "baddbmm",
    lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
    [((2, 3, 4), (2, 3, 5), (2, 5, 4)), ((4, 64, 64), (4, 64, 512), (4, 512, 64))],
    (1, 1, 0, 1),
    (1, 0, 1, 1),
)

# --- attention -------------------------------------------------------------------------------

HEADS = each((2, 2, 5, 8), (1, 1, 4, 4), (2, 4, 256, 32), (1, 1, 1024, 64), of=3)
DECODE = [
    ((2, 2, 1, 8), (2, 2, 9, 8), (2, 2, 9, 8)),
    ((8, 8, 1, 64), (8, 8, 512, 64), (8, 8, 512, 64)),
]
GROUPED = [
    ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    ((2, 8, 128, 32), (2, 2, 128, 32), (2, 2, 128, 32)),
]
ATTENTION: dict[str, Any] = {"tolerance": 4, "scales": 3}
OF_VALUES = ((0, 0, 1, 1), (1, -1, 0, 0))


def spelled_out(q: Tensor, k: Tensor, v: Tensor, fill: float = 0.0) -> Tensor:
    """Compute causal attention; a fill makes its mask additive."""
    logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    hidden = (
        logits + (future * fill).to(logits.dtype)
        if fill
        else logits.masked_fill(future, float("-inf"))
    )
    return hidden.softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    seen = seen.tril() if causal else coin(seen.shape, 0.7).fill_diagonal_(True)
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


sdpa = F.scaled_dot_product_attention
case("sdpa", sdpa, HEADS, *OF_VALUES, **ATTENTION)
case("sdpa_decode", sdpa, DECODE, *OF_VALUES, **ATTENTION)
case("sdpa_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), HEADS, *OF_VALUES, **ATTENTION)
case("sdpa_mask", masked, HEADS, *OF_VALUES, **ATTENTION)
case("sdpa_scale", lambda q, k, v: sdpa(q, k, v, scale=0.05), HEADS, *OF_VALUES, **ATTENTION)
case(
    "sdpa_grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), GROUPED, *OF_VALUES, **ATTENTION
)
case("attention_spelled_out", spelled_out, HEADS, *OF_VALUES, **ATTENTION)
case(
    "attention_spelled_out_additive",
    lambda q, k, v: spelled_out(q, k, v, fill=-1e9),
    HEADS,
    *OF_VALUES,
    **ATTENTION,
)
case(
    "sdpa_causal_mask", lambda q, k, v: masked(q, k, v, causal=True), HEADS, *OF_VALUES, **ATTENTION
)

# --- normalisation ---------------------------------------------------------------------------

NORM = each((3, 8), (4096, 16), (16, 4096))
AFFINE = [((3, 8), (8,)), ((4096, 16), (16,)), ((16, 4096), (4096,))]
AFFINE_BIAS = [(*s, s[1]) for s in AFFINE]

case("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]), NORM, tolerance=2)
case("layer_norm_eps_0", lambda x: F.layer_norm(x, x.shape[-1:], eps=0), NORM, (1, 0), tolerance=2)
case(
    "layer_norm_weight",
    lambda x, w: F.layer_norm(x, x.shape[-1:], w),
    AFFINE,
    (0, 1, 1),
    tolerance=2,
)
case(
    "layer_norm_bias",
    lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    AFFINE_BIAS,
    (0, 1, 1, 1),
    tolerance=2,
)
case("rms_norm", lambda x: F.rms_norm(x, x.shape[-1:]), NORM, tolerance=2)
case("rms_norm_weight", lambda x, w: F.rms_norm(x, x.shape[-1:], w), AFFINE, (0, 1, 1), tolerance=4)
case(
    "rms_norm_spelled_out",
    lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    AFFINE,
    (0, 1, 1),
    tolerance=8,
)

# --- losses ----------------------------------------------------------------------------------


def cross_entropy(**options: Any) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        target = ints(x.shape[:1], x.shape[1])
        if "ignore_index" in options:
            target[1::2] = options["ignore_index"]
        return F.cross_entropy(x, target, **options)

    return run


LOGITS = each((3, 8), (1, 2), (512, 64), (4, 4096), (2048, 512))
PAIRS = each((3, 8), (1,), (2**16,), of=2)
case("cross_entropy", cross_entropy(), LOGITS, tolerance=4)
case("cross_entropy_sum", cross_entropy(reduction="sum"), LOGITS, tolerance=4)
case("cross_entropy_ignored", cross_entropy(ignore_index=-100), LOGITS, tolerance=4)
case("cross_entropy_smooth", cross_entropy(label_smoothing=0.1), LOGITS, tolerance=4)
case("mse_loss", F.mse_loss, PAIRS, (1, 1, 2), tolerance=4)
case(
    "mse_loss_none", lambda x, y: F.mse_loss(x, y, reduction="none"), PAIRS, (1, 1, 2), tolerance=4
)
case("mse_loss_plain", lambda x: F.mse_loss(x, fixed(x.shape, x)), ONE, tolerance=4)

# --- embedding -------------------------------------------------------------------------------

case(
    "embedding", lambda w: F.embedding(ints((6, 4), w.shape[0]), w), each((9, 5), (16, 64)), LINEAR
)
ROWS_ABSENT = "rows of absent tokens are zero; those of present ones have RMS 1"
case(
    "embedding_few",
    lambda w: F.embedding(ints((64,), w.shape[0]), w),
    each((2048, 64)),
    LINEAR,
    backward={0: (0.1, 2)},
    reason=ROWS_ABSENT,
)
case("embedding_many", lambda w: F.embedding(ints((2**14,), w.shape[0]), w), each((64, 16)), LINEAR)

# --- views and data movement -----------------------------------------------------------------

TABLE = each((4, 6), (256, 1024))
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.t().reshape(-1),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[None].squeeze(0),
    "flatten": lambda x: x.flatten(),
    "expand": lambda x: x.expand(3, -1, -1),
    "slice": lambda x: x[1:, :-1],
    "slice_half": lambda x: x[:, ::2],
    "chunk": lambda x: x.chunk(2, -1)[0],
    "split": lambda x: torch.cat(x.split([1, x.shape[0] - 1])[::-1]),
    "unbind": lambda x: torch.stack(x.unbind(0)[::-1]),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 3),
    "index": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "index_repeated": lambda x: x[ints((2 * x.shape[0],), x.shape[0])],
    "index_select": lambda x: x.index_select(0, ints(x.shape[:1], x.shape[0])),
    "gather": lambda x: x.gather(1, ints(x.shape, x.shape[1])),
    "tril": torch.tril,
    "triu": torch.triu,
    "pad": lambda x: F.pad(x, (1, 1)),
    "masked_fill_0": lambda x: x.masked_fill(coin(x.shape), 0),
    "where_0": lambda x: torch.where(coin(x.shape), x, 0.0),
    "rotate_half": lambda x: torch.cat((-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]), -1),
}
for name, run in VIEWS.items():
    case(name, run, TABLE, LINEAR)
DILUTED = "a few elements of many: the zeros around them fit any scale, so they keep their own"
case("select", lambda x: x[0], TABLE, LINEAR, backward={0: (0.02, 2)}, reason=DILUTED)
case("slice_row", lambda x: x[:1], TABLE, LINEAR, backward={0: (0.02, 2)}, reason=DILUTED)
case("diagonal", lambda x: x.diagonal(), TABLE, LINEAR, backward={0: (0.01, 2)}, reason=DILUTED)
case(
    "cat",
    lambda x, y: torch.cat((x, y)),
    each((4, 6), (1, 1), (256, 512), of=2),
    (1, 1, 1),
)
case(
    "stack",
    lambda x, y: torch.stack((x, y)),
    each((4, 6), (1,), (2**17,), of=2),
    (1, 1, 1),
)
case(
    "where",
    lambda x, y: torch.where(coin(x.shape), x, y),
    each((4, 6), (2**17,), of=2),
    (1, 1, 1),
)
case("masked_fill", lambda x: x.masked_fill(coin(x.shape), -0.5), TABLE)
case(
    "index_add",
    lambda x, y: x.index_add(0, ints(y.shape[:1], x.shape[0]), y),
    each((4, 6), (256, 256), of=2),
    (1, 1, 1),
)
case(
    "scatter_add",
    lambda x, y: x.scatter_add(1, ints(x.shape, x.shape[1]), y),
    each((4, 6), (256, 256), of=2),
    (1, 1, 1),
)

# No dimension is under 4. Autograd spells x - mean, and the mean of n terms takes (n - 1) / (n + 1)
# of the variance of a difference of independent terms.
NARROW = each((3, 4), (3, 8), (1024, 64))

# --- reductions ------------------------------------------------------------------------------

case("sum", lambda x: x.sum(-1), ROWS, LINEAR)
case("sum_rows", lambda x: x.sum(0, keepdim=True), ROWS, LINEAR)
case("sum_positive", lambda x: x.square().sum(-1), ROWS, (1, 2))
case("sum_relu", lambda x: x.relu().sum(-1), ROWS, LINEAR)
case("sum_abs", lambda x: x.abs().sum(-1), ROWS, LINEAR)
case("sum_all", lambda x: x.sum(), ROWS, LINEAR, tolerance=8, plain_gradients=(0,))
case("mean", lambda x: x.mean(-1), ROWS, LINEAR)
case("mean_all", lambda x: x.mean(), ROWS, LINEAR, tolerance=8, plain_gradients=(0,))
case("mean_of_squares", lambda x: x.square().mean(), ROWS, (1, 2))
case("cumsum", lambda x: x.cumsum(-1), ROWS, LINEAR)
case("cumsum_positive", lambda x: x.square().cumsum(-1), ROWS, (1, 2))
SELECTED: dict[str, Any] = {"backward": {0: (0.01, 2)}, "reason": DILUTED}
case("amax", lambda x: x.amax(-1), ROWS, LINEAR, **SELECTED)
case("max", lambda x: x.max(-1).values, ROWS, LINEAR, **SELECTED)
case("min", lambda x: x.min(0).values, ROWS, LINEAR, **SELECTED)
case("max_all", lambda x: x.max(), ROWS, LINEAR, plain_gradients=(0,))
case("topk", lambda x: x.topk(2, -1).values, ROWS, LINEAR, **SELECTED)
case("sort", lambda x: x.sort(-1).values, ROWS, LINEAR)
case("var", lambda x: x.var(-1), NARROW, (1, 2), tolerance=4)
case("var_biased", lambda x: x.var(-1, unbiased=False), NARROW, (1, 2), tolerance=4)
case("std", lambda x: x.std(-1), NARROW, (1, 1), tolerance=4)
case("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), ROWS, LINEAR, tolerance=2)
case("norm_1", lambda x: torch.linalg.vector_norm(x, 1, dim=-1), ROWS, LINEAR, tolerance=2)
case(
    "norm_inf",
    lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    ROWS,
    LINEAR,
    tolerance=2,
)
case(
    "prod",
    lambda x: x.prod(-1),
    each((3, 4), (4096, 2)),
    tolerance=4,
    scales=0,
    differentiable=False,
)
