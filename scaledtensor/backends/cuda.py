"""CUDA devices, of NVIDIA and (ROCm) of AMD.

NVIDIA's FP8 units do these products:

    scales of left @ right               in         compute capability
    one a tensor                         float32    8.9 and later
    (1, 0) @ (1, 0), by row              float32    8.9 and later
    (1, 128) @ (1, 128)                  float32    9.0
    (1, 128) @ (128, 128)                float32    9.0
    (1, 32) @ (1, 32), MXFP8             E8M0       10.0

Blocks are (across, along) the summed dimension, as in `recipes.casts`. Elements are E4M3FN or E5M2,
and one operand is E4M3FN. Sizes are multiples of 16 and of a block; along a 128 x 128 they are
multiples of 512, because the units read four of its scales at a time. All other products are
emulated, and a `RecipeWarning` names each reason once. This library uses no FP8 units under ROCm.

The units read the left operand by rows and the right operand by columns. Codes in another order are
copied, one byte an element; torch.compile does that in the kernel that casts.

Emulated products are computed in bfloat16 from compute capability 8.0 and under ROCm, and in
float32 on earlier devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends.backend import Backend, Choice, Codes, Sharing

__all__ = ["CUDA", "FP8Units"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: Scales along the summed dimension that the units read at once.
_READ = 4


class _Kind(NamedTuple):
    """A way to share scales that some units know."""

    left: tuple[int, int]
    right: tuple[int, int]
    first: tuple[int, int]
    """The least compute capability."""
    last: int
    """The last major compute capability."""
    scales: torch.dtype = torch.float32


_ANY = 1 << 16
_TENSOR = _Kind((0, 0), (0, 0), (8, 9), _ANY)
_ROW = _Kind((1, 0), (1, 0), (8, 9), _ANY)
_MX = _Kind((1, 32), (1, 32), (10, 0), 10, torch.float8_e8m0fnu)
_KINDS = (
    _TENSOR,
    _ROW,
    _Kind((1, 128), (1, 128), (9, 0), 9),
    _Kind((1, 128), (128, 128), (9, 0), 9),
    _MX,
)


def _kind(a: Sharing, b: Sharing) -> _Kind | None:
    if a.scales != b.scales:
        return None
    wanted = (a.block, b.block, a.scales)
    return next((k for k in _KINDS if (k.left, k.right, k.scales) == wanted), None)


@dataclass(frozen=True)
class FP8Units:
    """The FP8 units of a compute capability; `backend.Units` describes the methods."""

    capability: tuple[int, int]

    # --- what the units take ---

    def obstacle(self, left: Codes, right: Codes) -> str | None:
        kind = _kind(left.sharing, right.sharing)
        if kind is None:
            return f"no FP8 unit multiplies {left.sharing.words} by {right.sharing.words}"
        return self._obstacle_of_matrices(kind, left.codes, right.codes)

    def obstacle_of_casts(self, left: Sharing, right: Sharing) -> str | None:
        kind = _kind(left, right)
        if kind is None:
            return f"no FP8 unit multiplies {left.words} by {right.words}"
        return self._obstacle_of_dtypes(kind, left.elements, right.elements)

    def obstacle_of_codes(self, a: Tensor, b: Tensor) -> str | None:
        return self._obstacle_of_matrices(_TENSOR, a, b)

    def obstacle_of_groups(self, a: Tensor, b: Tensor) -> str | None:
        # Groups along the summed dimension begin where the rows of one end, and the units want
        # multiples of 16.
        if self.capability != (9, 0):
            return "its FP8 units are of compute capability 9.0"
        if not a.dtype == b.dtype == torch.float8_e4m3fn:
            return f"its FP8 units take E4M3FN alone, not {a.dtype} by {b.dtype}"
        if a.dim() != 2 or b.dim() != 3:
            return "FP8 units take groups of rows, not groups along what is summed"
        return _obstacle_of_sizes(a.shape[1], b.shape[2])

    def _obstacle_of_matrices(self, kind: _Kind, a: Tensor, b: Tensor) -> str | None:
        reason = self._obstacle_of_dtypes(kind, a.dtype, b.dtype)
        if reason is not None:
            return reason
        if a.dim() != 2 or b.dim() != 2:
            return "FP8 units multiply two matrices, no batch of them and no vector"
        (m, k), n = a.shape, b.shape[1]
        across, along = kind.right
        if k % max(along * (_READ if across > 1 else 1), 1) or n % max(across, 1):
            return f"blocks of {kind.right} do not fill a matrix of {k} x {n}"
        if k % max(kind.left[1], 1):
            return f"blocks of {kind.left} do not fill a matrix of {m} x {k}"
        return _obstacle_of_sizes(m, k, n)

    def _obstacle_of_dtypes(self, kind: _Kind, a: torch.dtype, b: torch.dtype) -> str | None:
        if not kind.first <= self.capability <= (kind.last, _ANY):
            least = ".".join(map(str, kind.first))
            until = "" if kind.last == _ANY else f" to {kind.last}"
            wanted = f"want a compute capability of {least}{until}"
            return f"scales of {kind.left} by {kind.right} {wanted}"
        if a not in _FP8 or b not in _FP8 or a == b == torch.float8_e5m2:
            return f"no FP8 unit multiplies {a} by {b}"
        return None

    # --- products without an obstacle ---

    def scaled(self, a: Tensor, b: Tensor, scale: Tensor | None, fast: bool) -> Tensor:
        one = torch.ones((), device=a.device, dtype=torch.float32)
        of_rows = one if scale is None else scale
        return _torch.scaled_mm(_by_rows(a), _by_columns(b), of_rows, one, fast)

    def multiply(self, left: Codes, right: Codes, ratio: Tensor, fast: bool) -> Tensor:
        kind = _kind(left.sharing, right.sharing)
        rows, columns = _by_rows(left.codes), _by_columns(right.codes)
        if kind is _MX:
            scales = _tiled(left.scale), _tiled(right.scale.mT)
            return _torch.scaled_mm(rows, columns, *scales, fast) * ratio.to(torch.bfloat16)
        of_left = left.scale * ratio
        if kind is _TENSOR:
            return _torch.scaled_mm(rows, columns, of_left, right.scale, fast)
        if kind is _ROW:
            # Made again, since a dimension of one element may have any stride.
            of_rows = of_left.flatten().unsqueeze(1)
            of_columns = right.scale.flatten().unsqueeze(0)
            return _torch.scaled_mm(rows, columns, of_rows, of_columns, fast)
        # Scales of 1 x 128 lie one beside the other across the summed dimension, scales of squares
        # along it.
        squares = right.sharing.block[0] > 1
        of_columns = _by_columns(right.scale) if squares else _by_rows(right.scale)
        return _torch.scaled_mm(rows, columns, _by_columns(of_left), of_columns, fast)

    def groups(self, a: Tensor, b: Tensor, offs: Tensor, scale: Tensor, fast: bool) -> Tensor:
        of_rows = scale.expand(a.shape[0]).contiguous()
        of_columns = torch.ones(b.shape[0], b.shape[2], device=a.device, dtype=torch.float32)
        rows, columns = _by_rows(a), _by_columns(b)
        return _torch.scaled_grouped_mm(rows, columns, of_rows, of_columns, offs, fast)


def _obstacle_of_sizes(*sizes: int) -> str | None:
    if any(n % 16 or n == 0 for n in sizes):
        return f"sizes of {' x '.join(map(str, sizes))} are not all multiples of 16"
    return None


def _by_rows(x: Tensor) -> Tensor:
    return x.contiguous()


def _by_columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _tiled(scale: Tensor) -> Tensor:
    """Return scales of (rows, K / 32) in the order in which tensor cores read them. A tile is 128
    by 4, and its row r and column c are the byte 16 (r mod 32) + 4 (r div 32) + c (cuBLAS, "1D
    Block Scaling Factors Layout")."""
    height, width = scale.shape
    bytes_of = torch.nn.functional.pad(
        scale.view(torch.uint8), (0, -width % _READ, 0, -height % 128)
    )
    tiles = bytes_of.view(-(-height // 128), 4, 32, -(-width // _READ), _READ)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e8m0fnu)


# --- the backend -----------------------------------------------------------------------------


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability; None under ROCm."""
    return None if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def _units(device: torch.device) -> FP8Units | None:
    capability = _capability(device)
    return None if capability is None else FP8Units(capability)


def _flash(device: torch.device) -> str | None:
    capability = _capability(device)
    has = capability is not None and capability >= (8, 0)
    return "_scaled_dot_product_flash_attention" if has else None


def _products(device: torch.device) -> Choice:
    capability = _capability(device)
    if capability is None:
        return Choice(torch.bfloat16, "ROCm devices multiply bfloat16")
    major, minor = capability
    has = "has" if major >= 8 else "has no"
    dtype = torch.bfloat16 if major >= 8 else torch.float32
    return Choice(dtype, f"compute capability {major}.{minor} {has} bfloat16 units")


def _devices() -> Sequence[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(count)]


def _describe(device: torch.device) -> str:
    capability, name = _capability(device), torch.cuda.get_device_name(device)
    if capability is None:
        return name
    major, minor = capability
    return f"{name}, compute capability {major}.{minor}"


CUDA = Backend(
    "cuda",
    own_generator=True,
    is_capturing=lambda: torch.cuda.is_current_stream_capturing(),
    collectives="nccl",
    flash=_flash,
    products=_products,
    units=_units,
    devices=_devices,
    describe=_describe,
)
