"""Scattered writes, selections, scans and linear algebra."""

from typing import Any

import torch
import torch.nn.functional as F
from op_cases import (
    BILINEAR,
    DILUTED,
    LINEAR,
    MASKED,
    ROWS,
    SELECTED,
    TABLE,
    case,
    coin,
    each,
    fixed,
    ints,
)
from torch import Tensor

SUMMED = (1, 1, 1)

# --- data movement ---------------------------------------------------------------------------

MOVED: dict[str, Any] = {
    "rot90": lambda x: x.rot90(),
    "unfold_overlapping": lambda x: x.unfold(1, 4, 1),
    "unfold_copy": lambda x: torch.unfold_copy(x, 1, 2, 2),
    "permute_copy": lambda x: torch.permute_copy(x, (1, 0)),
    "split_copy": lambda x: torch.cat(torch.split_copy(x, 1)[::-1]),
    "unbind_copy": lambda x: torch.stack(torch.unbind_copy(x)[::-1]),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "take": lambda x: x.take(ints((x.numel(),), x.numel())),
    "masked_select": lambda x: x.masked_select(coin(x.shape)),
    "squeeze_in_place": lambda x: (x[None] * 1).squeeze_(0),
}
for name, run in MOVED.items():
    case(name, run, TABLE, LINEAR)
ZEROS: dict[str, Any] = {"forward": (0.02, 2), "reason": DILUTED}
case("diag", torch.diag, each((5,), (256,)), LINEAR, **ZEROS)
case("diag_embed", lambda x: torch.diag_embed(x, 1), each((2, 3), (64, 32)), LINEAR, **ZEROS)
case(
    "block_diag",
    lambda x, y: torch.block_diag(x, y),
    each((2, 3), (64, 32), of=2),
    SUMMED,
)
case(
    "chunk_cat",
    lambda x, y: torch._chunk_cat((x, y), 0, 2),
    [((4, 3), (2, 3)), ((64, 32), (64, 32))],
    SUMMED,
    differentiable=False,
)

# --- scattered writes ------------------------------------------------------------------------

PAIR = each((4, 6), (256, 256), of=2)
PART = [((4, 6), (2, 6)), ((256, 64), (128, 64))]


def places(x: Tensor, count: int) -> Tensor:
    """Return `count` different rows of x."""
    return torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(7))[:count]


REPLACED: dict[str, Any] = {
    "index_copy": lambda x, y: x.index_copy(0, places(x, y.shape[0]), y),
    "index_put": lambda x, y: x.index_put((places(x, y.shape[0]),), y),
    "scatter": lambda x, y: x.scatter(0, places(x, y.shape[0])[:, None].expand_as(y), y),
    "slice_scatter": lambda x, y: x.slice_scatter(y, 0, 1, 1 + y.shape[0]),
    "index_put_add": lambda x, y: x.index_put((ints(y.shape[:1], 3),), y, accumulate=True),
    "index_add_alpha": lambda x, y: x.index_add(0, places(x, y.shape[0]), y, alpha=-0.5),
    "put": lambda x, y: x.put(places(x.flatten(), y.numel()).view(y.shape), y),
}


for name, run in REPLACED.items():
    case(name, run, PART, SUMMED)
case(
    "masked_scatter",
    lambda x, y: x.masked_scatter(coin(x.shape, 0.4), y),
    PAIR,
    SUMMED,
    backward={0: (0.25, 2), 1: (0.25, 2)},
    reason=MASKED,
)
case("select_scatter", lambda x, y: x.select_scatter(y, 0, 1), [((2, 6), (6,))], SUMMED)
case(
    "diagonal_scatter",
    lambda x, y: x.diagonal_scatter(y),
    [((3, 4), (3,)), ((64, 64), (64,))],
    SUMMED,
)
case(
    "as_strided_scatter",
    lambda x, y: x.as_strided_scatter(y, y.shape, (6, 1)),
    [((4, 6), (2, 6)), ((256, 6), (128, 6))],
    SUMMED,
)
case("scatter_value", lambda x: x.scatter(1, ints((4, 1), 6), 0.7), each((4, 6), (256, 256)))
case("scatter_zero", lambda x: x.scatter(1, ints((4, 1), 6), 0.0), each((4, 6), (256, 256)), LINEAR)
case("index_fill", lambda x: x.index_fill(0, ints((2,), x.shape[0]), -0.5), TABLE)
case("index_fill_zero", lambda x: x.index_fill(0, ints((1,), 4), 0.0), TABLE, LINEAR)


def reduced(reduce: str, include_self: bool = True) -> Any:
    return lambda x, y: x.scatter_reduce(
        1, ints(y.shape, x.shape[1]), y, reduce, include_self=include_self
    )


HITS: dict[str, Any] = {
    "backward": {0: (0.25, 2), 1: (0.25, 2)},
    "reason": "how many terms meet in a place is data",
}
for reduce in ("sum", "mean", "amax", "amin"):
    case(f"scatter_reduce_{reduce}", reduced(reduce), PAIR, SUMMED, **HITS)
case("scatter_reduce_mean_without_self", reduced("mean", False), PAIR, SUMMED, **HITS)
case(
    "index_reduce_mean",
    lambda x, y: x.index_reduce(0, ints(y.shape[:1], x.shape[0]), y, "mean"),
    PAIR,
    SUMMED,
    **HITS,
)
case(
    "index_reduce_amax",
    lambda x, y: x.index_reduce(0, ints(y.shape[:1], x.shape[0]), y, "amax"),
    PAIR,
    SUMMED,
)
case(
    "scatter_reduce_prod",
    reduced("prod"),
    each((4, 6), of=2),
    scales=0,
    tolerance=4,
    forward=(0.2, 4),
    backward={0: (0.2, 4), 1: (0.1, 4)},
    reason="how many factors meet in a place is data",
)

# --- routing ---------------------------------------------------------------------------------


def experts(x: Tensor, w: Tensor) -> Tensor:
    """Send each row through the two matrices that its logits choose, and add up the results."""
    logits = x @ fixed((x.shape[1], w.shape[0]), x)
    weights, chosen = logits.softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for e, matrix in enumerate(w):
        row, rank = torch.where(F.one_hot(chosen, w.shape[0])[..., e] > 0)
        out.index_add_(0, row, (x[row] @ matrix) * weights[row, rank, None])
    return out


case(
    "routing",
    experts,
    [((6, 4), (3, 4, 4)), ((256, 32), (4, 32, 32))],
    (0, 1, 1),
    tolerance=16,
    scales=0,
    backward={0: (0.25, 4), 1: (0.25, 4)},
    forward=(0.25, 4),
    reason="the largest gates are chosen, which no rule of one operator can know",
)

# --- products --------------------------------------------------------------------------------

case(
    "addr",
    lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=2),
    [((3, 4), (3,), (4,)), ((256, 64), (256,), (64,))],
    (1, 1, 0, 1),
    (1, 0, 1, 1),
)
case(
    "addbmm",
    lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2),
    [((3, 4), (2, 3, 5), (2, 5, 4)), ((64, 64), (4, 64, 128), (4, 128, 64))],
    (1, 1, 0, 1),
    (1, 0, 1, 1),
)
case(
    "addmv",
    lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=2),
    [((3,), (3, 5), (5,)), ((256,), (256, 64), (64,))],
    (1, 1, 0, 1),
    (1, 0, 1, 1),
)
case("cross", lambda x, y: torch.linalg.cross(x, y), each((5, 3), (1024, 3), of=2), *BILINEAR)
case("outer", torch.outer, [((3,), (4,)), ((64,), (256,))], *BILINEAR)

# --- scans -----------------------------------------------------------------------------------

SCANNED = each((3, 8), (1, 2), (64, 128))
case("cummax", lambda x: x.cummax(-1).values, SCANNED, LINEAR, **SELECTED)
case("cummin", lambda x: x.cummin(0).values, SCANNED, LINEAR, **SELECTED)
PRODUCTS = "a product of n Gaussians has a kurtosis of 3^n: few samples carry its second moment"
case(
    "cumprod",
    lambda x: x.cumprod(-1),
    each((3, 4), (4096, 2)),
    scales=0,
    tolerance=8,
    forward=(0.25, 4),
    backward={0: (0.25, 4)},
    reason=PRODUCTS,
)
case("logcumsumexp", lambda x: x.logcumsumexp(-1), SCANNED, tolerance=8, scales=1)

# --- order statistics ------------------------------------------------------------------------

case("median", lambda x: x.median(-1).values, ROWS, LINEAR, **SELECTED)
case("nanmedian", lambda x: x.nanmedian(0).values, ROWS, LINEAR, **SELECTED)
case("median_all", lambda x: x.median(), SCANNED, LINEAR, plain_gradients=(0,))
case("kthvalue", lambda x: x.kthvalue(2, -1).values, ROWS, LINEAR, **SELECTED)
case("mode", lambda x: x.mode(-1).values, SCANNED, LINEAR, **SELECTED)
case("aminmax", lambda x: x.aminmax(dim=-1).max, ROWS, LINEAR, **SELECTED)
case("quantile", lambda x: x.float().quantile(0.3, -1), SCANNED, LINEAR, **SELECTED, tolerance=2)
case("unique", lambda x: x.unique(), SCANNED, LINEAR, differentiable=False)

# --- statistics ------------------------------------------------------------------------------

case("nansum", lambda x: x.nansum(-1), ROWS, LINEAR)
case("nanmean", lambda x: x.nanmean(-1), ROWS, LINEAR)
case("std_mean", lambda x: torch.std_mean(x, -1)[1], ROWS, LINEAR)
case("norm_old", lambda x: torch.norm(x, 2, -1), ROWS, LINEAR, tolerance=2)
case(
    "renorm",
    lambda x: x.renorm(2, 0, 2.0),
    each((3, 8), (64, 16)),
    tolerance=8,
    scales=2,
    backward={0: (0.05, 2)},
    reason="how many slices are over the bound is data",
)
case("trace", torch.trace, each((3, 5), (64, 64)), LINEAR, tolerance=4, plain_gradients=(0,))
case("dist", torch.dist, each((3, 5), of=2), SUMMED, tolerance=4, plain_gradients=(0, 1))

# --- linear algebra --------------------------------------------------------------------------


def conditioned(x: Tensor) -> Tensor:
    """Return a matrix near 2 times the identity."""
    return x * (0.5 / x.shape[-1] ** 0.5) + 2 * torch.eye(x.shape[-1], dtype=x.dtype)


def definite(x: Tensor) -> Tensor:
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-1], dtype=x.dtype)


la = torch.linalg
SQUARE = each((4, 4), (2, 3, 3), (32, 32))
SOLVED: dict[str, Any] = {
    "scales": 0,
    "tolerance": 16,
    "backward": {0: (0.1, 8), 1: (0.1, 8)},
    "reason": "autograd multiplies a matrix by its own factors, which are not independent of it",
}
case("inv", lambda x: la.inv(conditioned(x)), SQUARE, **SOLVED)
case("pinv", lambda x: la.pinv(conditioned(x)), SQUARE, **SOLVED)
case(
    "solve",
    lambda x, y: la.solve(conditioned(x), y),
    [((4, 4), (4, 2)), ((32, 32), (32, 8))],
    (0, 1, 1),
    **SOLVED,
)
case(
    "solve_triangular",
    lambda x, y: la.solve_triangular(conditioned(x).tril(), y, upper=False),
    [((4, 4), (4, 2)), ((32, 32), (32, 8))],
    (0, 1, 1),
    **SOLVED,
)
case("cholesky", lambda x: la.cholesky(definite(x)), SQUARE, **SOLVED)
case(
    "cholesky_solve",
    lambda x, y: torch.cholesky_solve(y, conditioned(x).tril()),
    [((4, 4), (4, 2)), ((32, 32), (32, 8))],
    (0, 1, 1),
    **SOLVED,
)
case("lu_factor", lambda x: la.lu_factor(conditioned(x))[0], SQUARE, **SOLVED)
case("lu", lambda x: la.lu(conditioned(x))[2], SQUARE, **SOLVED)
case("matrix_exp", lambda x: la.matrix_exp(x * 0.25), SQUARE, **SOLVED)
case("matrix_power", lambda x: la.matrix_power(conditioned(x), 3), SQUARE, **SOLVED)
TALL = each((5, 3), (64, 16))
FACTORS = {**SOLVED, "tolerance": 64}
case("qr_q", lambda x: la.qr(x)[0].abs(), TALL, (1, 0), **FACTORS)
case("qr_r", lambda x: la.qr(x)[1].abs(), TALL, LINEAR, **FACTORS)
if hasattr(la, "polar"):  # torch has it from version 2.14 on.
    case("polar_u", lambda x: la.polar(x)[0].abs(), TALL, (1, 0), **FACTORS)
    case("polar_h", lambda x: la.polar(x)[1].abs(), TALL, LINEAR, **FACTORS)
    case("matrix_sqrth", lambda x: la.matrix_sqrth(definite(x)), SQUARE, **SOLVED)
case("svdvals", la.svdvals, TALL, LINEAR, **FACTORS)
case("eigvalsh", lambda x: la.eigvalsh(x + x.mT), SQUARE, LINEAR, **FACTORS)
case(
    "det",
    lambda x: la.det(x.float()),
    each((7, 3, 3), (512, 3, 3)),
    (1, 3),
    tolerance=64,
    scales=0,
    heavy=True,
    heavy_grad=True,
    backward={0: (0.25, 4)},
    reason="a product of n factors, and the inverse in its gradient",
)
case(
    "slogdet",
    lambda x: la.slogdet(x.float())[1],
    each((7, 3, 3), (64, 8, 8)),
    tolerance=64,
    heavy_grad=True,
    backward={0: (0.1, 4)},
    reason="1 / det has no variance",
)

# --- grouped products ------------------------------------------------------------------------


def grouped(a: Tensor, b: Tensor) -> Tensor:
    """Three groups of rows, one of them empty."""
    half = a.shape[0] // 2
    offs = torch.tensor([half, half, a.shape[0]], dtype=torch.int32)
    return F.grouped_mm(a, b, offs=offs)


# This is not float64, as torch has no such product in float64: plain operands are cast.
GROUPED_ROWS = [((8, 16), (3, 16, 8)), ((256, 64), (3, 64, 32))]
EMPTY = {"backward": {1: (0.4, 2)}, "reason": "the matrix of an empty group has no gradient"}
case(
    "grouped_mm",
    lambda a, b: grouped(*(x if type(x) is not Tensor else x.float() for x in (a, b))),
    GROUPED_ROWS,
    *BILINEAR,
    **EMPTY,
)
