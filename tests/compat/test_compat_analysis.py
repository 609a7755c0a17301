"""Pictures, listings and tables of scales, under the published names."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scaledtensor import errors
from scaledtensor.compat import unit_scaling as uu
from scaledtensor.compat.unit_scaling import analysis, utils
from scaledtensor.compat.unit_scaling.transforms import (
    Metrics,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    track_scales,
    unit_scale,
)


class Model(nn.Module):
    def __init__(self, vocabulary=32, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.linear = nn.Linear(width, vocabulary)

    def forward(self, inputs, labels):
        x = self.embedding(inputs)
        x = self.linear(F.relu(x).view(x.shape))
        return x, F.cross_entropy(x.view(-1, x.size(-1)), labels.view(-1))


def batch():
    return torch.arange(24).view(2, 12) % 32, torch.arange(1, 25).view(2, 12) % 32


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    model = track_scales(Model())
    model(*batch())[1].backward()
    return model.scales_graph()


def names(graph):
    return {n.meta["clean_name"] for n in graph.nodes if n.op != "output"}


def test__a_graph__is_pruned(graph):
    weight = "self_modules_embedding_parameters_weight"
    assert {"inputs", weight, "x", "relu", "view", "x_1"} <= names(graph)  # Dynamo's names
    assert {F.embedding, F.relu, F.linear, "view"} <= {n.target for n in graph.nodes}
    floats = names(prune_non_float_tensors(graph))
    assert "inputs" not in floats
    changed = names(prune_same_scale_tensors(prune_non_float_tensors(graph)))
    assert {n for n in floats - changed if n.startswith("view")}
    assert "relu" not in names(prune_selected_nodes(graph, [F.relu]))
    assert "relu" in names(graph)  # a copy, unlike the published one


@pytest.mark.parametrize("metric", ["mean_abs", "standard deviation"])
def test__a_plot__has_a_title_and_ends(graph, metric):
    pytest.importorskip("matplotlib")
    axes = analysis.plot(graph, "demo", metric, xmin=2**-20, xmax=2**10)
    assert axes.get_xlim() == (-20, 10)
    assert axes.get_xlabel() == Metrics.get_full_name(
        {"standard deviation": "std"}.get(metric, metric)
    )
    assert any("demo" in text.get_text() for text in axes.figure.texts)


def test__metrics__have_the_published_numbers_and_more():
    published = pytest.importorskip("unit_scaling.transforms").Metrics
    assert set(published.names()) < set(Metrics.names())
    for name in published.names():
        assert Metrics.get_full_name(name) == published.get_full_name(name)


def test__a_metric_that_is_none__is_named(graph):
    pytest.importorskip("matplotlib")
    with pytest.raises(errors.ModelError, match="mean_abs"):
        analysis.plot(graph, metric="colour")


def test__a_data_frame__has_a_row_for_each_direction(graph, monkeypatch):
    class Frame(list):
        def __init__(self, rows, columns):
            super().__init__(dict(zip(columns, row, strict=True)) for row in rows)

    module = type("pandas", (), {"DataFrame": Frame})
    monkeypatch.setattr(analysis, "find_spec", lambda name: name)
    monkeypatch.setattr(analysis, "import_module", lambda name: module)
    rows = {(r["layer"], r["tensor type"]): r for r in analysis.graph_to_dataframe(graph)}
    assert rows["self_modules_linear_parameters_weight", "w"]["weight tensor"] is True
    assert rows["x_1", "x"]["direction"] == "fwd"  # x = self.linear(...)
    assert rows["x_1", "grad_x"]["number of elements"] == 24 * 32
    assert not any(layer in ("inputs", "output") for layer, _ in rows)
    with pytest.raises(errors.ModelError, match="scales_graph"):
        analysis.graph_to_dataframe(torch.fx.symbolic_trace(nn.Linear(2, 2)).graph)


def test__a_data_frame_without_pandas__says_so(graph, monkeypatch):
    monkeypatch.setattr(analysis, "find_spec", lambda name: None)
    with pytest.raises(errors.UnsupportedError, match="pip install pandas"):
        analysis.graph_to_dataframe(graph)


def test__a_visualiser__takes_a_batch_and_no_network():
    pytest.importorskip("matplotlib")
    model = Model()
    axes = analysis.visualiser(model, batch=batch(), title="demo")
    assert len(axes.get_yticks()) > 4
    assert model.linear.weight.grad is None
    with pytest.raises(errors.UnsupportedError, match="batch="):
        analysis.visualiser(model, object(), 16, 256)
    with pytest.raises(errors.UnsupportedError, match="example_batch"):
        analysis.example_batch(object(), 3, 256)


def test__a_listing__has_the_scales_of_each_line():
    torch.manual_seed(0)
    x, seed = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    listed = utils.analyse_module(uu.MLP(32), x, seed, syntax_highlight=False)
    scale = r"\(-> [\d.]+, <- [\d.]+\)"
    assert re.search(rf"U\.silu_glu\(.*{scale}", listed)
    assert re.search(r"# weight +\(-> [\d.]+, <- [\d.]+\.\.[\d.]+\)", listed)
    layers = nn.Sequential(nn.Linear(32, 32))
    assert "F.linear" in utils.analyse_module(layers, x, seed, syntax_highlight=False)
    brief = utils.analyse_module(layers, x, seed, recurse_modules=False, syntax_highlight=False)
    assert "F.linear" not in brief
    scaled = utils.analyse_module(unit_scale(layers), x, seed, syntax_highlight=False)
    assert re.search(r"F\.linear.*\(-> (0\.9|1)", scaled)


def test__a_coloured_listing__is_the_same_text():
    pytest.importorskip("pygments")
    x, layer = torch.randn(4, 4, requires_grad=True), nn.Linear(4, 4)
    coloured = utils.analyse_module(layer, x, torch.ones(4, 4))
    plain = utils.analyse_module(layer, x, torch.ones(4, 4), syntax_highlight=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).strip() == plain.strip()
    assert coloured != plain


def test__one_tensor__is_tracked():
    pair = utils.ScalePair()
    assert str(pair) == "(-> n/a, <- n/a)"
    x = torch.tensor([3.0, -3.0, 3.0, -3.0]).requires_grad_()
    seed = torch.tensor([2.0, 0.0, 2.0, 0.0])
    y = utils.ScaleTracker.track(x, pair)
    y.backward(seed)
    assert torch.equal(y, x)
    assert torch.equal(x.grad, seed)
    assert str(pair) == "(-> 3.46, <- 1.15)"


def test__before_a_call__the_graph_is_empty():
    assert not track_scales(nn.Linear(2, 2)).scales_graph().nodes


def test__capture__is_dynamos_or_that_of_eager_code():
    class Formula(nn.Module):
        def forward(self, x):
            half = x * 0.5
            half += 1
            return half.sum()

    def targets(**how):
        tracked = track_scales(Formula(), **how)
        tracked(torch.randn(4))
        return {n.meta["clean_name"]: n.target for n in tracked.scales_graph().nodes}

    found = targets()
    assert (found["half"], found["half_1"]) == (operator.mul, operator.iadd)
    assert {"mul", "sum_1"} <= set(targets(capture="eager"))
    with pytest.raises(errors.ModelError, match="'eager' or 'dynamo'"):
        track_scales(Formula(), capture="compiled")
