"""State dicts for libraries that write safetensors files.

safetensors knows torch's own tensors, and no subclass. `scale_model` therefore registers two hooks
on each module that has ScaledTensor parameters:

1. After `state_dict()`: where a library of `_READERS` asks, each ScaledTensor gives way to plain
   tensors: to its parts, `weight.qdata`, `weight.scale`, `weight.rms` and `weight.facts` (its
   format and recipe, as JSON in bytes), or to its value. Whoever else asks gets the ScaledTensors
   themselves, which `torch.save` writes.
2. Before `load_state_dict()`: parts are put together again, bit for bit, whoever loads them.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor.errors import CheckpointError
from scaledtensor.models.delayed import name_of
from scaledtensor.models.interpose import drop_hooks
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FACTS", "assembled", "attach", "detach", "joined", "parted", "parted_names"]

#: The name of the bytes that say what the other parts are parts of.
FACTS = "facts"

_TORCH = ("torch.nn.modules.module", __name__)


def parted(x: ScaledTensor) -> dict[str, Tensor]:
    """The plain tensors of `x` by the names of its parts: its own memory, and its facts.

    Raises:
        RecipeError: its recipe is of a class that is not registered, so that nothing could read it.
    """
    parts = import_module("scaledtensor.checkpoint.codec")
    told = json.dumps(parts.facts_of(x)).encode()
    found: dict[str, Tensor] = parts.inner_of(x)
    return found | {FACTS: torch.tensor(list(told), dtype=torch.uint8)}


def joined(name: str, parts: dict[str, Tensor]) -> ScaledTensor:
    """The ScaledTensor of which `parted` gave the parts. `name` is for messages.

    Raises:
        CheckpointError: a part is missing, or the parts do not fit together.
    """
    facts = parts.get(FACTS)
    if facts is None:
        raise CheckpointError(
            f"{name} came as {', '.join(sorted(parts))} and without its {FACTS}: the parts of one "
            "tensor are loaded together, and a checkpoint of several files may have them apart; "
            "scaledtensor.checkpoint.load_safetensors(folder) reads all files"
        )
    try:
        told = json.loads(bytes(facts.tolist()))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}.{FACTS} is damaged: {error}") from error
    module = import_module("scaledtensor.checkpoint.codec")
    inner = {part: x for part, x in parts.items() if part != FACTS}
    made: ScaledTensor = module.put_together(name, inner, told)
    return made


def parted_names(name: str) -> list[str]:
    """What the parts of a tensor of that name may be called."""
    return [f"{name}.{part}" for part in (*CodedTensor.INNER, FACTS)]


def assembled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with a ScaledTensor in place of its parts. A name that has facts alone is
    of a tensor that is tied to another, and is left out."""
    found = dict(tensors)
    ending = f".{FACTS}"
    for name in [key.removesuffix(ending) for key in tensors if key.endswith(ending)]:
        parts = _taken(found, name)
        if set(parts) != {FACTS}:
            found[name] = joined(name, parts)
    return found


def _taken(tensors: dict[str, Any], name: str) -> dict[str, Tensor]:
    """The parts of the tensor of that name, taken out of what holds them."""
    keys = [key for key in parted_names(name) if key in tensors]
    return {key.removeprefix(f"{name}."): tensors.pop(key) for key in keys}


# --- the hooks -------------------------------------------------------------------------------


def attach(module: nn.Module) -> None:
    """Register the hooks on `module` if it has ScaledTensor parameters, and none if it has not."""
    detach(module)
    if any(isinstance(p, ScaledTensor) for p in module._parameters.values()):
        module.register_state_dict_post_hook(_give)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_take)  # type: ignore[no-untyped-call]


def detach(module: nn.Module) -> None:
    """Take the hooks from `module`."""
    drop_hooks(module._state_dict_hooks, _give)
    drop_hooks(module._load_state_dict_pre_hooks, _take)


def _as_parts(name: str, x: ScaledTensor) -> dict[str, Tensor]:
    return {f"{name}.{part}": t for part, t in parted(x).items()}


def _as_value(name: str, x: ScaledTensor) -> dict[str, Tensor]:
    return {name: x.detach().dequantize()}


#: The modules that hand the state dict of a model to safetensors, and what each is given. Parts
#: resume a training bit for bit. Adapters are for any library to read, which knows them by the
#: endings of their names: they are values, without histories of delayed scaling.
_READERS: dict[str, Callable[[str, ScaledTensor], dict[str, Tensor]]] = {
    "accelerate.accelerator": _as_parts,
    "safetensors.torch": _as_parts,
    "transformers.trainer": _as_parts,
    "peft.utils.save_and_load": _as_value,
}


def _give(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    reader = _READERS.get(_asking())
    if reader is None:
        return
    for name in module._parameters:
        x = state.get(prefix + name)
        if isinstance(x, ScaledTensor):
            del state[prefix + name]
            state.update(reader(prefix + name, x))
            if reader is _as_value and name_of(name) in module._buffers:
                del state[prefix + name_of(name)]


def _asking() -> str:
    """The module whose code called `state_dict()`. Nothing that torch passes to a hook says so."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _TORCH:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _take(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    *rest: Any,
) -> None:
    for name, p in module._parameters.items():
        if not isinstance(p, ScaledTensor):
            continue
        full = prefix + name
        parts = _taken(state, full)
        if set(parts) == {FACTS}:
            # It is tied to another, under whose name its parts are: they are missed under this one.
            state[full] = p.detach()
            missing.extend(f"{full}.{part}" for part in p.INNER)
        elif parts:
            state[full] = joined(full, parts)
