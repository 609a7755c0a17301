"""Checks of tensors, and large CPU tensors cast piece by piece.

A large temporary is fresh memory, and the kernel takes longer to provide it than a cast takes to
run. The temporaries of a piece stay in the CPU's cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError

__all__ = [
    "FLOATS",
    "HALVES",
    "PIECE",
    "check_tensor",
    "covers_storage",
    "in_pieces",
    "named",
    "pieces",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)

#: Elements of a piece.
PIECE = 1 << 18


def covers_storage(q: Tensor) -> bool:
    """Whether `q` is the whole of its memory, and no part of a larger tensor."""
    return q.numel() * q.itemsize == q.untyped_storage().nbytes()


def check_tensor(given: Any, function: str, argument: str = "x") -> None:
    """Raise DTypeError unless `given` is a torch.Tensor. It is the argument called `argument` of
    `scaledtensor.formats.<function>`."""
    if not isinstance(given, Tensor):
        what = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
        raise DTypeError(
            f"{argument} of scaledtensor.formats.{function} is a torch.Tensor; got {what}. For"
            " arrays and lists use scaledtensor.formats.numpy, or make a tensor by torch.as_tensor"
        )


def named(dtypes: tuple[torch.dtype, ...]) -> str:
    """The names of dtypes, for messages."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    """The elements of `x` in a row, piece by piece; a small `x` itself."""
    return (x,) if x.numel() <= PIECE else torch.split(x.reshape(-1), PIECE)


def in_pieces(
    f: Callable[[Tensor, int, Tensor | None], Tensor],
    x: Tensor,
    dtype: torch.dtype,
    any_order: bool = True,
) -> Tensor:
    """Apply an elementwise `f`: `f(x, 0, None)` if `x` is small, else `f(x[a:b], a, out[a:b])` for
    each piece of the elements in a row.

    `f` may write its result into the third argument and return it; otherwise the result is copied
    there. With `any_order` the elements may be taken in the order of memory, else in the order of
    the indices. In traced code `x` stays whole.
    """
    real = type(x) is Tensor and backend_of(x).host and not torch.compiler.is_compiling()
    if not real or x.numel() <= PIECE:
        return f(x, 0, None)
    order = sorted(range(x.dim()), key=x.stride, reverse=True) if any_order else range(x.dim())
    rows = x.permute(*order)
    if not rows.is_contiguous():
        return f(x, 0, None)
    out = torch.empty(rows.shape, dtype=dtype, device="cpu")
    pairs = zip(pieces(rows), pieces(out), strict=True)
    for i, (piece, place) in enumerate(pairs):
        result = f(piece, i * PIECE, place)
        if result is not place:
            place.copy_(result)
    return out.permute(*(order.index(d) for d in range(x.dim())))
