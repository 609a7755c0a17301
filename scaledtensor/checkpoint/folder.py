"""Saves a model and its optimizer from N ranks into a folder, and loads them on M ranks.

`torch.distributed.checkpoint` writes tensors, reads them and divides them among ranks. `shards`
gives it ScaledTensors as plain tensors. This module adds three guarantees. A checkpoint is written
whole or not at all (`manifest`). Everything is compared before anything is changed (`Plan`). If one
rank meets an error, every rank raises it.
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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from scaledtensor.checkpoint import manifest
from scaledtensor.checkpoint.files import (
    TensorReader,
    as_damage,
    clear,
    need,
    read_torch,
    real,
    reason,
    refusal,
    sync_file,
)
from scaledtensor.checkpoint.fit import (
    as_parameter,
    matched,
    named_parameters,
    put,
    state_setter,
    template,
    tensors_of,
)
from scaledtensor.checkpoint.manifest import Contents, ModelTensor, Place, StateTensor, Told, merged
from scaledtensor.checkpoint.shards import PiecesToRead, Planner, Ranks, TensorToRead, imagined
from scaledtensor.errors import CheckpointError
from scaledtensor.tensors.codec import Facts

__all__ = ["Loaded", "about", "latest", "load", "prune", "save", "step_folder", "step_of", "verify"]

OBJECTS = "objects.pt"


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint beside the model and the optimizer."""

    extra: Any
    """The value that `save` got as `extra`."""
    per_rank: list[Any]
    """The values that `save` got as `per_rank`, one for each rank that saved."""


# --- saving ----------------------------------------------------------------------------------


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    per_rank: Any = None,
    group: Any = None,
) -> None:
    """Write a checkpoint, whole or not at all. An older one of that name stays until then.

    Every rank calls this. Each rank writes its shards. A tensor that is not sharded is written
    once.

    Args:
        folder: the name of the checkpoint, a folder that all ranks see.
        model: any module, plain or scaled, wrapped by DistributedDataParallel, `fully_shard` or
            torch.compile, or by none of them.
        optimizer: an optimizer of the model's parameters.
        extra: numbers, strings, tensors and containers of them, the same on every rank.
        per_rank: values of the same types, of this rank alone, such as the state of its random
            generators.
        group: the ranks; by default all.

    Raises:
        CheckpointError: a rank cannot write, `extra` differs or cannot be read back safely, or
            shards of one tensor have different scales. Every rank raises it. The checkpoint before
            stays whole.
        UnsupportedError: a shard of codes under scales of blocks.
        RecipeError: a recipe of a class that is not registered.
    """
    path, ranks = real(Path(folder)), Ranks(group)
    contents = ranks.agree(lambda: Contents(model, optimizer, ranks.rank))
    told = ranks.agree(lambda: merged(ranks.gather(contents.told)))
    planner = contents.under(told.common_levels())
    objects = ranks.agree(lambda: _objects(extra, per_rank, told, ranks))
    prepared = ranks.agree(lambda: manifest.prepare(path) if ranks.rank == 0 else None)
    temporary: Any = ranks.gather(prepared)[0]
    try:
        files = _write(path, temporary, contents.tensors, planner, objects, ranks)

        def finish() -> None:
            if ranks.rank == 0:
                about = {"ranks": ranks.size, "files": files}
                about |= {"model": told.model, "tied": told.tied, "optimizer": told.optimizer}
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
    """Write all files except the manifest; return the size and the digest of each."""

    def write() -> None:
        writer = FileSystemWriter(temporary)  # it syncs each file to the disk
        where = {"storage_writer": writer, "planner": planner, "process_group": ranks.group}
        write_tensors(tensors, **where, no_dist=not ranks.several)

    _named_errors(path, write)

    def write_objects() -> None:
        if ranks.rank == 0:
            (temporary / OBJECTS).write_bytes(objects)
            sync_file(temporary / OBJECTS)

    ranks.agree(write_objects)

    def digest() -> dict[str, Any]:
        names = sorted(file.name for file in temporary.iterdir())
        return manifest.digests(temporary, names[ranks.rank :: ranks.size])

    return {name: told for part in ranks.gather(ranks.agree(digest)) for name, told in part.items()}


def _objects(extra: Any, per_rank: Any, told: Told, ranks: Ranks) -> bytes:
    """Return all values that are no tensors of the model, as bytes that safe loading reads."""
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
            "groups": told.groups,
            "values": told.values,
        }
    )


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        _loaded(stream.getvalue())
    except Exception as error:  # pickle alone has half a dozen kinds
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


def _named_errors(path: Path, action: Any) -> None:
    """Call `action`, a call of torch.distributed.checkpoint; its errors name `path`.

    torch tells every rank of an error on one rank, and which rank it was. A rank that is gone
    shows as a failed collective.
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


# --- loading ---------------------------------------------------------------------------------


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: Any = None,
) -> Loaded:
    """Put a checkpoint into a model and an optimizer, on any number of ranks.

    Every rank calls this. Either side may be scaled or plain, with the conversions of `load_into`.
    If the formats are the same, elements and scales arrive bit for bit. Everything is read and
    compared first, which takes the memory of the loaded tensors once more.

    Args:
        folder: the name that `save` got.
        model: a model as for `save`, in any layout.
        optimizer: an optimizer of the same kind over the same parameters, new or not. Without an
            optimizer, only the model is loaded.
        group: the ranks; by default all.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing or has changed, or the checkpoint
            belongs to another model or optimizer. Every rank raises it. Model and optimizer are
            then unchanged.
    """
    path, ranks = manifest.present(Path(folder)), Ranks(group)
    told = ranks.agree(lambda: _verified(path, ranks))
    objects = ranks.agree(lambda: _read_objects(path))

    def compared() -> Plan:
        with as_damage(f"{path / manifest.NAME} or {OBJECTS}", named=True):
            return Plan(path, told, objects, model, optimizer, ranks.rank)

    plan = ranks.agree(compared)

    def read() -> None:
        if plan.reads:
            reader, alone = TensorReader(path), not ranks.several
            read_tensors(plan.reads, storage_reader=reader, process_group=group, no_dist=alone)

    ranks.agree(lambda: _named_errors(path, read))

    def rebuild() -> None:
        with as_damage(path, named=True):
            plan.rebuild()

    ranks.agree(rebuild)
    plan.apply()
    return Loaded(objects["extra"], objects["per_rank"])


class Plan:
    """The tensors that this rank reads from a checkpoint, and the places that they go to.

    A plan exists only if the whole checkpoint fits. Nothing is changed before `apply`.

    Attributes:
        reads: empty plain tensors, by their names in the checkpoint, to read into.
    """

    def __init__(
        self,
        path: Path,
        told: dict[str, Any],
        objects: dict[str, Any],
        model: nn.Module,
        optimizer: Optimizer | None,
        rank: int,
    ) -> None:
        self.rank, self.optimizer = rank, optimizer
        self.reads: dict[str, Tensor] = {}
        self._to_read: dict[Place, TensorToRead] = {}
        self._found: dict[Place, Tensor] = {}
        targets = tensors_of(model)
        sources = {name: imagined(name, facts) for name, facts in told["model"].items()}
        sources |= {name: sources[same] for name, same in told["tied"].items()}
        self._pairs: list[tuple[Tensor, ModelTensor]] = []
        for name, (target, _) in matched(path, targets, sources).items():
            source = ModelTensor(told["tied"].get(name, name))
            self._pairs.append((target, source))
            self._read(source, told["model"][source.name], target)
        self._states: list[tuple[Tensor, StateTensor, Tensor]] = []
        self._values: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            if told["optimizer"] is None:
                raise CheckpointError(f"{path} was saved without an optimizer")
            self._set_states = state_setter(path, model, optimizer, objects["groups"])
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, p in named_parameters(model).items():
                if id(p) in own:
                    self._values[name] = dict(objects["values"].get(name, {}))
                    for key, facts in told["optimizer"].get(name, {}).items():
                        place = StateTensor(name, key)
                        present = optimizer.state[p].get(key) if p in optimizer.state else None
                        self._read(place, facts, template(p, present, key, tuple(facts["shape"])))
                        self._states.append((p, place, sources[name]))

    def _read(self, place: Place, facts: Facts, like: Tensor | None) -> None:
        if place in self._to_read:
            return
        sharded_codes = (
            isinstance(place, StateTensor) and isinstance(like, DTensor) and "granularity" in facts
        )
        kind = PiecesToRead if sharded_codes or "pieces" in facts else TensorToRead
        self._to_read[place] = kind(str(place), facts, like, self.rank)
        self.reads |= self._to_read[place].blanks()

    def rebuild(self) -> None:
        """Rebuild all tensors from `reads`, in the formats of their places."""
        self._found = {place: x.build(self.reads) for place, x in self._to_read.items()}
        self.reads = {}
        optimizer = cast(Optimizer, self.optimizer)  # without one there are no states
        for p, place, saved in self._states:
            state = as_parameter(optimizer, p, self._found.pop(place), saved)
            self._values[place.parameter][place.key] = state

    def apply(self) -> None:
        """Change the model and the optimizer."""
        if self.optimizer is not None:
            self._set_states({name: own for name, own in self._values.items() if own})
        for target, source in self._pairs:
            put(target, self._found[source])


def _verified(path: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the manifest, after each rank has compared some of the files with it."""

    def read() -> dict[str, Any]:
        told = manifest.read(path)
        for name in (OBJECTS, ".metadata"):
            need(path / manifest.NAME, told["files"], name, dict, "a size and a digest")
        return told

    told = ranks.agree(read)
    own = dict(list(told["files"].items())[ranks.rank :: ranks.size])
    ranks.agree(lambda: _check_files(path, own))
    return told


def _check_files(path: Path, files: dict[str, Any]) -> None:
    wrong = manifest.damage(path, files)
    if wrong is not None:
        raise CheckpointError(f"{path} is damaged: {wrong}")


def _read_objects(path: Path) -> dict[str, Any]:
    """Read all values that are no tensors of the model, and check that each field is there."""
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


# --- one process is enough -------------------------------------------------------------------


def about(folder: str | Path) -> Loaded:
    """Return the contents of a checkpoint beside the model and the optimizer, in one process.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or has changed.
    """
    path = manifest.present(Path(folder))
    files = manifest.read(path)["files"]
    told = need(path / manifest.NAME, files, OBJECTS, dict, "a size and a digest")
    _check_files(path, {OBJECTS: told})
    objects = _read_objects(path)
    return Loaded(objects["extra"], objects["per_rank"])


def verify(folder: str | Path) -> None:
    """Read all files of a checkpoint and compare them with the manifest, in one process.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or has changed. The message
            names the file.
    """
    path = manifest.present(Path(folder))
    _check_files(path, manifest.read(path)["files"])


# --- the checkpoints of one training, numbered by step ---------------------------------------

_NAME = re.compile(r"step-(\d{6,})")


def step_folder(folder: str | Path, step: int) -> Path:
    """Return the path of a step's checkpoint: `folder/step-000120`.

    Raises:
        CheckpointError: `step` is not a whole number, 0 or greater.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"a step is a whole number from 0 on; got {step!r}")
    return Path(folder) / f"step-{step:06d}"


def step_of(path: str | Path) -> int:
    """Return the step of a path that `step_folder` made.

    Raises:
        CheckpointError: the path has another name.
    """
    found = _NAME.fullmatch(Path(path).name)
    if found is None:
        raise CheckpointError(f"{path} is not named for a step, as step-000120 is")
    return int(found[1])


def latest(folder: str | Path) -> Path | None:
    """Return the whole checkpoint of the highest step in `folder`; None if `folder` has none.

    A checkpoint is whole here if all files of its manifest exist in their sizes. `load` also
    compares their contents.
    """
    whole = _whole(Path(folder))
    return whole[-1] if whole else None


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Remove all whole checkpoints in `folder` except the last `keep`, and return their paths.

    Other folders stay. A checkpoint that is not whole may be being written, and does not count.
    One rank calls this, after `save` has returned on it.

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
    whole = (path for path in found if manifest.is_whole(manifest.present(path)))
    return sorted(whole, key=step_of)
