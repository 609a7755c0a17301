"""Putting tensors from a checkpoint into a model: scaled or plain, sharded or not, on either side.

All is compared first and nothing changed before; then values go in, bit for bit where both sides
hold them in one format.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from scaledtensor import _torch
from scaledtensor.coded import CodedTensor, as_bytes
from scaledtensor.errors import CheckpointError
from scaledtensor.histories import parameter_of
from scaledtensor.interpose import UNIT_SCALED, note_missing
from scaledtensor.recipes import Delayed
from scaledtensor.tensor import ScaledTensor, is_stored

__all__ = [
    "check_fit",
    "clean",
    "layout",
    "load_into",
    "local",
    "matched",
    "of_local",
    "put",
    "tensors_of",
    "unwrapped",
]

#: Modules that others are wrapped in, by the name under which they keep them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def load_into(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put tensors into a model by name, whichever side is scaled, or sharded.

    Into a ScaledTensor parameter, the elements and the scale of one of the same format go as they
    are; of another format, they are cast under their scale; a plain tensor gets the scale that
    `scale_model` would give it. Into a plain parameter goes the value. Recipes stay the model's.

    Tied names need only one of theirs; histories of delayed scaling that only one side has are left
    as they are. What a model without `unit_scale` saved goes into a unit-scaled one with a warning.

    Args:
        model: any module; also one that DistributedDataParallel, torch.compile or `fully_shard`
            wraps, and then every rank calls this with the same tensors.
        state: whole tensors, or shards as this model has them.

    Raises:
        CheckpointError: a name is missing or unknown; a tensor is of another shape, or of a kind
            that its place cannot hold. The model is then unchanged.
    """
    targets = tensors_of(model)
    pairs = matched("the state dict", targets, state)
    for target, source in pairs.values():
        put(target, source)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module in DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def clean(name: str) -> str:
    """A name without the wrappers that a module on the way is in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and saved buffers of a model, themselves, by names without wrappers.

    Raises:
        CheckpointError: a module keeps something else in its state dict.
    """
    found = {}
    for name, x in unwrapped(model).state_dict(keep_vars=True).items():
        if not isinstance(x, Tensor):
            raise CheckpointError(
                f"{name} in the model's state dict is a {type(x).__name__}; checkpoints hold "
                "tensors, and whatever else in `extra`"
            )
        found[clean(name)] = x
    return found


def matched(
    where: Any, targets: Mapping[str, Tensor], sources: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Any]]:
    """What goes where, by name. Sources are tensors, or anything with the facts of one.

    Raises:
        CheckpointError: as `load_into`; `where` is what its message calls the sources.
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
        check_fit(where, name, target, source)
    return pairs


def _is_mark(name: str) -> bool:
    """Whether a tensor of that name says that a model is unit-scaled."""
    return name.rpartition(".")[2] == UNIT_SCALED


def _is_history(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a tensor of that name is the history of delayed scaling of another."""
    p = local(tensors.get(parameter_of(name)))
    return isinstance(p, ScaledTensor) and isinstance(p.recipe, Delayed)


def check_fit(where: Any, name: str, target: Tensor, source: Any) -> None:
    """Raises CheckpointError unless `source` can be put into `target`."""

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
    if isinstance(held, CodedTensor):
        here = _coded(held)
        there = _coded(given) if isinstance(given, CodedTensor) else _told(given)
        if there != here:
            refuse(
                there, here, ", and codes are made with their scales: nothing is put into others"
            )
    elif given.layout != held.layout:
        refuse(given.layout, held.layout)


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
        for name in held.INNER:
            getattr(held, name).copy_(getattr(given, name))
    elif isinstance(held, ScaledTensor):
        _put_parts(held, _as_held(held, given))
    elif isinstance(given, ScaledTensor):
        held.copy_(given.dequantize())
    else:
        held.copy_(given)


def _put_parts(held: ScaledTensor, given: ScaledTensor) -> None:
    # Not held.copy_(): a shard may be a part of a buffer, and a part keeps the scale of the whole.
    for name in held.INNER:
        getattr(held, name).copy_(getattr(given, name))
    held.nonnegative = given.nonnegative
    # What FSDP2 knew of all shards together it asks for again, as after any overwriting. It makes
    # new objects of uneven shards before the first step, so that no rank may know it beforehand.
    held.agreed, held.whole_amax = False, None


def _as_held(held: Tensor, given: Tensor) -> Any:
    """`given`, whole, in the format of `held`: what `copy_` of a whole tensor makes of it."""
    if not isinstance(held, ScaledTensor) or isinstance(held, CodedTensor):
        return given
    same = isinstance(given, ScaledTensor) and given.format == held.format
    if same and not isinstance(given, CodedTensor):
        return given
    blank = held.make(
        torch.empty(given.shape, dtype=held.format.storage_dtype, device=held.device),
        torch.ones_like(held.scale),
        torch.ones_like(held.rms),
        held.format,
        held.dtype,
        held.recipe,
    )
    return blank.copy_(given.to(held.device))


def _needs_whole(held: Tensor, given: Tensor) -> bool:
    """Whether the scale that `held` gets depends on all of the elements."""
    if not isinstance(held, ScaledTensor):
        return False
    if not isinstance(given, ScaledTensor):
        return True
    return is_stored(held) and held.format != given.format


def _whole(x: Tensor) -> Tensor:
    """All of a tensor of which every rank has a shard. Every rank calls this."""
    if not isinstance(x, DTensor):
        return x
    part = x.to_local()
    if not isinstance(part, ScaledTensor):
        return x.full_tensor()
    qdata = of_local(as_bytes(part.qdata), x).full_tensor().view(part.qdata.dtype)
    return part.like(qdata, part.scale, part.rms)


def _shard(whole: Tensor, target: DTensor) -> DTensor:
    """The shards of a tensor that every rank has all of, laid out as `target`."""

    def cut(x: Tensor) -> Tensor:
        mesh, placements = target.device_mesh, target.placements
        return distribute_tensor(x, mesh, placements, src_data_rank=None).to_local()

    if not isinstance(whole, ScaledTensor):
        return of_local(cut(whole), target)
    if isinstance(whole, CodedTensor):
        whole = whole.widened()
    return of_local(whole.like(cut(whole.qdata), whole.scale, whole.rms), target)


def of_local(x: Tensor, like: DTensor) -> DTensor:
    """The DTensor of which this rank's shard is `x`, laid out as `like`."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local(x: Any) -> Any:
    """This rank's shard of a DTensor, the object itself; anything else as it is."""
    return _torch.local_part(x) if isinstance(x, DTensor) else x


# --- messages --------------------------------------------------------------------------------


def layout(x: DTensor) -> str:
    """How `x` is cut, into how many."""
    return f"{x.placements} on {tuple(x.device_mesh.shape)}"


def _told_layout(x: Any) -> str:
    if not isinstance(x, DTensor):
        return "whole"
    return f"cut by {x.placements} on {x.device_mesh.size()} ranks, {tuple(local(x).shape)} on one"


def _coded(x: CodedTensor) -> str:
    return f"a {type(x).__name__} of {x.format.name}, {x.granularity}"


def _told(x: Any) -> str:
    return f"a {type(x).__name__}"


def _some(names: Iterable[str]) -> str:
    first, *rest = list(names)
    shown = ", ".join([first, *rest[:4]])
    return shown if len(rest) <= 4 else f"{shown} and {len(rest) - 4} more"
