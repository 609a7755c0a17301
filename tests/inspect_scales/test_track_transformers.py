"""Models of `transformers` keep the same bits under tracking, which records every tensor."""

import pytest
import torch
from tracked_models import DOORS, same, step

import scaledtensor as sct
from scaledtensor.inspect import (
    analyse_module,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)

pytest.importorskip("transformers")

from benchmarks.zoo import batch, build

NAMES = ["GPT2LMHeadModel", "LlamaForCausalLM"]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", NAMES)
def test__a_step__is_the_same_bits_and_every_parameter_is_seen(name, scaled):
    torch.manual_seed(0)
    model = build(name)
    if scaled:
        sct.scale_model(model)
    plain, _ = step(model, (), **batch(name, 1))
    for door in DOORS:
        tracked, scales = step(model, (), door, **batch(name, 1))
        assert all(map(same, plain, tracked))
        graph = scales.scales_graph()
        graph.lint()
        owned = {n for n, p in model.named_parameters() if p.requires_grad}
        nodes = {n.target: n for n in graph.nodes if n.op == "get_attr"}
        assert owned <= nodes.keys()
        assert all(nodes[n].meta["metrics"].bwd is not None for n in owned)
        pruned = prune_same_scale_tensors(prune_non_float_tensors(graph))
        assert 80 < len(pruned.nodes) < len(graph.nodes)


@pytest.mark.parametrize("name", NAMES)
def test__the_listing__has_the_lines_of_its_layers(name):
    text = analyse_module(build(name), **batch(name, 1))
    line = next(
        x for x in text.splitlines() if "residual + hidden_states" in x or "+ residual" in x
    )
    assert "(-> 0.0" in line


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test__captured_by_dynamo__every_parameter_is_seen(name):
    torch.compiler.reset()
    model = build(name)
    tracked = track_scales(model, capture="dynamo")
    tracked(**batch(name, 1)).loss.backward()
    seen = {n.target for n in tracked.scales_graph().nodes if n.op == "get_attr"}
    assert {n for n, _ in model.named_parameters()} <= seen
    torch.compiler.reset()
