"""Shards of codes under the scales of their blocks: the states of an optimizer in 8 bits.

The blocks of a shard are its own, so that no other cut has the same. Each rank therefore writes
its shard as a tensor of its own, a piece. Where the same ranks load, they get their pieces back,
bit for bit; elsewhere the values that a rank needs are read off the pieces that have them, and the
optimizer puts them into its format anew.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scaledtensor.checkpoint.codec import (
    blank_of,
    dtype_of,
    facts_of,
    inner_of,
    plain_facts,
    put_together,
    told_parts,
)
from scaledtensor.checkpoint.fit import local, of_local
from scaledtensor.tensors.coded import CodedTensor

__all__ = ["Assembly", "described", "is_piece", "parts"]

Facts = dict[str, Any]


def is_piece(x: Tensor) -> bool:
    """Whether `x` is a shard of codes."""
    return isinstance(x, DTensor) and isinstance(local(x), CodedTensor)


def parts(name: str, x: DTensor, rank: int) -> dict[str, Tensor]:
    """The plain tensors of this rank's piece, by names that are this rank's."""
    return {f"{_named(name, rank)}.{part}": t for part, t in inner_of(local(x)).items()}


def described(x: DTensor) -> tuple[Facts, Facts]:
    """What JSON says of the whole, and of this rank's piece of it."""
    held = local(x)
    own = facts_of(held) | {"parts": told_parts(held), "offset": _region(x)[0]}
    return plain_facts(x), own


class Assembly:
    """A tensor in the making, of codes that were saved whole or in pieces.

    Args:
        name: what it is called in the checkpoint.
        facts: what was told of it, with its "pieces" by rank, if it was saved in such.
        like: how it is to be cut; None for the whole.
    """

    def __init__(self, name: str, facts: Facts, like: Tensor | None, rank: int) -> None:
        cut = isinstance(like, DTensor) and tuple(like.shape) == tuple(facts["shape"])
        self.like: DTensor | None = like if isinstance(like, DTensor) and cut else None
        self.device = torch.device("cpu") if like is None else like.device
        self.name, self.facts = name, facts
        offset, shape = [0] * len(facts["shape"]), facts["shape"]
        if self.like is not None:
            offset, shape = _region(self.like)
        self.offset, self.shape = offset, shape
        pieces: dict[str, Facts] = facts.get("pieces", {})
        own = pieces.get(str(rank)) if self.like is not None else None
        self.kept = own is not None and (own["offset"], own["shape"]) == (offset, shape)
        if self.kept and own is not None:
            self.pieces = {_named(name, rank): own}
        elif pieces:
            named = {_named(name, int(r)): piece for r, piece in pieces.items()}
            self.pieces = {n: piece for n, piece in named.items() if self._overlaps(piece)}
        else:
            self.pieces = {name: facts | {"offset": [0] * len(facts["shape"])}}

    def blanks(self) -> dict[str, Tensor]:
        """Plain tensors to read the pieces into."""
        found = {}
        for name, piece in self.pieces.items():
            for part, told in piece["parts"].items():
                found[f"{name}.{part}"] = blank_of(told, self.device)
        return found

    def build(self, read: Mapping[str, Tensor]) -> Tensor:
        """The tensor, or this rank's shard of it: codes as they were, or plain values."""
        made = {name: self._piece(name, piece, read) for name, piece in self.pieces.items()}
        if self.like is None and "pieces" not in self.facts:
            return made[self.name]
        if self.kept:
            return of_local(next(iter(made.values())), _checked(self.like))
        values = torch.zeros(self.shape, dtype=dtype_of(self.facts["dtype"]), device=self.device)
        for name, piece in self.pieces.items():
            there, here = self._overlap(piece)
            values[here] = made[name].dequantize()[there]
        return values if self.like is None else of_local(values, self.like)

    def _piece(self, name: str, piece: Facts, read: Mapping[str, Tensor]) -> Tensor:
        inner = {part: read[f"{name}.{part}"] for part in piece["parts"]}
        return put_together(name, inner, piece)

    def _overlaps(self, piece: Facts) -> bool:
        return all(cut.start < cut.stop for cut in self._overlap(piece)[0])

    def _overlap(self, piece: Facts) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a piece has what is needed here, and where here that goes."""
        there, here = [], []
        for own, size, other, length in zip(
            self.offset, self.shape, piece["offset"], piece["shape"], strict=True
        ):
            first, last = max(own, other), min(own + size, other + length)
            there.append(slice(first - other, max(last, first) - other))
            here.append(slice(first - own, max(last, first) - own))
        return tuple(there), tuple(here)


def _named(name: str, rank: int) -> str:
    return f"{name}.rank{rank}"


def _region(x: DTensor) -> tuple[list[int], list[int]]:
    """Where in the whole this rank's shard begins, and its shape."""
    (chunk,) = x.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return list(chunk.offsets), list(chunk.sizes)


def _checked(like: DTensor | None) -> DTensor:
    if like is None:
        raise TypeError("a tensor that is not cut has no layout")
    return like
