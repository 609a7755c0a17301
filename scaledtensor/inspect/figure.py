"""The drawing behind `plot`. It needs matplotlib, an extra, so only a call of `plot` imports it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import fx

from scaledtensor.formats import Format
from scaledtensor.formats.describe import number
from scaledtensor.inspect.metrics import Data, Metrics
from scaledtensor.inspect.scales import label

__all__ = ["Look", "draw"]

INK, MUTED, GRID = "#222222", "#6e6e6e", "#ececec"
FORWARD, BACKWARD, SUBNORMAL, LOST = "#0072b2", "#d55e00", "#009e73", "#888888"  # Okabe and Ito
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # the one that matplotlib brings along
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_ROW = 0.21  # inches
_LONGEST = 46  # characters of a label
_NEAR = 14  # octaves; limits of a format further than this from every dot are not shown
_OFFSET = 0.17  # half of the distance between a forward and a backward dot, in rows


@dataclass(frozen=True)
class Look:
    """The options of `plot`, checked."""

    title: str
    metric: str
    format: Format
    gradient_format: Format | None
    of: str
    arrows: bool
    bars: bool
    limits: tuple[float | None, float | None]


@dataclass(frozen=True)
class Row:
    """A tensor, with the numbers that are drawn for it and for its gradient."""

    node: fx.Node
    y: float
    forward: Data
    backward: Data | None


def draw(graph: fx.Graph, path: Path | None, look: Look) -> Figure:
    """Draw `graph`, whose nodes all have metrics. The figure is written to `path` if given."""
    rows = _rows(graph, look)
    with matplotlib.rc_context(STYLE):
        height = _ROW * len(rows) + 1.55
        figure = Figure(figsize=(11, height))
        names = [_short(label(row.node)) for row in rows]
        left = 0.35 + 0.068 * max(len(name) for name in names)
        axes = figure.add_axes(
            (left / 11, 0.62 / height, (10.7 - left) / 11, (height - 1.55) / height)
        )
        low, high = _octaves(rows, look)
        axes.set_xlim(low, high)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        _bands(axes, look.format)
        if look.gradient_format is not None and look.gradient_format != look.format:
            _lines(axes, look.gradient_format)
        if look.arrows:
            _arrows(axes, rows, look)
        for row in rows:
            _dots(axes, row, look, low)
        axes.set_yticks([row.y for row in rows], names)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"$2^{{{k:.0f}}}$"))
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        of = " of qdata" if look.of == "qdata" else ""
        axes.set_xlabel(Metrics.get_full_name(look.metric) + of)
        _legend(figure, rows, look, height)
        if path is not None:
            figure.savefig(path, dpi=150)
    return figure


def _rows(graph: fx.Graph, look: Look) -> list[Row]:
    def chosen(data: Data | None) -> Data | None:
        return data.held if data is not None and look.of == "qdata" else data

    rows: list[Row] = []
    for node in graph.nodes:
        if node.op == "output" or not node.meta["metrics"].fwd.numel:
            continue
        metrics = node.meta["metrics"]
        forward = metrics.fwd.held if look.of == "qdata" else metrics.fwd
        rows.append(Row(node, float(len(rows)), forward, chosen(metrics.bwd)))
    return rows


def _at(data: Data | None, look: Look) -> float | None:
    """The place of the dot, in octaves; None without data, and for zero, which has no logarithm."""
    value = 0.0 if data is None else float(getattr(data, look.metric))
    return math.log2(value) if value else None


def _octaves(rows: list[Row], look: Look) -> tuple[float, float]:
    both = [data for row in rows for data in (row.forward, row.backward)]
    found = (_at(data, look) for data in both)
    dots = [x for x in found if x is not None] or [0.0]
    low, high = min(dots), max(dots)
    shown = [low, high]
    for fmt in (look.format, look.gradient_format):
        if fmt is not None:
            shown += [x for x in _limits(fmt) if low - _NEAR <= x <= high + _NEAR]
    ends = min(shown) - 1.5, max(shown) + 1.5
    given = look.limits
    return (
        ends[0] if given[0] is None else given[0],
        ends[1] if given[1] is None else given[1],
    )


def _limits(fmt: Format) -> tuple[float, float, float]:
    """The smallest, the smallest normal and the largest value, in octaves."""
    smallest, normal, largest = (math.log2(v) for v in (fmt.min_subnormal, fmt.min_normal, fmt.max))
    return smallest, normal, largest


def _bands(axes: Any, fmt: Format) -> None:
    low, high = axes.get_xlim()
    smallest, normal, largest = _limits(fmt)
    for start, end, color, alpha in (
        (low, min(smallest, high), LOST, 0.16),
        (max(smallest, low), min(normal, high), SUBNORMAL, 0.10),
        (max(largest, low), high, LOST, 0.16),
    ):
        if start < end:
            axes.axvspan(start, end, color=color, alpha=alpha, linewidth=0, zorder=0)
    _marks(axes, fmt, 3, INK)


def _lines(axes: Any, fmt: Format) -> None:
    low, high = axes.get_xlim()
    for x in _limits(fmt):
        if low < x < high:
            axes.axvline(x, color=BACKWARD, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    _marks(axes, fmt, 16, BACKWARD)


def _marks(axes: Any, fmt: Format, offset: float, color: str) -> None:
    """Names the limits. The subnormals are few octaves wide, so their two labels point outwards."""
    low, high = axes.get_xlim()
    smallest, normal, largest = _limits(fmt)
    name = repr(fmt)
    marks = [
        (largest, f"{name} max {_power(fmt.max)}", "right" if high - largest < 4 else "center")
    ]
    if fmt.has_subnormals:
        marks.append((normal, f"normal {_power(fmt.min_normal)}", "left"))
    marks.append((smallest, f"{name} min {_power(fmt.min_subnormal)}", "right"))
    for x, words, side in marks:
        if not low < x < high:
            continue
        axes.annotate(
            words,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=({"left": 2, "right": -2}.get(side, 0), offset),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=8,
            color=color,
        )


def _dots(axes: Any, row: Row, look: Look, low: float) -> None:
    parameter = row.node.op == "get_attr"
    for data, color, offset, mark in (
        (row.forward, FORWARD, -_OFFSET, "o"),
        (row.backward, BACKWARD, _OFFSET, "D"),
    ):
        if data is None:
            continue
        x, y = _at(data, look), row.y + offset
        if look.bars and data.abs_max:
            ends = math.log2(data.abs_min_nonzero), math.log2(data.abs_max)
            axes.plot(ends, (y, y), color=color, alpha=0.28, linewidth=1.1, zorder=1.5)
        axes.plot(
            low if x is None else x,
            y,
            marker={True: "s" if mark == "o" else "d", False: mark}[parameter],
            markersize=4.4 if mark == "o" else 3.9,
            markerfacecolor="white" if x is None else color,
            markeredgecolor=color,
            markeredgewidth=0.9,
            clip_on=False,
            zorder=4,
        )


def _arrows(axes: Any, rows: list[Row], look: Look) -> None:
    at = {row.node: row for row in rows}
    for row in rows:
        for source in row.node.all_input_nodes:
            if source not in at:
                continue
            before = at[source]
            light = 0.5 if source.op == "get_attr" else 1.0
            ends = _at(before.forward, look), _at(row.forward, look)
            _arrow(axes, (ends[0], before.y - _OFFSET), (ends[1], row.y - _OFFSET), FORWARD, light)
            back = _at(row.backward, look), _at(before.backward, look)
            _arrow(axes, (back[0], row.y + _OFFSET), (back[1], before.y + _OFFSET), BACKWARD, light)


def _arrow(
    axes: Any,
    start: tuple[float | None, float],
    end: tuple[float | None, float],
    color: str,
    strength: float,
) -> None:
    if start[0] is None or end[0] is None:
        return
    rows = abs(start[1] - end[1])
    # An arrow over many rows, such as a residual's, bends past the dots between, within the figure.
    bend = 0.0 if rows <= 1.5 else 0.18 if rows < 6 else min(0.3, 5 / rows)
    axes.add_patch(
        FancyArrowPatch(
            (start[0], start[1]),
            (end[0], end[1]),
            arrowstyle="-|>,head_length=3,head_width=1.5",
            connectionstyle=f"arc3,rad={bend}",
            color=color,
            alpha=0.42 * strength / (1 + rows / 12),
            linewidth=0.8,
            shrinkA=2.5,
            shrinkB=2.5,
            zorder=2,
        )
    )


def _legend(figure: Figure, rows: list[Row], look: Look, height: float) -> None:
    def entry(words: str, marker: str, color: str, face: str | None = None) -> Line2D:
        style: dict[str, Any] = {"marker": marker, "markersize": 4.6, "linestyle": "none"}
        return Line2D([], [], color=color, markerfacecolor=face or color, label=words, **style)

    parameters = any(row.node.op == "get_attr" for row in rows)
    entries = [entry("forward", "o", FORWARD)]
    if any(row.backward is not None for row in rows):
        entries.append(entry("gradient", "D", BACKWARD))
    if parameters:
        entries.append(entry("of a parameter", "s", FORWARD))
    both = [d for row in rows for d in (row.forward, row.backward) if d is not None]
    if any(not getattr(data, look.metric) for data in both):
        entries.append(entry("zero", "o", FORWARD, "white"))
    figure.legend(
        handles=entries,
        loc="upper right",
        bbox_to_anchor=(10.75 / 11, 1 - 0.06 / height),
        ncols=len(entries),
        frameon=False,
        handletextpad=0.1,
        columnspacing=1.2,
    )
    if look.title:
        size = 12 if len(look.title) <= _LONGEST else 8.5
        at = 0.25 / 11, 1 - 0.12 / height
        figure.text(*at, look.title, va="top", fontsize=size, fontweight="bold")


def _power(value: float) -> str:
    factor, caret, power = number(value).rpartition("2^")
    factor = factor.replace("x", r"\times")
    return f"${factor}2^{{{power}}}$" if caret else power


def _short(name: str) -> str:
    """The end of a long name, since the end distinguishes it from others."""
    return name if len(name) <= _LONGEST else "..." + name[3 - _LONGEST :]
