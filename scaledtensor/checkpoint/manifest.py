"""The file that makes a folder a checkpoint: what is in it, and what its files must contain.

It is written last, into a folder of another name, which then takes its own by a rename. So there is
a checkpoint of that name in full, or the one before, at any moment:

    .run.tmp    being written; left over where a save was killed, and removed by the next
    run         whole
    .run.old    the one before, while the two change places
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint import pieces
from scaledtensor.checkpoint import shards as states
from scaledtensor.checkpoint.atomic import check_writable, clear, sync_file, sync_folder
from scaledtensor.checkpoint.codec import check_name, dtype_of, is_count, need, understood
from scaledtensor.checkpoint.fit import Level, Planner, common, levels, tensors_of
from scaledtensor.checkpoint.shards import described, parts
from scaledtensor.errors import CheckpointError

__all__ = [
    "NAME",
    "Contents",
    "damage",
    "digests",
    "install",
    "is_whole",
    "levelled",
    "merged",
    "prepare",
    "present",
    "read",
    "write",
]


# What a rank has to save, and what all of them have together.
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
        facts |= {"nonnegative": one.nonnegative}
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


NAME = "manifest.json"


KIND = "scaledtensor checkpoint"


VERSION = 1


def present(path: Path) -> Path:
    """Where the checkpoint called `path` is: there, or where the one before was put, if a save was
    killed just between."""
    old = _beside(path, "old")
    return old if not (path / NAME).exists() and (old / NAME).exists() else path


def prepare(path: Path) -> Path:
    """The empty folder to write the checkpoint called `path` into; leftovers of killed saves go.

    Raises:
        CheckpointError: there is something else of that name, or no folder to write in.
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
    """Let a folder with all that belongs in it take its name."""
    sync_folder(temporary)
    old = _beside(path, "old")
    if path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    sync_folder(path.parent)
    clear(old)


def write(folder: Path, contents: dict[str, Any]) -> None:
    file = folder / NAME
    body = {"kind": KIND, "version": VERSION} | contents
    file.write_text(json.dumps({"sha256": _sum(body)} | body))
    sync_file(file)


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or one that this release cannot read.
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
    """Raises CheckpointError unless each field is what `save` writes."""
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
    with understood(where):
        dtype_of(facts["dtype"])
    if "kind" in facts:
        for part, told in need(where, facts, "parts", dict, "tensors by name").items():
            _check_facts(f"{where}['parts'][{part!r}]", told)


def digests(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each file, its size and the SHA-256 of its contents."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
        for name in names
    }


def damage(folder: Path, files: dict[str, dict[str, Any]], contents: bool = True) -> str | None:
    """What is wrong with the first file that is not as the manifest says; None if nothing is."""
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
    """Whether all files of a checkpoint are there, in their sizes."""
    try:
        return damage(path, read(path)["files"], contents=False) is None
    except CheckpointError:
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}")
