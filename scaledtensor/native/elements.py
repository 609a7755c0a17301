"""The loops of `elements.cpp`. Each function reports whether it ran. It does not run without a
library, or on a tensor that it cannot read, and then changes nothing."""

import ctypes

import torch
from torch import Tensor

from scaledtensor import native

__all__ = ["adam", "rounded_rows"]


class _Adam(ctypes.Structure):
    """The struct `Adam` of the source."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("unit", "weight", "beta2", "share", "eps", "kept", "rate")
    )


def adam(
    gradient: Tensor, first: Tensor, second: Tensor, parameter: Tensor, *factors: float
) -> bool:
    """Make Adam's step on the elements of a gradient, two states and a parameter, in place.

    Args:
        gradient: float32 or bfloat16. The others are float32, contiguous and of the same shape.
        factors: Factors of the elements; see `Adam` in the source.
    """
    held = gradient, first, second, parameter
    if not all(x.is_contiguous() and native.takes(x) for x in held):
        return False
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        return False
    half = gradient.dtype is torch.bfloat16
    places = [x.data_ptr() for x in held]
    native.library().scaledtensor_adam(
        half, ctypes.byref(_Adam(*factors)), *places, gradient.numel(), torch.get_num_threads()
    )
    return True


def rounded_rows(
    product: Tensor,
    ratio: float,
    bias: Tensor | None = None,
    kept: float = 1,
    share: float = 1,
    *,
    in_place: bool = False,
) -> Tensor | None:
    """Return the rows of a float32 matrix times `ratio`, rounded to bfloat16.

    With `in_place` the matrix itself gets the rounded numbers. With a float32 `bias` for each
    column, the result is the rounded rows times `kept` plus the bias times `share`, as bfloat16.
    Returns None if the loop did not run.
    """
    for x in (product,) if bias is None else (product, bias):
        if not (x.dtype is torch.float32 and x.is_contiguous() and native.takes(x)):
            return None
    out = product if in_place else torch.empty_like(product, dtype=torch.bfloat16)
    places = (
        product.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if in_place else out.data_ptr(),
    )
    native.library().scaledtensor_rounded_rows(
        *places, ratio, kept, share, *product.shape, torch.get_num_threads()
    )
    return out
