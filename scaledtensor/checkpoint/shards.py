"""Tensors, whole or sharded, as the plain tensors that `torch.distributed.checkpoint` moves."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint.codec import (
    blank_of,
    facts_of,
    inner_names,
    inner_of,
    plain_facts,
    put_together,
    told_parts,
)
from scaledtensor.checkpoint.fit import as_it_was, clean, layout, local, of_local, put, unwrapped
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "NamedState",
    "Ranks",
    "Reading",
    "apart",
    "described",
    "imagined",
    "named_parameters",
    "named_state",
    "parts",
    "restore",
]


# What the ranks of a job tell each other while they save and load.
T = TypeVar("T")


class Ranks:
    """The processes of a group; one process where there is no group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.several else 0
        self.size = dist.get_world_size(group) if self.several else 1

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, in their order, on every rank.

        Raises:
            CheckpointError: one is gone.
        """
        if not self.several:
            return [mine]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, mine, self.group)
        except RuntimeError as error:
            raise CheckpointError(f"another rank is gone, or does not answer: {error}") from error
        return found

    def agree(self, action: Callable[[], T]) -> T:
        """What `action` returns here; where it fails on one rank, an error on every rank, so that
        none waits for another."""
        result: Any = None
        failed: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failed = error
        said = self.gather(None if failed is None else f"{failed}")
        if failed is not None:
            raise failed
        for rank, text in enumerate(said):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}")
        return result  # type: ignore[no-any-return]


def apart(state: Mapping[str, Any], *, loading: bool = False) -> dict[str, Any]:
    """A state dict with `name.qdata`, `name.scale`, ... in place of each ScaledTensor `name`.

    They are the tensors' own memory: what `torch.distributed.checkpoint.load` reads into them is
    read into the model, bit for bit, on any number of ranks and from any storage. Both sides must
    have the same formats; `save` and `load` of this module ask for less, and check more.

    Where there are shards, every rank calls this.

    Args:
        state: tensors and DTensors by name, in dicts of dicts; anything else passes.
        loading: it is to be loaded into, so that the scales it has now are of no matter.

    Raises:
        CheckpointError: in a state to save, shards of a tensor have different scales, as those of
            an optimizer's states do. Of expected RMS that differ, one is saved.
        UnsupportedError: a shard of codes under scales of blocks.
    """
    scales: dict[str, float] = {}
    found = _apart(state, "", scales)
    if scales and not loading:
        for rank, others in enumerate(Ranks().gather(scales)):
            for name in scales.keys() & others.keys():
                if scales[name] != others[name]:
                    raise CheckpointError(
                        f"the shards of {name} have different scales, {others[name]:g} on rank "
                        f"{rank} and {scales[name]:g} on this one, and only one would be saved: "
                        "scaledtensor.checkpoint.save keeps all"
                    )
    return found


def _apart(state: Mapping[str, Any], path: str, scales: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, x in state.items():
        if isinstance(x, DTensor) and isinstance(local(x), ScaledTensor):
            found |= parts(name, x)
            scales[f"{path}{name}"] = float(found[f"{name}.scale"])
        elif isinstance(x, Mapping):
            found[name] = _apart(x, f"{path}{name}.", scales)
        elif isinstance(x, Tensor):
            found |= parts(name, x)
        else:
            found[name] = x
    return found


def parts(name: str, x: Tensor) -> dict[str, Tensor]:
    """The plain tensors and DTensors of `x`, by name: its own memory."""
    held = local(x)
    if not isinstance(held, ScaledTensor):
        return {name: x.detach()}
    inner = inner_of(held)
    if isinstance(x, DTensor):
        _check_divisible(name, held)
        inner["qdata"] = of_local(inner["qdata"], x)
    return {f"{name}.{part}": t for part, t in inner.items()}


def described(x: Tensor) -> dict[str, Any]:
    """What JSON says of the whole of `x`: the facts of a ScaledTensor, and of each plain tensor."""
    held = local(x)
    if not isinstance(held, ScaledTensor):
        return plain_facts(x)
    told = told_parts(held)
    if not isinstance(x, DTensor):
        return facts_of(held) | {"parts": told}
    told["qdata"]["shape"] = list(x.shape)
    facts = facts_of(held) | {"shape": list(x.shape), "parts": told, "cut": layout(x)}
    facts.pop("nonnegative", None)  # one of the levels, which ranks may have of their own
    return facts


def imagined(name: str, facts: dict[str, Any]) -> Tensor:
    """The tensor that was described, on the meta device: shape, dtype, format and no numbers."""
    meta = torch.device("meta")
    if "kind" not in facts:
        return blank_of(facts, meta)
    inner = {part: blank_of(told, meta) for part, told in facts["parts"].items()}
    return put_together(name, inner, facts)


class Reading:
    """A described tensor that is to be read, as `like` is cut, or whole."""

    def __init__(self, name: str, facts: dict[str, Any], like: Tensor | None, rank: int) -> None:
        self.name, self.facts, self.rank = name, facts, rank
        self.device = torch.device("cpu") if like is None else like.device
        cut = isinstance(like, DTensor) and tuple(like.shape) == tuple(facts["shape"])
        self.like: DTensor | None = like if isinstance(like, DTensor) and cut else None

    def blanks(self) -> dict[str, Tensor]:
        """Plain tensors to read it into."""
        if "kind" not in self.facts:
            return {self.name: self._blank(self.facts)}
        return {
            f"{self.name}.{part}": self._blank(told) for part, told in self.facts["parts"].items()
        }

    def build(self, read: Mapping[str, Tensor]) -> Tensor:
        """It, or this rank's shard of it in a DTensor, of what was read into the blanks."""
        if "kind" not in self.facts:
            return read[self.name]
        inner = {part: read[f"{self.name}.{part}"] for part in inner_names(self.facts)}
        qdata = inner["qdata"]
        if not isinstance(qdata, DTensor):
            return put_together(self.name, inner, self.facts)
        own = qdata.to_local()
        facts = self.facts | {"shape": list(own.shape)}
        made = put_together(self.name, inner | {"qdata": own}, facts)
        own_level = facts.get("levels", {}).get(str(self.rank))
        if own_level is not None and facts["cut"] == layout(qdata):
            as_it_was(made, own_level)
        return of_local(made, qdata)

    def _blank(self, told: dict[str, Any]) -> Tensor:
        if self.like is None or told["shape"] != self.facts["shape"]:
            return blank_of(told, self.device)
        shape = list(local(self.like).shape)
        return of_local(blank_of(told | {"shape": shape}, self.device), self.like)


def _check_divisible(name: str, held: ScaledTensor) -> None:
    if isinstance(held, CodedTensor):
        raise UnsupportedError(
            f"{name} is a shard of a {type(held).__name__}, whose scales are those of blocks of "
            "this shard and would not fit another cut: keep it whole, or widen it first"
        )


# The state of an optimizer by the names of its parameters, which any number of ranks agree on.
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
