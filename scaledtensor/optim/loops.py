"""The step of `kernel.py` as one C++ loop, for parameters in the memory of a CPU.

PyTorch's operators take some eighty passes over memory for a step, and code that Inductor compiles
for AVX2 is slow with bytes. The loop of `native/steps.cpp` takes one pass. It reads and writes the
parameters where they are, so a small parameter is not copied either. `kernel.py` is the reference:
tests compare both. Codes may differ if a number lies on the boundary of two codes, as in compiled
code. Stochastic rounding and parameters in 8 bits stay with `kernel.py`.
"""

import ctypes
import math
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaledtensor import native
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import Format
from scaledtensor.formats.expansion import STEPS, below_largest, can_hold_apart, wanted_steps
from scaledtensor.optim.kernel import Plan
from scaledtensor.optim.states import STATES, GroupedState, Kept

if TYPE_CHECKING:
    from scaledtensor.optim.buckets import Entry

__all__ = ["Loop", "serve"]

#: The enumerations of the source.
_ELEMENTS = {"fp32": 0, "bf16": 1, "fp16": 2}
_RULES = {"adam": 0, "sgd": 1, "lion": 2}
_FLAGS = {"decoupled": 1, "decay": 2, "amsgrad": 4, "nesterov": 8}
_MASTERS = {None: 0, "fp32": 1, "bf16+16": 2}
_FLOATS, _HALVES, _FLOAT_CODES, _INTEGERS = range(4)


class _Format(ctypes.Structure):
    """`Format` of the source."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("codes", "elements", "mantissa", "bias")),
        *((name, ctypes.c_int32) for name in ("nan_code", "spikes")),
        *((name, ctypes.c_float) for name in ("max", "log_max", "wanted", "wanted_below", "room")),
    )


class _Step(ctypes.Structure):
    """`Step` of the source."""

    _fields_ = (
        ("format", _Format),
        *((name, ctypes.c_int32) for name in ("rule", "flags", "states", "elements")),
        *((name, ctypes.c_int32) for name in ("gradient", "master", "columns", "parts")),
        *((name, ctypes.c_void_p) for name in ("table", "numbers", "part", "state", "kept")),
    )


def serve(plan: Plan, entries: Sequence["Entry"]) -> bool:
    """Whether the loop makes the step of these entries."""
    first = entries[0]
    return (
        not torch.compiler.is_compiling()
        and _has(plan)
        and all(native.is_memory(x) for x in (first.elements, first.gradient))
        and all(type(x) in native.PLAIN for e in entries for x in (e.elements, e.gradient))
        and native.library() is not None
    )


@cache
def _has(plan: Plan) -> bool:
    """Whether the source has the formats and the optimizer of a plan."""
    kinds = (plan.elements, plan.gradient)
    fits = not plan.draws and plan.rule in _RULES and plan.master in _MASTERS
    return fits and all(kind in _ELEMENTS for kind in kinds)


class Loop:
    """The loop over the memory of one bucket.

    Args:
        plan: the plan of the bucket; see `serve`.
        states: the stored states of the bucket.
        master: the stored master of the bucket.
        firsts: the first group of each parameter.
        groups: the number of groups.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[Kept],
        master: Kept,
        firsts: Sequence[int],
        groups: int,
    ) -> None:
        self._states, self._master = states, master
        self._firsts, self._groups = firsts, groups
        fmt = STATES[plan.state_format]
        self._table = fmt.table(torch.device("cpu"))
        flags = sum(_FLAGS[flag] for flag in plan.flags)
        kinds = (_ELEMENTS[plan.elements], _ELEMENTS[plan.gradient], _MASTERS[plan.master])
        self._step = _Step(
            _facts(fmt.format) if isinstance(fmt, GroupedState) else _Format(codes=_FLOATS),
            *(_RULES[plan.rule], flags, len(states), *kinds, len(plan.columns), len(firsts)),
            table=None if self._table is None else self._table.data_ptr(),
        )

    def step(
        self, entries: Sequence["Entry"], numbers: Sequence[Sequence[float]]
    ) -> tuple[list["Entry"], list[Tensor]]:
        """Make one step in place. `numbers` are the columns of each parameter.

        Returns:
            The parameters that cannot be written in place, and the new elements of each.

        Raises:
            UnsupportedError: the memory of a parameter or of a gradient was freed. Nothing is
                changed then.
        """
        parts = array("q")
        apart: list[Entry] = []
        copies: list[Tensor] = []
        gradients: list[Tensor] = []  # alive while the loop reads them
        for entry, first in zip(entries, self._firsts, strict=True):
            elements, gradient = entry.elements, entry.gradient
            if entry.fresh or elements.is_neg() or not elements.is_contiguous():
                elements = elements.detach().clone(memory_format=torch.contiguous_format)
                apart.append(entry)
                copies.append(elements)
            if gradient.is_neg() or not gradient.is_contiguous():
                gradients.append(gradient := gradient.resolve_neg().contiguous())
            places, count = (elements.data_ptr(), gradient.data_ptr()), elements.numel()
            if count and not all(places):
                raise UnsupportedError(
                    f"a parameter of shape {tuple(elements.shape)} or its gradient has no memory: "
                    "a storage was resized to 0. Step when the storage has its elements again"
                )
            parts.extend((*places, count, first))
        columns = array("f", chain.from_iterable(numbers))
        # Somebody may have moved the memory of a state since the last step.
        held = ([t.data_ptr() for t in kept] for kept in self._states)
        states = array("q", chain.from_iterable((*at, 0, 0)[:3] for at in held))
        step = self._step
        step.part, step.numbers, step.state = (x.buffer_info()[0] for x in (parts, columns, states))
        step.kept = self._master[0].data_ptr() if self._master else None
        native.library().scaledtensor_step(
            ctypes.byref(step), self._groups, torch.get_num_threads()
        )
        return apart, copies


@cache
def _facts(fmt: Format) -> _Format:
    """The numbers of a format, as `formats.expansion` uses them."""
    spikes, top = can_hold_apart(fmt), below_largest(fmt)
    if fmt.bits > 8:
        return _Format(_HALVES, _ELEMENTS[fmt.name], spikes=spikes, max=fmt.max)

    return _Format(
        codes=_INTEGERS if fmt.is_integer else _FLOAT_CODES,
        mantissa=fmt.mantissa_bits,
        bias=fmt.bias,
        nan_code=-1 if fmt.nan_code is None else fmt.nan_code,
        spikes=spikes,
        max=fmt.max,
        log_max=math.log2(fmt.max),
        wanted=wanted_steps(fmt.max, fmt),
        wanted_below=wanted_steps(top, fmt),
        room=STEPS * math.log2(fmt.max / top),
    )
