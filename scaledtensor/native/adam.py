"""A fused step of Adam for several parameters, by the loop of `adam.cpp`."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import native

__all__ = ["Options", "Parameter", "serves", "step"]


class _Amounts(ctypes.Structure):
    """The struct `Amounts` of the source."""

    _fields_ = (("scale", ctypes.c_float), ("rms", ctypes.c_float))


class Parameter(ctypes.Structure):
    """The struct `Parameter` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gradient", "elements", "first", "second")),
        *((name, ctypes.c_int64) for name in ("count", "half")),
        *((name, ctypes.c_double) for name in ("start1", "start2")),
        *((f"of_{name}", _Amounts) for name in ("gradient", "elements", "first", "second")),
    )


class Options(ctypes.Structure):
    """The struct `Options` of the source."""

    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in ("lr", "beta1", "beta2", "weight_decay", "eps", "growth")
    )


def serves(gradient: Tensor, *held: Tensor) -> bool:
    """Whether the loop can read the elements of a gradient, and write the elements of a parameter
    and its two moments."""
    return (
        gradient.dtype in (torch.float32, torch.bfloat16)
        and native.takes(gradient, *held)
        and all(x.is_contiguous() for x in (gradient, *held))
    )


def step(parameters: Sequence[Parameter], options: Options) -> Sequence[Parameter]:
    """Make a step, in place, and return the parameters with their new scales and RMS."""
    array: Any = (Parameter * len(parameters))(*parameters)
    native.library().scaledtensor_adam(
        array, len(parameters), ctypes.byref(options), torch.get_num_threads()
    )
    return array  # type: ignore[no-any-return]
