"""fully_shard on ScaledTensor parameters: the same training, and bytes of codes on the wire."""

import pytest
import torch
import training

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
