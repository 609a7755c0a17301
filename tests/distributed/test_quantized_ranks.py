"""Quantised weights on several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scaledtensor as sct


def layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return sct.quantize_(nn.Linear(32, 24), sct.WeightOnly())


def written():
    weight = layer(dist.get_rank()).weight
    before = weight.dequantize()
    told = []
    for write in (
        lambda: dist.all_reduce(weight.data),
        lambda: dist.all_reduce(weight),
        lambda: dist.broadcast(weight.data, 0),
        lambda: dist.reduce(weight, 0),
        lambda: dist.all_gather_into_tensor(weight.data, torch.ones(12, 32)),
    ):
        with pytest.raises(sct.errors.UnsupportedError) as caught:
            write()
        told.append(str(caught.value))
    return told, torch.equal(weight.dequantize(), before)


def test__a_collective_that_writes__is_an_error(world):
    for told, same in world(2, written):
        assert same
        assert all("unscale_model(model)" in words for words in told)


def written_into_blocks():
    x = sct.scaled(torch.full((4, 32), dist.get_rank() + 1.0), "e4m3fn", "amax", sct.PerAxis(0))
    told = []
    for write in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([x, x], x),
        lambda: dist.reduce_scatter_tensor(x, torch.ones(8, 32)),
    ):
        with pytest.raises(sct.errors.UnsupportedError) as caught:
            write()
        told.append(str(caught.value))
    return told


def test__a_collective_that_writes_into_codes_of_blocks__is_an_error(world):
    for told in world(2, written_into_blocks):
        assert all("x.widened()" in words for words in told)


def gathered():
    weight = layer(dist.get_rank()).weight
    parts = [torch.zeros(24, 32) for _ in range(2)]
    dist.all_gather(parts, weight)
    whole = torch.zeros(48, 32)
    dist.all_gather_into_tensor(whole, weight.data)
    return parts, whole


def test__a_collective_that_reads__takes_the_values(world):
    for parts, whole in world(2, gathered):
        for rank, part in enumerate(parts):
            assert torch.equal(part, layer(rank).weight.dequantize())
        assert torch.equal(whole, torch.cat(parts))


class Adapted(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base, self.adapter = layer(seed), nn.Linear(32, 24)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def in_ddp(equal):
    model = Adapted(0 if equal else dist.get_rank())
    try:
        DistributedDataParallel(model)(torch.ones(1, 32)).sum().backward()
    except sct.errors.UnsupportedError as error:
        return str(error)
    return float(model.adapter.weight.grad.sum())


def test__ddp__takes_equal_weights__and_says_so_if_they_differ(world):
    assert all(isinstance(found, float) for found in world(2, in_ddp, True))
    first, second = world(2, in_ddp, False)
    told = second if isinstance(second, str) else first
    assert "all ranks hold equal codes" in told
