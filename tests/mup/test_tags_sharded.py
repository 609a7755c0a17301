"""FSDP2 replaces parameters by DTensors, which keep the tags and take the same steps."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import scaledtensor.nn as uu
from scaledtensor import mup
from scaledtensor.optim import AdamW


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tagged_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    for layer, mup_type in ((model[0], "weight"), (model[2], "output")):
        mup.tag(layer.weight, mup_type, 2)
        mup.tag(layer.bias, "bias")
    return mup.keep_tags(model)


def decoder() -> nn.Sequential:
    torch.manual_seed(0)
    return uu.TransformerDecoder(hidden_size=16, vocab_size=8, layers=2, heads=2)


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "x"),
    [(tagged_model, torch.randn(8, 4)), (decoder, torch.randint(0, 8, (2, 6)))],
    ids=["tagged", "decoder"],
)
def test__tags__survive_fully_shard_and_training(one_process, make, x):
    plain = make()
    model = copy.deepcopy(plain)
    for layer in (*getattr(model, "layers", model[:1]), model):
        fully_shard(layer)
    expected = [mup.tags(p) for p in plain.parameters()]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert [mup.tags(p) for p in model.parameters()] == expected
    for got, want in zip(train(model, x), train(plain, x), strict=True):
        torch.testing.assert_close(got, want)
    assert [mup.tags(p) for p in model.parameters()] == expected
