"""Products and sums in an order that depends on the position in the summed dimension alone.

`rows` multiplies rows by rows in the order that `native/products.cpp` states. Without that library,
and for float64, `_fold` adds in a fixed order of its own. It adds neighbours: 64 consecutive
elements are a block, blocks 2i and 2i + 1 are added until one block is left, and that block is
folded by halves. In both orders, zeros that follow the last element change no bit. So attention
over i keys has the same bits as attention over T keys if only i of them are visible.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scaledtensor.native.products import dot_rows
from scaledtensor.native.weighted import weighted_sums

__all__ = ["rows", "total", "weighted", "wide"]

_BLOCK = 64
#: The number of float32 products that the order without the library keeps at once: 16 MiB.
_HELD = 1 << 22


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sums of elements of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b.mT` of (B, M, K) and (B, N, K), as (B, M, N) in the dtype of `a`."""
    if not a.shape[2]:
        return a.new_zeros(*a.shape[:2], b.shape[1])
    if a.dtype == b.dtype and a.dtype in (torch.float32, torch.bfloat16):
        y = dot_rows(*(x if x.stride(2) == 1 else x.contiguous() for x in (a, b)))
        if y is not None:
            return y
    held = torch.promote_types(wide(a.dtype), wide(b.dtype))
    if held == torch.float32 and not (a.dtype == b.dtype == torch.float32):
        return rows(a.float(), b.float()).to(a.dtype)
    return _rows_by_folds(a.to(held), b.to(held)).to(a.dtype)


def _rows_by_folds(a: Tensor, b: Tensor) -> Tensor:
    (batches, m, k), n = a.shape, b.shape[1]
    y = a.new_empty(batches, m, n)
    across = max(1, min(n, _HELD // max(k, 1)))
    down = max(1, min(m, _HELD // max(k * across, 1)))
    for batch in range(batches):
        for j in range(0, n, across):
            right = b[batch, j : j + across]
            for i in range(0, m, down):
                left = a[batch, i : i + down].unsqueeze(1)
                y[batch, i : i + down, j : j + across] = _fold(left * right)
    return y


def weighted(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return `p @ v` of weights (B, M, K) and rows (B, K, N), and the sums of weights (B, M, 1).

    The rows are added one after another, from the first to the last, so weights of zero anywhere
    change no bit.
    """
    held = weighted_sums(p, v if v.stride(2) == 1 or v.shape[2] == 1 else v.contiguous())
    if held is not None:
        return held
    y, sums = p.new_zeros(*p.shape[:2], v.shape[2]), p.new_zeros(*p.shape[:2], 1)
    for i in range(p.shape[2]):
        weight = p[:, :, i : i + 1]
        y = y + weight * v[:, i : i + 1]
        sums = sums + weight
    return y, sums


def _fold(x: Tensor) -> Tensor:
    """Return the sums over the last dimension."""
    excess = -x.shape[-1] % _BLOCK
    if excess or not x.shape[-1]:
        x = torch.constant_pad_nd(x, (0, excess or _BLOCK))
    x = x.reshape(*x.shape[:-1], -1, _BLOCK)
    while (blocks := x.shape[-2]) > 1:
        odd, paired = blocks % 2, blocks // 2 * 2
        last = x[..., paired:, :]
        x = x[..., 0:paired:2, :] + x[..., 1:paired:2, :]
        if odd:
            x = torch.cat((x, last), -2)
    x = x.squeeze(-2)
    while (width := x.shape[-1] // 2) > 0:
        x = x[..., :width] + x[..., width:]
    return x.squeeze(-1) + 0.0  # no sum is -0


def total(x: Tensor, dims: Sequence[int] | int | None, keepdim: bool) -> Tensor:
    """Return the sums over `dims` (None or empty: all), in `wide(x.dtype)`."""
    x = x.to(wide(x.dtype))
    if x.dim() == 0:
        return x.clone()
    given = (dims,) if isinstance(dims, int) else tuple(dims or range(x.dim()))
    summed = sorted(d % x.dim() for d in given)
    kept = [d for d in range(x.dim()) if d not in summed]
    lines = x.permute(*kept, *summed).reshape(
        1, math.prod(x.shape[d] for d in kept), math.prod(x.shape[d] for d in summed)
    )
    y = rows(lines, lines.new_ones(1, 1, lines.shape[2]))
    if keepdim:
        return y.view([1 if d in summed else n for d, n in enumerate(x.shape)])
    return y.view([x.shape[d] for d in kept])
