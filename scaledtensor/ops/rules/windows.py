"""Counts of the elements under windows: for convolutions, pooling and unfolding.

At the borders of an image, padding and strides leave fewer terms in a window, and fewer windows
over an element. In small images most windows are at a border. So the rules count the terms, and do
not take all windows to be full.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["expanded", "pairs", "share", "sym_max"]

#: These take symbolic sizes too. torch gives them no types.
sym_max: Any = torch.sym_max
sym_min: Any = torch.sym_min


def expanded(sizes: Any, dims: int, default: Sequence[int] = ()) -> Sequence[Any]:
    """Return a size for each dimension. One size is for all; no size at all stands for
    `default`."""
    if not isinstance(sizes, Sequence):
        return [sizes] * dims
    if len(sizes) == 0:
        return default
    return list(sizes) * dims if len(sizes) == 1 else sizes


def share(part: Sequence[int], whole: Sequence[int]) -> Any:
    """Return the number of elements of `part` for each element of `whole`."""
    return math.prod(part) / sym_max(math.prod(whole), 1)


def pairs(
    sizes: Sequence[int],
    windows: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Any:
    """Count the pairs of a window and a tap of its kernel that lie on an element of the image.

    Taps on padding do not count. `sizes` are the sizes of the image and `windows` the numbers of
    windows over it, by dimension. The result is at least 1, so that callers may divide by it.
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
