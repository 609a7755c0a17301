"""Loading: compares tensors from a checkpoint with a model and an optimizer, and puts them in.

Tensors may be scaled or plain, sharded or whole, on either side. All of them are compared first,
and nothing is changed before. Then the values go in, bit for bit if both sides have one format.

A model and its optimizer are seen here as tensors by name. The names are free of the wrappers of
torch.compile and others, and the same on any number of ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scaledtensor.checkpoint.shards import local, of_local
from scaledtensor.errors import CheckpointError
from scaledtensor.models.delayed import parameter_of
from scaledtensor.models.interpose import UNIT_SCALED, note_missing
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.recipes import Delayed
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.memo import after_overwrite, note
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.tensor import ScaledTensor, is_stored
from scaledtensor.tensors.wrapper import as_bytes, is_wrapper

__all__ = [
    "NamedState",
    "as_parameter",
    "load_into",
    "matched",
    "named_parameters",
    "named_state",
    "put",
    "state_setter",
    "template",
    "tensors_of",
]

#: The names under which wrappers keep the module in them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def load_into(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put tensors into a model by name. Either side may be scaled or plain, sharded or whole.

    A ScaledTensor parameter takes the elements and the scale of a ScaledTensor of its format
    unchanged. It casts elements of another format under their scale. A plain tensor gets the scale
    that `scale_model` would give it. A plain parameter takes the value. Recipes stay the model's.

    One of several tied names is enough. Histories of delayed scaling that only one side has are
    ignored. If a model without `unit_scale` was saved, loading it into a unit-scaled one warns.

    Args:
        model: any module. DistributedDataParallel, torch.compile or `fully_shard` may wrap it; then
            every rank calls this with the same tensors.
        state: whole tensors, or shards in the layout of this model.

    Raises:
        CheckpointError: a name is missing or unknown; a tensor has another shape, or a kind that
            its place cannot hold. The model is then unchanged.
    """
    targets = tensors_of(model)
    pairs = matched("the state dict", targets, state)
    for target, source in pairs.values():
        put(target, source)


# --- names -----------------------------------------------------------------------------------


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _clean(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a model, not copied, by names without wrappers.

    Raises:
        CheckpointError: a module keeps something else in its state dict.
    """
    found = {}
    for name, x in _unwrapped(model).state_dict(keep_vars=True).items():
        if not isinstance(x, Tensor):
            raise CheckpointError(
                f"{name} in the model's state dict is a {type(x).__name__}; checkpoints hold "
                "tensors, and whatever else in `extra`"
            )
        found[_clean(name)] = x
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, by its first name without wrappers."""
    return {_clean(name): p for name, p in _unwrapped(model).named_parameters()}


@dataclass
class NamedState:
    """The state of an optimizer by the names of its parameters."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The entries of each parameter's state that are no tensors."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The options of each parameter group, and the names of its parameters."""


def named_state(model: nn.Module, optimizer: Optimizer) -> NamedState:
    """Return the state of `optimizer`, which optimizes the parameters of `model`.

    Raises:
        CheckpointError: the optimizer has a parameter that is not in the model.
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


def _name(p: Tensor, names: dict[int, str]) -> str:
    if id(p) not in names:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the model's: "
            "make the optimizer of model.parameters(), after scale_model and fully_shard"
        )
    return names[id(p)]


def _check_shards(name: str, p: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse a plain state with the shape of a shard, which would be saved as a whole tensor."""
    shape = local(p).shape
    for key, x in state.items():
        if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.shape == shape != p.shape:
            raise CheckpointError(
                f"the state {key!r} of {name} is of shape {tuple(shape)}, as this rank's shard of "
                f"{tuple(p.shape)}, and is no DTensor: make it one, cut as the parameter is"
            )


# --- comparing -------------------------------------------------------------------------------


def matched(
    where: Any, targets: Mapping[str, Tensor], sources: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Any]]:
    """Return (target, source) for each name. A source is a tensor, real or on the meta device.

    Raises:
        CheckpointError: see `load_into`. `where` names the sources in the message.
    """
    have = {id(targets[name]) for name in sources if name in targets}
    missing = [
        name
        for name, x in targets.items()
        if name not in sources
        and id(x) not in have
        and not _is_history(name, targets)
        and not _is_mark(name)
    ]
    unknown = [name for name in sources if name not in targets and not _is_history(name, sources)]
    if missing or unknown:
        parts = [f"it has no {_some(missing)}"] if missing else []
        parts += [f"this model has no {_some(unknown)}"] if unknown else []
        if any(map(_is_mark, unknown)):
            parts.append("call scaledtensor.unit_scale on the model first")
        raise CheckpointError(f"{where} belongs to another model: {'; '.join(parts)}")
    for name in filter(_is_mark, targets):
        if name not in sources:
            note_missing(name)
    pairs = {name: (x, sources[name]) for name, x in targets.items() if name in sources}
    for name, (target, source) in pairs.items():
        _check_fit(where, name, target, source)
    return pairs


def _is_mark(name: str) -> bool:
    """Return whether a tensor of that name marks a model as unit-scaled."""
    return name.rpartition(".")[2] == UNIT_SCALED


def _is_history(name: str, tensors: Mapping[str, Any]) -> bool:
    """Return whether the tensor `name` is the history of another tensor under delayed scaling."""
    p = local(tensors.get(parameter_of(name)))
    return isinstance(p, ScaledTensor) and isinstance(p.recipe, Delayed)


def _check_fit(where: Any, name: str, target: Tensor, source: Any) -> None:
    """Raise CheckpointError unless `source` can be put into `target`."""

    def refuse(there: Any, here: Any, more: str = "") -> None:
        raise CheckpointError(
            f"{where} belongs to another model: {name} is {there} there and {here} here{more}"
        )

    if tuple(source.shape) != tuple(target.shape):
        refuse(tuple(source.shape), tuple(target.shape))
    held, given = local(target), local(source)
    if isinstance(source, DTensor):
        there, here = _told_layout(source), _told_layout(target)
        if there != here:
            refuse(
                there,
                here,
                ": shards of one rank's own file fit that number of ranks alone. Save with "
                "scaledtensor.checkpoint.save, which loads on any",
            )
    if held.is_floating_point() != given.dtype.is_floating_point:
        refuse(given.dtype, held.dtype)
    if isinstance(held, (CodedTensor, QuantizedTensor)):
        there, here = _told_codes(given), _told_codes(held)
        if there != here:
            refuse(
                there, here, ", and codes are made with their scales: nothing is put into others"
            )
    elif given.layout != held.layout:
        refuse(given.layout, held.layout)


def _told_layout(x: Any) -> str:
    if not isinstance(x, DTensor):
        return "whole"
    return f"cut by {x.placements} on {x.device_mesh.size()} ranks, {tuple(local(x).shape)} on one"


def _told_codes(x: Any) -> str:
    kind = f"a {type(x).__name__}"
    if isinstance(x, QuantizedTensor):
        more = (f"codes in {x.order}", *x.extras)
        return f"{kind} of {x.config}, {', '.join(more)}"
    return f"{kind} of {x.format.name}, {x.granularity}" if isinstance(x, CodedTensor) else kind


def _some(names: Iterable[str]) -> str:
    first, *rest = list(names)
    shown = ", ".join([first, *rest[:4]])
    return shown if len(rest) <= 4 else f"{shown} and {len(rest) - 4} more"


# --- putting tensors into a model ------------------------------------------------------------


@torch.no_grad()
def put(target: Tensor, source: Tensor) -> None:
    """Overwrite a whole tensor, or this rank's shard of one, by `source`, which fits."""
    held = local(target)
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        source = _shard(_as_held(held, source.to(held.device)), target)
    elif isinstance(target, DTensor) and _needs_whole(held, local(source)):
        source = _shard(_as_held(held, _whole(source)), target)
    given = local(source)
    if isinstance(held, CodedTensor):
        _put_parts(held, given)
    elif isinstance(held, ScaledTensor):
        given = _as_held(held, given)
        # Not held.copy_(): a shard may be a part of a buffer, and a part keeps the whole's scale.
        _put_parts(held, given)
        held.nonnegative = given.nonnegative
        # FSDP2 asks all shards again for their common scale and amax, as after any overwriting. It
        # makes new objects of uneven shards before the first step, so no rank may know it earlier.
        after_overwrite(held)
    elif is_wrapper(given) and not is_wrapper(held):
        held.copy_(given.dequantize())
    else:
        held.copy_(given)


def _put_parts(held: Ruled, given: Any) -> None:
    for name in held.INNER:
        getattr(held, name).copy_(getattr(given, name))


def _as_held(held: Tensor, given: Tensor) -> Any:
    """Return `given`, a whole tensor, in the format of `held`, as `copy_` would make it."""
    if type(held) is not ScaledTensor:
        return given
    if type(given) is ScaledTensor and given.format == held.format:
        return given
    blank = held.make(
        torch.empty(given.shape, dtype=held.format.storage_dtype, device=held.device),
        torch.ones_like(held.scale),
        torch.ones_like(held.rms),
        held.format,
        held.dtype,
        held.recipe,
    )
    note(blank, agreed=True)  # a shard has the scale of the whole, whatever its own RMS is
    return blank.copy_(given.to(held.device))


def _needs_whole(held: Tensor, given: Tensor) -> bool:
    """Return whether the scale that `held` gets depends on all elements of the whole tensor."""
    if not isinstance(held, ScaledTensor):
        return False
    if not isinstance(given, Ruled):
        return True
    return is_stored(held) and held.format != given.format


def _whole(x: Tensor) -> Tensor:
    """Return the whole of a sharded tensor. Every rank calls this."""
    if not isinstance(x, DTensor):
        return x
    part = x.to_local()
    if not isinstance(part, ScaledTensor):
        return x.full_tensor()
    qdata = of_local(as_bytes(part.qdata), x).full_tensor().view(part.qdata.dtype)
    return part.like(qdata, part.scale, part.rms)


def _shard(whole: Tensor, target: DTensor) -> DTensor:
    """Return the shards, in the layout of `target`, of a tensor that every rank has whole."""

    def cut(x: Tensor) -> Tensor:
        mesh, placements = target.device_mesh, target.placements
        return distribute_tensor(x, mesh, placements, src_data_rank=None).to_local()

    if not isinstance(whole, Ruled):
        return of_local(cut(whole), target)
    whole = whole.widened()
    return of_local(whole.like(cut(whole.qdata), whole.scale, whole.rms), target)


# --- putting states into an optimizer --------------------------------------------------------


def state_setter(
    where: Any, model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]]
) -> Callable[[Mapping[str, dict[str, Any]]], None]:
    """Compare saved groups with `optimizer`; return a function that sets its states by name.

    Args:
        where: the name of the checkpoint in error messages.
        model: the model with the optimizer's parameters.
        optimizer: the optimizer to load into.
        groups: the `groups` of the `NamedState` that was saved.

    Raises:
        CheckpointError: this optimizer has another number of groups, other parameters or options.
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
    """Return the tensor with the layout for a state of `p`; None if the state is read whole."""
    if isinstance(present, Tensor) and tuple(present.shape) == shape:
        return present
    return p if tuple(p.shape) == shape and key != "step" else None


@torch.no_grad()
def as_parameter(optimizer: Optimizer, p: Tensor, state: Tensor, saved: Tensor) -> Tensor:
    """Return `state` in the format of `p`, if it was saved in the format of its parameter, `saved`.

    torch's optimizers hold states as `zeros_like(p)` does: a ScaledTensor gets a scaled state, in
    its format and under its recipe. A state in another format was the choice of its optimizer, and
    stays in that format, unless this optimizer is torch's and has no such choice.
    """
    held = local(state)
    foreign = isinstance(held, CodedTensor) and type(optimizer).__module__.startswith("torch.")
    if state.shape != p.shape or (_kind(held) != _kind(saved) and not foreign):
        return state
    made = torch.zeros_like(p)
    new = local(made)
    if _kind(new) == _kind(held) and getattr(new, "recipe", None) == getattr(held, "recipe", None):
        return state
    put(made, state)
    return made


def _kind(x: Tensor) -> Any:
    return (type(x), x.format) if isinstance(x, Ruled) else None
