"""The scales of the shards of one tensor, which ranks may choose each for its own.

A checkpoint that any number of ranks loads has one scale a tensor. Parameters have it anyway. The
states of optimizers often do not: each rank wrote its shard under a scale that fits that. They are
brought under the largest of their scales while they are written, which is exact for powers of two
and formats of 16 bits and more, and what each rank had is noted: where the same ranks load, each
gets its own back, bit for bit.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from scaledtensor.checkpoint.fit import local
from scaledtensor.coded import CodedTensor
from scaledtensor.errors import CheckpointError
from scaledtensor.tensor import ScaledTensor

__all__ = ["Level", "Planner", "as_it_was", "common", "levels"]


class Level(NamedTuple):
    """What the shards of a tensor may differ in, and how many elements say so."""

    scale: float
    rms: float
    nonnegative: bool
    numel: int
    agreed: bool
    """Whether the ranks have seen to it that the scales are the same."""


def levels(state: Mapping[str, Tensor]) -> dict[str, Level]:
    """Of each sharded ScaledTensor, what this rank's shard has."""
    found = {}
    for name, x in state.items():
        held = local(x)
        scaled = isinstance(held, ScaledTensor) and not isinstance(held, CodedTensor)
        if isinstance(x, DTensor) and scaled:
            scale, rms = float(held.scale), float(held.rms)
            found[name] = Level(scale, rms, held.nonnegative, held.numel(), held.agreed)
    return found


def common(shards: list[Level]) -> Level:
    """The largest scale of the shards that are not known to be zero, and the RMS of them all."""
    told = [level for level in shards if level.numel and level.rms != 0] or shards
    numel = sum(level.numel for level in shards)
    energy = math.fsum(level.numel * level.rms**2 for level in told)
    same = all(level.rms == told[0].rms for level in shards)
    rms = told[0].rms if same else math.sqrt(energy / max(numel, 1))
    scale = max(level.scale for level in told)
    nonnegative, agreed = (all(x[i] for x in told) for i in (2, 4))
    return Level(scale, rms, nonnegative, numel, agreed)


def as_it_was(x: ScaledTensor, level: list[Any]) -> None:
    """Give a shard that was brought under the common scale its own back, in place."""
    scale, rms, nonnegative, _, _ = Level(*level)
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
