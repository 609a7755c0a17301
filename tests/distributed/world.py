"""Several processes on this machine, for tests of communication between ranks.

`world(2, job, *args)` calls `job(*args)` on two ranks of a gloo group and returns the result of
each. Processes take seconds to start. They therefore stay from one call to the next, and stop only
when one fails, as the others may be waiting for it.
"""

import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import scaledtensor as sct

#: Limit in seconds for a collective, and for a call as a whole.
PATIENCE = 120


def _rank(rank: int, size: int, store: str, door: Connection) -> None:
    torch.set_num_threads(1)
    sct.on_missing("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            job, args = door.recv()
            try:
                door.send((True, job(*args)))
            except BaseException:
                door.send((False, traceback.format_exc()))


class World:
    """`size` processes that wait for jobs."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        # One process imports torch; ranks are forks of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["scaledtensor"])
        self.doors: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.doors.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of `job(*args)` on all ranks.

        Raises:
            RuntimeError: the job raised on one rank, or did not return; has that rank's traceback.
        """
        for door in self.doors:
            door.send((job, args))
        waiting = dict(enumerate(self.doors))
        results: dict[int, Any] = {}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), PATIENCE)
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting)} did not return in {PATIENCE} s")
            for rank, door in list(waiting.items()):
                if door in ready:
                    try:
                        fine, result = door.recv()
                    except EOFError:
                        fine, result = False, "the process died"
                    if not fine:
                        raise RuntimeError(f"rank {rank}: {result}")
                    results[rank] = result
                    del waiting[rank]
        return [results[rank] for rank in sorted(results)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


class Worlds:
    """Worlds of several sizes, each started at its first use."""

    def __init__(self) -> None:
        self.running: dict[int, World] = {}

    def __call__(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        if size not in self.running:
            self.running[size] = World(size)
        try:
            return self.running[size].run(job, *args)
        except BaseException:
            self.running.pop(size).stop()
            raise

    def stop(self) -> None:
        while self.running:
            self.running.popitem()[1].stop()
