"""Counting what windows see: for convolutions, pooling and unfolding.

Padding and strides leave a window with fewer terms at the borders, and an element in fewer windows.
On small images that is most of them, so the terms are counted and not taken to be the whole kernel.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["expanded", "pairs", "sym_max", "sym_min"]

#: Of symbolic sizes too. torch leaves them untyped.
sym_max: Any = torch.sym_max
sym_min: Any = torch.sym_min


def expanded(sizes: Any, dims: int, default: Sequence[int] = ()) -> Sequence[Any]:
    """A size for each dimension, from one for all; an empty one stands for `default`."""
    if not isinstance(sizes, Sequence):
        return [sizes] * dims
    if len(sizes) == 0:
        return default
    return list(sizes) * dims if len(sizes) == 1 else sizes


def pairs(
    sizes: Sequence[int],
    windows: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Any:
    """How many pairs of a window and a tap of its kernel see an element that is no padding.

    `sizes` of the image and `windows` over it, by dimension. Never under 1, for the sake of
    divisions by it.
    """
    found: Any = math.prod(
        _pairs_in(*given)
        for given in zip(sizes, windows, kernel, stride, padding, dilation, strict=True)
    )
    return sym_max(found, 1)


def _pairs_in(
    size: int, windows: int, kernel: int, stride: int, padding: int, dilation: int
) -> Any:
    total: Any = 0
    for tap in range(kernel):
        offset = tap * dilation - padding
        last = sym_min(windows - 1, (size - 1 - offset) // stride)
        first = sym_max(0, -(offset // stride))
        total = total + sym_max(last - first + 1, 0)
    return total
