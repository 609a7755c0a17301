"""Rows of codes times their scales: the function of `rows.cpp`, for caches of keys and values."""

import ctypes

import torch
from torch import Tensor

from scaledtensor import native
from scaledtensor.native.products import Codes, decoder_of

__all__ = ["decoded_rows"]

_FLOATS = (torch.float32, torch.bfloat16)


class _Rows(ctypes.Structure):
    """The struct `Rows` of the source.

    The row r of a batch has the scales from `scale + batch * scale_batch + (first + r) // group *
    scale_row` on, and `block` columns share one.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "table", "y")),
        *((name, ctypes.c_int64) for name in ("batches", "rows", "width")),
        *((name, ctypes.c_int64) for name in ("code_row", "code_batch")),
        *((name, ctypes.c_int64) for name in ("scale_row", "scale_batch")),
        *((name, ctypes.c_int64) for name in ("first", "group", "block")),
        *((name, ctypes.c_int32) for name in ("kind", "bits", "half")),
    )


def decoded_rows(
    codes: Tensor,
    fmt: Codes,
    scale: Tensor | float,
    width: int,
    dtype: torch.dtype,
    group: int = 1,
    first: int = 0,
) -> Tensor | None:
    """Return the values of codes times their scales, (B, H, R, width) in `dtype`.

    Args:
        codes: (B, H, R, bytes of a row) as uint8, or the elements of a format of more than 8 bits.
            It may be a slice of the rows of a contiguous tensor.
        fmt: FP32, BF16, or any format of at most 8 bits.
        scale: One number, or float32 numbers of shape (B, H, G, S), contiguous. A row has S scales,
            where S divides `width`. If G is 1, all rows have the same scales; else `group` rows
            have the same scales.
        width: The elements of a row.
        dtype: The dtype of the result. Float32 products are rounded to it once.
        group: The number of rows that share their scales.
        first: The number of rows in the group of the first row that `codes` does not have.

    Returns None if the loop does not run: in compiled code, without a library, or for a format or a
    tensor that it does not read. The caller then multiplies by PyTorch's operators.
    """
    if torch.compiler.is_compiling() or (fmt.bits > 8 and fmt.storage_dtype not in _FLOATS):
        return None
    batch, heads, rows, row = codes.shape
    if not native.takes(codes) or (codes.stride(3) != 1 and row > 1):
        return None
    if batch > 1 and codes.stride(0) != heads * codes.stride(1):
        return None
    if not isinstance(scale, Tensor):
        scale = torch.full((1, 1, 1, 1), scale, dtype=torch.float32, device="cpu")
    if not scale.is_contiguous() or not native.takes(scale):
        return None
    narrow = dtype if dtype in _FLOATS else torch.float32
    y = torch.empty(batch, heads, rows, width, dtype=narrow, device="cpu")
    if type(y) is not Tensor:  # under a mode that makes tensors without memory
        return None
    kind, table = decoder_of(fmt)
    size, groups, blocks = codes.element_size(), scale.shape[2], scale.shape[3]
    call = _Rows(
        *(codes.data_ptr(), scale.data_ptr(), table, y.data_ptr()),
        *(batch * heads, rows, width, codes.stride(2) * size, codes.stride(1) * size),
        *(0 if groups == 1 else blocks, 0 if scale.numel() == 1 else groups * blocks),
        *(first, group, width // blocks, kind, fmt.bits, narrow is torch.bfloat16),
    )
    if y.numel():
        native.library().scaledtensor_rows(ctypes.byref(call), torch.get_num_threads())
    return y if narrow is dtype else y.to(dtype)
