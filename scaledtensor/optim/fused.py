"""A step of many parameters in one function of flat memory: read, update, write, in groups of 128.

What is kept of the parameters of a `Bucket` lies in memory one after another, each parameter padded
to whole groups, so that one call steps all of them; the states that a user sees are views of it.
Elements of parameters and gradients are copied there and back, but for one large parameter by
itself, which is stepped where it is.

The function is the same eager and compiled; only the number of groups is dynamic, so that a model
needs few compilations. It goes by pieces whose intermediate results stay in a cache.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import Format, decode
from scaledtensor.formats import get as get_format
from scaledtensor.optim.keeping import (
    GROUP,
    MASTERS,
    Kept,
    Watch,
    empty_state,
    hold_apart,
    read_state,
    table_of,
    watch_over,
    write_state,
)
from scaledtensor.optim.updates import RULES, Flags

__all__ = ["Plan", "goes_by_pieces", "run", "zeros_for"]

#: Rows of an eager piece: ten matrices of them stay in a cache of a megabyte.
_PIECE = 256

#: Rows of a compiled piece on a CPU. The code keeps two matrices of them, which stay in a cache; a
#: call takes a twentieth as long as they do.
_COMPILED_PIECE = 1 << 11

#: Places in `value_table`, which are made of a byte and a power of 8 bits, are not checked.
_UNCHECKED: dict[str, Any] = {"assert_indirect_indexing": False}


Found = list[tuple[Tensor, Tensor] | None]
"""Of each state that has a `Watch`: itself in float32, and what `write_state` says of it."""


class Plan(NamedTuple):
    """What the code of a step depends on."""

    rule: str
    flags: Flags
    states: tuple[str, ...]
    columns: tuple[str, ...]
    state_format: str
    stochastic: bool
    """Whether states are rounded stochastically."""
    master: str | None
    elements: str
    """Format of the parameters' elements."""
    gradient: str
    """Format of the gradients'."""

    @property
    def draws(self) -> int:
        """Keys of stochastic rounding that a step takes."""
        return (len(self.states) if self.stochastic else 0) + (self.master in ("bf16", "fp16"))


def zeros_for(plan: Plan, groups: int, device: torch.device) -> tuple[list[Kept], Kept]:
    """States and the part of masters beside parameters, of so many groups."""
    states = [empty_state(plan.state_format, groups, device) for _ in plan.states]
    return states, MASTERS[plan.master].empty(groups, device)


def run(
    plan: Plan,
    elements: Tensor,
    gradient: Tensor,
    columns: Tensor,
    states: Sequence[Kept],
    master: Kept,
    keys: Tensor | None,
    compiled: bool,
) -> None:
    """One step, in place in `elements`, `states` and `master`.

    `elements` and `gradient` are (groups, 128); `columns` (groups, number of them) float32; `keys`
    (draws, 2) int32.
    """
    table = table_of(plan.state_format, elements.device)
    piece = _piece(plan, elements, compiled)
    watch = watch_over(plan.state_format, states)
    for start in range(0, len(elements), piece):
        part = slice(start, start + piece)
        rows = (elements[part], gradient[part], columns[part])
        *kept, beside = (tuple(t[part] for t in k) for k in (*states, master))
        above = tuple(None if x is None else x[part] for x in watch.above)
        its = Watch(above, watch.reads)
        place = 0 if compiled else start * GROUP
        if compiled:
            watched = (x for x in above if x is not None)
            _torch.mark_rows_dynamic([*rows, *chain(*kept, beside), *watched])
            found = _compiled(plan)(*rows, tuple(kept), beside, table, keys, its)
        else:
            found = _step(plan, *rows, tuple(kept), beside, table, keys, its, place)
        for i, (state, told) in enumerate(zip(kept, found, strict=True)):
            if told is not None:
                key = keys[i] if plan.stochastic and keys is not None else None
                moments, again = told
                hold_apart(plan.state_format, state, moments, again, key, place)


def goes_by_pieces(plan: Plan, device: torch.device) -> bool:
    """Whether a compiled step may be several calls. Not where it draws: the place of the first
    element would be a constant of the code; nor on other devices than CPUs, where a call costs more
    than it saves."""
    return device.type == "cpu" and not plan.draws


def _piece(plan: Plan, elements: Tensor, compiled: bool) -> int:
    """Rows that are stepped in one call."""
    if not compiled:
        return _PIECE
    if not goes_by_pieces(plan, elements.device):
        return len(elements)
    # Alike: code of one group would be code of its own.
    return -(-len(elements) // -(-len(elements) // _COMPILED_PIECE))


def _step(
    plan: Plan,
    elements: Tensor,
    gradient: Tensor,
    columns: Tensor,
    states: tuple[Kept, ...],
    master: Kept,
    table: Tensor | None,
    keys: Tensor | None,
    watch: Watch,
    start: int,
) -> Found:
    rule, held, fmt = RULES[plan.rule], MASTERS[plan.master], get_format(plan.elements)
    c = {name: columns[:, i : i + 1] for i, name in enumerate(plan.columns)}
    drawn = iter(() if keys is None else keys.unbind())
    value = held.read(elements, fmt, master, c["unit"])
    g = _decoded(gradient, get_format(plan.gradient)) * c["gradient"]
    name = plan.state_format
    moments = tuple(read_state(name, kept, table, watch.reads) for kept in states)
    value, moments = rule.update(value, g, moments, c, plan.flags)
    found: Found = []
    for kept, rows, above in zip(states, moments, watch.above, strict=True):
        key = next(drawn) if plan.stochastic else None
        again = write_state(name, kept, rows, key, start, above)
        found.append(None if again is None else (rows, again))
    held.write(elements, fmt, master, value, c["unit"], next(drawn, None), start)
    return found


def _decoded(x: Tensor, fmt: Format) -> Tensor:
    return decode(x, fmt, torch.float32)


@cache
def _compiled(plan: Plan) -> Any:
    def step(
        elements: Tensor,
        gradient: Tensor,
        columns: Tensor,
        states: tuple[Kept, ...],
        master: Kept,
        table: Tensor | None,
        keys: Tensor | None,
        watch: Watch,
    ) -> Found:
        rows = (elements, gradient, columns)
        return _step(plan, *rows, states, master, table, keys, watch, 0)

    # Dynamo counts recompilations by code object: a plan has one of its own.
    code = step.__code__.replace(co_name=f"{plan.rule}_step")
    own = FunctionType(code, globals(), closure=step.__closure__)
    return torch.compile(own, fullgraph=True, options=_UNCHECKED)
