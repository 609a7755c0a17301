"""One rank of a job is killed while all of them save."""

import contextlib
import os
import signal
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from killed import PATIENCE, dies_at, ended, forked
from test_checkpoint_ranks import contents, different, made, moments, sharded
from torch.distributed.checkpoint import filesystem

from scaledtensor import checkpoint
from scaledtensor.checkpoint import folder, manifest
from scaledtensor.errors import CheckpointError


def in_group(rank, store, job, *args):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE),
    )
    job(rank, *args)


def of_two(tmp_path, job, *args):
    """Return how each of two ranks ended."""
    store = tmp_path / "store"
    with contextlib.suppress(FileNotFoundError):
        store.unlink()
    children = [forked(in_group, rank, store, job, *args) for rank in range(2)]
    return [ended(child) for child in children]


def cut(seed):
    model = made("unit", seed)
    return sharded(model, moments(model, seed))


def saves(rank, path, seed):
    checkpoint.save(path, *cut(seed), extra={"seed": seed})


def saves_and_dies(rank, path, seed, dying, point):
    model, optimizer = cut(seed)
    if rank == dying:
        dies_at(*point)
    try:
        checkpoint.save(path, model, optimizer, extra={"seed": seed})
    except CheckpointError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(7)


def loads(rank, path, seed):
    model, optimizer = cut(100)
    assert checkpoint.load(path, model, optimizer).extra == {"seed": seed}
    assert different(contents(model, optimizer), contents(*cut(seed))) == []


POINTS = {
    "rank 1, in its file": (1, (filesystem, "_write_item", 3, False)),
    "rank 1, after its file": (1, (folder, "write_tensors", 1, True)),
    "rank 1, before its digests": (1, (manifest, "digests", 1, False)),
    "rank 0, in its file": (0, (filesystem, "_write_item", 3, False)),
    "rank 0, before the metadata": (0, (filesystem.FileSystemWriter, "finish", 1, False)),
    "rank 0, in place of the manifest": (0, (manifest, "write", 1, False)),
    "rank 0, between the renames": (0, (os, "replace", 2, False)),
}


#: The other points check the same at other places.
FIRST = ("rank 1, in its file", "rank 1, before its digests", "rank 0, between the renames")


@pytest.mark.parametrize(
    "point", [p if p in FIRST else pytest.param(p, marks=pytest.mark.slow) for p in POINTS]
)
def test__a_killed_rank__costs_the_save_and_no_checkpoint(point, tmp_path, capfd):
    runs = tmp_path / "runs"
    runs.mkdir()
    dying, where = POINTS[point]
    assert of_two(tmp_path, saves, runs / "run", 5) == [0, 0]
    codes = of_two(tmp_path, saves_and_dies, runs / "run", 6, dying, where)
    assert codes[dying] == -signal.SIGKILL
    # The other rank reports the failure and does not wait for ever.
    assert codes[1 - dying] == 7
    assert "rank" in capfd.readouterr().err
    assert of_two(tmp_path, loads, runs / "run", 5) == [0, 0]
    assert of_two(tmp_path, saves, runs / "run", 7) == [0, 0]
    assert [path.name for path in runs.iterdir()] == ["run"]
    assert of_two(tmp_path, loads, runs / "run", 7) == [0, 0]
