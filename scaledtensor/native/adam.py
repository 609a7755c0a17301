"""A fused step of Adam for several parameters, by the loop of `adam.cpp`."""

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from scaledtensor import native

__all__ = ["Options", "serves", "step"]


#: The struct `Parameter` of the source: four places, the number of elements, whether the gradient
#: is bfloat16, how far scales may change, 1 - beta1^step, 1 - beta2^step, and four pairs of scale
#: and RMS. To fill a `ctypes.Structure` takes six times as long.
_PARAMETER = struct.Struct("7q2d8f")
_FIRST_WRITTEN = 11


class Options(ctypes.Structure):
    """The struct `Options` of the source."""

    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in ("lr", "beta1", "beta2", "weight_decay", "eps", "coupled", "growth")
    )


def serves(gradient: Tensor, *held: Tensor) -> bool:
    """Whether the loop can read the elements of a gradient, and write the elements of a parameter
    and its two moments."""
    return (
        gradient.dtype in (torch.float32, torch.bfloat16)
        and native.takes(gradient, *held)
        and all(x.is_contiguous() for x in (gradient, *held))
    )


def step(
    parameters: Sequence[Sequence[float]], options: Options
) -> Sequence[tuple[float, float, float, float, float, float]]:
    """Make a step, in place. Each parameter has the numbers of the struct `Parameter` in its order.

    Returns:
        The new scale and RMS of the elements, of the first moment and of the second moment of each
        parameter.
    """
    record = bytearray(_PARAMETER.size * len(parameters))
    for n, parameter in enumerate(parameters):
        _PARAMETER.pack_into(record, _PARAMETER.size * n, *parameter)
    place = (ctypes.c_char * len(record)).from_buffer(record)
    native.library().scaledtensor_adam(
        place, len(parameters), ctypes.byref(options), torch.get_num_threads()
    )
    return [numbers[_FIRST_WRITTEN:] for numbers in _PARAMETER.iter_unpack(record)]
