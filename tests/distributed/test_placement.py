"""Ranks own whole tensors: the training is the same as with one optimizer, and its states are
divided."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from tensors import value_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scaledtensor as sct
from scaledtensor.distributed import ShardedOptimizer, count_traffic, place
from scaledtensor.errors import CheckpointError, DistributedError, ShapeError, UnsupportedError


def test__tensors__go_to_the_emptiest_rank__largest_first():
    sizes = [3, 5, 2, 7, 5, 1]
    tensors = [torch.empty(n) for n in sizes]
    # 7 | 5 . | 7, 5+5 | 7+3, 10 | 10+2, 10 | 12, 11
    assert place(tensors, 2) == [0, 1, 0, 0, 1, 1]
    assert place(tensors, 2) == place(tensors, 2)
    assert place(tensors, 1) == [0] * 6
    assert place([], 3) == []
    assert place(tensors[:1], 3, [4, 0, 0]) == [1]


def test__a_scaled_tensor__counts_with_its_scales():
    codes = sct.scaled(torch.randn(64), "e4m3fn")  # 64 bytes, a scale and an expected RMS
    assert place([torch.empty(17), torch.empty(71, dtype=torch.uint8), codes], 2) == [1, 1, 0]


def test__no_rank_holds_more_than_four_thirds_of_the_best():
    g = torch.Generator().manual_seed(0)
    for _ in range(30):
        sizes = torch.randint(1, 50, (7,), generator=g).tolist()
        tensors = [torch.empty(n, dtype=torch.uint8) for n in sizes]
        ours = place(tensors, 3)
        fullest = max(sum(s for s, r in zip(sizes, ours, strict=True) if r == k) for k in range(3))
        best = min(
            max(sum(s for s, r in zip(sizes, ranks, strict=True) if r == k) for k in range(3))
            for ranks in itertools.product(range(3), repeat=7)
        )
        assert fullest <= best * (4 / 3 - 1 / 9)


@pytest.mark.parametrize(("ranks", "held"), [(0, None), (-1, None), (2, [1])])
def test__ranks_that_cannot_be__are_refused(ranks, held):
    with pytest.raises(ShapeError, match="place takes"):
        place([torch.empty(1)], ranks, held)


def model_of(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 1000))
    if kind in ("scaled", "bfloat16"):
        sct.scale_model(model.to(torch.bfloat16) if kind == "bfloat16" else model)
    elif kind == "mixed":
        sct.scale_model(model, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


def groups_of(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(kind, make, steps, checkpoint=None):
    """Return the losses, the parameters with their scales, and the optimizer."""
    model = model_of(kind)
    forward = DistributedDataParallel(model)
    optimizer = make(groups_of(model))
    if checkpoint is not None:
        weights, state = checkpoint
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    g = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 40, generator=g), torch.randint(1000, (8,), generator=g)
        x = x.to(next(model.parameters()).dtype)
        loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses, model, optimizer


def sharded(groups):
    return ShardedOptimizer(groups, torch.optim.AdamW, lr=1e-2)


def whole(groups):
    return torch.optim.AdamW(groups, lr=1e-2)


def held(state):
    """Return the bytes of an optimizer's states on this rank."""
    tensors = [t for of_one in state.values() for t in of_one.values()]
    tensors = [part for t in tensors for part in sct.distributed.placement.parts(t)]
    return sum(t.nbytes for t in tensors)


def inner(p):
    return [t.clone() for t in sct.distributed.placement.parts(p)]


def both_ways(kind, steps):
    losses, one, optimizer = train(kind, whole, steps)
    ours, two, divided = train(kind, sharded, steps)
    same = [
        all(torch.equal(a, b) for a, b in zip(inner(p), inner(q), strict=True))
        for p, q in zip(one.parameters(), two.parameters(), strict=True)
    ]
    full, again = optimizer.state_dict(), divided.state_dict()
    equal = full["state"].keys() == again["state"].keys() and all(
        torch.equal(
            torch.as_tensor(value_of(a[k])), torch.as_tensor(value_of(again["state"][i][k]))
        )
        for i, a in full["state"].items()
        for k in a
    )
    options = [{k: v for k, v in g.items() if k != "params"} for g in full["param_groups"]] == [
        {k: v for k, v in g.items() if k != "params"} for g in again["param_groups"]
    ]
    return losses == ours, same, equal, options, held(optimizer.state), held(divided.state)


@pytest.mark.parametrize("kind", ["plain", "scaled", "bfloat16", "mixed"])
def test__a_sharded_optimizer__trains_bit_for_bit_as_one_for_all(world, kind):
    results = world(2, both_ways, kind, 25)
    for losses, parameters, states, options, _, _ in results:
        assert losses
        assert all(parameters)
        assert states
        assert options
    everything = results[0][4]
    shares = [divided for *_, divided in results]
    assert abs(sum(shares) - everything) < 200  # a count of steps for each parameter
    assert max(shares) < everything * 0.97  # the last weight alone is 0.95 of it


def resumed(kind):
    _, model, optimizer = train(kind, sharded, 3)
    checkpoint = ({k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict())
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 40, generator=g), torch.randint(1000, (8,), generator=g)

    def one_more(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        return [t for p in model.parameters() for t in inner(p)]

    went_on = one_more(model, optimizer)
    ways = []
    for make in (sharded, whole):  # The states go into an optimizer that is not sharded, too.
        fresh = model_of(kind)
        fresh.load_state_dict(checkpoint[0])
        again = make(groups_of(fresh))
        again.load_state_dict(copy.deepcopy(checkpoint[1]))  # torch keeps the tensors
        ways.append(one_more(fresh, again))
    counted = [g.get("steps_for_rebalance") for g in checkpoint[1]["param_groups"]]
    return [all(map(torch.equal, went_on, way)) for way in ways], counted


@pytest.mark.parametrize("kind", ["plain", "scaled"])
def test__a_checkpoint__goes_on_bit_for_bit__sharded_or_not(world, kind):
    for ways, counted in world(2, resumed, kind):
        assert ways == [True, True]
        assert counted == ([3, 3] if kind == "scaled" else [None, None])


def traffic_of_a_step():
    model = model_of("plain")
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with count_traffic() as traffic:
        optimizer.step()
    added = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    added.grad = torch.ones(3)
    optimizer.step(lambda: added.sum())
    rows = [(row.name, row.calls, row.payload) for row in traffic.collectives]
    return rows, sum(p.nbytes for p in model.parameters()), added.tolist(), optimizer.owner[added]


def test__a_step__broadcasts_each_parameter_once__and_groups_can_be_added(world):
    results = world(2, traffic_of_a_step)
    for rows, size, added, owner in results:
        assert rows == [("broadcast", 2, size)]  # the last weight, and all else in one
        assert added == [owner - 0.5] * 3  # the owner's value, stepped


def refusals():
    model, told = model_of("plain"), []
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    shard = dist.tensor.distribute_tensor(torch.ones(4), mesh, [dist.tensor.Shard(0)])
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:-1]
    for call in (
        lambda: optimizer.add_param_group({"params": [nn.Parameter(shard)]}),
        lambda: optimizer.load_state_dict(state),
        lambda: ShardedOptimizer(model.parameters(), torch.optim.SGD, group=5),
    ):
        try:
            call()
        except (UnsupportedError, CheckpointError, DistributedError) as error:
            told.append(str(error))
    return told, len(optimizer.param_groups)


def test__what_cannot_be__is_told__and_nothing_changed(world):
    for rank, (told, groups) in enumerate(world(2, refusals)):
        assert "1 parameters are DTensors" in told[0]
        assert "groups of [5] parameters, the optimizer of [6]" in told[1]
        assert f"rank {rank} is not in the group" in told[2]
        assert groups == 1


def test__without_a_process_group__it_says_what_to_call():
    with pytest.raises(DistributedError, match="init_process_group"):
        ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=1.0)
