"""The matrix products of ATen by `sums.rows`.

A product is rounded to its dtype, and then a bias is added. So `linear` has the same bits whether
torch makes it of `addmm`, or of `mm` or `bmm` and a sum.
"""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.invariant.sums import rows, total

__all__ = ["addbmm", "addmm", "addmm_activation", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"]

Torch = Any
"""The operator of torch that a function replaces, to be called with its arguments."""


def mm(torchs: Torch, a: Tensor, b: Tensor) -> Tensor:
    return rows(a.unsqueeze(0), b.t().unsqueeze(0)).squeeze(0)


def bmm(torchs: Torch, a: Tensor, b: Tensor) -> Tensor:
    return rows(a, b.mT)


def mv(torchs: Torch, a: Tensor, b: Tensor) -> Tensor:
    return rows(a.unsqueeze(0), b.view(1, 1, -1)).view(-1)


def dot(torchs: Torch, a: Tensor, b: Tensor) -> Tensor:
    return rows(a.view(1, 1, -1), b.view(1, 1, -1)).view(())


def _plus(y: Tensor, x: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta x + alpha y. torch does not read x if beta is 0."""
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    return y + (x if beta == 1 else x * beta)


def addmm(
    torchs: Torch, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(mm(torchs, a, b), x, beta, alpha)


def addmm_activation(
    torchs: Torch,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    use_gelu: bool = False,
) -> Tensor:
    y = addmm(torchs, x, a, b, beta=beta, alpha=alpha)
    return torch.nn.functional.gelu(y, approximate="tanh") if use_gelu else y.relu()


def addmv(
    torchs: Torch, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(mv(torchs, a, b), x, beta, alpha)


def baddbmm(
    torchs: Torch, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(bmm(torchs, a, b), x, beta, alpha)


def addbmm(
    torchs: Torch, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(total(bmm(torchs, a, b), 0, False).to(x.dtype), x, beta, alpha)
