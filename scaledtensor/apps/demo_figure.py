"""The demo's picture: the losses, and the gradients beside E5M2's range."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from scaledtensor.apps.demo import ROWS, SMALL, Runs, shares_of_e5m2
from scaledtensor.apps.training import FINAL_STEPS
from scaledtensor.formats import E5M2

SMOOTHING = 10  # steps in the moving mean of the curves
INK, MUTED, GRID = "#222222", "#6e6e6e", "#e4e4e4"
# The colours of Okabe and Ito, which every colour vision distinguishes.
NO_SCALE, SCALED, RANGE = "#d55e00", "#0072b2", "#009e73"


class Line(NamedTuple):
    color: str
    width: float
    dashes: Any = "-"


# Drawn in this order: wide curves lie below narrow ones, so curves that coincide stay visible.
LINES = {
    "fp32": Line("#b5b5b5", 7.0),
    "bf16": Line("#56b4e9", 4.2),
    "fp8": Line(NO_SCALE, 2.0),
    "fp8-small": Line(NO_SCALE, 2.0, (0, (1.2, 1.2))),
    "unit": Line(SCALED, 2.0),
    "unit-small": Line("#f0e442", 2.0, (0, (1.2, 2.4))),
}

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # matplotlib contains it
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw(runs: Runs, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        # A file needs no pyplot, with its global state and its choice of a window system.
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04)
        figure = Figure(figsize=(13, 6), layout=layout)
        left, right = figure.subplots(1, 2)
        _losses(left, runs)
        _gradients(right, runs)
        figure.savefig(path, dpi=160)


def _losses(axes: Any, runs: Runs) -> None:
    for order, (name, line) in enumerate(LINES.items()):
        if name not in runs:
            continue
        losses = np.array(runs[name].losses)
        window = min(SMOOTHING, len(losses))
        means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(
            np.arange(window, len(losses) + 1),
            means,
            color=line.color,
            linewidth=line.width,
            linestyle=line.dashes,
            zorder=3 + order,
            label=f"{_title(name)}   {runs[name].final_loss():.3f}",
        )
    _heading(axes, "Training loss")
    axes.set_xlabel("AdamW step")
    axes.set_ylabel(f"loss in nats a character, mean of {SMOOTHING} steps")
    axes.grid(axis="y", color=GRID)
    axes.legend(
        title=f"row, and the mean of its last {FINAL_STEPS} losses",
        loc="upper left",
        bbox_to_anchor=(0, -0.14),
        ncols=2,
        alignment="left",
        handlelength=2.6,
        columnspacing=1.4,
        fontsize=9.5,
        borderaxespad=0,
    )


def _gradients(axes: Any, runs: Runs) -> None:
    lowest, normal, largest = (
        math.log2(bound) for bound in (E5M2.min_subnormal, E5M2.min_normal, E5M2.max)
    )
    axes.axvspan(lowest, normal, color=RANGE, alpha=0.07, linewidth=0)
    axes.axvspan(normal, largest, color=RANGE, alpha=0.16, linewidth=0)
    for bound in (lowest, normal, largest):
        axes.axvline(bound, color=RANGE, linewidth=1)

    bins = np.arange(-56.0, 20.5, 0.5)
    tallest = 0.0
    for name, multiplier, color, words in (
        ("fp32", SMALL, "#b57f00", rf"loss $\times\,2^{{{math.log2(SMALL):.0f}}}$"),
        ("fp32", 1.0, NO_SCALE, "without scales"),
        ("unit", 1.0, SCALED, "ScaledTensor"),
    ):
        if name not in runs:
            continue
        values = runs[name].gradients[multiplier]
        heights = _histogram(values, bins)
        axes.stairs(heights, bins, fill=True, color=color, alpha=0.28)
        axes.stairs(heights, bins, color=color, linewidth=1.6)
        lost = shares_of_e5m2(values)["rounds to zero"]
        axes.annotate(
            f"{words}\n{100 * lost:.3g}%\nround to zero",
            (bins[heights.argmax()], heights.max()),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=color,
            fontsize=9.5,
            fontweight="bold",
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5},
        )
        tallest = max(tallest, heights.max())

    top = 1.5 * tallest or 1.0  # room for the words above
    for x, words, side in (
        (lowest - 0.6, f"smallest subnormal\n$2^{{{lowest:.0f}}}$", "right"),
        (normal + 0.6, f"smallest normal\n$2^{{{normal:.0f}}}$", "left"),
        (largest - 0.6, f"largest\n{E5M2.max:,.0f}", "right"),
    ):
        axes.text(x, 0.98 * top, words, ha=side, va="top", color="#00694d", fontsize=9)
    _heading(axes, "What a cast of the gradients to E5M2 sees")
    axes.set_xlabel(r"$\log_2$ |element| of the gradients at the linear layers' outputs")
    axes.set_ylabel("% of the elements, per half octave")
    axes.text(
        0,
        -0.14,
        "Shaded: what E5M2 holds. One batch after the last step:\n"
        "without scales, the gradient's values in the FP32 run;\n"
        "ScaledTensor, its stored elements in the FP8 run.",
        transform=axes.transAxes,
        va="top",
        fontsize=9.5,
        color=MUTED,
        linespacing=1.5,
    )
    axes.set_xlim(bins[0], bins[-1])
    axes.set_ylim(0, top)


def _histogram(values: Tensor, bins: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The percentage of the elements in each bin; zeros do not count."""
    octaves = values[values != 0].abs().log2().numpy()
    counts, _ = np.histogram(octaves, bins)
    return 100 * counts / max(1, len(octaves))


def _heading(axes: Any, words: str) -> None:
    axes.set_title(words, loc="left", fontsize=12.5, fontweight="bold", pad=12)


def _title(name: str) -> str:
    """The row's title, with its power of two set as mathematics."""
    words, _, factor = ROWS[name].title.partition(", loss x ")
    return rf"{words}, loss $\times\,2^{{{factor[2:]}}}$" if factor else words
