"""Large CPU tensors, piece by piece: temporaries that stay in the cache, and are not fresh memory.

A large temporary is fresh memory, and the kernel takes longer to hand it out than a cast to run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError

__all__ = ["check_tensor"]


# The check that the casts share: their tensors are torch's.
def check_tensor(given: Any, function: str, argument: str = "x") -> None:
    """Raises DTypeError unless `given`, that argument of `scaledtensor.formats.<function>`, is a
    torch.Tensor."""
    if not isinstance(given, Tensor):
        what = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
        raise DTypeError(
            f"{argument} of scaledtensor.formats.{function} is a torch.Tensor; got {what}. For"
            " arrays and lists use scaledtensor.formats.numpy, or make a tensor by torch.as_tensor"
        )


_PIECE = 1 << 18


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    """The elements of `x` in a row, piece by piece."""
    return torch.split(x.reshape(-1), _PIECE)


def in_pieces(
    f: Callable[[Tensor, int, Tensor | None], Tensor],
    x: Tensor,
    dtype: torch.dtype,
    any_order: bool = True,
) -> Tensor:
    """`f(x, 0, None)`, elementwise; in pieces `f(x[a:b], a, out[a:b])` in a row where x is large.

    `f` may write into the third and return it, else that is done here. With `any_order` the
    elements may be taken as they lie in memory, else as they are counted. Where it is traced, `x`
    stays whole.
    """
    real = type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()
    if x.numel() <= _PIECE or not real:
        return f(x, 0, None)
    order = sorted(range(x.dim()), key=x.stride, reverse=True) if any_order else range(x.dim())
    rows = x.permute(*order)
    if not rows.is_contiguous():
        return f(x, 0, None)
    out = torch.empty(rows.shape, dtype=dtype)
    source, target = rows.view(-1), out.view(-1)
    pieces = zip(torch.split(source, _PIECE), torch.split(target, _PIECE), strict=True)
    for i, (piece, place) in enumerate(pieces):
        result = f(piece, i * _PIECE, place)
        if result is not place:
            place.copy_(result)
    return out.permute(*(order.index(d) for d in range(x.dim())))
