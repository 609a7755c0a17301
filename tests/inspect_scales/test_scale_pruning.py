"""Pruning removes, keeps and bridges nodes."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from tracked_models import BUILDERS

from scaledtensor.errors import ModelError
from scaledtensor.inspect import (
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    tracking,
)


class Mixed(nn.Module):
    """A model with integers, masks, views and a tuple between operators on floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids.clamp(0, 9), self.table)
        x = x.view(-1, 8).t().contiguous()
        a, b = (x * 3).chunk(2)
        mask = a > b
        return torch.where(mask, a + 1, b).sum()


def recorded(model: nn.Module, *args: Tensor) -> fx.Graph:
    with tracking(model) as scales:
        model(*args).square().mean().backward()
    return scales.scales_graph()


def names(graph: fx.Graph) -> list[str]:
    return [n.meta["clean_name"] for n in graph.nodes]


def inputs(graph: fx.Graph, name: str) -> list[str]:
    (node,) = (n for n in graph.nodes if n.meta["clean_name"] == name)
    return [n.meta["clean_name"] for n in node.all_input_nodes]


def test__what_holds_no_floats__goes():
    graph = recorded(Mixed(), torch.arange(6))
    assert {"ids", "clamp", "gt", "chunk"} <= set(names(graph))
    pruned = prune_non_float_tensors(graph)
    assert not {"ids", "clamp", "gt", "chunk"} & set(names(pruned))
    assert all("metrics" in n.meta for n in pruned.nodes if n.op != "output")
    assert inputs(pruned, "embedding") == ["table"]
    assert inputs(pruned, "chunk_1") == ["mul"]
    # The mask had two inputs and now has none.
    assert inputs(pruned, "where") == ["add", "chunk_1"]


def test__what_keeps_the_scale__goes():
    graph = prune_non_float_tensors(recorded(Mixed(), torch.arange(6)))
    pruned = prune_same_scale_tensors(graph)
    assert not {"view", "t", "contiguous"} & set(names(pruned))
    assert {"table", "mul", "where"} <= set(names(pruned))
    coarse = prune_same_scale_tensors(graph, rtol=1e6)
    assert "mul" not in names(coarse)
    assert "where" in names(coarse)  # It has several inputs.


@pytest.mark.parametrize("target", [torch.add, operator.add, "add", Tensor.add])
def test__selected_operators__go_however_they_were_spelled(target):
    graph = recorded(Mixed(), torch.arange(6))
    pruned = prune_selected_nodes(graph, [target])
    assert "add" in names(graph)
    assert "add" not in names(pruned)
    assert inputs(pruned, "where") == ["gt", "chunk_0", "chunk_1"]


def test__functions_of_torch__can_be_selected():
    graph = recorded(Mixed(), torch.arange(6))
    assert "embedding" not in names(prune_selected_nodes(graph, [F.embedding, torch.where]))


@pytest.mark.parametrize("name", BUILDERS)
def test__pruned_graphs__are_sound_and_leave_the_first_alone(name):
    model, args = BUILDERS[name]()
    graph = recorded(model, *args)
    before = names(graph)
    pruned = prune_same_scale_tensors(prune_non_float_tensors(graph))
    pruned.lint()
    assert len(pruned.nodes) < len(graph.nodes)
    assert names(graph) == before
    assert next(iter(pruned.nodes)).meta["metrics"].fwd.numel


def test__a_graph_without_scales__is_refused():
    graph = fx.symbolic_trace(nn.Linear(2, 2)).graph
    for prune in (prune_non_float_tensors, prune_same_scale_tensors):
        with pytest.raises(ModelError, match="take it from scales_graph"):
            prune(graph)
    with pytest.raises(ModelError, match="take it from scales_graph"):
        prune_selected_nodes(graph, ["linear"])
