"""The state of an optimizer by the names of its parameters, which any number of ranks agree on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint.fit import clean, local, put, unwrapped
from scaledtensor.coded import CodedTensor
from scaledtensor.errors import CheckpointError
from scaledtensor.tensor import ScaledTensor

__all__ = ["NamedState", "named_parameters", "named_state", "restore"]


class NamedState:
    """An optimizer's state in parts: tensors, other values, and the options of its groups."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, by its first name without wrappers."""
    return {clean(name): p for name, p in unwrapped(model).named_parameters()}


def named_state(model: nn.Module, optimizer: Optimizer) -> NamedState:
    """The state of `optimizer`, whose parameters are the model's.

    Raises:
        CheckpointError: it has a parameter that is not the model's.
    """
    names = {id(p): name for name, p in named_parameters(model).items()}
    packed = optimizer.state_dict()
    found = NamedState()
    by_index: dict[Any, str] = {}
    for group, told in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        own = [_name(p, names) for p in group["params"]]
        by_index |= dict(zip(told["params"], own, strict=True))
        options = {k: v for k, v in told.items() if k not in ("params", "param_names")}
        found.groups.append({"options": options, "names": own})
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for index, state in packed["state"].items():
        name = by_index[index]
        _check_shards(name, parameters[name], state)
        found.tensors[name] = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        found.values[name] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
    return found


def _check_shards(name: str, p: Tensor, state: Mapping[str, Any]) -> None:
    """A state of a shard's shape that is no DTensor would be saved as if it were all there is."""
    shape = local(p).shape
    for key, x in state.items():
        if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.shape == shape != p.shape:
            raise CheckpointError(
                f"the state {key!r} of {name} is of shape {tuple(shape)}, as this rank's shard of "
                f"{tuple(p.shape)}, and is no DTensor: make it one, cut as the parameter is"
            )


def restore(
    where: Any, model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]]
) -> Callable[[Mapping[str, dict[str, Any]]], None]:
    """What puts states by name into `optimizer`, once all has been compared.

    Args:
        groups: those of `named_state`, as they were saved.

    Raises:
        CheckpointError: there are other groups, with other parameters or options, than here.
    """
    names = {id(p): name for name, p in named_parameters(model).items()}
    packed = optimizer.state_dict()
    here = packed["param_groups"]
    if len(groups) != len(here):
        raise CheckpointError(
            f"{where} belongs to another optimizer: it has {len(groups)} parameter groups, "
            f"this one {len(here)}"
        )
    index: dict[str, Any] = {}
    made = []
    for i, (told, there) in enumerate(zip(here, groups, strict=True)):
        own = [_name(p, names) for p in optimizer.param_groups[i]["params"]]
        if absent := sorted(set(own) - set(there["names"])):
            raise CheckpointError(
                f"{where} belongs to another optimizer: its group {i} has no {absent[0]}"
            )
        if absent := sorted(set(optimizer.defaults) - set(there["options"])):
            raise CheckpointError(
                f"{where} belongs to another optimizer: its group {i} has "
                f"{', '.join(sorted(there['options']))}, and no {absent[0]}"
            )
        index |= dict(zip(own, told["params"], strict=True))
        kept = {k: told[k] for k in ("params", "param_names") if k in told}
        made.append(there["options"] | kept)

    def load(states: Mapping[str, dict[str, Any]]) -> None:
        state = {index[name]: own for name, own in states.items() if name in index}
        optimizer.load_state_dict(packed | {"state": state, "param_groups": made})

    return load


def template(p: Tensor, present: Any, key: str, shape: tuple[int, ...]) -> Tensor | None:
    """The tensor as which a state of the parameter `p` is laid out; None for a whole one."""
    if isinstance(present, Tensor) and tuple(present.shape) == shape:
        return present
    return p if tuple(p.shape) == shape and key != "step" else None


@torch.no_grad()
def as_parameter(optimizer: Optimizer, p: Tensor, state: Tensor, saved: Tensor) -> Tensor:
    """A state as `p` has it here, if it was held as its parameter was there, which `saved` tells.

    Optimizers of torch hold states as zeros_like(p) does: scaled where it is, in its format and
    under its recipe. A state in a format of the optimizer's choice stays in that, unless this one
    is of torch and has no such choice.
    """
    held = local(state)
    foreign = isinstance(held, CodedTensor) and _is_of_torch(optimizer)
    if state.shape != p.shape or (_held_as(held) != _held_as(saved) and not foreign):
        return state
    made = torch.zeros_like(p)
    if _held_as(local(made)) == _held_as(held) and _recipe(local(made)) == _recipe(held):
        return state
    put(made, state)
    return made


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")


def _held_as(x: Tensor) -> Any:
    return (type(x), x.format) if isinstance(x, ScaledTensor) else None


def _recipe(x: Tensor) -> Any:
    return x.recipe if isinstance(x, ScaledTensor) else None


def _name(p: Tensor, names: dict[int, str]) -> str:
    if id(p) not in names:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the model's: "
            "make the optimizer of model.parameters(), after scale_model and fully_shard"
        )
    return names[id(p)]
