"""Saving a model and its optimizer from N ranks into a folder, and loading it on M.

`torch.distributed.checkpoint` writes and cuts the tensors; `shards` tells it of ScaledTensors in
tensors that it knows. What it has no notion of is here: whole or not at all (`manifest`), all
is compared before anything is changed, and every rank raises what one meets.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors
from torch.optim import Optimizer

from scaledtensor.checkpoint import manifest, states
from scaledtensor.checkpoint.atomic import clear, sync_file
from scaledtensor.checkpoint.fit import matched, put, tensors_of
from scaledtensor.checkpoint.levels import Level, Planner, common, levels
from scaledtensor.checkpoint.ranks import Ranks
from scaledtensor.checkpoint.reader import TensorReader
from scaledtensor.checkpoint.shards import blank, described, imagined, parts, rebuilt
from scaledtensor.errors import CheckpointError

__all__ = ["Loaded", "about", "load", "save", "verify"]

OBJECTS = "objects.pt"


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held beside the model and the optimizer."""

    extra: Any
    """What `save` was given as `extra`."""
    per_rank: list[Any]
    """What each of the ranks that saved gave as `per_rank`."""


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    per_rank: Any = None,
    group: Any = None,
) -> None:
    """Write a checkpoint, whole or not at all: until it is on the disk, one of that name stays.

    Every rank calls this. Each writes its shards; what is not sharded is written once.

    Args:
        folder: what the checkpoint is called, a folder that all ranks see.
        model: any module, plain or scaled, wrapped by DistributedDataParallel, `fully_shard` or
            torch.compile, or none of them.
        optimizer: over the model's parameters.
        extra: numbers, strings, tensors and containers of them, the same on every rank.
        per_rank: the same, of this rank alone: the states of its random generators, say.
        group: the ranks; by default all.

    Raises:
        CheckpointError: on every rank, if one cannot write, `extra` differs or cannot be read back
            safely, or shards of one tensor have different scales. What was saved before is whole.
        UnsupportedError: a shard of codes under scales of blocks.
        RecipeError: a recipe of a class that is not registered.
    """
    path, ranks = Path(folder), Ranks(group)
    contents = ranks.agree(lambda: _Contents(model, optimizer, ranks.rank))
    told = ranks.agree(lambda: _merged(ranks.gather(contents.told)))
    planner = contents.under(_levelled(told))
    objects = ranks.agree(lambda: _objects(extra, per_rank, told, ranks))
    prepared = ranks.agree(lambda: manifest.prepare(path) if ranks.rank == 0 else None)
    temporary: Any = ranks.gather(prepared)[0]
    try:
        files = _write(path, temporary, contents.tensors, planner, objects, ranks)

        def finish() -> None:
            if ranks.rank == 0:
                about = {"ranks": ranks.size, "files": files}
                about |= {kind: told[kind] for kind in ("model", "tied", "optimizer")}
                manifest.write(temporary, about)
                manifest.install(temporary, path)

        ranks.agree(finish)
    except Exception:
        if ranks.rank == 0:
            clear(temporary)
        raise


def _write(
    path: Path,
    temporary: Path,
    tensors: dict[str, Tensor],
    planner: Planner,
    objects: bytes,
    ranks: Ranks,
) -> dict[str, Any]:
    """Write all but the manifest; the size and digest of each file."""

    def write() -> None:
        writer = FileSystemWriter(temporary)  # which waits for the disk, file by file
        where = {"storage_writer": writer, "planner": planner, "process_group": ranks.group}
        write_tensors(tensors, **where, no_dist=not ranks.several)

    _through(path, write)

    def write_objects() -> None:
        if ranks.rank == 0:
            (temporary / OBJECTS).write_bytes(objects)
            sync_file(temporary / OBJECTS)

    ranks.agree(write_objects)

    def digest() -> dict[str, Any]:
        names = sorted(file.name for file in temporary.iterdir())
        return manifest.digests(temporary, names[ranks.rank :: ranks.size])

    return {name: told for part in ranks.gather(ranks.agree(digest)) for name, told in part.items()}


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: Any = None,
) -> Loaded:
    """Put a checkpoint into a model and an optimizer, on any number of ranks.

    Every rank calls this. Either side may be scaled or plain: `load_into` says what goes into what.
    Where the formats are the same, elements and scales arrive bit for bit. Everything is read and
    compared first, which takes the memory of what is loaded once more.

    Args:
        folder: what `save` was given.
        model: as for `save`, cut in any way.
        optimizer: one of the same kind over the same parameters, new or not; without one, the model
            alone is loaded.
        group: the ranks; by default all.

    Raises:
        CheckpointError: on every rank, if there is no checkpoint, a file is missing or has changed,
            or it belongs to another model or optimizer. Model and optimizer are then unchanged.
    """
    path, ranks = manifest.present(Path(folder)), Ranks(group)
    told = ranks.agree(lambda: _verified(path, ranks))
    objects = ranks.agree(lambda: torch.load(path / OBJECTS, map_location="cpu", weights_only=True))
    plan = ranks.agree(lambda: _Plan(path, told, objects, model, optimizer, ranks.rank))

    def read() -> None:
        if plan.reads:
            reader, alone = TensorReader(path), not ranks.several
            read_tensors(plan.reads, storage_reader=reader, process_group=group, no_dist=alone)

    ranks.agree(lambda: _through(path, read))
    ranks.agree(plan.rebuild)
    plan.apply()
    return Loaded(objects["extra"], objects["per_rank"])


def about(folder: str | Path) -> Loaded:
    """What a checkpoint holds beside the model and the optimizer. One process is enough.

    Raises:
        CheckpointError: there is none, or a file is missing or has changed.
    """
    path = manifest.present(Path(folder))
    wrong = manifest.damage(path, {OBJECTS: manifest.read(path)["files"][OBJECTS]})
    if wrong is not None:
        raise CheckpointError(f"{path} is damaged: {wrong}")
    objects = torch.load(path / OBJECTS, map_location="cpu", weights_only=True)
    return Loaded(objects["extra"], objects["per_rank"])


def verify(folder: str | Path) -> None:
    """Read all of a checkpoint and compare it with what was written. One process is enough.

    Raises:
        CheckpointError: there is none, or a file is missing or has changed; says which.
    """
    path = manifest.present(Path(folder))
    wrong = manifest.damage(path, manifest.read(path)["files"])
    if wrong is not None:
        raise CheckpointError(f"{path} is damaged: {wrong}")


class _Contents:
    """What a rank has to save: plain tensors by name, and what is to be told of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, rank: int) -> None:
        targets = tensors_of(model)
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(x), name) for name, x in targets.items()}
        whole = {f"model.{name}": targets[name] for name in first.values()}
        kept: dict[str, list[str]] = {}
        state = states.named_state(model, optimizer) if optimizer is not None else None
        if state is not None:
            for name, own in state.tensors.items():
                kept[name] = list(own)
                whole |= {f"optimizer.{name}.{key}": x for key, x in own.items()}
        self.tensors: dict[str, Tensor] = {}
        for name, x in whole.items():
            for part, t in parts(name, x).items():
                if part in self.tensors:
                    raise CheckpointError(f"two tensors would be called {part} in the checkpoint")
                self.tensors[part] = t
        facts = {name: described(x) for name, x in whole.items()}
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


def _merged(all_told: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks told together; where two tell of one thing, the same."""
    first = all_told[0]
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in first.items()}
    for rank, told in enumerate(all_told[1:], 1):
        if (told["optimizer"] is None) != (first["optimizer"] is None):
            raise CheckpointError(f"rank 0 or rank {rank} saves an optimizer, and the other none")
        for name, level in told["levels"].items():
            merged["levels"][name] = merged["levels"].get(name, {}) | level
        for kind in ("model", "tied", "optimizer", "values"):
            for name, value in (told[kind] or {}).items():
                seen = merged[kind].setdefault(name, value)
                if seen != value:
                    raise CheckpointError(
                        f"{name} is {value} on rank {rank} and {seen} on a rank before it"
                    )
        if told["groups"] is not None:
            merged["groups"] = _merged_groups(rank, merged["groups"], told["groups"])
    return merged


def _levelled(told: dict[str, Any]) -> dict[str, Level]:
    """The one scale of each tensor whose shards have several, noted in what is told of it."""
    found = {}
    for name, shards in told["levels"].items():
        one = common(list(shards.values()))
        kind, _, rest = name.partition(".")
        owner, _, key = rest.rpartition(".")
        facts = told["model"][rest] if kind == "model" else told["optimizer"][owner][key]
        facts |= {"nonnegative": one.nonnegative}
        if any(shard[:3] != one[:3] for shard in shards.values()):
            facts |= {"levels": {str(rank): list(shard) for rank, shard in shards.items()}}
            found[name] = one
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


def _objects(extra: Any, per_rank: Any, told: dict[str, Any], ranks: Ranks) -> bytes:
    """What is no tensor of the model, as a file of torch that safe loading reads."""
    mine = ranks.agree(lambda: _saved((extra, per_rank)))
    given = [_loaded(raw) for raw in ranks.gather(mine)]
    for rank, (extra, _) in enumerate(given):
        if not _same(extra, given[0][0]):
            raise CheckpointError(
                f"extra is not the same on rank {rank} as on rank 0: what belongs to one rank goes "
                "into per_rank"
            )
    return _saved(
        {
            "extra": given[0][0],
            "per_rank": [own for _, own in given],
            "groups": told["groups"],
            "values": told["values"],
        }
    )


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        _loaded(stream.getvalue())
    except Exception as error:  # pickle alone has half a dozen
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"extra, per_rank or the optimizer's options hold what safe loading refuses: {reason}"
        ) from error
    return stream.getvalue()


def _loaded(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _saved(a) == _saved(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


def _verified(path: Path, ranks: Ranks) -> dict[str, Any]:
    """The manifest, after each rank has compared some of the files with it."""
    told = ranks.agree(lambda: manifest.read(path))

    def compare() -> None:
        own = dict(list(told["files"].items())[ranks.rank :: ranks.size])
        wrong = manifest.damage(path, own)
        if wrong is not None:
            raise CheckpointError(f"{path} is damaged: {wrong}")

    ranks.agree(compare)
    return told


class _Plan:
    """What is read for this rank, into what, and where it goes from there."""

    def __init__(
        self,
        path: Path,
        told: dict[str, Any],
        objects: dict[str, Any],
        model: nn.Module,
        optimizer: Optimizer | None,
        rank: int,
    ) -> None:
        self.rank = rank
        self.reads: dict[str, Tensor] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        targets = tensors_of(model)
        sources = {name: imagined(name, facts) for name, facts in told["model"].items()}
        sources |= {name: sources[same] for name, same in told["tied"].items()}
        self.pairs = [
            (target, f"model.{told['tied'].get(name, name)}")
            for name, (target, _) in matched(path, targets, sources).items()
        ]
        for target, source in self.pairs:
            self._read(source, told["model"][source.removeprefix("model.")], target)
        self.states: list[tuple[Tensor, str, str, Tensor]] = []
        self.restore: Any = None
        if optimizer is not None:
            if told["optimizer"] is None:
                raise CheckpointError(f"{path} was saved without an optimizer")
            self.restore = states.restore(path, model, optimizer, objects["groups"])
            self._plan_states(told, objects, model, optimizer, sources)

    def _plan_states(
        self,
        told: dict[str, Any],
        objects: dict[str, Any],
        model: nn.Module,
        optimizer: Optimizer,
        sources: dict[str, Tensor],
    ) -> None:
        parameters = states.named_parameters(model)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in parameters.items():
            if id(p) not in own:
                continue
            self.values[name] = dict(objects["values"].get(name, {}))
            for key, facts in told["optimizer"].get(name, {}).items():
                present = optimizer.state[p].get(key) if p in optimizer.state else None
                like = states.template(p, present, key, tuple(facts["shape"]))
                self._read(f"optimizer.{name}.{key}", facts, like)
                self.states.append((p, name, key, sources[name]))

    def _read(self, name: str, facts: dict[str, Any], like: Tensor | None) -> None:
        if name not in self.facts:
            self.facts[name] = facts
            self.reads |= blank(name, facts, like)

    def rebuild(self) -> None:
        """All that was read, as it goes into its place; nothing has changed yet."""
        self.found = {
            name: rebuilt(name, facts, self.reads, self.rank) for name, facts in self.facts.items()
        }
        self.reads = {}
        for p, name, key, saved in self.states:
            found = self.found.pop(f"optimizer.{name}.{key}")
            self.values[name][key] = states.as_parameter(p, found, saved)

    def apply(self) -> None:
        if self.restore is not None:
            self.restore({name: own for name, own in self.values.items() if own})
        for target, source in self.pairs:
            put(target, self.found[source])


def _through(path: Path, action: Any) -> None:
    """`action`, a call of torch.distributed.checkpoint, its errors by name.

    It tells every rank of an error on one, and which; a rank that is gone shows as a failed
    collective.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            action()
    except CheckpointError:
        raise
    except (CheckpointException, RuntimeError, OSError) as error:
        causes = getattr(error, "failures", None)
        told = f"rank {next(iter(causes))}: {next(iter(causes.values()))[0]}" if causes else error
        raise CheckpointError(f"{path} could not be saved or loaded: {told}") from error
