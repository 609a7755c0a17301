"""The states of an optimizer on their way from and to a `state_dict`."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from scaledtensor.errors import FormatError, ShapeError
from scaledtensor.optim.buckets import as_spread, check_alike, part
from scaledtensor.optim.masters import MASTER_STATES, MASTERS
from scaledtensor.optim.states import LARGEST_UNIT, LEAST_UNIT, STATES, unit_of, values_of
from scaledtensor.optim.updates import RULES, Group
from scaledtensor.tensors.coded import is_expanded
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["exported", "holds_groups", "loaded_states", "widened"]

State = dict[str, Any]
"""The states of one parameter, by name."""


def holds_groups(state_dict: dict[str, Any]) -> bool:
    """Whether a `state_dict` has states that torch's own classes cannot read."""
    return any(
        is_expanded(part(x)) or name in MASTER_STATES
        for state in state_dict["state"].values()
        if isinstance(state, dict)
        for name, x in state.items()
    )


def loaded_states(
    optimizer: Optimizer, state_dict: dict[str, Any], wide: bool
) -> dict[Tensor, State]:
    """Return copies of the states in a `state_dict`, each in the format of its parameter's group.

    Returns no states if the parameters do not match the file: torch raises the error for this.

    Args:
        optimizer: the optimizer that loads the states.
        state_dict: the file.
        wide: whether "fp32" means float32. Otherwise it means the parameter's dtype, as in torch.
    """
    saved, groups = state_dict["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return {}
    rule = getattr(optimizer, "rule", None) if wide else None
    found = {}
    for group, given in zip(groups, saved, strict=True):
        for p, place in zip(group["params"], given["params"], strict=True):
            if place in state_dict["state"]:
                state = state_dict["state"][place]
                found[p] = _loaded(p, group, state, wide, _units(rule, group, state))
    return found


def _units(rule: str | None, group: Group, saved: State) -> dict[str, float]:
    """Return the unit of each state. A step of `RULES` has one unit for all: the unit of the first
    state, and its square for averages of squares. Torch's step has one for each state."""
    if rule is None:
        return {}
    names = RULES[rule].states(group)
    unit = unit_of(part(saved.get(names[0]))) if names else 1.0
    unit = min(max(unit, LEAST_UNIT), LARGEST_UNIT)
    return {name: unit * unit if name in RULES[rule].squared else unit for name in names}


def _loaded(p: Tensor, group: Group, saved: State, wide: bool, units: dict[str, float]) -> State:
    fmt, holder = STATES[group["state_format"]], MASTERS[group["master_format"]]
    made: State = {}
    for name, x in saved.items():
        if x is None:  # the buffer of SGD without momentum
            continue
        if name == "step":
            made[name] = torch.tensor(float(x), dtype=torch.float32)
            continue
        if not isinstance(x, Tensor):
            made[name] = x
            continue
        if x.shape != p.shape:
            raise ShapeError(
                f"state {name!r} of a parameter of shape {tuple(p.shape)} has shape "
                f"{tuple(x.shape)}"
            )
        check_alike(name, x, p)
        own, mine = part(x), part(p)
        if name in MASTER_STATES:
            if name != holder.state:
                raise FormatError(
                    f"a {name} was saved for a parameter of shape {tuple(p.shape)}, and with "
                    f"master_format={group['master_format']!r} there is none: load it with the "
                    "master_format it was saved with"
                )
            kept = holder.converted(own, mine)
        elif group["state_format"] == "fp32" and not wide:
            like_torch = widened(own, mine) if isinstance(mine, ScaledTensor) else values_of(own)
            kept = like_torch.detach().to(mine.device, mine.dtype, copy=True)
        else:
            kept = fmt.converted(own, mine, units.get(name, unit_of(own)))
        made[name] = as_spread(kept, p)
    return made


def exported(optimizer: Optimizer) -> dict[str, Any]:
    """Return the `state_dict` that `LowPrecision.plain_state_dict` describes."""
    held = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for place, state in held["state"].items():
        p = parameters[place]
        states[place] = {
            name: as_spread(_plain(part(x), part(p)), p) if name != "step" else x.clone()
            for name, x in state.items()
            if name not in MASTER_STATES
        }
    return {**held, "state": states}


def _plain(x: Any, p: Tensor) -> Any:
    wide = widened(x, p)
    return x.clone() if wide is x and isinstance(x, Tensor) else wide


def widened(x: Any, p: Tensor) -> Any:
    """Return a state as torch's own step keeps it, if it is in groups; any other one unchanged."""
    if not is_expanded(x):
        return x
    return x.widened() if isinstance(p, ScaledTensor) else x.dequantize()
