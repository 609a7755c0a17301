"""`broadcast_from_rank0`: rank 0 has the whole state, with scales; all other ranks have nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import scaledtensor as sct

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def stepped(seed, sharded):
    torch.manual_seed(seed)
    model = sct.scale_model(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def value(x):
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.dequantize() if isinstance(x, sct.ScaledTensor) else x


def loaded(sharded):
    model, optimizer = stepped(0, sharded)
    state = get_model_state_dict(model, options=WHOLE)
    moments = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    first = dist.get_rank() == 0
    scaled = [isinstance(x, sct.ScaledTensor) for x in state.values()]
    new, its = stepped(1, sharded)
    set_model_state_dict(new, state if first else {}, options=FROM_RANK_0)
    set_optimizer_state_dict(new, its, moments if first else {}, options=FROM_RANK_0)
    same = []
    for p, q in zip(new.parameters(), model.parameters(), strict=True):
        own, wanted = its.state[p], optimizer.state[q]
        same.append(torch.equal(value(p), value(q)))
        same += [torch.equal(value(own[name]), value(wanted[name])) for name in wanted]
    parts = [p.to_local() if sharded else p for p in new.parameters()]
    new(torch.ones(4, 16)).square().mean().backward()
    its.step()
    return scaled, same, [float(p.scale) for p in parts]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test__the_scaled_state_of_rank_0__reaches_all_ranks(world, sharded):
    (scaled, same, scales), (_, same_there, scales_there) = world(2, loaded, sharded)
    assert all(scaled)
    assert all(same)
    assert all(same_there)
    assert scales == scales_there
