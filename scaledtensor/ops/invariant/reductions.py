"""Sums, means, variances, norms and softmax by `sums.total`.

Rows of one length have the same bits in any batch. A softmax also has the same bits if more masked
logits follow.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.invariant.sums import total

__all__ = [
    "batch_norm",
    "log_softmax",
    "logsumexp",
    "mean",
    "mean_of_all",
    "softmax",
    "std",
    "std_mean",
    "sum_of_all",
    "summed",
    "var",
    "var_mean",
    "vector_norm",
]

Torch = Any
Dims = Sequence[int] | int | None


def summed(
    torchs: Torch,
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = x.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        return torchs(x, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
    return total(x.to(torch.promote_types(x.dtype, dtype)), dim, keepdim).to(dtype)


def sum_of_all(torchs: Torch, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.sum(x, list(range(x.dim())), dtype=dtype)


def mean(
    torchs: Torch,
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = x.dtype if dtype is None else dtype
    y = total(x.to(torch.promote_types(x.dtype, dtype)), dim, keepdim)
    return (y / _count(x, dim)).to(dtype)


def mean_of_all(torchs: Torch, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.mean(x, list(range(x.dim())), dtype=dtype)


def _count(x: Tensor, dim: Dims) -> int:
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    count = 1
    for d in dims if x.dim() else ():
        count *= x.shape[d]
    return count


def var_mean(
    torchs: Torch,
    x: Tensor,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """The mean comes first, and then the sum of squared distances from it."""
    count = _count(x, dim)
    centre = total(x, dim, True) / count
    squares = total((x - centre).square(), dim, True)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    found = [y.to(x.dtype) for y in (variance, centre)]
    if not keepdim:
        dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
        found = [y.squeeze(dims) for y in found]
    return found[0], found[1]


def var(torchs: Torch, x: Tensor, dim: Dims = None, **how: Any) -> Tensor:
    return var_mean(torchs, x, dim, **how)[0]


def std_mean(torchs: Torch, x: Tensor, dim: Dims = None, **how: Any) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, centre = var_mean(torchs, wide, dim, **how)
    return variance.sqrt().to(x.dtype), centre.to(x.dtype)


def std(torchs: Torch, x: Tensor, dim: Dims = None, **how: Any) -> Tensor:
    return std_mean(torchs, x, dim, **how)[0]


def vector_norm(
    torchs: Torch,
    x: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = x.dtype if dtype is None else dtype
    wide = x.to(torch.promote_types(out, torch.float32))
    if ord == 2:
        return total(wide.square(), dim, keepdim).sqrt().to(out)
    if ord == 1:
        return total(wide.abs(), dim, keepdim).to(out)
    if ord in (0, float("inf"), float("-inf")):  # any order of these gives the same bits
        return torchs(x, ord, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
    raise UnsupportedError(
        f"a vector norm of order {ord} has no fixed order of additions under "
        "scaledtensor.batch_invariant; it takes the orders 0, 1, 2 and infinity. Write "
        f"x.abs().pow({ord}).sum(dim).pow(1 / {ord})"
    )


def softmax(torchs: Torch, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return wide if half_to_float else x.clone()
    e = (wide - wide.amax(dim, keepdim=True)).exp()
    y = e / total(e, dim, True)
    return y if half_to_float else y.to(x.dtype)


def log_softmax(torchs: Torch, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """torch's own operator reads each contiguous row by itself."""
    if x.dim() == 0:
        return torchs(x, dim, half_to_float)  # type: ignore[no-any-return]
    lines = x.movedim(dim, -1).contiguous()
    y: Tensor = torchs(lines, -1, half_to_float)
    return y.movedim(-1, dim)


def logsumexp(torchs: Torch, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    top = wide.amax(dims, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)
    y = total((wide - top).exp(), dims, True).log() + top
    return (y if keepdim else y.squeeze(dims)).to(x.dtype)


def batch_norm(
    torchs: Torch,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation by stored statistics. torch's own has two formulas, for two layouts."""
    if training or mean is None or var is None:
        raise UnsupportedError(
            "batch normalisation in training depends on the whole batch, which contradicts "
            "scaledtensor.batch_invariant; call model.eval(), or take a norm of single rows"
        )
    shape = [1, -1] + [1] * (x.dim() - 2)
    factor = (var.float() + eps).rsqrt()
    factor = factor if weight is None else factor * weight.float()
    y = (x.float() - mean.float().view(shape)) * factor.view(shape)
    y = y if bias is None else y + bias.float().view(shape)
    none = x.new_empty(0, dtype=torch.float32)
    return y.to(x.dtype), none, none.clone()
