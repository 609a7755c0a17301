"""Tensors, whole or sharded, as the plain tensors that `torch.distributed.checkpoint` moves.

1. `apart` does this for a state dict. It is public.
2. `parts`, `described` and `TensorToRead` do this for one tensor of a folder of checkpoints.
3. Pieces: shards of codes under scales of blocks, which have no other layout than their own.
4. Levels: the shards of one tensor may have different scales, and a checkpoint has one.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from scaledtensor import _torch
from scaledtensor.errors import CheckpointError, UnsupportedError
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.tensors.codec import (
    Facts,
    dtype_from_name,
    empty_like_facts,
    facts_of,
    facts_of_plain,
    part_names,
    parts_of,
    prefixed,
    rebuilt,
)
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.tensors.wrapper import Wrapper, is_wrapper

__all__ = [
    "Level",
    "PiecesToRead",
    "Planner",
    "Ranks",
    "TensorToRead",
    "apart",
    "common",
    "described",
    "imagined",
    "is_piece",
    "layout",
    "levels",
    "local",
    "of_local",
    "parts",
    "piece_described",
    "piece_parts",
]

T = TypeVar("T")


# --- ranks and their shards ------------------------------------------------------------------


class Ranks:
    """The processes of a group; one process if torch.distributed is not initialized."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.several else 0
        self.size = dist.get_world_size(group) if self.several else 1

    def gather(self, mine: T) -> list[T]:
        """Return the objects that all ranks gave, in the order of the ranks, on every rank.

        Raises:
            CheckpointError: a rank is gone.
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
        """Call `action` and return its result on this rank.

        An error on one rank becomes an error on every rank, so that no rank waits for another.
        """
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


def local(x: Any) -> Any:
    """Return this rank's shard of a DTensor, without a copy; return any other `x` as it is."""
    return _torch.local_part(x) if isinstance(x, DTensor) else x


def of_local(x: Tensor, like: DTensor) -> DTensor:
    """Return the DTensor with the layout of `like` that has `x` as this rank's shard."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def layout(x: DTensor) -> str:
    """Return the placements of `x` and the shape of its mesh, as text."""
    return f"{x.placements} on {tuple(x.device_mesh.shape)}"


def _region(x: DTensor) -> tuple[list[int], list[int]]:
    """Return the offset of this rank's shard in the whole tensor, and the shape of the shard."""
    (chunk,) = x.__create_chunk_list__()
    return list(chunk.offsets), list(chunk.sizes)


# --- a state dict ----------------------------------------------------------------------------


def apart(state: Mapping[str, Any], *, loading: bool = False) -> dict[str, Any]:
    """Return a state dict with `name.qdata`, `name.scale`, ... in place of each ScaledTensor.

    The plain tensors share memory with the ScaledTensors. So `torch.distributed.checkpoint.load`
    reads straight into the model, bit for bit, on any number of ranks and from any storage. Both
    sides must have the same formats. `save` and `load` of this module need less, and check more.

    If the state has shards, every rank calls this.

    Args:
        state: tensors and DTensors by name, in dicts of dicts. Other values pass unchanged.
        loading: the state is a target of loading, so its present scales do not matter.

    Raises:
        CheckpointError: shards of a tensor to save have different scales. The states of an
            optimizer can have these. If only the expected RMS differ, one of them is saved.
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
        if isinstance(x, Mapping):
            found[name] = _apart(x, f"{path}{name}.", scales)
        elif isinstance(x, Tensor):
            found |= parts(name, x)
            if isinstance(x, DTensor) and isinstance(local(x), ScaledTensor):
                scales[f"{path}{name}"] = float(found[f"{name}.scale"])
        else:
            found[name] = x
    return found


# --- a tensor of a folder --------------------------------------------------------------------


def parts(name: str, x: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors and DTensors of `x` by name. They are not copied."""
    held = local(x)
    if not is_wrapper(held):
        return {name: x.detach()}
    found = parts_of(held)
    if isinstance(x, DTensor):
        if isinstance(held, CodedTensor):
            raise UnsupportedError(
                f"{name} is a shard of a {type(held).__name__}, whose scales are those of blocks "
                "of this shard and would not fit another cut: keep it whole, or widen it first"
            )
        found |= {part: _spread(found[part], x) for part in held.cut}
    return prefixed(name, found)


def _spread(part: Tensor, x: DTensor) -> DTensor:
    """Return the DTensor whose shard on this rank is `part`, an inner tensor of the shard of `x`.
    The rows of both are cut alike."""
    held = local(x)
    if part.shape == held.shape:
        return of_local(part, x)
    # All ranks have as many rows, or the weight could not be gathered (`quantization/shards.py`).
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False)


def described(x: Tensor) -> Facts:
    """Return the facts of the whole of `x`, and of each of its parts, as JSON has them."""
    held = local(x)
    if not is_wrapper(held):
        return facts_of_plain(x)
    facts = _facts_with_parts(held)
    if isinstance(x, DTensor):
        for part in held.cut:
            facts["parts"][part]["shape"] = list(_spread(getattr(held, part), x).shape)
        facts |= {"shape": list(x.shape), "cut": layout(x)}
        facts.pop("nonnegative", None)  # this belongs to the level, which may differ between ranks
    return facts


def _facts_with_parts(x: Wrapper) -> Facts:
    return facts_of(x) | {"parts": {part: facts_of_plain(t) for part, t in parts_of(x).items()}}


def imagined(name: str, facts: Facts) -> Tensor:
    """Return the described tensor on the meta device: it has shape, dtype and format, no values."""
    meta = torch.device("meta")
    if "kind" not in facts:
        return empty_like_facts(facts, meta)
    made = {part: empty_like_facts(told, meta) for part, told in facts["parts"].items()}
    return rebuilt(name, made, facts)


class TensorToRead:
    """A described tensor that is to be read: whole, or in the layout of `like`.

    Args:
        name: its name in the checkpoint.
        facts: the result of `described`.
        like: the tensor to load into. The result takes its device and, if the shapes agree, its
            layout; None is for a whole tensor on the CPU.
        rank: this rank.
    """

    def __init__(self, name: str, facts: Facts, like: Tensor | None, rank: int) -> None:
        self.name, self.facts, self.rank = name, facts, rank
        self.device = torch.device("cpu") if like is None else like.device
        cut = isinstance(like, DTensor) and _cuts(like, facts)
        self.like: DTensor | None = like if isinstance(like, DTensor) and cut else None

    def blanks(self) -> dict[str, Tensor]:
        """Return empty plain tensors to read into."""
        if "kind" not in self.facts:
            return {self.name: self._blank(self.facts)}
        told = self.facts["parts"].items()
        return prefixed(self.name, {part: self._blank(facts, part) for part, facts in told})

    def build(self, read: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, or a DTensor with this rank's shard, from the filled blanks."""
        if "kind" not in self.facts:
            return read[self.name]
        found = {part: read[f"{self.name}.{part}"] for part in part_names(self.facts)}
        qdata = found["qdata"]
        if not isinstance(qdata, DTensor):
            return rebuilt(self.name, found, self.facts)
        facts = self.facts | {"shape": list(local(self.like).shape)}
        made = rebuilt(self.name, {part: local(x) for part, x in found.items()}, facts)
        own_level = facts.get("levels", {}).get(str(self.rank))
        if own_level is not None and facts["cut"] == layout(qdata):
            _restore_level(cast(ScaledTensor, made), Level(*own_level))
        return of_local(made, qdata)

    def _blank(self, told: Facts, part: str = "") -> Tensor:
        if self.like is None:
            return empty_like_facts(told, self.device)
        held = local(self.like)
        if _is_quantized(self.facts) and part in held.cut:
            held = getattr(held, part)
        elif told["shape"] != self.facts["shape"]:
            return empty_like_facts(told, self.device)
        own = empty_like_facts(told | {"shape": list(held.shape)}, self.device)
        return _spread(own, self.like)


def _is_quantized(facts: Facts) -> bool:
    return facts.get("kind") == "QuantizedTensor"


def _cuts(like: DTensor, facts: Facts) -> bool:
    """Return whether a described tensor can be read in the layout of `like`, shard by shard."""
    if tuple(like.shape) != tuple(facts["shape"]):
        return False
    held = local(like)
    if not _is_quantized(facts):
        return True
    return isinstance(held, QuantizedTensor) and described(like)["parts"] == facts["parts"]


# --- pieces ----------------------------------------------------------------------------------
#
# An optimizer keeps states in 8 bits, as codes under scales of blocks. The blocks of a shard belong
# to that shard, and another layout has other blocks. Each rank therefore writes its shard as a
# tensor of its own, a piece. If the same ranks load, they get their pieces back, bit for bit.
# Otherwise a rank decodes the pieces that overlap its shard, and the optimizer encodes the values.


def is_piece(x: Tensor) -> bool:
    """Return whether `x` is a shard of codes."""
    return isinstance(x, DTensor) and isinstance(local(x), CodedTensor)


def piece_parts(name: str, x: DTensor, rank: int) -> dict[str, Tensor]:
    """Return the plain tensors of this rank's piece, under names that contain the rank."""
    return prefixed(_piece_name(name, rank), parts_of(local(x)))


def piece_described(x: DTensor) -> Facts:
    """Return the facts of this rank's piece, with its offset in the whole tensor."""
    return _facts_with_parts(local(x)) | {"offset": _region(x)[0]}


def _piece_name(name: str, rank: int) -> str:
    return f"{name}.rank{rank}"


class PiecesToRead(TensorToRead):
    """A tensor of codes that is to be read, and was saved whole or in pieces.

    The arguments are the arguments of `TensorToRead`. If the tensor was saved in pieces, `facts`
    has the facts of each by its rank, under "pieces".
    """

    def __init__(self, name: str, facts: Facts, like: Tensor | None, rank: int) -> None:
        super().__init__(name, facts, like, rank)
        self.offset, self.shape = [0] * len(facts["shape"]), facts["shape"]
        if self.like is not None:
            self.offset, self.shape = _region(self.like)
        pieces: dict[str, Facts] = facts.get("pieces", {})
        own = pieces.get(str(rank)) if self.like is not None else None
        self.kept = own is not None and (own["offset"], own["shape"]) == (self.offset, self.shape)
        if self.kept and own is not None:
            self.pieces = {_piece_name(name, rank): own}
        elif pieces:
            named = {_piece_name(name, int(r)): piece for r, piece in pieces.items()}
            self.pieces = {n: piece for n, piece in named.items() if self._overlaps(piece)}
        else:
            self.pieces = {name: facts | {"offset": [0] * len(facts["shape"])}}

    def blanks(self) -> dict[str, Tensor]:
        """Return empty plain tensors to read the pieces into."""
        found: dict[str, Tensor] = {}
        for name, piece in self.pieces.items():
            told = piece["parts"].items()
            found |= prefixed(name, {part: empty_like_facts(t, self.device) for part, t in told})
        return found

    def build(self, read: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, or this rank's shard of it: the codes as saved, or plain values."""
        made = {
            name: rebuilt(name, {part: read[f"{name}.{part}"] for part in piece["parts"]}, piece)
            for name, piece in self.pieces.items()
        }
        if self.like is None and "pieces" not in self.facts:
            return made[self.name]
        if self.like is not None and self.kept:
            return of_local(next(iter(made.values())), self.like)
        dtype = dtype_from_name(self.facts["dtype"])
        values = torch.zeros(self.shape, dtype=dtype, device=self.device)
        for name, piece in self.pieces.items():
            there, here = self._overlap(piece)
            values[here] = made[name].dequantize()[there]
        return values if self.like is None else of_local(values, self.like)

    def _overlaps(self, piece: Facts) -> bool:
        return all(cut.start < cut.stop for cut in self._overlap(piece)[0])

    def _overlap(self, piece: Facts) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the elements that a piece and this rank's shard share, as slices of each."""
        there, here = [], []
        for own, size, other, length in zip(
            self.offset, self.shape, piece["offset"], piece["shape"], strict=True
        ):
            first, last = max(own, other), min(own + size, other + length)
            there.append(slice(first - other, max(last, first) - other))
            here.append(slice(first - own, max(last, first) - own))
        return tuple(there), tuple(here)


# --- levels ----------------------------------------------------------------------------------
#
# A checkpoint that any number of ranks loads has one scale a tensor. The shards of a parameter have
# one scale. The shards of an optimizer's state often have several, because each rank chooses a
# scale that fits its shard. `Planner` writes them under the largest of these scales, which is exact
# for powers of two and formats of 16 bits and more. The checkpoint also notes the level of each
# rank. If the same ranks load, each gets its own level back, bit for bit.


class Level(NamedTuple):
    """The attributes in which shards of a tensor may differ, and how many elements a shard has."""

    scale: float
    rms: float
    nonnegative: bool
    numel: int


def levels(state: Mapping[T, Tensor]) -> dict[T, Level]:
    """Return the level of this rank's shard of each sharded ScaledTensor."""
    found = {}
    for name, x in state.items():
        held = local(x)
        if isinstance(x, DTensor) and type(held) is ScaledTensor:
            scale, rms = float(held.scale), float(held.rms)
            found[name] = Level(scale, rms, held.nonnegative, held.numel())
    return found


def common(shards: list[Level]) -> Level:
    """Return the largest scale of the shards that are not known to be zero, and the common RMS."""
    told = [level for level in shards if level.numel and level.rms != 0] or shards
    numel = sum(level.numel for level in shards)
    energy = math.fsum(level.numel * level.rms**2 for level in told)
    same = all(level.rms == told[0].rms for level in shards)
    rms = told[0].rms if same else math.sqrt(energy / max(numel, 1))
    scale = max(level.scale for level in told)
    return Level(scale, rms, all(level.nonnegative for level in told), numel)


class Planner(DefaultSavePlanner):
    """Multiplies tensors by powers of two while they are written, one tensor at a time.

    Args:
        factors: the power of two for each tensor, by its name.
    """

    def __init__(self, factors: dict[str, float]) -> None:
        super().__init__()
        self.factors = factors

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        name = write_item.index.fqn
        factor = self.factors.get(name, 1.0)
        return found if factor == 1 else _multiplied(name.removesuffix(".qdata"), found, factor)


def _multiplied(name: str, q: Tensor, factor: float) -> Tensor:
    made = q * factor if q.dtype.itemsize > 1 else None
    if made is None or not torch.equal((made / factor).nan_to_num(), q.nan_to_num()):
        raise CheckpointError(
            f"the shards of {name} have different scales, and its elements ({q.dtype}) cannot be "
            "brought under one exactly. One tensor has one scale: give all shards that of the "
            "whole before saving"
        )
    return made


def _restore_level(x: ScaledTensor, level: Level) -> None:
    """Put a shard that was saved under the common scale back under its own, in place."""
    x.qdata.mul_(float(x.scale) / level.scale)
    x.scale.fill_(level.scale)
    x.rms.fill_(level.rms)
    x.nonnegative = level.nonnegative
