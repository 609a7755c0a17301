"""The contents of a checkpoint, and its manifest: the file that makes a folder a checkpoint.

Each rank collects its `Contents`, and the ranks merge their facts. The manifest holds these facts,
and the size and digest of each file. It is written last, into a folder with a temporary name,
which then takes the name of the checkpoint by a rename. At any moment, a whole checkpoint of that
name exists: the new one, or the one before it.

    .run.tmp    the new one, while it is written; the next save removes the rest of a killed save
    run         the whole checkpoint
    .run.old    the one before it, while the two change places
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint.files import (
    as_damage,
    check_name,
    check_writable,
    clear,
    is_count,
    need,
    sync_file,
    sync_folder,
)
from scaledtensor.checkpoint.fit import NamedState, named_state, tensors_of
from scaledtensor.checkpoint.shards import (
    Level,
    Planner,
    common,
    described,
    is_piece,
    levels,
    parts,
    piece_described,
    piece_parts,
)
from scaledtensor.errors import CheckpointError
from scaledtensor.tensors.codec import Facts, dtype_from_name, facts_of_plain

__all__ = [
    "NAME",
    "Contents",
    "ModelTensor",
    "Place",
    "StateTensor",
    "damage",
    "digests",
    "install",
    "is_whole",
    "merged",
    "prepare",
    "present",
    "read",
    "write",
]

NAME = "manifest.json"
KIND = "scaledtensor checkpoint"
VERSION = 1


# --- the contents ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelTensor:
    """The place of a tensor in the model's state dict."""

    name: str

    def __str__(self) -> str:
        """The tensor's name in the checkpoint."""
        return f"model.{self.name}"


@dataclass(frozen=True)
class StateTensor:
    """The place of a tensor in the optimizer's state: a parameter, and the key of its state."""

    parameter: str
    key: str

    def __str__(self) -> str:
        """The tensor's name in the checkpoint."""
        return f"optimizer.{self.parameter}.{self.key}"


Place: TypeAlias = ModelTensor | StateTensor


@dataclass
class Told:
    """The facts that a rank tells the others about its contents. The manifest keeps most of them.

    Attributes:
        model: the facts of each tensor of the model.
        tied: the name of a tied tensor -> the name under which the tensor is saved.
        optimizer: the facts of the states of each parameter; None without an optimizer.
        groups, values: see `NamedState`; None without an optimizer.
        levels: the level of each sharded ScaledTensor, by rank.
        pieces: the facts of each piece, by rank.
    """

    model: dict[str, Facts]
    tied: dict[str, str]
    optimizer: dict[str, dict[str, Facts]] | None = None
    groups: list[Any] | None = None
    values: dict[str, dict[str, Any]] | None = None
    levels: dict[Place, dict[int, Level]] = field(default_factory=dict)
    pieces: dict[Place, dict[int, Facts]] = field(default_factory=dict)

    def facts(self, place: Place) -> Facts:
        """Return the facts of the tensor at `place`. The caller may add to them."""
        if isinstance(place, ModelTensor):
            return self.model[place.name]
        return (self.optimizer or {})[place.parameter][place.key]

    def common_levels(self) -> dict[Place, Level]:
        """Return the one level for each tensor whose shards have several levels.

        Adds the levels and the pieces of all ranks to the facts, for the manifest.
        """
        found = {}
        for place, shards in self.levels.items():
            one = common(list(shards.values()))
            facts = self.facts(place)
            facts |= {"nonnegative": one.nonnegative}
            if any(shard[:3] != one[:3] for shard in shards.values()):
                facts |= {"levels": {str(rank): list(shard) for rank, shard in shards.items()}}
                found[place] = one
        for place, pieces in self.pieces.items():
            self.facts(place)["pieces"] = {str(rank): piece for rank, piece in pieces.items()}
        return found


class Contents:
    """The contents that this rank saves.

    Attributes:
        tensors: the plain tensors by their names in the checkpoint.
        told: the facts about them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, Tensor] = {}
        targets = tensors_of(model)
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(x), name) for name, x in targets.items()}
        self.told = Told(model={}, tied={n: same for n, same in tied.items() if n != same})
        state = None if optimizer is None else named_state(model, optimizer)
        for name in first.values():
            self.told.model[name] = self._add(ModelTensor(name), targets[name])
        if state is not None:
            self._add_states(state)

    def _add_states(self, state: NamedState) -> None:
        self.told.groups, self.told.values = state.groups, state.values
        self.told.optimizer = {
            name: {key: self._add(StateTensor(name, key), x) for key, x in held.items()}
            for name, held in state.tensors.items()
        }

    def _add(self, place: Place, x: Tensor) -> Facts:
        """Add a tensor to `tensors`; return its facts."""
        if isinstance(place, StateTensor) and isinstance(x, DTensor) and is_piece(x):
            facts, found = facts_of_plain(x), piece_parts(str(place), x, self.rank)
            self.told.pieces[place] = {self.rank: piece_described(x)}
        else:
            facts, found = described(x), parts(str(place), x)
        for part, t in found.items():
            if part in self.tensors:
                raise CheckpointError(f"two tensors would be called {part} in the checkpoint")
            self.tensors[part] = t
        for level in levels({place: x}).values():
            self.told.levels[place] = {self.rank: level}
        return facts

    def under(self, common_levels: dict[Place, Level]) -> Planner:
        """Put the named tensors under these levels; return the planner that writes them so."""
        factors = {}
        for place, level in common_levels.items():
            if f"{place}.scale" in self.tensors:
                own = self.tensors[f"{place}.scale"]
                factors[f"{place}.qdata"] = float(own) / level.scale
                self.tensors[f"{place}.scale"] = torch.full_like(own, level.scale)
                self.tensors[f"{place}.rms"] = torch.full_like(own, level.rms)
        return Planner(factors)


def merged(all_told: list[Told]) -> Told:
    """Return the facts of all ranks together.

    Raises:
        CheckpointError: two ranks have different facts about one tensor.
    """
    whole, *others = all_told
    for rank, told in enumerate(others, 1):
        if (told.optimizer is None) != (whole.optimizer is None):
            raise CheckpointError(f"rank 0 or rank {rank} saves an optimizer, and the other none")
        for place, own_level in told.levels.items():
            whole.levels[place] = whole.levels.get(place, {}) | own_level
        for place, own_piece in told.pieces.items():
            whole.pieces[place] = whole.pieces.get(place, {}) | own_piece
        for kind in ("model", "tied", "optimizer", "values"):
            for name, value in (getattr(told, kind) or {}).items():
                seen = getattr(whole, kind).setdefault(name, value)
                if seen != value:
                    raise CheckpointError(
                        f"{name} is {value} on rank {rank} and {seen} on a rank before it"
                    )
        if told.groups is not None:
            whole.groups = _merged_groups(rank, whole.groups or [], told.groups)
    return whole


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


# --- the folder ------------------------------------------------------------------------------


def present(path: Path) -> Path:
    """Return the folder that holds the checkpoint `path`.

    This is `path` itself, or the folder of the checkpoint before it, if a save was killed while the
    two changed places.
    """
    old = _beside(path, "old")
    return old if not (path / NAME).exists() and (old / NAME).exists() else path


def prepare(path: Path) -> Path:
    """Remove the rest of killed saves; return an empty folder for the new checkpoint `path`.

    Raises:
        CheckpointError: `path` is something else than a checkpoint, or cannot be written.
    """
    check_writable(path)
    old = _beside(path, "old")
    others = path.exists() and not (path / NAME).exists()
    if others and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(f"{path} is no checkpoint, and would be replaced by one: move it")
    if present(path) == old:
        clear(path)
        os.replace(old, path)
    patterns = (f".{path.name}.tmp", f".{path.name}.old", f".{path.name}.*.gone", ".step-*.tmp")
    for pattern in (*patterns, ".step-*.gone"):
        for left in path.parent.glob(pattern):
            clear(left)
    temporary = _beside(path, "tmp")
    temporary.mkdir()
    return temporary


def install(temporary: Path, path: Path) -> None:
    """Give the folder `temporary`, which is complete, the name `path`."""
    sync_folder(temporary)
    old = _beside(path, "old")
    if path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    sync_folder(path.parent)
    clear(old)


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}")


# --- the manifest ----------------------------------------------------------------------------


def write(folder: Path, contents: dict[str, Any]) -> None:
    """Write the manifest of `folder`, with a digest of its own contents."""
    file = folder / NAME
    body = {"kind": KIND, "version": VERSION} | contents
    file.write_text(json.dumps({"sha256": _sum(body)} | body))
    sync_file(file)


def read(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, with all its fields checked.

    Raises:
        CheckpointError: there is no checkpoint, or this release cannot read it.
    """
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {kind}; a checkpoint is a folder that save() wrote")
    file = path / NAME
    if not file.exists():
        hint = ""
        if (path / ".metadata").exists():
            hint = "; torch.distributed.checkpoint wrote it, and its own load reads it"
        raise CheckpointError(f"{path} is no checkpoint: it has no {NAME}{hint}")
    try:
        found = json.loads(file.read_text())
        kind, version = found["kind"], found["version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it cannot be read") from error
    if found.pop("sha256", None) != _sum(found):
        raise CheckpointError(f"{file} is damaged: it has changed since it was saved")
    if kind != KIND or version != VERSION:
        raise CheckpointError(
            f"{path} is a {kind!r} of version {version}; this release reads {KIND!r} of {VERSION}"
        )
    _check(file, found)
    contents: dict[str, Any] = found
    return contents


def _check(file: Path, found: dict[str, Any]) -> None:
    """Raise CheckpointError unless each field has the type that `save` writes."""
    need(file, found, "ranks", int, "a whole number")
    for name, told in need(file, found, "files", dict, "sizes and digests by name").items():
        where = f"{file}, files[{name!r}]"
        check_name(file, name)
        if not is_count(need(where, told, "bytes", int, "a whole number")):
            raise CheckpointError(f"{where} is damaged: its field 'bytes' is {told['bytes']}")
        need(where, told, "sha256", str, "a digest")
    model = need(file, found, "model", dict, "the model's tensors by name")
    for name, facts in model.items():
        _check_facts(f"{file}, model[{name!r}]", facts)
    for name, same in need(file, found, "tied", dict, "names by name").items():
        if not isinstance(same, str) or same not in model:
            raise CheckpointError(
                f"{file} is damaged: tied[{name!r}] is {same!r}, which is no tensor of the model"
            )
    kinds: Any = (dict, type(None))
    for name, own in (need(file, found, "optimizer", kinds, "states by name") or {}).items():
        if not isinstance(own, dict):
            raise CheckpointError(f"{file} is damaged: optimizer[{name!r}] holds no states")
        for key, facts in own.items():
            _check_facts(f"{file}, optimizer[{name!r}][{key!r}]", facts)


def _check_facts(where: str, facts: Any) -> None:
    shape = need(where, facts, "shape", list, "a list of sizes")
    if not all(map(is_count, shape)):
        raise CheckpointError(f"{where} is damaged: its field 'shape' is {shape}")
    need(where, facts, "dtype", str, "the name of a dtype")
    with as_damage(where):
        dtype_from_name(facts["dtype"])
    if "kind" in facts:
        for part, told in need(where, facts, "parts", dict, "tensors by name").items():
            _check_facts(f"{where}['parts'][{part!r}]", told)


def digests(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the size and the SHA-256 digest of each file."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
        for name in names
    }


def damage(folder: Path, files: dict[str, dict[str, Any]], contents: bool = True) -> str | None:
    """Return how the first damaged file differs from its entry in `files`; None if none differs.

    Args:
        folder: the folder of the files.
        files: the size and the digest of each file.
        contents: False compares sizes only, which does not read the files.
    """
    for name, told in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != told["bytes"]:
            return f"{name} has {size} bytes in place of {told['bytes']}"
        if contents and _digest(file) != told["sha256"]:
            return f"the contents of {name} have changed since they were saved"
    return None


def is_whole(path: Path) -> bool:
    """Return whether `path` is a checkpoint with all its files, in their sizes."""
    try:
        return damage(path, read(path)["files"], contents=False) is None
    except CheckpointError:
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
