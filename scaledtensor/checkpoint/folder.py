"""Saving a model and its optimizer from N ranks into a folder, and loading it on M.

`torch.distributed.checkpoint` writes and cuts the tensors; `shards` tells it of ScaledTensors in
tensors that it knows. What it has no notion of is here: whole or not at all (`manifest`), all
is compared before anything is changed, and every rank raises what one meets.
"""

import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors
from torch.optim import Optimizer

from scaledtensor.checkpoint import manifest
from scaledtensor.checkpoint.atomic import clear, real, reason, sync_file
from scaledtensor.checkpoint.codec import need, read_torch, refusal, understood
from scaledtensor.checkpoint.fit import Planner
from scaledtensor.checkpoint.manifest import Contents, is_whole, levelled, merged, present
from scaledtensor.checkpoint.reader import Plan, TensorReader
from scaledtensor.checkpoint.shards import Ranks
from scaledtensor.errors import CheckpointError

__all__ = ["Loaded", "about", "latest", "load", "prune", "save", "step_folder", "step_of", "verify"]


# The checkpoints of one training, numbered by step: finding the latest, removing the oldest.
_NAME = re.compile(r"step-(\d{6,})")


def step_folder(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of a step goes: `folder/step-000120`.

    Raises:
        CheckpointError: `step` is not a whole number from 0 on.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"a step is a whole number from 0 on; got {step!r}")
    return Path(folder) / f"step-{step:06d}"


def step_of(path: str | Path) -> int:
    """The step of a folder that `step_folder` named.

    Raises:
        CheckpointError: it has another name.
    """
    found = _NAME.fullmatch(Path(path).name)
    if found is None:
        raise CheckpointError(f"{path} is not named for a step, as step-000120 is")
    return int(found[1])


def latest(folder: str | Path) -> Path | None:
    """The checkpoint of the highest step in `folder` that is whole; None where there is none.

    Whole has all files of its manifest in their sizes; `load` compares their contents too.
    """
    whole = _whole(Path(folder))
    return whole[-1] if whole else None


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Remove all but the last `keep` whole checkpoints in `folder`. What is not whole is left: it
    may be being written, and is nothing to count on.

    One rank calls it, after `save` has returned on it.

    Returns:
        What was removed.

    Raises:
        CheckpointError: `keep` is under 1.
    """
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise CheckpointError(f"prune keeps a whole number of checkpoints from 1 on; got {keep!r}")
    doomed = _whole(Path(folder))[:-keep]
    for path in doomed:
        clear(path)
    return doomed


def _whole(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    names = {path.name.removeprefix(".").removesuffix(".old") for path in folder.iterdir()}
    found = [folder / name for name in names if _NAME.fullmatch(name)]
    return sorted((path for path in found if is_whole(present(path))), key=step_of)


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
    path, ranks = real(Path(folder)), Ranks(group)
    contents = ranks.agree(lambda: Contents(model, optimizer, ranks.rank))
    told = ranks.agree(lambda: merged(ranks.gather(contents.told)))
    planner = contents.under(levelled(told))
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
    objects = ranks.agree(lambda: _read_objects(path))

    def compared() -> Plan:
        with understood(f"{path / manifest.NAME} or {OBJECTS}", named=True):
            return Plan(path, told, objects, model, optimizer, ranks.rank)

    plan = ranks.agree(compared)

    def read() -> None:
        if plan.reads:
            reader, alone = TensorReader(path), not ranks.several
            read_tensors(plan.reads, storage_reader=reader, process_group=group, no_dist=alone)

    ranks.agree(lambda: _through(path, read))

    def rebuild() -> None:
        with understood(path, named=True):
            plan.rebuild()

    ranks.agree(rebuild)
    plan.apply()
    return Loaded(objects["extra"], objects["per_rank"])


def about(folder: str | Path) -> Loaded:
    """What a checkpoint holds beside the model and the optimizer. One process is enough.

    Raises:
        CheckpointError: there is none, or a file is missing or has changed.
    """
    path = manifest.present(Path(folder))
    files = manifest.read(path)["files"]
    told = need(path / manifest.NAME, files, OBJECTS, dict, "a size and a digest")
    wrong = manifest.damage(path, {OBJECTS: told})
    if wrong is not None:
        raise CheckpointError(f"{path} is damaged: {wrong}")
    objects = _read_objects(path)
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


def _read_objects(path: Path) -> dict[str, Any]:
    """Read the entries that are no tensors of the model, and check that each field is there."""
    file = path / OBJECTS
    found = read_torch(file, file)
    for field, kind, what in (
        ("extra", object, "anything"),
        ("per_rank", list, "a list with one entry for each rank"),
        ("groups", (list, type(None)), "the options of the optimizer's groups"),
        ("values", (dict, type(None)), "the optimizer's numbers by name"),
    ):
        need(file, found, field, kind, what)
    for name, own in (found["values"] or {}).items():
        step = own.get("step", 0) if isinstance(own, dict) else None
        if step is None or float(step) < 0:
            raise CheckpointError(f"{file} is damaged: values[{name!r}] is {own!r}")
    return cast(dict[str, Any], found)


def _objects(extra: Any, per_rank: Any, told: dict[str, Any], ranks: Ranks) -> bytes:
    """The entries that are no tensors of the model, as bytes that safe loading reads."""
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
        raise CheckpointError(
            "extra, per_rank or the optimizer's options hold what safe loading refuses: "
            f"{refusal(error)}"
        ) from None
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

    def read() -> dict[str, Any]:
        told = manifest.read(path)
        for name in (OBJECTS, ".metadata"):
            need(path / manifest.NAME, told["files"], name, dict, "a size and a digest")
        return told

    told = ranks.agree(read)

    def compare() -> None:
        own = dict(list(told["files"].items())[ranks.rank :: ranks.size])
        wrong = manifest.damage(path, own)
        if wrong is not None:
            raise CheckpointError(f"{path} is damaged: {wrong}")

    ranks.agree(compare)
    return told


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
        told = reason(error)
        if causes:
            told = f"rank {next(iter(causes))}: {reason(next(iter(causes.values()))[0])}"
        raise CheckpointError(f"{path} could not be saved or loaded: {told}") from error
