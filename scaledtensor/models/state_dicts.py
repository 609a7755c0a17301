"""State dicts for libraries that write safetensors files.

safetensors knows torch's own tensors only, and no subclass. `scale_model` therefore registers two
hooks on each module that has ScaledTensor parameters:

1. After `state_dict()`: if a library of `_READERS` called it, plain tensors replace each
   ScaledTensor. These are its parts, `weight.qdata`, `weight.scale`, `weight.rms` and
   `weight.facts` (its format and recipe, as JSON in bytes), or its value. Every other caller gets
   the ScaledTensors, which `torch.save` writes.
2. Before `load_state_dict()`: parts become ScaledTensors again, bit for bit, for every caller. If
   it assigns (`assign=True`), a plain tensor takes the format and recipe of the parameter.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from scaledtensor.errors import CheckpointError
from scaledtensor.models.delayed import name_of
from scaledtensor.models.interpose import drop_hooks
from scaledtensor.ops.products.table import cast_once
from scaledtensor.recipes import Recipe
from scaledtensor.tensors.codec import facts_of, part_names, parts_of, prefixed, rebuilt
from scaledtensor.tensors.tensor import ScaledTensor, is_stored
from scaledtensor.tensors.wrap import scaled
from scaledtensor.tensors.wrapper import Wrapper, is_wrapper

__all__ = ["FACTS", "assembled", "attach", "detach", "joined", "kept", "parted", "parted_names"]

#: The name of the bytes that hold the facts of a tensor, beside its parts.
FACTS = "facts"

_TORCH = ("torch.nn.modules.module", __name__)


def parted(x: Wrapper) -> dict[str, Tensor]:
    """Return the inner tensors of `x`, not copied, and its facts as bytes, by their names.

    Raises:
        RecipeError: the class of its recipe is not registered, so nothing could read the recipe.
    """
    told = json.dumps(facts_of(x)).encode()
    return parts_of(x) | {FACTS: torch.tensor(list(told), dtype=torch.uint8)}


def joined(name: str, parts: dict[str, Tensor]) -> Wrapper:
    """Return the ScaledTensor with the parts that `parted` gave. `name` is for messages.

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
    return rebuilt(name, parts, told)


def parted_names(name: str) -> list[str]:
    """Return all names that the parts of the tensor `name` can have."""
    return [f"{name}.{part}" for part in (*part_names(), FACTS)]


def assembled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name, with a ScaledTensor in place of its parts.

    A name with facts and no other part belongs to a tensor that is tied to another. It is left out.
    """
    found = dict(tensors)
    ending = f".{FACTS}"
    for name in [key.removesuffix(ending) for key in tensors if key.endswith(ending)]:
        parts = _taken(found, name)
        if set(parts) != {FACTS}:
            found[name] = joined(name, parts)
    return found


def _taken(tensors: dict[str, Any], name: str) -> dict[str, Tensor]:
    """Remove the parts of the tensor `name` from `tensors`, and return them."""
    keys = [key for key in parted_names(name) if key in tensors]
    return {key.removeprefix(f"{name}."): tensors.pop(key) for key in keys}


# --- the hooks -------------------------------------------------------------------------------


def attach(module: nn.Module) -> None:
    """Register the hooks on `module` if it or a part of it has ScaledTensor parameters; otherwise
    remove them. The hook of a container finds the parameters of parts that came later, such as
    DoRA's magnitudes, which PEFT computes from a scaled weight."""
    detach(module)
    if any(is_wrapper(p) for p in module.parameters()):
        module.register_state_dict_post_hook(_give)
        module.register_load_state_dict_pre_hook(_take)


def detach(module: nn.Module) -> None:
    """Remove the hooks from `module`."""
    drop_hooks(module._state_dict_hooks, _give)
    drop_hooks(module._load_state_dict_pre_hooks, _take)


def _as_parts(name: str, x: Wrapper) -> dict[str, Tensor]:
    return prefixed(name, parted(x))


def _as_value(name: str, x: Wrapper) -> dict[str, Tensor]:
    return {name: x.detach().dequantize()}


#: The modules that hand the state dict of a model to safetensors -> the tensors that each gets.
#: Parts resume a training bit for bit. Adapters are for any library to read. Libraries know them by
#: the endings of their names, so they are values, without histories of delayed scaling.
_READERS: dict[str, Callable[[str, Wrapper], dict[str, Tensor]]] = {
    "accelerate.accelerator": _as_parts,
    "safetensors.torch": _as_parts,
    "transformers.trainer": _as_parts,
    "peft.utils.save_and_load": _as_value,
}


def _give(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Hook after `state_dict()`: replace ScaledTensors if a library of `_READERS` called it."""
    reader = _READERS.get(_caller())
    if reader is None:
        return
    for key in [k for k, x in state.items() if k.startswith(prefix) and is_wrapper(x)]:
        state.update(reader(key, state.pop(key)))
        name = key.removeprefix(prefix)
        if reader is _as_value and name_of(name) in module._buffers:
            del state[prefix + name_of(name)]


def _caller() -> str:
    """Return the module that called `state_dict()`. torch does not pass it to hooks."""
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
    """Hook before `load_state_dict()`: join the parts of each ScaledTensor. torch calls the hook of
    a container first, and hands the joined tensors to its parts."""
    for name, p in module.named_parameters(remove_duplicate=False):
        if not is_wrapper(p):
            continue
        full = prefix + name
        parts = _taken(state, full)
        if set(parts) == {FACTS}:
            # The parts of a tied tensor have the name of the other one. They are missing here.
            state[full] = p.detach()
            missing.extend(f"{full}.{part}" for part in p.INNER)
        elif parts:
            state[full] = joined(full, parts)
        elif metadata.get("assign_to_params_buffers"):
            state[full] = _assigned(p, state.get(full))


def _assigned(p: Any, x: Any) -> Any:
    """Return the tensor of a state dict that is assigned to a parameter. torch would make the
    parameter the plain tensor, and the model would train in float32."""
    plain = isinstance(x, Tensor) and not is_wrapper(x) and x.is_floating_point()
    if not plain or type(p) is not ScaledTensor or p.recipe is None or x.shape != p.shape:
        return x
    return kept(x.detach(), p.recipe, is_stored(p), p.dtype)


def kept(x: Tensor, recipe: Recipe, stored: bool, dtype: torch.dtype | None = None) -> ScaledTensor:
    """Return plain values in the form in which a recipe keeps a parameter."""
    made = cast(ScaledTensor, scaled(x, recipe.master, dtype=dtype, recipe=recipe))
    return cast(ScaledTensor, cast_once(made)) if stored else made
