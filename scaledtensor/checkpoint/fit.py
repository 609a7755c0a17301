"""Putting tensors from a checkpoint into a model: scaled or plain, sharded or not, on either side.

All is compared first and nothing changed before; then values go in, bit for bit where both sides
hold them in one format.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from scaledtensor import _torch
from scaledtensor.errors import CheckpointError
from scaledtensor.models.delayed import parameter_of
from scaledtensor.models.interpose import UNIT_SCALED, note_missing
from scaledtensor.recipes import Delayed
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.memo import after_overwrite
from scaledtensor.tensors.tensor import ScaledTensor, is_stored
from scaledtensor.tensors.wrapper import as_bytes

__all__ = [
    "Level",
    "Planner",
    "as_it_was",
    "check_fit",
    "clean",
    "common",
    "layout",
    "levels",
    "load_into",
    "local",
    "matched",
    "of_local",
    "put",
    "tensors_of",
    "unwrapped",
]


# The scales of the shards of one tensor, which ranks may choose each for its own.  A checkpoint
# that any number of ranks loads has one scale a tensor. Parameters have it anyway. The states of
# optimizers often do not: each rank wrote its shard under a scale that fits that. They are
# brought under the largest of their scales while they are written, which is exact for powers of
# two and formats of 16 bits and more, and what each rank had is noted: where the same ranks load,
# each gets its own back, bit for bit.
class Level(NamedTuple):
    """What the shards of a tensor may differ in, and how many elements say so."""

    scale: float
    rms: float
    nonnegative: bool
    numel: int


def levels(state: Mapping[str, Tensor]) -> dict[str, Level]:
    """Of each sharded ScaledTensor, what this rank's shard has."""
    found = {}
    for name, x in state.items():
        held = local(x)
        scaled = isinstance(held, ScaledTensor) and not isinstance(held, CodedTensor)
        if isinstance(x, DTensor) and scaled:
            scale, rms = float(held.scale), float(held.rms)
            found[name] = Level(scale, rms, held.nonnegative, held.numel())
    return found


def common(shards: list[Level]) -> Level:
    """The largest scale of the shards that are not known to be zero, and the RMS of them all."""
    told = [level for level in shards if level.numel and level.rms != 0] or shards
    numel = sum(level.numel for level in shards)
    energy = math.fsum(level.numel * level.rms**2 for level in told)
    same = all(level.rms == told[0].rms for level in shards)
    rms = told[0].rms if same else math.sqrt(energy / max(numel, 1))
    scale = max(level.scale for level in told)
    return Level(scale, rms, all(level.nonnegative for level in told), numel)


def as_it_was(x: ScaledTensor, level: list[Any]) -> None:
    """Give a shard that was brought under the common scale its own back, in place."""
    scale, rms, nonnegative, _ = Level(*level)
    x.qdata.mul_(float(x.scale) / scale)
    x.scale.fill_(scale)
    x.rms.fill_(rms)
    x.nonnegative = nonnegative


class Planner(DefaultSavePlanner):
    """Multiplies tensors on their way to the file, one at a time.

    Args:
        factors: powers of two by the name of a tensor.
    """

    def __init__(self, factors: dict[str, float]) -> None:
        super().__init__()
        self.factors = factors

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        name = write_item.index.fqn
        factor = self.factors.get(name, 1.0)
        return found if factor == 1 else _moved(name.removesuffix(".qdata"), found, factor)


def _moved(name: str, q: Tensor, factor: float) -> Tensor:
    moved = q * factor if q.dtype.itemsize > 1 else None
    if moved is None or not torch.equal((moved / factor).nan_to_num(), q.nan_to_num()):
        raise CheckpointError(
            f"the shards of {name} have different scales, and its elements ({q.dtype}) cannot be "
            "brought under one exactly. One tensor has one scale: give all shards that of the "
            "whole before saving"
        )
    return moved


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
    after_overwrite(held)


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
