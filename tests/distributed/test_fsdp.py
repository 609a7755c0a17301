"""`fully_shard` of ScaledTensor parameters gives the same training and sends codes."""

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.recipes import Current, Delayed, Unit
from scaledtensor.tensors.shards import part_of

STEPS = 25  # past two rebalancings


def losses_of(recipe, steps=STEPS, **options):
    gpt = training.sharded(training.model(recipe))
    losses = training.train(gpt, steps, **options)
    values = {name: training.whole(p) for name, p in gpt.named_parameters()}
    scales = {name: float(part_of(p).scale) for name, p in gpt.named_parameters()}
    return losses, values, scales


def single(recipe, steps=STEPS, **options):
    gpt = training.model(recipe)
    losses = training.train(gpt, steps, share=False, **options)
    return losses, {name: training.whole(p) for name, p in gpt.named_parameters()}, gpt


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test__a_sharded_training__is_that_of_one_process_that_accumulates(world, ranks):
    alone, values, gpt = single("unit", accumulate=ranks)
    results = world(ranks, losses_of, "unit")
    for losses, found, scales in results:
        assert losses == pytest.approx(alone, abs=1e-3 if ranks > 2 else 1e-6)
        assert scales == {name: float(p.scale) for name, p in gpt.named_parameters()}
        if ranks == 2:  # With more ranks, each backend sums in its own order.
            assert all(torch.equal(found[name], values[name]) for name in values)
    assert all(r[0] == results[0][0] for r in results)


def test__a_sharded_training__is_the_same_to_the_bit__with_the_loss_scaled(world):
    plain = world(2, losses_of, "unit", 12)[0]
    scaled = world(2, losses_of_multiplied, 12, 2.0**-18)[0]
    assert plain[0] == scaled[0]
    assert all(torch.equal(plain[1][name], scaled[1][name]) for name in plain[1])


def losses_of_multiplied(steps, multiplier):
    return losses_of("unit", steps, multiplier=multiplier)


RECIPES = [
    Current(),
    Delayed(),
    sct.recipes.MXFP8(),
    Unit(rebalance=1),
    *(
        pytest.param(recipe, marks=pytest.mark.slow)
        for recipe in (
            Current(granularity="row"),
            sct.recipes.MinMSE(),
            sct.recipes.Blockwise(),
            Unit(saved="e4m3fn"),
            Unit(rebalance=0),
        )
    ),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test__every_recipe__trains_sharded_as_alone(world, recipe):
    alone, values, _ = single(recipe, 8, accumulate=2)
    losses, found, _ = world(2, losses_of, recipe, 8)[0]
    assert losses == pytest.approx(alone, abs=1e-6)
    assert all(torch.equal(found[name], values[name]) for name in values)


def test__constant_scales__are_of_the_gradients_that_each_rank_has(world):
    # Those gradients are of the mean over the rank's batch, so their power of two differs from
    # accumulated ones.
    alone, _, _ = single(sct.recipes.Constant(), 8, accumulate=2)
    losses, _, _ = world(2, losses_of, sct.recipes.Constant(), 8)[0]
    assert losses == pytest.approx(alone, abs=2e-2)


# --- what fully_shard offers -----------------------------------------------------------------


def losses_with(kind, steps=6):
    """Train with one of the options of `fully_shard`, or with a feature beside it."""
    options, how = {}, {}
    prepare = wrap = None
    recipe = "unit"
    if kind == "reduce in bf16":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    elif kind == "parameters in bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    elif kind == "not resharded":
        options["reshard_after_forward"] = False
    elif kind == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif kind == "accumulated":
        how["accumulate"] = 2
    elif kind == "checkpointed":
        wrap = checkpointed
    elif kind == "zeros":
        prepare = zeroed
    elif kind == "frozen":
        prepare, recipe = frozen, Unit(store_frozen=True)
    elif kind == "partly plain":
        recipe = Unit(overrides={"blocks.0*": None})
    gpt = training.model(recipe, prepare=prepare)
    if wrap is not None:
        wrap(gpt)
    if dist.is_initialized():
        gpt = training.sharded(gpt, **options)
    else:
        how["accumulate"] = 2 * how.get("accumulate", 1)
    return training.train(gpt, steps, **how)


def checkpointed(gpt):
    for block in gpt.blocks:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)


def zeroed(gpt):
    for block in gpt.blocks:
        nn.init.zeros_(block.mlp[2].weight)


def frozen(gpt):
    for block in gpt.blocks:
        block.attention.qkv.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("reduce in bf16", 2e-3),
        ("parameters in bf16", 2e-2),
        ("not resharded", 1e-6),
        ("offloaded", 1e-6),
        ("accumulated", 1e-3),
        ("checkpointed", 1e-6),
        ("zeros", 2e-3),  # They have no scale until they are measured.
        ("frozen", 1e-6),
        ("partly plain", 1e-6),
    ],
)
def test__fully_shard__with(world, kind, tolerance):
    alone = losses_with(kind)
    for losses in world(2, losses_with, kind):
        assert losses == pytest.approx(alone, abs=tolerance)


# --- the rest of the library on sharded models -----------------------------------------------


def compiled_losses():
    torch._dynamo.reset()
    gpt = training.model("unit")
    for i, block in enumerate(gpt.blocks):
        gpt.blocks[i] = torch.compile(block, fullgraph=True)
    return training.train(training.sharded(gpt), 5)


@pytest.mark.slow
def test__compiled_blocks__train_as_eager_ones(world):
    eager = world(2, losses_of, "unit", 5)[0][0]
    for losses in world(2, compiled_losses):
        assert losses == pytest.approx(eager, abs=1e-2)


def clipped():
    gpt = training.model("unit")
    if dist.is_initialized():
        training.sharded(gpt)
    inputs, targets = next(training.batches(1))
    gpt(inputs, targets)[1].backward()
    norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), 0.1)
    return float(training.whole(norm)), [training.whole(p.grad) for p in gpt.parameters()]


def test__clip_grad_norm__sees_the_whole_gradient(world):
    norm, grads = clipped()
    for found, parts in world(2, clipped):
        assert found == pytest.approx(norm, rel=1e-5)
        for a, b in zip(parts, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def rebalanced():
    gpt = training.sharded(training.model(Unit(rebalance=0)))
    training.train(gpt, 8)
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(2.0**6)  # The change is in place, so scales stay.
    before = {name: training.whole(p) for name, p in gpt.named_parameters()}
    changed = sct.rebalance(gpt)
    parts = {name: part_of(p) for name, p in gpt.named_parameters()}
    kept = [torch.equal(before[name], training.whole(p)) for name, p in gpt.named_parameters()]
    return changed, {name: float(part.scale) for name, part in parts.items()}, all(kept), before


def test__rebalance__is_by_the_whole_of_each_parameter(world):
    first, second = world(2, rebalanced)
    changed, scales, kept, values = first
    assert kept
    assert second[:3] == first[:3]
    assert changed == len(scales)
    for name, value in values.items():
        assert scales[name] == sct.scaled(value).scale


def told(recipe):
    gpt = training.sharded(training.model(recipe))
    shown = str(gpt)
    try:
        sct.unscale_model(gpt)
    except sct.errors.ModelError as error:
        return shown, str(error)


def test__a_sharded_model__shows_its_recipe__and_is_not_unwrapped(world):
    shown, error = world(2, told, "unit")[0]
    assert "Unit()" in shown
    assert "full_tensor" in error


def coded_parameter():
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    values = torch.randn(32, 32, generator=generator)
    held = sct.scaled(values, "e4m3fn", "amax", sct.PerBlock((1, 32)))
    layer.weight = nn.Parameter(held, requires_grad=False)
    if dist.is_initialized():
        fully_shard(layer)
    y, weight = layer(torch.randn(4, 32, generator=generator)), layer.weight
    held = weight.to_local() if hasattr(weight, "to_local") else weight
    return training.whole(y), held.format.name


def test__codes_under_scales_of_blocks__are_sharded_widened(world):
    y, fmt = coded_parameter()
    assert fmt == "e4m3fn"
    for found, kept in world(2, coded_parameter):
        torch.testing.assert_close(found, y, rtol=1e-2, atol=1e-2)
        assert kept in ("fp32", "bf16")


class Tied(nn.Module):
    """The model's linear layer comes first and shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 32, bias=False)
        self.table = nn.Embedding(32, 16)
        self.table.weight = self.head.weight
        self.plain = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.head(self.plain(self.table(x)))


def formats_gathered():
    torch.manual_seed(0)
    made = sct.scale_model(Tied())
    whole = dict(made.named_parameters())
    expected = made(torch.arange(32)).dequantize().detach()
    fully_shard(made)
    seen = {}

    def look(module, inputs):
        seen.update((name, p.format.name) for name, p in made.named_parameters())

    made.plain.register_forward_pre_hook(look)
    found = made(torch.arange(32)).dequantize().detach()
    return sorted(whole), seen, torch.equal(found, expected)


def test__a_weight_that_is_looked_up_too__is_gathered_as_it_is(world):
    for _, seen, same in world(2, formats_gathered):
        assert seen == {"head.weight": "fp32", "plain.weight": "e4m3fn"}
        assert same


def loaded_in_part():
    torch.manual_seed(0)
    layer = sct.scale_model(nn.Linear(16, 5))  # three rows and two
    x = torch.ones(2, 16)
    expected = training.whole(layer(x))
    fully_shard(layer)
    layer(x)
    layer.load_state_dict({}, strict=False)
    return torch.equal(training.whole(layer(x)), expected)


def test__uneven_parts__agree_again_after_loading(world):
    assert world(2, loaded_in_part) == [True, True]


def flattened():
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        FullyShardedDataParallel(
            training.model("unit"), use_orig_params=True, device_id=torch.device("cpu")
        )
    except sct.errors.UnsupportedError as error:
        return str(error)


def test__the_class_that_flattens_parameters__is_refused_by_name(world):
    (message,) = world(1, flattened)
    assert "fully_shard(model)" in message


def test__other_programs__may_ask_whether_a_parameter_is_flattened():
    weight = next(training.model("unit").parameters())
    assert not hasattr(weight, "_fsdp_flattened")  # Prodigy asks so
    assert getattr(weight, "_fsdp_flattened", False) is False


def calibrated(recipe, by_layer):
    """Each rank has its own data, and the terms of one rank add up to more."""
    torch.manual_seed(0)
    parts = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    for linear in parts:
        linear.weight.data.normal_(std=0.2).abs_()
    model = sct.scale_model(nn.Sequential(*parts), recipe)
    for layer in parts if by_layer else ():
        fully_shard(layer)
    fully_shard(model)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    batch = torch.randn(32, 64, generator=generator)
    batch = batch.abs() * 100 if torch.distributed.get_rank() else batch
    sct.calibrate(model, [batch])
    shifts = [getattr(part_of(p).recipe, "shifts", None) for p in model.parameters()]
    return [b.clone() for b in model.buffers()], shifts, float(batch.max())


@pytest.mark.parametrize("by_layer", [False, True])
def test__a_calibration__finds_on_all_ranks_what_one_saw(world, by_layer):
    (first, _, small), (second, _, large) = world(2, calibrated, Delayed(), by_layer)
    assert large > 2 * small
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert float(first[0][0, 1]) == pytest.approx(large, rel=0.01)
    (_, first, _), (_, second, _) = world(2, calibrated, Unit(), by_layer)
    assert first == second
    assert any(shifts != (0, 0) for shifts in first)
