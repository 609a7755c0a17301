"""The parts of a QuantizedTensor: the matrix of its codes, their scales, and checks of both."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import QuantizationError, ScaleError, ShapeError
from scaledtensor.formats import PerBlock, PerTensor
from scaledtensor.formats.layouts import check_scale_shape, packed_shape
from scaledtensor.recipes.casts import Cast, Microscale, TwoLevel

__all__ = [
    "EXTRAS",
    "Order",
    "block_of",
    "check_inner",
    "matrix_of",
    "matrix_shape",
    "rows_of_scales",
    "scale_dtype",
]

#: How the codes lie in the tensor (`quantization/tensor.py`).
Order = Literal["rows", "columns", "kernel"]

#: The names of inner tensors that only some weights have.
EXTRAS = ("input_scale", "columns")


def block_of(cast: Cast) -> PerTensor | PerBlock:
    """The elements of the matrix of codes that share a scale."""
    if cast.block == (0, 0):
        return PerTensor()
    return PerBlock((cast.block[0] or -1, cast.block[1] or -1))


def rows_of_scales(cast: Cast, matrix: Sequence[int]) -> int | None:
    """How many rows of codes in the shape `matrix` share their scales; None if all rows do. The
    rows of a batch of matrices are the matrices."""
    block = block_of(cast)
    if isinstance(block, PerTensor):
        return None
    if len(matrix) == 3:
        return 1
    return None if block.block[0] < 0 else block.block[0]


def scale_dtype(cast: Cast) -> torch.dtype:
    """The dtype of the scales of blocks."""
    if isinstance(cast.scale, TwoLevel):
        return torch.float8_e4m3fn
    return torch.float8_e8m0fnu if isinstance(cast.scale, Microscale) else torch.float32


def matrix_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """The shape of the matrix of codes of a tensor of `shape`."""
    if order == "kernel":
        return shape[0], math.prod(shape[1:])
    if order == "columns":
        *batch, rows, columns = shape
        return *batch, columns, rows
    return tuple(shape)


def matrix_of(weight: Tensor, order: Order) -> Tensor:
    """The matrix, float32, whose codes a tensor of a plain weight holds."""
    matrix = weight.mT if order == "columns" else weight.reshape(matrix_shape(weight.shape, order))
    return matrix.float().contiguous()


def check_inner(inner: Sequence[Tensor], shape: Sequence[int], context: Any) -> None:
    """Raise an error unless the inner tensors fit a QuantizedTensor of `shape` and `context`."""
    fmt, _, config, order, extras = context
    known = tuple(name for name in EXTRAS if name in extras)
    if tuple(extras) != known or order not in ("rows", "columns", "kernel"):
        raise QuantizationError(f"this release does not know {extras} or the order {order!r}")
    qdata, scale, whole = inner[:3]
    if len(shape) < 2 or min(shape) < 0:
        raise ShapeError(f"a quantised weight has two dimensions or more; got {tuple(shape)}")
    matrix, how = matrix_shape(shape, order), config.weight
    if fmt != how.format:
        raise QuantizationError(f"the config stores {how.format.name}; got codes in {fmt.name}")
    packed = fmt.storage_dtype if fmt.bits >= 8 else torch.uint8, packed_shape(fmt, matrix)
    if (qdata.dtype, tuple(qdata.shape)) != packed:
        raise ShapeError(
            f"codes of {fmt.name} for a matrix of {matrix} are {packed[0]} of shape {packed[1]}; "
            f"got {qdata.dtype} of {tuple(qdata.shape)}"
        )
    if scale.dtype != scale_dtype(how):
        raise ScaleError(f"scales of {how} are {scale_dtype(how)}; got {scale.dtype}")
    check_scale_shape(scale, block_of(how), matrix)
    named = dict(zip(extras, inner[3:], strict=True))
    for name, x in {"tensor_scale": whole, **named}.items():
        wanted = () if name != "columns" else (matrix[-1],)
        if x.dtype != torch.float32 or tuple(x.shape) != wanted:
            got = f"{x.dtype} of {tuple(x.shape)}"
            raise ScaleError(f"{name} is float32 of shape {wanted}; got {got}")
    for name, x in {"scale": scale, "tensor_scale": whole, **named}.items():
        if not x.is_meta and not _torch.is_tracing(x):
            numbers = x.detach().float()
            # A NaN marks a block that held one. The scale of a block of zeros may be 0.
            if not ((numbers >= 0) & (numbers < math.inf) | numbers.isnan()).all():
                raise ScaleError(f"{name} holds numbers that are negative or infinite")
            if name in named and not (numbers > 0).all():
                raise ScaleError(f"{name} divides inputs, and holds a number that is not positive")
