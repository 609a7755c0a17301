"""One rank of two is killed, has a NaN, or has another model: no rank hangs, and every fault is
reported."""

import math
import os
import signal

import pytest
import torch
import torch.distributed as dist
import training
from killed import ended, forked
from test_checkpoint_killed import in_group
from torch import nn

from scaledtensor.distributed import FP8State, fp8_all_reduce_hook, use_fp8_reduce_scatter

WAYS = ["ddp", "ddp-fp8", "fsdp", "fsdp-fp8"]


def prepared(way, gpt):
    if way.startswith("ddp"):
        model = training.ddp(gpt)
        if way == "ddp-fp8":
            model.register_comm_hook(FP8State(), fp8_all_reduce_hook)
        return model
    model = training.sharded(gpt)
    if way == "fsdp-fp8":
        use_fp8_reduce_scatter(model)
    return model


def dies(rank, way):
    model = prepared(way, training.model("unit"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(4):
        for x, y in training.batches(1):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test__a_rank_that_is_killed__ends_the_other(way, tmp_path, capfd):
    store = tmp_path / "store"
    children = [forked(in_group, rank, store, dies, way) for rank in range(2)]
    assert [ended(child) for child in children] == [1, -signal.SIGKILL]  # no -SIGALRM: no hang
    assert "Error" in capfd.readouterr().err


def gradients_after_a_nan(way):
    """Return the number of gradients, and whether their norm is finite, when one rank's loss is
    NaN."""
    gpt = training.model("unit")
    model = prepared(way, gpt)
    ((x, y),) = training.batches(1)
    factor = math.nan if dist.get_rank() else 1.0
    (model(x, y)[1] * factor).backward()
    grads = [p.grad for p in model.parameters()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return len(grads), bool(torch.as_tensor(float(norm)).isfinite())


@pytest.mark.parametrize("way", WAYS)
def test__a_nan_of_one_rank__is_seen_on_all(world, way):
    for count, finite in world(2, gradients_after_a_nan, way):
        assert count > 10
        assert not finite


def another_model(rank, way):
    prepare = None
    if rank:

        def prepare(gpt):
            gpt.head = nn.Linear(32, 31, bias=False)

    model = prepared(way, training.model("unit", prepare=prepare))
    ((x, y),) = training.batches(1)
    model(x, y)[1].backward()


@pytest.mark.parametrize("way", WAYS)
def test__another_model_on_one_rank__ends_in_an_error(way, tmp_path, capfd):
    store = tmp_path / "store"
    children = [forked(in_group, rank, store, another_model, way) for rank in range(2)]
    assert 0 not in [ended(child) for child in children]
    assert "Error" in capfd.readouterr().err
