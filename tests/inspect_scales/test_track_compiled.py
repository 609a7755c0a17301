"""Tracking works with torch.compile in every order."""

import pytest
import torch
from torch import nn
from tracked_models import Stack, same

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError
from scaledtensor.inspect import Scales, track_scales, tracking


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model_and_input() -> tuple[Stack, torch.Tensor]:
    torch.manual_seed(0)
    return Stack(), torch.randn(8, 16)


def names(scales: Scales) -> set[str]:
    return {n.meta["clean_name"] for n in scales.scales_graph().nodes if "metrics" in n.meta}


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def test__a_compiled_model__is_tracked_as_eager_code():
    model, x = model_and_input()
    with tracking(model) as reference:
        model(x).backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with tracking(compiled) as scales:
        compiled(x).backward()
    assert names(scales) == names(reference)
    tracked = track_scales(compiled)
    tracked(x).backward()
    assert names(tracked.scales) == names(reference)


def test__a_compiled_part__is_tracked_as_eager_code():
    model, x = model_and_input()
    with tracking(model) as reference:
        model(x).backward()
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
    with tracking(model) as scales:
        model(x).backward()
    assert {n.meta["module"] for n in scales.scales_graph().nodes} == {
        n.meta["module"] for n in reference.scales_graph().nodes
    }


def test__a_tracked_model__runs_as_eager_code_inside_compiled_code():
    model, x = model_and_input()
    tracked = track_scales(model)
    compiled = torch.compile(tracked, backend="aot_eager")
    compiled(x).backward()
    assert "linear" in names(tracked.scales)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(nn.Sequential(tracked), backend="aot_eager", fullgraph=True)(x)
    torch.compile(nn.Sequential(nn.Linear(16, 16), tracked), backend="aot_eager")(x)
    assert "linear" in names(tracked.scales)


@pytest.mark.parametrize("scaled", [False, True])
def test__captured_by_dynamo__it_computes_the_same_bits(scaled):
    model, x = model_and_input()
    if scaled:
        sct.scale_model(model)
    model(x).backward()
    expected = gradients(model)
    model.zero_grad()
    tracked = track_scales(model, capture="dynamo")
    for _ in range(2):
        model.zero_grad()
        tracked(x).backward()
        assert all(map(same, expected, gradients(model)))
    graph = tracked.scales_graph()
    graph.lint()
    linear = next(n for n in graph.nodes if n.meta["clean_name"] == "linear" or n.name == "h")
    assert linear.meta["module"].startswith("blocks.0")
    assert linear.meta["metrics"].bwd is not None
    parameters = {n.target for n in graph.nodes if n.op == "get_attr"}
    assert parameters == {n for n, _ in model.named_parameters()}


def test__as_a_backend__each_run_is_a_recording():
    model, x = model_and_input()
    scales = Scales()
    compiled = torch.compile(model, backend=scales.backend)
    compiled(x).backward()
    first = len(scales.scales_graph().nodes)
    compiled(x).backward()
    assert len(scales.scales_graph().nodes) == first
    assert "blocks_0_fc1_weight" in names(scales)
    assert all(
        n.meta["metrics"].bwd is not None
        for n in scales.scales_graph().nodes
        if n.meta["requires_grad"]
    )


def test__over_several_graphs__the_flow_of_data_is_kept():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            print(end="")  # Dynamo leaves it to Python.
            return self.b(h)

    tracked = track_scales(Broken(), capture="dynamo")
    tracked(torch.randn(2, 4)).sum().backward()
    calls = [n for n in tracked.scales_graph().nodes if n.op == "call_function"]
    assert len(calls) == 2
    assert calls[0] in calls[1].all_input_nodes


def test__where_dynamo_captures_nothing__it_says_so():
    class Opaque(nn.Module):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with pytest.raises(UnsupportedError, match="captured no operator"):
        track_scales(Opaque(), capture="dynamo")(torch.ones(2))
