"""Weighted sums of rows: the function of `weighted.cpp`, which states the order of additions."""

import ctypes

import torch
from torch import Tensor

from scaledtensor import native

__all__ = ["weighted_sums"]


class _Weighted(ctypes.Structure):
    """The struct `Weighted` of the source. Strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("p", "v", "y", "total")),
        *((name, ctypes.c_int64) for name in ("batches", "m", "n", "k")),
        *((name, ctypes.c_int64) for name in ("p_row", "p_batch", "v_row", "v_batch")),
    )


def weighted_sums(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return `p @ v` (B, M, N) and the sums of the rows of `p` (B, M, 1), without a gradient.

    Args:
        p: Weights (B, M, K), float32.
        v: Rows (B, K, N), float32. The elements of a row are adjacent in memory, in both.

    Returns None if there is no C++ library, or if a dtype, a device or a layout is none of these.
    """
    for x in (p, v):
        if type(x) is not Tensor or not native.is_memory(x) or x.dtype is not torch.float32:
            return None
        if x.shape[2] > 1 and x.stride(2) != 1:
            return None
    if native.library() is None:
        return None
    (batches, m, k), n = p.shape, v.shape[2]
    y, total = (
        torch.empty(batches, m, width, dtype=torch.float32, device="cpu") for width in (n, 1)
    )
    call = _Weighted(
        *(x.data_ptr() for x in (p, v, y, total)),
        *(batches, m, n, k, p.stride(1), p.stride(0), v.stride(1), v.stride(0)),
    )
    native.library().scaledtensor_weighted(ctypes.byref(call), torch.get_num_threads())
    return y, total
