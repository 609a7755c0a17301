"""The steps of the optimizers, as functions of float32 matrices of groups and of columns.

    value, states = rule(value, gradient, states, columns)

A row has its own hyperparameters, that of its parameter, so that parameters of different groups are
stepped at once. Everything is in units that make scales cancel: the value in that of the parameter
(its `scale`), the gradient and first moments in a unit u of the parameter's gradients, second
moments in u^2. `columns` are the numbers that follow from these, computed in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

__all__ = ["RULES", "Columns", "Plan", "Rule", "Units", "goes_by_pieces", "run", "zeros_for"]


Columns = Mapping[str, Tensor]


States = tuple[Tensor, ...]


Flags = frozenset[str]


#: Of its square, a float32 number.
_LARGEST = 2.0**64 - 2.0**40


class Units(NamedTuple):
    """Of one parameter: powers of two, 1 where tensors are plain."""

    value: float
    gradient: float
    """The scale of the gradient at hand."""
    moment: float
    """u, chosen at the first step."""


@dataclass(frozen=True)
class Rule:
    """One optimizer."""

    states: Callable[[dict[str, Any]], tuple[str, ...]]
    """Names of the states that a parameter group has, as torch.optim calls them."""
    squared: tuple[str, ...]
    """Those in units of u^2."""
    flags: Callable[[dict[str, Any]], Flags]
    """What of a group's options chooses other code."""
    columns: tuple[str, ...]
    numbers: Callable[[dict[str, Any], float, bool, Units], dict[str, float]]
    """(group, number of this step, whether it is the first, units): the columns; and "unit", the
    parameter's, that every rule has."""
    update: Callable[[Tensor, Tensor, States, Columns, Flags], tuple[Tensor, States]]
    counts: bool = True
    """Whether it keeps the number of steps."""


def _gradient(group: dict[str, Any], units: Units) -> float:
    sign = -1.0 if group.get("maximize") else 1.0
    return sign * units.gradient / units.moment


# --- Adam and AdamW --------------------------------------------------------------------------


def _adam_numbers(
    group: dict[str, Any], step: float, first: bool, units: Units
) -> dict[str, float]:
    beta1, beta2 = (float(b) for b in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    coupled = not group["decoupled_weight_decay"]
    return {
        "gradient": _gradient(group, units),
        "decay": decay * units.value / units.moment if coupled else 1 - lr * decay,
        "rate": lr / (1 - beta1**step) / units.value,
        "first": 1 - beta1,
        "keep": beta2,
        "second": 1 - beta2,
        "root": (1 - beta2**step) ** -0.5,
        "eps": float(group["eps"]) / units.moment,
    }


def _adam(
    value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
) -> tuple[Tensor, States]:
    """m, v as running means of g and g^2; w - lr m / (sqrt(v) + eps), both corrected for their
    start (Kingma and Ba, arXiv 1412.6980; decoupled decay: Loshchilov and Hutter, arXiv
    1711.05101; amsgrad, the largest v so far: Reddi et al., arXiv 1904.09237)."""
    if "decoupled" in flags:
        value = value * c["decay"]
    elif "decay" in flags:
        g = g + value * c["decay"]
    m, v, *largest = states
    # A gradient of which the square is no float32 counts as the largest of which it is: states in
    # groups keep finite numbers. One that is infinite itself makes the parameter a NaN.
    g = torch.where(g.abs() < torch.inf, g.clamp(-_LARGEST, _LARGEST), g)
    m = m + (g - m) * c["first"]
    v = v * c["keep"] + g * g * c["second"]
    if "amsgrad" in flags:
        largest = [torch.maximum(largest[0], v)]
    root = (largest[0] if largest else v).sqrt() * c["root"]
    value = value - c["rate"] * (m / (root + c["eps"]))
    return value, (m, v, *largest)


def _adam_states(group: dict[str, Any]) -> tuple[str, ...]:
    names = ("exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def _adam_flags(group: dict[str, Any]) -> Flags:
    decay = "decoupled" if group["decoupled_weight_decay"] else group["weight_decay"] and "decay"
    return frozenset(filter(None, (decay, group["amsgrad"] and "amsgrad")))


# --- SGD -------------------------------------------------------------------------------------


def _sgd_numbers(group: dict[str, Any], step: float, first: bool, units: Units) -> dict[str, float]:
    return {
        "gradient": _gradient(group, units),
        "decay": float(group["weight_decay"]) * units.value / units.moment,
        "rate": float(group["lr"]) * units.moment / units.value,
        "momentum": float(group["momentum"]),
        "keep": 0.0 if first else float(group["momentum"]),
        "add": 1.0 if first else 1 - float(group["dampening"]),
    }


def _sgd(
    value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
) -> tuple[Tensor, States]:
    """b = mu b + (1 - d) g, at first g; w - lr b, or with Nesterov's g + mu b."""
    if "decay" in flags:
        g = g + value * c["decay"]
    if not states:
        return value - c["rate"] * g, ()
    buffer = states[0] * c["keep"] + g * c["add"]
    direction = g + buffer * c["momentum"] if "nesterov" in flags else buffer
    return value - c["rate"] * direction, (buffer,)


def _sgd_states(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd_flags(group: dict[str, Any]) -> Flags:
    nesterov, decay = group["nesterov"] and "nesterov", group["weight_decay"] and "decay"
    return frozenset(filter(None, (nesterov, decay)))


# --- Lion ------------------------------------------------------------------------------------


def _lion_numbers(
    group: dict[str, Any], step: float, first: bool, units: Units
) -> dict[str, float]:
    beta1, beta2 = (float(b) for b in group["betas"])
    lr = float(group["lr"])
    return {
        "gradient": _gradient(group, units),
        "decay": 1 - lr * float(group["weight_decay"]),
        "rate": lr / units.value,
        "look": 1 - beta1,
        "add": 1 - beta2,
    }


def _lion(
    value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
) -> tuple[Tensor, States]:
    """w - lr sign(b1 m + (1 - b1) g), after the decay; then m = b2 m + (1 - b2) g (Chen et al.,
    arXiv 2302.06675, algorithm 2)."""
    (m,) = states
    direction = (m + (g - m) * c["look"]).sign()
    return value * c["decay"] - c["rate"] * direction, (m + (g - m) * c["add"],)


def _lion_states(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg",)


def _no_flags(group: dict[str, Any]) -> Flags:
    return frozenset()


RULES: Mapping[str, Rule] = {
    "adam": Rule(
        _adam_states,
        ("exp_avg_sq", "max_exp_avg_sq"),
        _adam_flags,
        ("gradient", "decay", "rate", "first", "keep", "second", "root", "eps", "unit"),
        _adam_numbers,
        _adam,
    ),
    "sgd": Rule(
        _sgd_states,
        (),
        _sgd_flags,
        ("gradient", "decay", "rate", "momentum", "keep", "add", "unit"),
        _sgd_numbers,
        _sgd,
        counts=False,
    ),
    "lion": Rule(
        _lion_states,
        (),
        _no_flags,
        ("gradient", "decay", "rate", "look", "add", "unit"),
        _lion_numbers,
        _lion,
    ),
}


# A step of many parameters in one function of flat memory: read, update, write, in groups of 128.
# What is kept of the parameters of a `Bucket` lies in memory one after another, each parameter
# padded to whole groups, so that one call steps all of them; the states that a user sees are
# views of it. Elements of parameters and gradients are copied there and back, but for one large
# parameter by itself, which is stepped where it is.  The function is the same eager and compiled;
# only the number of groups is dynamic, so that a model needs few compilations. It goes by pieces
# whose intermediate results stay in a cache.
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
