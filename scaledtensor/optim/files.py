"""The states of an optimizer on their way from and to a `state_dict`."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from scaledtensor.errors import FormatError, ShapeError
from scaledtensor.optim.buckets import as_spread, check_alike, part
from scaledtensor.optim.keeping import GROUP, MASTERS
from scaledtensor.optim.updates import RULES
from scaledtensor.tensors.expanded import ExpandedTensor
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.tensors.wrap import scaled

__all__ = ["LARGEST_UNIT", "LEAST_UNIT", "adopted", "exported", "holds_groups", "is_low"]


#: Squares of units stay powers of two that are float32 numbers.
LEAST_UNIT, LARGEST_UNIT = 2.0**-60, 2.0**60


def is_low(group: dict[str, Any]) -> bool:
    """Whether torch's own step does not do for a parameter group."""
    return group["state_format"] != "fp32" or group["master_format"] is not None


def holds_groups(state_dict: dict[str, Any]) -> bool:
    """Whether a `state_dict` has states that torch's own classes would not read."""
    return any(
        isinstance(part(x), ExpandedTensor) or name in ("master", "remainder")
        for state in state_dict["state"].values()
        if isinstance(state, dict)
        for name, x in state.items()
    )


def adopted(
    optimizer: Optimizer, state_dict: dict[str, Any], wide: bool
) -> dict[Tensor, dict[str, Any]]:
    """The states in a `state_dict`, copied, each in the format that the parameter's group has;
    "fp32" is float32 where `wide`, else as torch has it, the dtype of the parameter.

    Leaves what torch checks to torch: where parameters do not match it has none.
    """
    saved = state_dict["param_groups"]
    groups = optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return {}
    found, rule = {}, getattr(optimizer, "rule", None) if wide else None
    for own, given in zip(groups, saved, strict=True):
        for p, place in zip(own["params"], given["params"], strict=True):
            if place in state_dict["state"]:
                state = state_dict["state"][place]
                units = _units(rule, own, state)
                found[p] = _adopted(p, own, state, wide, units)
    return found


def _units(rule: str | None, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, float]:
    """The unit of each state in a step, which has one for all: that of the first, and its square
    for averages of squares. Torch's step has one for each."""
    if rule is None:
        return {}
    names = RULES[rule].states(group)
    unit = _unit(part(saved.get(names[0]))) if names else 1.0
    unit = min(max(unit, LEAST_UNIT), LARGEST_UNIT)
    return {name: unit * unit if name in RULES[rule].squared else unit for name in names}


def _unit(x: Any) -> float:
    if isinstance(x, ExpandedTensor):
        return float(x.tensor_scale)
    return float(x.scale) if isinstance(x, ScaledTensor) else 1.0


def _adopted(
    p: Tensor, group: dict[str, Any], saved: dict[str, Any], wide: bool, units: dict[str, float]
) -> dict[str, Any]:
    beside = MASTERS[group["master_format"]].state
    made = {}
    for name, x in saved.items():
        if x is None:  # SGD's buffer, where it has no momentum
            continue
        if not isinstance(x, Tensor) or name == "step":
            made[name] = torch.tensor(float(x)) if name == "step" else x
            continue
        if x.shape != p.shape:
            raise ShapeError(
                f"state {name!r} of a parameter of shape {tuple(p.shape)} has shape "
                f"{tuple(x.shape)}"
            )
        check_alike(name, x, p)
        own, mine = part(x), part(p)
        if name in ("master", "remainder"):
            if name != beside:
                raise FormatError(
                    f"a {name} was saved for a parameter of shape {tuple(p.shape)}, and with "
                    f"master_format={group['master_format']!r} there is none: load it with the "
                    "master_format it was saved with"
                )
            kept = _master(own, mine, group["master_format"])
        else:
            unit = units.get(name, _unit(own))
            if group["state_format"] != "fp32":
                kept = _grouped(own, mine, group["state_format"], unit)
            else:
                kept = _single(own, mine, unit) if wide else _torchs(own, mine)
        made[name] = as_spread(kept, p)
    return made


def _master(x: Tensor, p: Tensor, name: str) -> Tensor:
    if name == "bf16+16":
        if x.dtype != torch.int16:
            raise FormatError(f"a remainder is int16; got {x.dtype}")
        return x.detach().to(p.device, copy=True)
    if name == "fp16":
        return _grouped(x, p, "fp16", _unit(x))
    return _values(x).to(p.device, torch.float32, copy=True)


def _single(x: Tensor, p: Tensor, unit: float) -> Tensor:
    if not isinstance(p, ScaledTensor):
        return _values(x).to(p.device, torch.float32, copy=True)
    return scaled(_values(x).to(p.device, torch.float32), scale=unit)


def _torchs(x: Tensor, p: Tensor) -> Tensor:
    """As torch's own step keeps it."""
    if not isinstance(p, ScaledTensor):
        return _values(x).to(p.device, p.dtype, copy=True)
    wide = x.widened() if isinstance(x, ExpandedTensor) else x
    return wide.detach().to(p.device, p.dtype, copy=True)


def _grouped(x: Tensor, p: Tensor, name: str, unit: float) -> Tensor:
    if isinstance(x, ExpandedTensor) and x.format.name == name and x.granularity == GROUP:
        return x.detach().to(p.device, copy=True)
    values = _values(x).to(p.device)
    return ExpandedTensor(values, name, GROUP, dtype=torch.float32, tensor_scale=unit)


def _values(x: Tensor) -> Tensor:
    return x.detach().dequantize() if isinstance(x, ScaledTensor) else x.detach()


def exported(optimizer: Optimizer) -> dict[str, Any]:
    """See `LowPrecision.plain_state_dict`."""
    held = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for place, state in held["state"].items():
        p = parameters[place]
        scaled = isinstance(part(p), ScaledTensor)
        states[place] = {
            name: x.clone() if name == "step" else as_spread(_plain(part(x), scaled), p)
            for name, x in state.items()
            if name not in ("master", "remainder")
        }
    return {**held, "state": states}


def _plain(x: Any, scaled: bool) -> Any:
    if not isinstance(x, ExpandedTensor):
        return x.clone() if isinstance(x, Tensor) else x
    return x.widened() if scaled else x.dequantize()
