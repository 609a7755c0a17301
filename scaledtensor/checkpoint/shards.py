"""Tensors, whole or sharded, as the plain tensors that `torch.distributed.checkpoint` moves."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scaledtensor.checkpoint.fit import layout, local, of_local
from scaledtensor.checkpoint.levels import as_it_was
from scaledtensor.checkpoint.parts import (
    blank_of,
    facts_of,
    inner_names,
    inner_of,
    plain_facts,
    put_together,
    told_parts,
)
from scaledtensor.checkpoint.ranks import Ranks
from scaledtensor.coded import CodedTensor
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.tensor import ScaledTensor

__all__ = ["Reading", "apart", "described", "imagined", "parts"]


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
        # Saved whole, a parameter has one scale: its own. States are not held to that.
        made.agreed = facts.get("agreed", self.name.startswith("model.") and bool(made.rms > 0))
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
