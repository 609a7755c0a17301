"""The states of an optimizer on their way from and to a `state_dict`."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from scaledtensor.errors import FormatError, ShapeError
from scaledtensor.expanded import ExpandedTensor
from scaledtensor.optim.keeping import GROUP, MASTERS
from scaledtensor.tensor import ScaledTensor

__all__ = ["adopted", "exported", "holds_groups", "is_low"]


def is_low(group: dict[str, Any]) -> bool:
    """Whether torch's own step does not do for a parameter group."""
    return group["state_format"] != "fp32" or group["master_format"] is not None


def holds_groups(state_dict: dict[str, Any]) -> bool:
    """Whether a `state_dict` has states that torch's own classes would not read."""
    return any(
        isinstance(x, ExpandedTensor) or name in ("master", "remainder")
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
    found = {}
    for own, given in zip(groups, saved, strict=True):
        for p, place in zip(own["params"], given["params"], strict=True):
            if place in state_dict["state"]:
                found[p] = _adopted(p, own, state_dict["state"][place], wide)
    return found


def _adopted(p: Tensor, group: dict[str, Any], saved: dict[str, Any], wide: bool) -> dict[str, Any]:
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
        if name in ("master", "remainder"):
            if name != beside:
                raise FormatError(
                    f"a {name} was saved for a parameter of shape {tuple(p.shape)}, and with "
                    f"master_format={group['master_format']!r} there is none: load it with the "
                    "master_format it was saved with"
                )
            made[name] = _master(x, p, group["master_format"])
        else:
            made[name] = _state(x, p, group["state_format"], torch.float32 if wide else p.dtype)
    return made


def _master(x: Tensor, p: Tensor, name: str) -> Tensor:
    if name == "bf16+16":
        if x.dtype != torch.int16:
            raise FormatError(f"a remainder is int16; got {x.dtype}")
        return x.detach().to(p.device, copy=True)
    if name == "fp16":
        return _grouped(x, p, "fp16")
    return _values(x).to(p.device, torch.float32, copy=True)


def _state(x: Tensor, p: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if name != "fp32":
        return _grouped(x, p, name)
    if not isinstance(p, ScaledTensor):
        return _values(x).to(p.device, dtype, copy=True)
    wide = x.widened() if isinstance(x, ExpandedTensor) else x
    return wide.detach().to(p.device, dtype, copy=True)


def _grouped(x: Tensor, p: Tensor, name: str) -> Tensor:
    if isinstance(x, ExpandedTensor) and x.format.name == name and x.granularity == GROUP:
        return x.detach().to(p.device, copy=True)
    unit: Any = 1.0
    if isinstance(x, ExpandedTensor):
        unit = x.tensor_scale
    elif isinstance(x, ScaledTensor):
        unit = x.scale
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
        scaled = isinstance(parameters[place], ScaledTensor)
        states[place] = {
            name: _plain(x, scaled)
            for name, x in state.items()
            if name not in ("master", "remainder")
        }
    return {**held, "state": states}


def _plain(x: Any, scaled: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    if not isinstance(x, ExpandedTensor):
        return x.clone()  # "step", which torch would share with the optimizer that loads it
    return x.widened() if scaled else x.dequantize()
