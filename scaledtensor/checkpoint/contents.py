"""What a rank has to save, and what all of them have together."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint import pieces, states
from scaledtensor.checkpoint.fit import tensors_of
from scaledtensor.checkpoint.levels import Level, Planner, common, levels
from scaledtensor.checkpoint.shards import described, parts
from scaledtensor.errors import CheckpointError

__all__ = ["Contents", "levelled", "merged"]


class Contents:
    """What a rank has to save: plain tensors by name, and what is to be told of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, rank: int) -> None:
        targets = tensors_of(model)
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(x), name) for name, x in targets.items()}
        whole = {f"model.{name}": targets[name] for name in first.values()}
        kept: dict[str, list[str]] = {}
        state = states.named_state(model, optimizer) if optimizer is not None else None
        if state is not None:
            for name, held in state.tensors.items():
                kept[name] = list(held)
                whole |= {f"optimizer.{name}.{key}": x for key, x in held.items()}
        self.tensors: dict[str, Tensor] = {}
        facts: dict[str, dict[str, Any]] = {}
        own: dict[str, dict[str, Any]] = {}
        for name, x in whole.items():
            if name[0] == "o" and isinstance(x, DTensor) and pieces.is_piece(x):
                facts[name], own[name] = pieces.described(x)
                found = pieces.parts(name, x, rank)
            else:
                facts[name], found = described(x), parts(name, x)
            for part, t in found.items():
                if part in self.tensors:
                    raise CheckpointError(f"two tensors would be called {part} in the checkpoint")
                self.tensors[part] = t
        self.told: dict[str, Any] = {
            "model": {n.removeprefix("model."): f for n, f in facts.items() if n[0] == "m"},
            "tied": {name: same for name, same in tied.items() if name != same},
            "optimizer": None
            if state is None
            else {
                name: {key: facts[f"optimizer.{name}.{key}"] for key in keys}
                for name, keys in kept.items()
            },
            "groups": None if state is None else state.groups,
            "values": None if state is None else state.values,
            "levels": {name: {rank: level} for name, level in levels(whole).items()},
            "pieces": {name: {rank: told} for name, told in own.items()},
        }

    def under(self, scales: dict[str, Level]) -> Planner:
        """Let the tensors that are named be written under those scales; what writes them so."""
        factors = {}
        for name, level in scales.items():
            if f"{name}.scale" in self.tensors:
                own = self.tensors[f"{name}.scale"]
                factors[f"{name}.qdata"] = float(own) / level.scale
                self.tensors[f"{name}.scale"] = torch.full_like(own, level.scale)
                self.tensors[f"{name}.rms"] = torch.full_like(own, level.rms)
        return Planner(factors)


def merged(all_told: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks told together; where two tell of one thing, the same."""
    first = all_told[0]
    whole: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in first.items()}
    for rank, told in enumerate(all_told[1:], 1):
        if (told["optimizer"] is None) != (first["optimizer"] is None):
            raise CheckpointError(f"rank 0 or rank {rank} saves an optimizer, and the other none")
        for kind in ("levels", "pieces"):
            for name, own in told[kind].items():
                whole[kind][name] = whole[kind].get(name, {}) | own
        for kind in ("model", "tied", "optimizer", "values"):
            for name, value in (told[kind] or {}).items():
                seen = whole[kind].setdefault(name, value)
                if seen != value:
                    raise CheckpointError(
                        f"{name} is {value} on rank {rank} and {seen} on a rank before it"
                    )
        if told["groups"] is not None:
            whole["groups"] = _merged_groups(rank, whole["groups"], told["groups"])
    return whole


def _facts(told: dict[str, Any], name: str) -> dict[str, Any]:
    """What is told of a tensor, to add to."""
    kind, _, rest = name.partition(".")
    owner, _, key = rest.rpartition(".")
    found: dict[str, Any] = (
        told["model"][rest] if kind == "model" else told["optimizer"][owner][key]
    )
    return found


def levelled(told: dict[str, Any]) -> dict[str, Level]:
    """The one scale of each tensor whose shards have several, noted in what is told of it."""
    found = {}
    for name, shards in told["levels"].items():
        one = common(list(shards.values()))
        facts = _facts(told, name)
        facts |= {"nonnegative": one.nonnegative, "agreed": one.agreed}
        if any(shard[:3] != one[:3] for shard in shards.values()):
            facts |= {"levels": {str(rank): list(shard) for rank, shard in shards.items()}}
            found[name] = one
    for name, shards in told["pieces"].items():
        _facts(told, name)["pieces"] = {str(rank): piece for rank, piece in shards.items()}
    return found


def _merged_groups(rank: int, seen: list[Any], told: list[Any]) -> list[Any]:
    if len(seen) != len(told):
        raise CheckpointError(f"rank {rank} has {len(told)} parameter groups, rank 0 {len(seen)}")
    made = []
    for i, (one, other) in enumerate(zip(seen, told, strict=True)):
        if one["options"] != other["options"]:
            raise CheckpointError(
                f"parameter group {i} has {other['options']} on rank {rank} and {one['options']} "
                "on a rank before it"
            )
        names = list(dict.fromkeys((*one["names"], *other["names"])))
        made.append({"options": one["options"], "names": names})
    return made
