"""The picture of a recording: every tensor and its gradient, beside the range of a format."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from scaledtensor.errors import ModelError, UnsupportedError
from scaledtensor.formats import E4M3FN, E5M2, FormatLike
from scaledtensor.formats import get as get_format
from scaledtensor.inspect.listing import prune_non_float_tensors, prune_same_scale_tensors
from scaledtensor.inspect.metrics import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

SUFFIXES = (".png", ".svg", ".pdf")


def plot(
    graph: fx.Graph,
    path: str | Path | None = None,
    *,
    title: str = "",
    metric: str = "rms",
    format: FormatLike = E4M3FN,
    gradient_format: FormatLike | None = E5M2,
    of: str = "value",
    prune_same_scale: bool = True,
    show_arrows: bool = True,
    show_error_bars: bool = True,
    xmin: float | None = None,
    xmax: float | None = None,
) -> "Figure":
    """Draw a scales graph: a row for each tensor, a dot for its scale and one for its gradient's.

    The horizontal axis is logarithmic, to base 2. Bands show the ranges of `format`: lost to zero,
    subnormal, normal, saturated. Dashed lines show the same ranges of `gradient_format`. Thin bars
    reach from the smallest magnitude that is not zero to the largest one. Arrows follow the data,
    forward and backward. A scale of zero is a hollow dot at the left edge.

    Args:
        graph: from `scales_graph()`, pruned or not. Nodes that hold no floats are left out.
        path: file to write (.png, .svg or .pdf); no display is needed.
        metric: one of `Metrics.names()`.
        of: "value", or "qdata" for the elements of ScaledTensors, which a format has to hold.
        prune_same_scale: leave out views and other operators that keep the scale of their input.
        xmin, xmax: ends of the axis; by default it holds all dots, and the limits of formats that
            are near them.

    Returns:
        The matplotlib figure, made without pyplot.

    Raises:
        UnsupportedError: matplotlib is missing (`pip install scaledtensor[plot]`), or `path` has
            another suffix.
        ModelError: `graph` has no scales, or `metric` or `of` has another value.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedError("plot() needs matplotlib: pip install scaledtensor[plot]")
    if path is not None and Path(path).suffix not in SUFFIXES:
        raise UnsupportedError(f"plot() writes {', '.join(SUFFIXES)}; got {str(path)!r}")
    if metric not in Metrics.names():
        raise ModelError(f"metric is one of {', '.join(Metrics.names())}; got {metric!r}")
    if of not in ("value", "qdata"):
        raise ModelError(f"of is 'value' or 'qdata'; got {of!r}")
    graph = prune_non_float_tensors(graph)
    if prune_same_scale:
        graph = prune_same_scale_tensors(graph)
    if not any("metrics" in n.meta for n in graph.nodes):
        raise ModelError("this graph has no tensor of floats to draw")
    from scaledtensor.inspect.figure import Look, draw  # matplotlib is an extra

    low, high = (None if x is None else math.log2(x) for x in (xmin, xmax))
    return draw(
        graph,
        None if path is None else Path(path),
        Look(
            title=title,
            metric=metric,
            format=get_format(format),
            gradient_format=None if gradient_format is None else get_format(gradient_format),
            of=of,
            arrows=show_arrows,
            bars=show_error_bars,
            limits=(low, high),
        ),
    )
