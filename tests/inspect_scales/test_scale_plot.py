"""`plot` draws every tensor against a format."""

from math import log2

import pytest
import torch
from torch import Tensor, fx, nn
from tracked_models import BUILDERS, Stack

import scaledtensor as sct
from scaledtensor.errors import FormatError, ModelError, UnsupportedError
from scaledtensor.inspect import plot, tracking
from scaledtensor.inspect.listing import prune_non_float_tensors

pytest.importorskip("matplotlib")


def recorded(model: nn.Module, *args: Tensor) -> fx.Graph:
    with tracking(model) as scales:
        model(*args).square().mean().backward()
    return scales.scales_graph()


def rows(figure) -> list[str]:
    return [t.get_text() for t in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test__a_picture__is_written(suffix, tmp_path):
    path = tmp_path / f"scales{suffix}"
    plot(recorded(Stack(), torch.randn(8, 16)), path, title="A stack")
    assert path.stat().st_size > 10_000


def test__every_tensor__has_a_row_and_its_dots():
    graph = recorded(Stack(), torch.randn(8, 16))
    figure = plot(graph, show_arrows=False, show_error_bars=False, prune_same_scale=False)
    nodes = [n for n in prune_non_float_tensors(graph).nodes if n.op != "output"]
    assert len(rows(figure)) == len(nodes)
    assert "blocks.0.fc1: linear" in rows(figure)
    dots = {(float(x[0]), round(float(y[0]))) for x, y in _lines(figure)}
    for i, node in enumerate(nodes):
        for data in (node.meta["metrics"].fwd, node.meta["metrics"].bwd):
            if data is not None and data.rms:
                assert (log2(data.rms), i) in dots


def _lines(figure) -> list[tuple[list[float], list[float]]]:
    return [line.get_data() for line in figure.axes[0].lines if len(line.get_xdata()) == 1]


def test__views__are_left_out_unless_asked_for():
    graph = recorded(nn.Sequential(nn.Linear(4, 4), nn.Flatten()), torch.randn(3, 4))
    assert "1: flatten" not in rows(plot(graph))
    assert "1: flatten" in rows(plot(graph, prune_same_scale=False))


@pytest.mark.parametrize("name", BUILDERS)
def test__no_words__overlap(name):
    model, args = BUILDERS[name]()
    figure = plot(recorded(model, *args), title="A title", prune_same_scale=False)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    words = [*axes.texts, *axes.get_yticklabels(), *figure.texts, *figure.legends[0].get_texts()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in words if t.get_text()]
    page = figure.bbox
    for i, (text, box) in enumerate(boxes):
        assert page.x0 <= box.x0, text
        assert box.x1 <= page.x1, text
        for other, second in boxes[i + 1 :]:
            # Boxes of neighbouring rows touch, so the bound is a pixel.
            apart = min(box.x1, second.x1) - max(box.x0, second.x0) <= 1
            apart |= min(box.y1, second.y1) - max(box.y0, second.y0) <= 1
            assert apart, (text, other)


def test__elements_of_scaled_tensors__can_be_drawn():
    graph = recorded(sct.scale_model(Stack()), torch.randn(64, 16))
    figure = plot(graph, of="qdata", show_error_bars=False)
    dots = [float(x[0]) for x, _ in _lines(figure)]
    assert "qdata" in figure.axes[0].get_xlabel()
    assert sum(abs(x) <= 1 for x in dots) > len(dots) / 2


def test__limits_and_formats__are_taken():
    graph = recorded(Stack(), torch.randn(8, 16))
    figure = plot(graph, metric="std", format="fp16", gradient_format=None, xmin=2**-8, xmax=16)
    assert figure.axes[0].get_xlim() == (-8, 4)
    assert "standard deviation" in figure.axes[0].get_xlabel()
    with pytest.raises(FormatError):
        plot(graph, format="e9m9")


def test__bad_arguments__are_named(tmp_path):
    graph = recorded(Stack(), torch.randn(8, 16))
    with pytest.raises(ModelError, match="metric is one of"):
        plot(graph, metric="median")
    with pytest.raises(ModelError, match="of is 'value' or 'qdata'"):
        plot(graph, of="codes")
    with pytest.raises(UnsupportedError, match=r"writes \.png, \.svg, \.pdf"):
        plot(graph, tmp_path / "scales.jpg")
    with pytest.raises(ModelError, match="take it from scales_graph"):
        plot(fx.symbolic_trace(nn.Linear(2, 2)).graph)


def test__without_matplotlib__it_says_what_to_install(monkeypatch):
    graph = recorded(Stack(), torch.randn(8, 16))
    monkeypatch.setitem(plot.__globals__, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install scaledtensor\[plot\]"):
        plot(graph)
