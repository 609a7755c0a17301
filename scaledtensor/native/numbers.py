"""The numbers of a compiled graph, by the loop of `numbers.cpp`."""

import ctypes
from collections.abc import Sequence
from itertools import starmap

import torch
from torch import Tensor

from scaledtensor import native

__all__ = ["OPERATIONS", "Program", "Step", "serves"]

#: The operations of a step, in the order of the source. `add_square` adds the square of its second
#: operand to the first. The others are the operations of `scaledtensor.scales.forms`.
OPERATIONS = (
    *("mul", "add", "sub", "div", "neg", "abs", "sqrt", "exp", "rsqrt", "least", "most"),
    *("square", "add_square", "power", "ratio", "nonzero", "finite", "same"),
)

_FLOATS = (torch.float32, torch.float64)


class Step(ctypes.Structure):
    """The struct `Step` of the source."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("operation", "first", "second", "single"))


class _Leaf(ctypes.Structure):
    """The struct `Leaf` of the source."""

    _fields_ = (("count", ctypes.c_int64), ("wide", ctypes.c_int64))


def serves(leaves: Sequence[Tensor]) -> bool:
    """Whether the loop can read these leaves, which are on a CPU."""
    for x in leaves:
        if type(x) not in native.PLAIN or x.dtype not in _FLOATS or not x.is_contiguous():
            return False
    return True


class Program:
    """A list of steps.

    Args:
        leaves: the number of elements of each leaf, and whether they are float64 numbers.
        constants: numbers that are operands.
        steps: the steps. The place of an operand counts the leaves first, each of their elements by
            itself, then the constants, then the results of steps.
        wanted: the places of the numbers that the loop writes as float32 numbers.
        wide: the places of the numbers that it writes as float64 numbers.
    """

    def __init__(
        self,
        leaves: Sequence[tuple[int, bool]],
        constants: Sequence[float],
        steps: Sequence[Step],
        wanted: Sequence[int],
        wide: Sequence[int],
    ) -> None:
        self._counts = len(wanted), len(wide)
        self._leaves = (_Leaf * len(leaves))(*starmap(_Leaf, leaves)), len(leaves)
        self._pointers = ctypes.c_void_p * len(leaves)
        self._constants = (ctypes.c_double * len(constants))(*constants), len(constants)
        self._steps = (Step * len(steps))(*steps), len(steps)
        self._wanted = (ctypes.c_int32 * len(wanted))(*wanted), len(wanted)
        self._wide = (ctypes.c_int32 * len(wide))(*wide), len(wide)

    def run(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the numbers `wanted` as float32, and the numbers `wide` as float64. The loop
        `serves` the leaves."""
        narrow, wide = (
            torch.empty(count, dtype=dtype, device="cpu")
            for count, dtype in zip(self._counts, _FLOATS, strict=True)
        )
        native.library().scaledtensor_numbers(
            self._pointers(*[x.data_ptr() for x in leaves]),
            *(*self._leaves, *self._constants, *self._steps),
            *(*self._wanted, narrow.data_ptr(), *self._wide, wide.data_ptr()),
        )
        return narrow, wide
