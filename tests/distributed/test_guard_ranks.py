"""Weights are spread over ranks: the site of each rank looks, and all ranks take one shift."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import scaledtensor as sct
from scaledtensor.recipes import Unit
from scaledtensor.tensors.shards import part_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.linear.weight.data.abs_()

    def forward(self, x):
        return self.linear(x).relu()


def trained(guard, compiles=False):
    """Return the shifts after each step and the error of the last output."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(6)))
    inputs = torch.randn(2, 64, 64)
    with torch.no_grad():
        want = [plain(x) for x in inputs]
    model = sct.scale_model(plain, Unit(guard=guard))
    for block in model:
        fully_shard(block)
        if compiles:
            block.compile(backend="aot_eager")
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-20)
    shifts = []
    x, y = inputs[dist.get_rank()], want[dist.get_rank()]
    # One rank has larger data, which saturate earlier.
    factor = 1.0 + 15.0 * dist.get_rank()
    for _ in range(11):
        optimizer.zero_grad()
        held = sct.scaled(x, "fp32", recipe=Unit())
        out = model(held * (factor - 1) + held)
        out.dequantize().square().mean().backward()
        optimizer.step()
        shifts.append([part_of(p).recipe.shifts for p in model.parameters()])
    found = out.detach().dequantize() / factor
    return shifts, float((found - y).norm() / y.norm())


def test__sharded_weights__are_corrected_in_the_first_step__alike_on_all_ranks(world):
    (shifts, error), (others, other) = world(2, trained, True)
    assert shifts == others
    assert any(inputs > 0 for inputs, _ in shifts[0])
    assert error < 0.1
    assert other < 0.1


def test__compiled_sharded_weights__are_corrected_in_a_few_steps__alike_on_all_ranks(world):
    (shifts, error), (others, other) = world(2, trained, True, True)
    assert shifts[4:] == others[4:]
    assert any(inputs > 0 for inputs, _ in shifts[0])
    assert error < 0.1
    assert other < 0.1


def test__without_the_guard__they_saturate(world):
    assert min(error for _, error in world(2, trained, False)) > 0.2


def gathered():
    """Return the shifts of the parts of a weight, and of the whole weight."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.Sequential(nn.Linear(8, 8, bias=False)), Unit(shifts=(3, 1)))
    fully_shard(model)
    (weight,) = model.parameters()
    return part_of(weight).recipe.shifts, weight.full_tensor().recipe.shifts


def test__the_whole_of_a_sharded_weight__has_the_shifts_of_its_parts(world):
    assert world(2, gathered) == [((3, 1), (3, 1))] * 2
