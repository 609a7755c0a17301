"""The processes that tests of several ranks run on."""

import pytest
import torch
import torch.distributed as dist


def summed(x):
    total = torch.tensor(float(dist.get_rank() + x))
    dist.all_reduce(total)
    return float(total)


def fails_on_one():
    if dist.get_rank() == 1:
        raise ValueError("not today")
    dist.barrier()


def test__a_job__runs_on_every_rank(world):
    assert world(2, summed, 10) == [21.0, 21.0]
    assert world(2, summed, 20) == [41.0, 41.0]


def test__an_error_of_one_rank__is_told__and_later_jobs_run(world):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1.*not today"):
        world(2, fails_on_one)
    assert world(2, summed, 10) == [21.0, 21.0]
