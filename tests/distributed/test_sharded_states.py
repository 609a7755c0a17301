"""Optimizers keep states in few bits for parameters that are spread over ranks."""

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import scaledtensor as sct
from scaledtensor.optim.buckets import part


def made(recipe, name, state_format, **options):
    gpt = training.sharded(training.model(recipe))
    make = getattr(sct.optim, name)
    return gpt, make(gpt.parameters(), lr=3e-3, state_format=state_format, **options)


def losses_of(recipe, name, state_format):
    gpt, optimizer = made(recipe, name, state_format)
    losses = training.train(gpt, 10, optimizer)
    p, state = next(iter(optimizer.state.items()))
    kinds = {type(x).__name__ for x in state.values() if isinstance(x, DTensor)}
    parts = {getattr(part(x), "kind", "Tensor") for x in state.values() if isinstance(x, DTensor)}
    return losses, kinds, parts, [x.shape == p.shape for x in state.values() if x.dim()]


@pytest.mark.parametrize(
    ("recipe", "state_format"),
    [
        ("unit", "e4m3fn"),
        (None, "e4m3fn"),
        pytest.param("unit", "fp16", marks=pytest.mark.slow),
        pytest.param(None, "int8", marks=pytest.mark.slow),
    ],
)
def test__states_in_few_bits__train_as_float32_ones(world, recipe, state_format):
    (exact, *_), _ = world(2, losses_of, recipe, "AdamW", "fp32")
    for losses, kinds, parts, shapes in world(2, losses_of, recipe, "AdamW", state_format):
        assert losses == pytest.approx(exact, abs=2e-2)
        assert kinds == {"DTensor"}
        assert parts == {"ExpandedTensor"}
        assert all(shapes)


def test__lion__steps_parts(world):
    for losses, *_ in world(2, losses_of, "unit", "Lion", "e4m3fn"):
        assert losses[-1] < losses[0]


def resumed(folder, state_format):
    gpt, optimizer = made("unit", "AdamW", state_format)
    training.train(gpt, 4, optimizer)
    sct.checkpoint.save(folder, gpt, optimizer)
    gone_on = training.train(gpt, 4, optimizer)
    other, theirs = made("unit", "AdamW", state_format)
    sct.checkpoint.load(folder, other, theirs)
    again = training.train(other, 4, theirs)
    equal = [
        torch.equal(training.whole(a), training.whole(b))
        for a, b in zip(gpt.parameters(), other.parameters(), strict=True)
    ]
    return gone_on == again, all(equal)


@pytest.mark.parametrize("state_format", ["e4m3fn", "fp32"])
def test__a_loaded_training__goes_on_to_the_same_bits(world, tmp_path, state_format):
    assert world(2, resumed, str(tmp_path / "kept"), state_format) == [(True, True)] * 2


def nothing_here():
    """A parameter with one row: the second rank has no part of it."""
    torch.manual_seed(0)
    layer = sct.scale_model(nn.Linear(16, 1))
    fully_shard(layer)
    optimizer = sct.optim.AdamW(layer.parameters(), lr=1e-2, state_format="e4m3fn")
    before = training.whole(layer.weight)
    for _ in range(2):
        layer(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return part(layer.weight).numel(), bool((training.whole(layer.weight) != before).all())


def test__a_rank_without_a_part__takes_part(world):
    (mine, moved), (other, moved_too) = world(2, nothing_here)
    assert (mine, other) == (16, 0)
    assert moved
    assert moved_too


def laid_out_otherwise():
    gpt, optimizer = made("unit", "AdamW", "e4m3fn")
    training.train(gpt, 1, optimizer)
    whole = training.model("unit")
    alone = sct.optim.AdamW(whole.parameters(), lr=3e-3, state_format="e4m3fn")
    try:
        alone.load_state_dict(optimizer.state_dict())
    except sct.errors.ShapeError as error:
        return str(error), len(alone.state)
    finally:
        dist.barrier()


def test__states_of_parts__are_no_states_of_the_whole(world):
    for message, states in world(2, laid_out_otherwise):
        assert "scaledtensor.checkpoint" in message
        assert states == 0
