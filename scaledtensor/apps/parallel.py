"""A training on the processes that torchrun started: `scaledtensor train --parallel`."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from scaledtensor import checkpoint
from scaledtensor.apps.checkpoint import compare, identity
from scaledtensor.apps.commands import KINDS
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.training import Alone, Trainer
from scaledtensor.backends import backend_of
from scaledtensor.checkpoint.files import check_random_state, is_count, need
from scaledtensor.distributed import (
    ColwiseParallel,
    FP8State,
    RowwiseParallel,
    fp8_all_reduce_hook,
    use_fp8_reduce_scatter,
)
from scaledtensor.errors import CheckpointError, DistributedError
from scaledtensor.tensors.tensor import ScaledTensor

KEPT = 2  # checkpoints

#: Each rank has the features of whole attention heads of each matrix. Activations are whole where
#: attention reads them, since one matrix has the query, key and value of a head as rows.
PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "blocks.*.attention.qkv": lambda: ColwiseParallel(output_layouts=Replicate()),
    "blocks.*.attention.proj": lambda: RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.mlp.0": ColwiseParallel,
    "blocks.*.mlp.2": RowwiseParallel,
}


@dataclass(frozen=True)
class Parallel(Alone):
    """This process, as one of several that share a training."""

    kind: str
    reduce: str
    device: torch.device
    mesh: Any
    """A mesh of one dimension, or of the two dimensions "dp" and "tp"."""
    first: bool = True

    @property
    def data(self) -> Any:
        """The dimension of the mesh along which batches are divided; None if they are not."""
        return {"tp": None, "fsdp2+tp": self.mesh["dp"] if self.mesh.ndim > 1 else None}.get(
            self.kind, self.mesh
        )

    def spread(self, model: GPT) -> Callable[..., Any]:
        if self.kind in ("tp", "fsdp2+tp"):
            along = self.mesh["tp"] if self.mesh.ndim > 1 else self.mesh
            parallelize_module(model, along, {name: make() for name, make in PLAN.items()})
        if self.kind == "ddp":
            return self._replicated(model)
        if self.kind in ("fsdp2", "fsdp2+tp"):
            lowered = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
            options: dict[str, Any] = {"mp_policy": lowered} if self.reduce == "bf16" else {}
            for block in model.blocks:
                fully_shard(block, mesh=self.data, **options)
            fully_shard(model, mesh=self.data, **options)
            if self.reduce == "fp8":
                use_fp8_reduce_scatter(model)
        return model

    def _replicated(self, model: GPT) -> Callable[..., Any]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped: Any = nn.parallel.DistributedDataParallel(model)
        if self.reduce == "fp8":
            wrapped.register_comm_hook(FP8State(), fp8_all_reduce_hook)
        elif self.reduce == "bf16":
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped  # type: ignore[no-any-return]

    def part(self, batch: Tensor) -> Tensor:
        if self.data is None:
            return batch
        mine: Tensor = batch.chunk(self.data.size())[self.data.get_local_rank()]
        return mine

    def mean(self, loss: Tensor) -> Tensor:
        if self.data is not None:
            loss = loss.detach().float().clone()
            dist.all_reduce(loss, group=self.data.get_group())
            loss /= self.data.size()
        return loss

    def any(self, here: bool) -> bool:
        told = torch.tensor(float(here), device=self.device, dtype=torch.float32)
        dist.all_reduce(told)
        return bool(told > 0)

    def device_of(self, device: torch.device) -> torch.device:
        return self.device

    def watched(self, trainer: Trainer, kept_in: Path) -> AbstractContextManager[Any]:
        return lost_ranks_told(trainer, kept_in)

    def whole(self, trainer: Trainer) -> GPT:
        return whole(trainer)


@contextmanager
def joined(args: argparse.Namespace, config: GPTConfig) -> Iterator[Parallel]:
    """Join the processes that torchrun started (see `start`), and leave them at the end."""
    processes = start(args, config)
    yield processes
    dist.destroy_process_group()  # not after an error, when other processes may be gone


def start(args: argparse.Namespace, config: GPTConfig) -> Parallel:
    """Join the other processes.

    Raises:
        DistributedError: there are none, the backend is unknown, or the work cannot be divided.
    """
    ranks = _ranks()
    data, tensor = _divided(args, config, ranks)
    device = args.device
    if not backend_of(device).host:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device)
    backend = args.backend or (backend_of(device).collectives)
    known = sorted(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
    if not dist.is_backend_available(backend):
        raise DistributedError(
            f"--backend {backend} is not in this build of torch; it has {', '.join(known)}"
        )
    dist.init_process_group(backend)
    shape = (data, tensor) if args.parallel == "fsdp2+tp" else (ranks,)
    names = ("dp", "tp") if len(shape) > 1 else ("tp" if args.parallel == "tp" else "dp",)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Parallel(args.parallel, args.reduce, device, mesh, dist.get_rank() == 0)


def _ranks() -> int:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise DistributedError(
            f"--parallel needs the processes that torchrun starts, and {', '.join(missing)} is not "
            "set: torchrun --nproc-per-node 2 -m scaledtensor train ..."
        )
    return int(os.environ["WORLD_SIZE"])


def _divided(args: argparse.Namespace, config: GPTConfig, ranks: int) -> tuple[int, int]:
    """(number of ranks that share the batches, number of ranks that share the matrices)."""
    kind = args.parallel
    tensor = ranks if kind == "tp" else 2 if kind == "fsdp2+tp" else 1
    if ranks % tensor:
        raise DistributedError(
            f"--parallel {kind} takes an even number of processes; there are {ranks}"
        )
    data = ranks // tensor
    if args.batch % data:
        raise DistributedError(
            f"--batch {args.batch} cannot be divided among {data} processes: take a multiple"
        )
    if config.n_embd % tensor:
        raise DistributedError(
            f"--width {config.n_embd} cannot be divided among {tensor} processes: take a multiple"
        )
    if kind == "tp" and args.reduce != "fp32":
        raise DistributedError("--parallel tp sends no gradients: leave --reduce out")
    return data, tensor


def refuse_forgotten() -> None:
    """Raises DistributedError if torchrun started several processes without --parallel."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DistributedError(
            f"{os.environ['WORLD_SIZE']} processes were started, each of which would train the same"
            f" model: say how they share it, --parallel {' | '.join(KINDS[1:])}"
        )


# --- checkpoints -----------------------------------------------------------------------------


def check_folder(path: Path) -> None:
    """Raises CheckpointError now if the first save would fail."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; with --parallel --checkpoint is a folder, to which each rank writes"
        )
    path.mkdir(parents=True, exist_ok=True)


def save(trainer: Trainer, folder: Path) -> None:
    """Add the checkpoint of this step to `folder`, which keeps the last few."""
    checkpoint.save(
        checkpoint.step_folder(folder, trainer.steps_done),
        trainer.model,
        trainer.optimizer,
        extra={
            "identity": identity(trainer),
            "step": trainer.steps_done,
            "batches": trainer.batches.get_state(),
        },
        per_rank=torch.get_rng_state(),
    )
    if dist.get_rank() == 0:
        checkpoint.prune(folder, KEPT)


def load(trainer: Trainer, folder: Path) -> Path:
    """Continue `trainer` from the last checkpoint in `folder`, on any number of ranks."""
    path = checkpoint.latest(folder)
    if path is None:
        raise CheckpointError(f"{folder} holds no whole checkpoint, so there is nothing to resume")
    extra = checkpoint.about(path).extra
    where = f"the extra of {path}"
    compare(path, need(where, extra, "identity", dict, "a table of settings"), identity(trainer))
    if not is_count(need(where, extra, "step", int, "a whole number")):
        raise CheckpointError(f"{where} is damaged: its field 'step' is {extra['step']}")
    check_random_state(where, extra, "batches", torch.Generator().set_state)
    found = checkpoint.load(path, trainer.model, trainer.optimizer)
    trainer.batches.set_state(found.extra["batches"].cpu())
    trainer.steps_done = found.extra["step"]
    if len(found.per_rank) == dist.get_world_size():  # else no state belongs to this rank
        torch.set_rng_state(found.per_rank[dist.get_rank()].cpu())
    return path


# --- failures between processes --------------------------------------------------------------


@contextmanager
def lost_ranks_told(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Raises DistributedError, with advice, if a collective fails or torchrun ends this process.

    torchrun does that within a tenth of a second after another process has died.
    """

    def lost(what: str, why: str) -> DistributedError:
        last = checkpoint.latest(folder)
        go_on = "start over" if last is None else f"--resume continues from {last}"
        after = f"after step {trainer.steps_done}"
        return DistributedError(
            f"rank {dist.get_rank()} lost another rank{what} {after}{why}: {go_on}"
        )

    def ended(number: int, frame: object) -> None:
        raise lost(" or was told to end", " (SIGTERM)")

    before: Any = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistributedError) or not _is_of_the_wire(error):
            raise
        first = str(error).partition("\n")[0]
        # torchrun's signal would end this process before it has told the error.
        before = signal.SIG_IGN
        raise lost("", f", which was killed or failed ({first})") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_of_the_wire(error: RuntimeError) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "store", "socket")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)


# --- the whole model -------------------------------------------------------------------------


@torch.no_grad()
def whole(trainer: Trainer) -> GPT:
    """The trained model on this rank, with plain parameters. Every rank calls it."""
    state = {}
    for name, p in trainer.model.state_dict().items():
        held = p.full_tensor() if isinstance(p, DTensor) else p
        state[name] = held.dequantize() if isinstance(held, ScaledTensor) else held
    model = GPT(trainer.model.config).to(trainer.device)
    own = model.state_dict()
    model.load_state_dict({name: state[name] for name in own})
    return model
