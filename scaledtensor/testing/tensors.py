"""What the checks read of tensors and of functions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import decode
from scaledtensor.tensor import ScaledTensor

__all__ = ["bits", "exact", "name_of", "rms"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a plain tensor, as integers of its width."""
    return x.contiguous().view(_INTEGERS[x.dtype.itemsize])


def exact(x: Tensor) -> Tensor:
    """The value in float64, apart from any graph."""
    if isinstance(x, ScaledTensor):
        return decode(x.qdata.detach(), x.format, torch.float64) * x.scale.double()
    return x.detach().double()


def rms(*samples: Tensor) -> float:
    """The RMS over all elements of all samples."""
    squares = sum(float(s.detach().double().square().sum()) for s in samples)
    return math.sqrt(squares / max(sum(s.numel() for s in samples), 1))


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
