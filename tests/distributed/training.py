"""The same small training on one process and on several."""

import torch
import torch.distributed as dist
from small_models import GPT
from tensors import value_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import scaledtensor as sct

VOCABULARY, CONTEXT, BATCH = 29, 16, 8


def model(recipe="unit", seed=0, prepare=None):
    torch.manual_seed(seed)
    gpt = GPT(VOCABULARY, CONTEXT, layers=2, heads=2, width=32)
    if prepare is not None:
        prepare(gpt)
    return gpt if recipe is None else sct.scale_model(gpt, recipe)


def sharded(gpt, **options):
    for block in gpt.blocks:
        fully_shard(block, **options)
    return fully_shard(gpt, **options)


def batches(steps, seed=1):
    """Yield batches of sequences that a model can learn: each token is the one before it plus a
    step of its row."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        tokens = (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def train(gpt, steps, optimizer=None, multiplier=1.0, share=True, accumulate=1, part=None):
    """Return the loss of each step over the batches of all ranks. `part` says which share this rank
    has."""
    optimizer = optimizer or torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    alone = not share or not dist.is_initialized()
    everyone = (0, 1, None) if alone else (dist.get_rank(), dist.get_world_size(), None)
    rank, ranks, group = part or everyone
    losses = []
    for inputs, targets in batches(steps):
        if ranks > 1:
            inputs, targets = (t.chunk(ranks)[rank] for t in (inputs, targets))
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True):
            _, loss = gpt(x, y)
            (loss * (multiplier / accumulate)).backward()
            total += loss.detach() / accumulate
        if ranks > 1:
            dist.all_reduce(total, group=group)
        for p in gpt.parameters():
            if p.grad is not None and multiplier != 1:
                p.grad = p.grad * (1 / multiplier)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / ranks)
    return losses


def whole(p):
    """Return the value of a parameter, whole and plain."""
    p = p.detach()
    p = p.full_tensor() if hasattr(p, "full_tensor") else p
    return value_of(p)


def mesh(*names):
    shape = (2, dist.get_world_size() // 2) if len(names) == 2 else (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ddp(gpt, **options):
    return nn.parallel.DistributedDataParallel(gpt, **options)
