"""One step of many parameters, as one function of flat memory.

`run` reads the states and the values of some groups, applies the rule of the optimizer, and writes
the results in place. Eager and compiled steps run the same function. Only the number of groups is
dynamic, so a model needs few compilations. On a CPU the groups are stepped in pieces, so that the
intermediate results stay in a cache.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.formats import decode, get
from scaledtensor.optim.masters import MASTERS, Draw
from scaledtensor.optim.states import GROUP, STATES, Kept
from scaledtensor.optim.updates import RULES, Flags

__all__ = ["Plan", "goes_by_pieces", "run"]

#: Rows of an eager piece: ten matrices of this size stay in a cache of a megabyte.
_PIECE = 256

#: Rows of a compiled piece on a CPU. The code keeps two matrices, which stay in a cache. The call
#: itself takes a twentieth of the time of the piece.
_COMPILED_PIECE = 1 << 11

#: A byte and a power of 8 bits are always a place in the table of values, so no check is needed.
#: Globals are constants of this package, so a call need not guard against a change: these guards
#: take a CPU up to a tenth of the time of a compiled step.
_UNCHECKED: dict[str, Any] = {
    "assert_indirect_indexing": False,
    "guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe,
}

Found = list[tuple[Tensor, Tensor] | None]
"""For each state: its float32 rows and the groups that `write_spikes` must write again."""


class Plan(NamedTuple):
    """Everything that the code of a step depends on."""

    rule: str
    """Name of the optimizer in `RULES`."""
    flags: Flags
    states: tuple[str, ...]
    """Names of the states."""
    columns: tuple[str, ...]
    """Names of the columns of hyperparameters."""
    state_format: str
    stochastic: bool
    """Whether states are rounded stochastically."""
    master: str | None
    elements: str
    """Format of the parameters' elements."""
    gradient: str
    """Format of the gradients' elements."""

    @property
    def draws(self) -> int:
        """Number of keys of stochastic rounding that a step uses."""
        return (len(self.states) if self.stochastic else 0) + MASTERS[self.master].draws


class Watch(NamedTuple):
    """How the states of a piece treat spikes, see `GroupedState`."""

    above: tuple[Tensor | None, ...]
    """For each state, the result of `watch`."""
    reads: bool
    """Whether a group may hold a spike. The compiled step has separate code for each case."""


def run(
    plan: Plan,
    elements: Tensor,
    gradient: Tensor,
    columns: Tensor,
    states: Sequence[Kept],
    master: Kept,
    above: Sequence[Tensor | None],
    keys: Tensor | None,
    compiled: bool,
) -> None:
    """Make one step in place in `elements`, `states` and `master`.

    Args:
        plan: chooses the code.
        elements: elements of parameters, (groups, 128).
        gradient: elements of gradients, (groups, 128).
        columns: float32 hyperparameters of each group, (groups, columns of the plan).
        states: the stored states.
        master: the stored master.
        above: for each state, the result of `watch`.
        keys: int32 keys of stochastic rounding, (draws of the plan, 2).
        compiled: whether to compile the step.
    """
    fmt = STATES[plan.state_format]
    table = fmt.table(elements.device)
    reads = fmt.has_spikes(states)
    piece = _piece(plan, elements, compiled)
    for start in range(0, len(elements), piece):
        part = slice(start, start + piece)
        rows = (elements[part], gradient[part], columns[part])
        *kept, beside = (tuple(t[part] for t in k) for k in (*states, master))
        watch = Watch(tuple(None if x is None else x[part] for x in above), reads)
        place = 0 if compiled else start * GROUP
        if compiled:
            watched = (x for x in watch.above if x is not None)
            _torch.mark_rows_dynamic([*rows, *chain(*kept, beside), *watched])
            found = _compiled(plan)(*rows, tuple(kept), beside, table, keys, watch)
        else:
            found = _step(plan, *rows, tuple(kept), beside, table, keys, watch, place)
        for i, (state, again) in enumerate(zip(kept, found, strict=True)):
            if again is not None:
                key = keys[i] if plan.stochastic and keys is not None else None
                new, places = again
                fmt.write_spikes(state, new, places, key, place)


def goes_by_pieces(plan: Plan, device: torch.device) -> bool:
    """Whether a compiled step may be several calls.

    A step with stochastic rounding may not: the place of its first element would be a constant of
    the code. Neither may a step on another device than a CPU: there, a call costs more than it
    saves.
    """
    return backend_of(device).host and not plan.draws


def _piece(plan: Plan, elements: Tensor, compiled: bool) -> int:
    """Return the number of rows that one call steps."""
    if not compiled:
        return _PIECE
    if not goes_by_pieces(plan, elements.device):
        return len(elements)
    # The pieces are alike, because a piece of one group would need separate code.
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
    fmt, holder = STATES[plan.state_format], MASTERS[plan.master]
    of_elements, of_gradient = get(plan.elements), get(plan.gradient)
    c = {name: columns[:, i : i + 1] for i, name in enumerate(plan.columns)}
    drawn = iter(() if keys is None else keys.unbind())

    value = holder.read(elements, of_elements, master, c["unit"])
    g = decode(gradient, of_gradient, torch.float32) * c["gradient"]
    rows = tuple(fmt.read(kept, table, watch.reads) for kept in states)

    value, rows = RULES[plan.rule].update(value, g, rows, c, plan.flags)

    found: Found = []
    for kept, new, above in zip(states, rows, watch.above, strict=True):
        again = fmt.write(kept, new, next(drawn) if plan.stochastic else None, start, above)
        found.append(None if again is None else (new, again))
    draw = Draw(next(drawn, None), start)
    holder.write(elements, of_elements, master, c["unit"], value, draw)
    return found


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

    # Dynamo counts recompilations for each code object, so each plan gets a code object.
    code = step.__code__.replace(co_name=f"{plan.rule}_step")
    own = FunctionType(code, globals(), closure=step.__closure__)
    return torch.compile(own, fullgraph=True, options=_UNCHECKED)
