"""Large CPU tensors, piece by piece: temporaries that stay in the cache, and are not fresh memory.

A large temporary is fresh memory, and the kernel takes longer to hand it out than a cast to run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_PIECE = 1 << 17


def in_pieces(
    f: Callable[[Tensor, int], Tensor], x: Tensor, dtype: torch.dtype, any_order: bool = True
) -> Tensor:
    """`f(x, 0)`, elementwise, in pieces `f(x[a:b], a)` of the elements in a row where x is large.

    With `any_order` the elements may be taken as they lie in memory, else as they are counted.
    """
    if x.numel() <= _PIECE or not x.is_cpu or type(x) is not Tensor:
        return f(x, 0)
    order = sorted(range(x.dim()), key=x.stride, reverse=True) if any_order else range(x.dim())
    rows = x.permute(*order)
    if not rows.is_contiguous():
        return f(x, 0)
    out = torch.empty(rows.shape, dtype=dtype)
    source, target = rows.view(-1), out.view(-1)
    for start in range(0, x.numel(), _PIECE):
        target[start : start + _PIECE] = f(source[start : start + _PIECE], start)
    return out.permute(*(order.index(d) for d in range(x.dim())))
