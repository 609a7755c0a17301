"""Checks of the formats that a ScaledTensor can hold and of the dtypes that it can appear as."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scaledtensor.errors import CheckpointError, DTypeError, FormatError
from scaledtensor.formats import Format

__all__ = [
    "APPEARANCES",
    "appearance",
    "check_part",
    "check_storable",
    "check_strided",
    "is_storable",
]

APPEARANCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def appearance(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if autograd can see a ScaledTensor as one. Raises DTypeError."""
    if dtype not in APPEARANCES:
        allowed = ", ".join(str(d) for d in APPEARANCES)
        raise DTypeError(f"a ScaledTensor appears as one of {allowed}; got {dtype}")
    return dtype


def check_strided(x: Tensor) -> None:
    """Raises DTypeError unless `x` is dense."""
    if x.layout != torch.strided:
        raise DTypeError(f"a ScaledTensor is dense (torch.strided); got {x.layout}")


def check_part(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raises CheckpointError unless the inner tensor `name` has this dtype and shape."""
    if x.dtype != dtype or tuple(x.shape) != tuple(shape):
        raise CheckpointError(
            f"its {name} is {x.dtype} of shape {tuple(x.shape)}, in place of {dtype} of "
            f"{tuple(shape)}"
        )


def is_storable(fmt: Format) -> bool:
    """Whether torch has a dtype for elements of this format."""
    return fmt.storage_dtype.is_floating_point and fmt.signed


def check_storable(fmt: Format) -> None:
    """Raises FormatError unless torch has a dtype for elements of `fmt`."""
    if not is_storable(fmt):
        raise FormatError(
            f"torch has no dtype for {fmt.name}, and operators compute on elements that have one; "
            "scaledtensor.scaled() and CodedTensor hold its codes"
        )
