"""`fully_shard` cuts a quantised weight into codes, gathers codes, and adapters train beside it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
from transformers.pytorch_utils import Conv1D

import scaledtensor as sct
from scaledtensor.quantization.tensor import QuantizedTensor

CONFIGS = {
    "weight only": sct.WeightOnly(),
    "nvfp4": sct.WeightOnly("nvfp4"),
    "mxfp4": sct.WeightOnly("mxfp4"),
    "int4": sct.WeightOnly("int4"),
    "six bits": sct.WeightOnly("e2m3fn"),
    "dynamic": sct.Dynamic(),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, 3 * width, bias=False)

    def forward(self, x):
        return x + self.down(gelu(self.up(x) + self.b(self.a(x))))


def adapted(config, width):
    """Return a model whose adapters alone train, on a quantised base."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(width), Block(width), nn.Linear(width, 10))
    for name, p in model.named_parameters():
        p.requires_grad_(".a." in name or ".b." in name)
    return sct.quantize_(model, config, lambda module, name: name.endswith(("up", "down")))


def blocks_sharded(model, **options):
    for block in model[:2]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def trained(model, width, ranks, rank, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, width, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
        mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        loss = cross_entropy(model(x[mine]).float(), y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


def sharded(name, width, dtype):
    model, ranks = adapted(CONFIGS[name], width), dist.get_world_size()
    whole = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    blocks_sharded(model, mp_policy=policy)
    part = model[0].up.weight.to_local()
    kind, share = type(part), part.qdata.nbytes / whole[0].up.weight.qdata.nbytes
    losses = trained(model, width, ranks, dist.get_rank())
    values = model[0].up.weight.full_tensor()
    same = torch.equal(values, whole[0].up.weight.dequantize())
    return kind, share, losses, trained(whole, width, 1, 0), same


@pytest.mark.parametrize("name", CONFIGS)
def test__a_quantised_base__is_sharded_and_gathered_in_codes(world, name):
    for kind, share, losses, whole, same in world(2, sharded, name, 32, None):
        assert kind is QuantizedTensor
        assert share == 0.5
        assert losses == pytest.approx(whole, rel=1e-4)
        assert same


def test__mixed_precision__gives_the_value_in_its_dtype(world):
    for _, _, losses, whole, same in world(2, sharded, "int4", 32, torch.bfloat16):
        assert losses == pytest.approx(whole, rel=1e-2)
        assert same


def refused(config, rows):
    """Return the error of a layer that cannot be cut, from `fully_shard` or from the first call."""
    layer = sct.quantize_(nn.Linear(256, rows, bias=False), config)
    with pytest.raises(sct.errors.UnsupportedError) as caught:
        fully_shard(layer)(torch.ones(1, 256))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "rows", "told"),
    [
        (sct.WeightOnly("fp8_block"), 128, "parts of 64 rows, and 128 rows share"),
        (sct.WeightOnly("nvfp4"), 25, "parts of different sizes"),
        (sct.WeightOnly("nvfp4"), 1, "parts of different sizes"),
    ],
)
def test__parts_that_cannot_be_gathered__are_an_error_on_each_rank(world, config, rows, told):
    for words in world(2, refused, config, rows):
        assert told in words
        assert "ignored_params" in words


def transposed():
    layer = sct.quantize_(Conv1D(24, 32), sct.WeightOnly())
    with pytest.raises(sct.errors.UnsupportedError) as caught:
        fully_shard(layer)
    return str(caught.value)


def test__transposed_weights__are_an_error(world):
    assert all("lie in columns" in words for words in world(2, transposed))


def saved(folder, name):
    """Save a sharded model; load it sharded and whole; save it whole and load it sharded."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    whole = adapted(CONFIGS[name], 32)
    wanted = whole(x)
    sct.checkpoint.save(f"{folder}/sharded", blocks_sharded(adapted(CONFIGS[name], 32)))
    sct.checkpoint.save(f"{folder}/whole", whole)
    found = []
    for source, model in (
        ("sharded", blocks_sharded(emptied(name))),
        ("sharded", emptied(name)),
        ("whole", blocks_sharded(emptied(name))),
    ):
        sct.checkpoint.load(f"{folder}/{source}", model)
        found.append(torch.equal(model(x), wanted))
    try:
        sct.checkpoint.load(
            f"{folder}/sharded", blocks_sharded(adapted(sct.WeightOnly("int8"), 32))
        )
    except sct.errors.CheckpointError as error:
        return found, str(error)
    return found, ""


def emptied(name):
    """Return the model with other weights."""
    model = adapted(CONFIGS[name], 32)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                if isinstance(module.weight, QuantizedTensor):
                    module.weight.qdata.view(torch.uint8).zero_()
                else:
                    module.weight.zero_()
    return model


@pytest.mark.parametrize("name", ["nvfp4", "weight only", "dynamic"])
def test__a_folder__fits_any_number_of_ranks(world, tmp_path, name):
    for found, refusal in world(2, saved, str(tmp_path), name):
        assert found == [True, True, True]
        assert "WeightOnly(int8" in refusal


def on_one_rank(name):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    model = adapted(CONFIGS[name], 32)
    wanted = model(x)
    blocks_sharded(model, mesh=mesh)
    return [torch.equal(model(x), wanted) for _ in range(2)]


@pytest.mark.parametrize("name", ["nvfp4", "dynamic"])
def test__one_rank__holds_all_parts(world, name):
    assert world(2, on_one_rank, name) == [[True, True], [True, True]]


def small(layer, config):
    """Return whether results stay as they were where a part has few rows or blocks."""
    torch.manual_seed(0)
    layer = sct.quantize_(layer, config)
    shape = {nn.Linear: (4, 64), nn.Conv1d: (4, 16, 8), nn.Conv2d: (4, 16, 8, 8)}[type(layer)]
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    wanted = layer(x)
    return torch.equal(fully_shard(layer)(x), wanted)


@pytest.mark.parametrize(
    ("layer", "config"),
    [
        (nn.Linear(64, 2), sct.WeightOnly()),
        (nn.Linear(64, 256), sct.WeightOnly("fp8_block")),
        (nn.Conv1d(16, 32, 1), sct.WeightOnly("int8", (16, 16))),
        (nn.Conv2d(16, 32, 3), sct.WeightOnly("int8", (16, 16))),
    ],
    ids=["one row", "one block", "conv1d", "conv2d"],
)
def test__parts_of_one_scale__and_of_kernels__are_gathered(world, layer, config):
    assert world(2, small, layer.requires_grad_(False), config) == [True, True]


def calibrated_apart():
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, bias=False).requires_grad_(False)
    torch.manual_seed(dist.get_rank())
    data = [torch.randn(32, 64) * (2 * torch.randn(64)).exp()]
    sct.quantize_(layer, sct.WeightOnly("int4", 32, fold=True), calibration=data)
    with pytest.raises(sct.errors.UnsupportedError) as caught:
        fully_shard(layer)(torch.ones(1, 64))
    return str(caught.value)


def test__ranks_with_other_factors__are_an_error_on_each(world):
    assert all("same calibration data" in words for words in world(2, calibrated_apart))


def unwrapped():
    model = blocks_sharded(adapted(sct.WeightOnly(), 32))
    with pytest.raises(sct.errors.ModelError) as caught:
        sct.unscale_model(model)
    return str(caught.value)


def test__a_sharded_base__is_not_unwrapped(world):
    assert "spread over ranks" in world(2, unwrapped)[0]


def in_other_programs():
    weight = sct.quantize_(nn.Linear(32, 24), sct.WeightOnly()).weight
    with torch.no_grad():
        made = [weight.new_zeros(24, 32), *weight.chunk(2), weight[:4], weight.view(-1)]
    return [isinstance(x, QuantizedTensor) for x in made], made[0].add_(1).sum().item()


def test__the_same_operators_elsewhere__read_plain_values():
    kinds, total = in_other_programs()
    assert not any(kinds)
    assert total == 24 * 32
