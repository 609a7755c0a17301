"""Products that the FP8 units of a CUDA device do as they are.

    scales of left @ right               in         compute capability
    one a tensor                         float32    8.9 and later
    (1, 0) @ (1, 0), by row              float32    8.9 and later
    (1, 128) @ (1, 128)                  float32    9.0
    (1, 128) @ (128, 128)                float32    9.0
    (1, 32) @ (1, 32), MXFP8             E8M0       10.0

Blocks are (across, along) what is summed, as in `recipes.casts`. Elements are E4M3FN or E5M2, one
of the two E4M3FN. Sizes are multiples of 16 and of a block; of 512 along a 128 x 128, whose scales
the units read four at a time. What is none of these is emulated: the same values in bfloat16 or
float32, which a `RecipeWarning` says once for each reason.

The units read the left operand by rows and the right one by columns. Where codes lie otherwise they
are copied, one byte an element; torch.compile does that in the kernel that casts.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import RecipeWarning
from scaledtensor.ops.products.quantize import Coded
from scaledtensor.recipes.casts import Cast, Microscale, TwoLevel

__all__ = [
    "groups",
    "multiply",
    "obstacle",
    "obstacle_of_casts",
    "obstacle_of_codes",
    "obstacle_of_groups",
    "scaled",
    "told",
]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: Scales along what is summed, that the units read at once.
_READ = 4


class _Kind(NamedTuple):
    """A way to share scales that some units know."""

    left: tuple[int, int]
    right: tuple[int, int]
    first: tuple[int, int]
    """The least compute capability."""
    last: int
    """The last major one."""


_ANY = 1 << 16
_TENSOR = _Kind((0, 0), (0, 0), (8, 9), _ANY)
_ROW = _Kind((1, 0), (1, 0), (8, 9), _ANY)
_FLOAT32 = (
    _TENSOR,
    _ROW,
    _Kind((1, 128), (1, 128), (9, 0), 9),
    _Kind((1, 128), (128, 128), (9, 0), 9),
)
_MX = _Kind((1, 32), (1, 32), (10, 0), 10)


def obstacle(left: Coded, a: Cast, right: Coded, b: Cast) -> str | None:
    """Why the units do not take a product of operands cast like this; None where they do."""
    kind = _kind(a, b)
    if kind is None:
        return f"no FP8 unit multiplies {a} by {b}"
    return _of_kind(kind, left.codes, right.codes)


def obstacle_of_casts(a: Cast, b: Cast, held: tuple[int, int] | None) -> str | None:
    """The same of operands of any size, on a device of the compute capability `held`."""
    kind = _kind(a, b)
    if kind is None:
        return f"no FP8 unit multiplies {a} by {b}"
    return _of_device(kind, held, a.format.storage_dtype, b.format.storage_dtype)


def obstacle_of_codes(a: Tensor, b: Tensor) -> str | None:
    """The same of elements under one scale a tensor."""
    return _of_kind(_TENSOR, a, b)


def obstacle_of_groups(a: Tensor, b: Tensor) -> str | None:
    """The same of rows in groups, (M, K), by one matrix for each, (groups, K, N), under one scale a
    tensor. Groups along what is summed begin where the rows of one end, and the units want
    multiples of 16."""
    if _torch.compute_capability(a) != (9, 0):
        return "its FP8 units are of compute capability 9.0"
    if not a.dtype == b.dtype == torch.float8_e4m3fn:
        return f"its FP8 units take E4M3FN alone, not {a.dtype} by {b.dtype}"
    if a.dim() != 2 or b.dim() != 3:
        return "FP8 units take groups of rows, not groups along what is summed"
    return _of_sizes(a.shape[1], b.shape[2])


def told(reason: str) -> None:
    """Say, once for each, why a product on a CUDA device is emulated."""
    if reason not in _told:
        _told.add(reason)
        warnings.warn(
            f"an FP8 product is computed from the same values in 16 or 32 bits: {reason}",
            RecipeWarning,
            stacklevel=2,
        )


_told: set[str] = set()


def _kind(a: Cast, b: Cast) -> _Kind | None:
    if isinstance(a.scale, TwoLevel) or isinstance(b.scale, TwoLevel):
        return None
    by_a, by_b = (isinstance(side.scale, Microscale) for side in (a, b))
    if by_a != by_b:
        return None
    known = (_MX,) if by_a else _FLOAT32
    return next((k for k in known if (a.block, b.block) == (k.left, k.right)), None)


def _of_kind(kind: _Kind, a: Tensor, b: Tensor) -> str | None:
    reason = _of_device(kind, _torch.compute_capability(a), a.dtype, b.dtype)
    if reason is not None:
        return reason
    if a.dim() != 2:
        return "a batch of matrices has no FP8 product"
    (m, k), n = a.shape, b.shape[1]
    across, along = kind.right
    if k % max(along * (_READ if across > 1 else 1), 1) or n % max(across, 1):
        return f"blocks of {kind.right} do not fill a matrix of {k} x {n}"
    if k % max(kind.left[1], 1):
        return f"blocks of {kind.left} do not fill a matrix of {m} x {k}"
    return _of_sizes(m, k, n)


def _of_device(
    kind: _Kind, held: tuple[int, int] | None, a: torch.dtype, b: torch.dtype
) -> str | None:
    if held is None or not kind.first <= held <= (kind.last, _ANY):
        least = ".".join(map(str, kind.first))
        until = "" if kind.last == _ANY else f" to {kind.last}"
        return f"scales of {kind.left} by {kind.right} want a compute capability of {least}{until}"
    if a not in _FP8 or b not in _FP8 or a == b == torch.float8_e5m2:
        return f"no FP8 unit multiplies {a} by {b}"
    return None


def _of_sizes(*sizes: int) -> str | None:
    if any(n % 16 or n == 0 for n in sizes):
        return f"sizes of {' x '.join(map(str, sizes))} are not all multiples of 16"
    return None


# --- products that have no obstacle ----------------------------------------------------------


def scaled(a: Tensor, b: Tensor, scale: Tensor | None, fast: bool) -> Tensor:
    """`(a @ b) * scale` in bfloat16, where None is 1: one multiplication, one rounding."""
    one = torch.ones((), device=a.device)
    return _torch.scaled_mm(_by_rows(a), _by_columns(b), one if scale is None else scale, one, fast)


def multiply(left: Coded, a: Cast, right: Coded, b: Cast, ratio: Tensor, fast: bool) -> Tensor:
    """The product of the values of two operands, times `ratio`, in bfloat16."""
    kind = _kind(a, b)
    rows, columns = _by_rows(left.codes), _by_columns(right.codes)
    if kind is _MX:
        scales = _tiled(left.scale), _tiled(right.scale.mT)
        return _torch.scaled_mm(rows, columns, *scales, fast) * ratio.to(torch.bfloat16)
    of_left = left.scale * ratio
    if kind is _TENSOR:
        return _torch.scaled_mm(rows, columns, of_left, right.scale, fast)
    if kind is _ROW:
        # Anew, since a dimension of one element may have any stride.
        of_rows, of_columns = of_left.flatten().unsqueeze(1), right.scale.flatten().unsqueeze(0)
        return _torch.scaled_mm(rows, columns, of_rows, of_columns, fast)
    # Scales of 1 x 128 lie one beside the other across what is summed, those of squares along it.
    squares = b.block[0] > 1
    of_columns = _by_columns(right.scale) if squares else _by_rows(right.scale)
    return _torch.scaled_mm(rows, columns, _by_columns(of_left), of_columns, fast)


def groups(a: Tensor, b: Tensor, offs: Tensor, scale: Tensor, fast: bool) -> Tensor:
    """`scale` times the product of each group of rows and its matrix, in bfloat16."""
    of_rows = scale.expand(a.shape[0]).contiguous()
    of_columns = torch.ones(b.shape[0], b.shape[2], device=a.device)
    rows, columns = _by_rows(a), _by_columns(b)
    return _torch.scaled_grouped_mm(rows, columns, of_rows, of_columns, offs, fast)


def _by_rows(x: Tensor) -> Tensor:
    return x.contiguous()


def _by_columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _tiled(scale: Tensor) -> Tensor:
    """Scales of (rows, K / 32) in the order in which tensor cores read them: tiles of 128 by 4, of
    which the row r and the column c are the byte 16 (r mod 32) + 4 (r div 32) + c (cuBLAS, "1D
    Block Scaling Factors Layout")."""
    height, width = scale.shape
    bytes_of = torch.nn.functional.pad(
        scale.view(torch.uint8), (0, -width % _READ, 0, -height % 128)
    )
    tiles = bytes_of.view(-(-height // 128), 4, 32, -(-width // _READ), _READ)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e8m0fnu)
