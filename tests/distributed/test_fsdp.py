"""fully_shard on ScaledTensor parameters: the same training, and bytes of codes on the wire."""

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.recipes import Current, Delayed, Unit
from scaledtensor.shards import part_of

STEPS = 50


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


@pytest.mark.parametrize("ranks", [2, 4])
def test__a_sharded_training__is_that_of_one_process_that_accumulates(world, ranks):
    alone, values, gpt = single("unit", accumulate=ranks)
    results = world(ranks, losses_of, "unit")
    for losses, found, scales in results:
        assert losses == pytest.approx(alone, abs=1e-3 if ranks > 2 else 1e-6)
        assert scales == {name: float(p.scale) for name, p in gpt.named_parameters()}
        if ranks == 2:  # of more, the order in which a backend sums is its own
            assert all(torch.equal(found[name], values[name]) for name in values)
    assert all(r[0] == results[0][0] for r in results)


def test__a_sharded_training__is_the_same_to_the_bit__with_the_loss_scaled(world):
    plain = world(2, losses_of, "unit", 20)[0]
    scaled = world(2, losses_of_multiplied, 20, 2.0**-18)[0]
    assert plain[0] == scaled[0]
    assert all(torch.equal(plain[1][name], scaled[1][name]) for name in plain[1])


def losses_of_multiplied(steps, multiplier):
    return losses_of("unit", steps, multiplier=multiplier)


RECIPES = [
    Current(),
    Current(granularity="row"),
    Delayed(),
    sct.recipes.MinMSE(),
    sct.recipes.MXFP8(),
    sct.recipes.Blockwise(),
    Unit(saved="e4m3fn"),
    Unit(rebalance=1),
    Unit(rebalance=0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test__every_recipe__trains_sharded_as_alone(world, recipe):
    alone, values, _ = single(recipe, 12, accumulate=2)
    losses, found, _ = world(2, losses_of, recipe, 12)[0]
    assert losses == pytest.approx(alone, abs=1e-6)
    assert all(torch.equal(found[name], values[name]) for name in values)


def test__constant_scales__are_of_the_gradients_that_each_rank_has(world):
    # Those are of the mean over its own batch: another power of two than of accumulated ones.
    alone, _, _ = single(sct.recipes.Constant(), 12, accumulate=2)
    losses, _, _ = world(2, losses_of, sct.recipes.Constant(), 12)[0]
    assert losses == pytest.approx(alone, abs=2e-2)


# --- what fully_shard offers -----------------------------------------------------------------


def losses_with(kind, steps=10):
    """A training with one of the options of `fully_shard`, or of what is used beside it."""
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
        ("zeros", 2e-3),  # which are under no scale until they are measured
        ("frozen", 1e-6),
        ("partly plain", 1e-6),
    ],
)
def test__fully_shard__with(world, kind, tolerance):
    alone = losses_with(kind)
    for losses in world(2, losses_with, kind):
        assert losses == pytest.approx(alone, abs=tolerance)
