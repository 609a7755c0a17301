"""Casts under scales of blocks: the function of `blocks.cpp`.

`formats/blocks.py` defines scales and casts. Its functions give the same bits.
"""

import ctypes
import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from scaledtensor import native

__all__ = ["Grid", "Kind", "Power", "cast_values"]

#: The ways to a scale: it is given, or follows from the amax of a block.
Kind = Literal["given", "ratio", "power", "two_level"]
_KINDS = get_args(Kind)
_FLOATS = (torch.float32, torch.bfloat16)


class Grid(NamedTuple):
    """The numbers of a format, as elements are rounded to them."""

    largest: float
    lowest: float
    normal: float
    """The smallest normal number."""
    mantissa: int
    """The bits after the leading one."""
    signed_zero: bool


class Power(NamedTuple):
    """How a scale that is a power of two follows from the bits of an amax, a float64: the carry is
    added to them, and `above` is subtracted from the exponent field."""

    carry: int
    above: int
    least: int


class _Blocks(ctypes.Structure):
    """The struct `Blocks` of the source.

    `whole` means that all elements share a scale or a second level, which is written to `scales`.
    `rows` means that each row has one scale, which is written there. `least` is the exponent of the
    smallest normal number.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "scales")),
        *((name, ctypes.c_int64) for name in ("m", "k", "block")),
        *((name, ctypes.c_int32) for name in ("half_x", "half_y", "kind", "whole", "rows")),
        *((name, ctypes.c_int32) for name in ("signed_zero", "mantissa", "least")),
        *((name, ctypes.c_int32) for name in ("above", "least_scale")),
        ("carry", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("largest", "lowest", "given")),
    )


def cast_values(
    x: Tensor,
    kind: Kind,
    block: Literal["tensor", "row"] | int,
    grid: Grid,
    dtype: torch.dtype,
    power: Power | None = None,
    given: float = 1,
) -> tuple[Tensor, Tensor | None] | None:
    """Cast the rows of a matrix under scales, to nearest even, and return the values of the codes.
    Numbers beyond the format's range saturate.

    Args:
        x: (M, K), float32 or bfloat16, contiguous.
        kind: "ratio", "power" and "two_level" are "fp32", "pow2" or "e8m0", and "nvfp4" of
            `quantize_blocks`. With "given" all elements have the scale `given`.
        block: The elements that share a scale: all, a row, or a number of adjacent elements.
        grid: The numbers of the format.
        dtype: float32, or bfloat16 if it holds the results exactly.
        power: How the scale follows from an amax, for "power".
        given: A float32 number, for "given".

    Returns:
        (values, outer). `values` (M, K) are multiplied by the scales of their blocks. `outer` is
        the scale of the tensor, 0-dim, or of each row, (M, 1), by which they are still to be
        multiplied; None if blocks have all scales. The result is None if the loop did not run, or
        if an element is infinite or NaN.
    """
    if x.dtype not in _FLOATS or not x.is_contiguous() or not x.numel() or not native.takes(x):
        return None
    m, k = x.shape
    carry, above, least = power or (0, 0, 0)
    whole, rows = block == "tensor" or kind in ("given", "two_level"), block == "row"
    y = torch.empty(m, k, dtype=dtype, device="cpu")
    levels = () if whole else (m, 1)
    outer = torch.empty(levels, dtype=torch.float32, device="cpu") if whole or rows else None
    call = _Blocks(
        *(x.data_ptr(), y.data_ptr(), None if outer is None else outer.data_ptr()),
        *(m, k, block if isinstance(block, int) else k),
        *(x.dtype is torch.bfloat16, dtype is torch.bfloat16, _KINDS.index(kind), whole, rows),
        *(grid.signed_zero, grid.mantissa, math.frexp(grid.normal)[1] - 1),
        *(above, least, carry, grid.largest, grid.lowest, given),
    )
    ran = native.library().scaledtensor_blocks(ctypes.byref(call), torch.get_num_threads())
    return (y, outer) if ran else None
