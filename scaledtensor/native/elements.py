"""The loops of `elements.cpp`. Each function reports whether it ran. It does not run without a
library, or on a tensor that it cannot read, and then changes nothing."""

import ctypes
import math

import torch
from torch import Tensor

from scaledtensor import native

__all__ = [
    "column_sums",
    "converted",
    "magnitudes",
    "rounded_rows",
    "scale",
    "scaled",
    "squares",
    "total",
    "within",
]


#: PyTorch multiplies fewer elements in less time than a call of the loop takes.
_MANY = 1 << 14
#: The loop is no faster than PyTorch for shorter rows.
_WIDE = 16
#: torch adds the rows of so many columns at a time in one order. Columns that are left over have
#: another order.
_COLUMNS = 32


def scaled(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor | None:
    """Return elements times `factor` in `dtype`, with one rounding; None if the loop did not run.

    It makes bfloat16 of float32, and float32 of bfloat16, for tensors without gaps in memory, and
    for rows with one distance, such as the heads of one part of a `split`. It multiplies bfloat16
    elements by a power of two, in half of PyTorch's time, as it converts nothing.
    """
    if type(x) is not Tensor or x.numel() < _MANY:  # a traced tensor may have symbolic sizes
        return None
    half, halves = x.dtype is torch.bfloat16, dtype is torch.bfloat16
    if half and halves:
        served = math.frexp(factor)[0] == 0.5
    else:
        served = (half and dtype is torch.float32) or (halves and x.dtype is torch.float32)
    if not served or not native.takes(x):
        return None
    out = torch.empty_like(x, dtype=dtype)
    rows = _rows(x, out)
    if rows is None:
        return None
    native.library().scaledtensor_scaled(
        half, halves, x.data_ptr(), out.data_ptr(), factor, *rows, torch.get_num_threads()
    )
    return out


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`. The loop converts between bfloat16 and float32 in less time than
    PyTorch."""
    if x.dtype is dtype:
        return x
    made = scaled(x, 1.0, dtype)
    return x.to(dtype) if made is None else made


def scale(x: Tensor, factor: float) -> bool:
    """Multiply the elements of `x` by a factor, as `scaled` does from bfloat16 to bfloat16, in
    place. Returns whether the loop ran."""
    if x.dtype is not torch.bfloat16 or x.numel() < _MANY or math.frexp(factor)[0] != 0.5:
        return False
    if not x.is_contiguous() or not native.takes(x):
        return False
    place, size = x.data_ptr(), (1, x.numel(), 0)
    native.library().scaledtensor_scaled(
        True, True, place, place, factor, *size, torch.get_num_threads()
    )
    return True


def _rows(x: Tensor, out: Tensor) -> tuple[int, int, int] | None:
    """Return the number of rows of `x`, their elements, and the distance of rows. `out` has the
    elements in the same order, without gaps. None if `x` has gaps of several sizes."""
    if type(out) is not Tensor:
        return None
    if out.stride() == x.stride():
        return 1, x.numel(), 0
    rows, columns = 1, 1
    distance: int | None = None
    for in_order, stride, size in sorted(zip(out.stride(), x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if in_order != rows * columns or not stride:
            return None
        if distance is None and stride == columns:
            columns *= size
        elif distance is None:
            rows, distance = size, stride
        elif stride == rows * distance:
            rows *= size
        else:
            return None
    return None if columns < _WIDE else (rows, columns, distance or 0)


def total(x: Tensor, first: float, y: Tensor, second: float) -> Tensor | None:
    """Return `x * first + y * second` in one pass, for bfloat16 elements and factors that are
    powers of two of float32 or their negatives; None if the loop did not run."""
    if not type(x) is type(y) is Tensor or not x.dtype is y.dtype is torch.bfloat16:
        return None
    if x.numel() < _MANY or x.shape != y.shape:
        return None
    if not abs(math.frexp(first)[0]) == abs(math.frexp(second)[0]) == 0.5:
        return None
    if not (x.is_contiguous() and y.is_contiguous() and native.takes(x, y)):
        return None
    out = torch.empty_like(x)
    places = (x.data_ptr(), y.data_ptr(), out.data_ptr())
    native.library().scaledtensor_total(*places, first, second, x.numel(), torch.get_num_threads())
    return out


def rounded_rows(
    product: Tensor,
    ratio: float,
    bias: Tensor | None = None,
    kept: float = 1,
    share: float = 1,
    *,
    in_place: bool = False,
) -> Tensor | None:
    """Return the rows of a matrix times `ratio`, rounded to bfloat16. The matrix is float32 or
    bfloat16.

    With `in_place` a float32 matrix itself gets the rounded numbers. With a float32 `bias` for each
    column, the result is the rounded rows times `kept` plus the bias times `share`, as bfloat16.
    Returns None if the loop did not run.
    """
    half = product.dtype is torch.bfloat16 and not in_place
    if bias is not None and not _takes_rows(bias, False):
        return None
    if not _takes_rows(product, half):
        return None
    out = product if in_place else torch.empty_like(product, dtype=torch.bfloat16)
    places = (
        product.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if in_place else out.data_ptr(),
    )
    native.library().scaledtensor_rounded_rows(
        half, *places, ratio, kept, share, *product.shape, torch.get_num_threads()
    )
    return out


def _takes_rows(x: Tensor, half: bool) -> bool:
    dtype = torch.bfloat16 if half else torch.float32
    return x.dtype is dtype and x.is_contiguous() and native.takes(x)


# --- statistics ------------------------------------------------------------------------------


def magnitudes(x: Tensor) -> tuple[float, float] | None:
    """Return the largest magnitude of `x` and the sum of its squares; None if the loop did not run.
    If an element is not finite, the largest magnitude is not finite."""
    if not _is_read(x):
        return None
    x, copies = _without_gaps(x)
    total = ctypes.c_double()
    place, to = x.data_ptr(), ctypes.byref(total)
    largest = native.library().scaledtensor_magnitudes(
        x.dtype is torch.bfloat16, place, x.numel(), to, torch.get_num_threads()
    )
    return largest, total.value * copies


def squares(x: Tensor) -> float | None:
    """Return the sum of the squares of `x` in float64; None if the loop did not run."""
    if not _is_read(x):
        return None
    x, copies = _without_gaps(x)
    found: float = native.library().scaledtensor_squares(
        x.dtype is torch.bfloat16, x.data_ptr(), x.numel(), torch.get_num_threads()
    )
    return found * copies


def within(x: Tensor, limit: float) -> int | None:
    """Return the number of magnitudes up to `limit`, which is not negative; None if the loop did
    not run."""
    if not _is_read(x):
        return None
    x, copies = _without_gaps(x)
    found: int = native.library().scaledtensor_within(
        x.dtype is torch.bfloat16, x.data_ptr(), x.numel(), limit
    )
    return found * copies


def column_sums(x: Tensor) -> Tensor | None:
    """Return the float32 sums over all dimensions of `x` but the last, to the bits of torch, which
    first writes bfloat16 elements as float32. None if the loop did not run."""
    if type(x) is not Tensor or x.dtype is not torch.bfloat16:
        return None
    if x.shape[-1] % _COLUMNS or not x.numel() or not (x.is_contiguous() and _is_read(x)):
        return None
    columns = x.shape[-1]
    y = torch.empty(columns, dtype=torch.float32, device="cpu")
    rows = x.numel() // columns
    native.library().scaledtensor_column_sums(
        x.data_ptr(), y.data_ptr(), rows, columns, torch.get_num_threads()
    )
    return y


def _is_read(x: Tensor) -> bool:
    known = x.dtype in (torch.float32, torch.bfloat16)
    return known and not torch.compiler.is_compiling() and native.takes(x)


def _without_gaps(x: Tensor) -> tuple[Tensor, int]:
    """Return the elements of `x` in one piece of memory, and how often `x` repeats them. The order
    does not matter to a sum. Parts with gaps between them are copied."""
    if x.is_contiguous():
        return x, 1
    count = x.numel()
    if 0 in x.stride():
        x = x[tuple(slice(None) if stride else 0 for stride in x.stride())]
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute(order).contiguous(), count // x.numel()
