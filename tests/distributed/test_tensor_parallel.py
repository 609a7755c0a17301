"""Tensor parallelism of scaled linears, alone and with fully_shard."""

import pytest
import torch
import torch.distributed as dist
import training
from tensors import gaussian
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as parallel_styles
from torch.distributed.tensor.parallel import parallelize_module

import scaledtensor as sct
from scaledtensor.distributed import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from scaledtensor.errors import ModelError
from scaledtensor.formats import FP32

#: Scales and rules of Unit without its rounding, which would hide the effect of a division on sums.
WIDE = sct.recipes.Unit(forward=FP32, gradient=FP32, activation=FP32)

PLAN = {
    "blocks.*.attention.qkv": ColwiseParallel(output_layouts=Replicate()),
    "blocks.*.attention.proj": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
}


def parallel(gpt, mesh):
    return parallelize_module(gpt, mesh, PLAN)


def by_tensor(recipe, steps, **options):
    gpt = parallel(training.model(recipe), training.mesh("tp"))
    losses = training.train(gpt, steps, share=False, **options)
    return losses, {name: training.whole(p) for name, p in gpt.named_parameters()}


def in_two_dimensions(recipe, steps, **options):
    mesh = training.mesh("dp", "tp")
    gpt = parallel(training.model(recipe), mesh["tp"])
    training.sharded(gpt, mesh=mesh["dp"])
    rank = mesh.get_local_rank("dp")
    losses = training.train(gpt, steps, part=(rank, 2, mesh.get_group("dp")), **options)
    return losses, {name: training.whole(p) for name, p in gpt.named_parameters()}


@pytest.mark.parametrize(
    ("recipe", "apart"),
    [
        pytest.param(WIDE, 2e-6, id="wide"),
        ("unit", 1e-2),
        ("current", 1e-2),
        pytest.param("mxfp8", 1e-2, marks=pytest.mark.slow),
    ],
)
def test__a_training__has_the_losses_of_one_process(world, recipe, apart):
    gpt = training.model(recipe)
    alone = training.train(gpt, 10, share=False)
    for losses, values in world(2, by_tensor, recipe, 10):
        assert losses == pytest.approx(alone, abs=apart)
        for name, p in gpt.named_parameters():
            assert values[name].shape == p.shape


def multiplied(job, multiplier):
    return job("unit", 8, multiplier=multiplier)


@pytest.mark.parametrize(
    ("job", "ranks"), [(by_tensor, 2), pytest.param(in_two_dimensions, 4, marks=pytest.mark.slow)]
)
def test__a_training__is_the_same_to_the_bit__with_the_loss_scaled(world, job, ranks):
    plain, scaled = (world(ranks, multiplied, job, m)[0] for m in (1.0, 2.0**-18))
    assert plain[0] == scaled[0]
    assert all(torch.equal(plain[1][name], scaled[1][name]) for name in plain[1])


@pytest.mark.parametrize(("recipe", "apart"), [pytest.param(WIDE, 2e-6, id="wide"), ("unit", 1e-2)])
def test__beside_fully_shard__losses_are_those_of_one_process(world, recipe, apart):
    gpt = training.model(recipe)
    alone = training.train(gpt, 8, share=False, accumulate=2)
    results = world(4, in_two_dimensions, recipe, 8)
    for losses, values in results:
        assert losses == pytest.approx(alone, abs=apart)
        assert all(torch.equal(values[name], results[0][1][name]) for name in values)


# --- sequence parallelism --------------------------------------------------------------------


class Feed(nn.Sequential):
    """An MLP as one module, so that its input can be prepared."""


def block(norm, recipe="unit"):
    torch.manual_seed(0)
    made = nn.Sequential(norm(32), Feed(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    nn.init.normal_(made[0].weight)
    return sct.scale_model(made, recipe)


def results(made, x, cut=lambda t: t):
    y = made(sct.scaled(x).requires_grad_())
    weights = torch.linspace(-1, 1, 4 * 8 * 32).view(4, 8, 32)
    (y * cut(weights)).sum().backward()
    values = {name: training.whole(p.grad) for name, p in made.named_parameters()}
    return training.whole(y), values


def by_sequence(norm, recipe, prepared):
    mesh = training.mesh("tp")
    plan = {
        "0": SequenceParallel(),
        "1.0": ColwiseParallel() if prepared else ColwiseParallel(input_layouts=Shard(1)),
        "1.2": RowwiseParallel(output_layouts=Shard(1)),
    }
    if prepared:
        plan["1"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    made = parallelize_module(block(norm, recipe), mesh, plan)
    rank = dist.get_rank()
    return results(made, inputs().chunk(2, 1)[rank].clone(), lambda t: t.chunk(2, 1)[rank])


def inputs():
    return gaussian(4, 8, 32, seed=1)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    # Tolerances for the order of sums, for products rounded to bfloat16, and for operands with an
    # amax per part.
    [pytest.param(WIDE, 1e-5, id="wide"), ("unit", 0.02), ("current", 0.1)],
)
def test__a_sequence_in_parts__gives_the_values_and_gradients_of_the_whole(
    world, norm, prepared, recipe, tolerance
):
    y, grads = results(block(norm, recipe), inputs())
    parts = world(2, by_sequence, norm, recipe, prepared)
    near(torch.cat([part for part, _ in parts], 1), y, tolerance)
    for _, found in parts:
        for name, grad in grads.items():
            near(found[name], grad, tolerance)


def near(a, b, tolerance):
    assert (a - b).norm() < tolerance * b.norm()


# --- what does not fit -----------------------------------------------------------------------


def refused(prepare, style):
    mesh = training.mesh("tp")
    try:
        parallelize_module(prepare(), mesh, {"0": style})
    except (ModelError, sct.errors.UnsupportedError) as error:
        return str(error)


def plain():
    return nn.Sequential(nn.Linear(4, 4))


def uneven():
    return sct.scale_model(nn.Sequential(nn.Linear(4, 3)))


def norm():
    return sct.scale_model(nn.Sequential(nn.LayerNorm(4)))


def delayed():
    return sct.scale_model(nn.Sequential(nn.Linear(4, 4)), "delayed")


@pytest.mark.parametrize(
    ("prepare", "style", "words"),
    [
        (plain, ColwiseParallel(), "call scale_model"),
        (uneven, ColwiseParallel(), "which 2 ranks do not divide"),
        (norm, RowwiseParallel(), "is for nn.Linear"),
        (norm, ColwiseParallel(), "got LayerNorm"),
        (delayed, ColwiseParallel(), "recipe by history"),
        (
            plain,
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "call scale_model",
        ),
    ],
)
def test__what_does_not_fit__is_refused_by_name(world, prepare, style, words):
    assert all(words in message for message in world(2, refused, prepare, style))


def test__layouts__go_in_pairs():
    with pytest.raises(ModelError, match="got 1 and 2"):
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=(Replicate(), None))


def of_torch(style):
    return refused(uneven, style)


@pytest.mark.parametrize(
    "style", [parallel_styles.ColwiseParallel, parallel_styles.RowwiseParallel]
)
def test__the_styles_of_torch__are_refused_by_name(world, style):
    (message,) = world(1, of_torch, style())
    assert "scaledtensor.distributed do" in message
