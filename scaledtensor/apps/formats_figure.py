"""A format's picture: its values, and the relative rounding error at every magnitude."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from scaledtensor.formats.describe import number
from scaledtensor.formats.format import Format
from scaledtensor.formats.rounding import fake_quantize

SUFFIXES = (".png", ".svg", ".pdf")
_PIXELS = 1400  # across the picture; each shows the largest error within it
_SAMPLES = _PIXELS * 750
_RULER_LINES = 600

INK, MUTED, GRID = "#222222", "#6e6e6e", "#e4e4e4"
NORMAL, SUBNORMAL, LOST = "#0072b2", "#009e73", "#d55e00"  # Okabe and Ito
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
}


def draw(fmt: Format, path: Path) -> None:
    """Draw `fmt` and write the picture to `path`. No display is needed. Raises OSError if it cannot
    be written."""
    with matplotlib.rc_context(STYLE):
        # A file needs no pyplot, with its global state and its choice of a window system.
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.03)
        figure = Figure(figsize=(11, 7.5), layout=layout)
        values, errors = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.7))
        _values(values, fmt)
        _errors(errors, fmt)
        figure.savefig(path, dpi=160)


def _values(axes: Any, fmt: Format) -> None:
    """Draw the values as a ruler: a value with fewer significant bits has a longer line."""
    low, high = _limits(fmt)
    finest = fmt.mantissa_bits
    if fmt.bits > 8:
        finest = min(finest, int(math.log2(_RULER_LINES / (high - low))))
    for color, values in _shown_values(fmt, finest).items():
        lengths = [0.8 ** (_significant_bits(value) - 1) for value in values]
        axes.vlines(np.log2(values), 0, lengths, color=color, linewidth=1.3)
    _zones(axes, fmt)
    marks = [(fmt.max, "largest", "right"), (fmt.min_subnormal, "smallest", "right")]
    if fmt.has_subnormals:
        marks.append((fmt.min_normal, "smallest normal", "left"))
    for value, words, side in marks:
        axes.annotate(
            f"{words}\n{_mathematics(value)}",
            (math.log2(value), 1.0),
            xytext=(3 if side == "right" else -3, 6),
            textcoords="offset points",
            ha=side,
            fontsize=9.5,
        )
    axes.set_ylim(0, 1.4)
    axes.tick_params(bottom=False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title(f"{fmt!r}", loc="left", fontsize=15, fontweight="bold", pad=26)
    axes.annotate(
        _layout(fmt),
        (0, 1),
        xytext=(0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        color=MUTED,
    )
    words = "its positive values, the longer the fewer significant bits"
    if finest < fmt.mantissa_bits:
        drawn = f"{finest} of its {fmt.mantissa_bits} mantissa bits" if finest else "powers of two"
        words += f" (drawn to {drawn})"
    axes.set_xlabel(words, fontsize=9.5, color=MUTED)


def _layout(fmt: Format) -> str:
    if fmt.is_integer:
        return f"two's complement, {fmt.bits} bits, in steps of {number(fmt.eps)}"
    parts = (fmt.exponent_bits, "exponent"), (fmt.mantissa_bits, "mantissa")
    bits = ", ".join(f"{n} {part} bit{'s' * (n != 1)}" for n, part in parts)
    return f"{'sign, ' if fmt.signed else 'unsigned, '}{bits}, bias {fmt.bias}"


def _shown_values(fmt: Format, finest: int) -> dict[str, list[float]]:
    """Subnormal and normal values, by colour. Only values with up to `finest` mantissa bits are
    shown."""
    step = 1 << (fmt.mantissa_bits - finest)
    first = 1 << fmt.mantissa_bits if fmt.signed else 0
    normals = [fmt.value(code) for code in range(first, fmt.max_code + 1, step)]
    # An octave of subnormals shows as many values as an octave of normals, down to the smallest.
    codes = {m << k for k in range(fmt.mantissa_bits) for m in range(1, 2 << finest)}
    subnormals = [fmt.value(code) for code in sorted(codes) if code < first]
    return {SUBNORMAL: subnormals, NORMAL: normals}


def _significant_bits(value: float) -> int:
    significand = int(math.ldexp(math.frexp(value)[0], 53))
    return 53 - (significand & -significand).bit_length() + 1


def _errors(axes: Any, fmt: Format) -> None:
    low, high = _limits(fmt)
    octaves = torch.linspace(low, high, _SAMPLES, dtype=torch.float64)
    x = octaves.exp2()
    error = ((fake_quantize(x, fmt) - x).abs() / x).view(_PIXELS, -1)
    middle = octaves.view(_PIXELS, -1).mean(1)
    floor = 2.0 ** (-fmt.mantissa_bits - 4)
    largest = error.amax(1).clamp_min(floor)
    axes.fill_between(middle, floor, largest, color=NORMAL, alpha=0.15, linewidth=0)
    axes.plot(middle, largest, color=NORMAL, linewidth=1.2)
    _zones(axes, fmt)

    if not fmt.is_integer:
        _bound(axes, fmt)
    axes.set_yscale("log", base=2)
    axes.set_ylim(floor, 4)
    axes.set_xlim(low, high)
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _power(math.log2(y))))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: _power(k)))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.set_ylabel("relative error |rounded - x| / x")
    axes.set_xlabel("magnitude of x")
    lowest = float(fake_quantize(torch.tensor(2.0**low, dtype=torch.float64), fmt))
    for at, side, words in (
        (low, "left", f"rounds to\n{_mathematics(lowest)}"),
        (high, "right", "saturates\n"),
    ):
        axes.annotate(
            words,
            (at, 4),
            xytext=(5 if side == "left" else -5, -5),
            textcoords="offset points",
            ha=side,
            va="top",
            color=LOST,
        )


def _bound(axes: Any, fmt: Format) -> None:
    """Draw the bound of the relative error of normal numbers."""
    bound = fmt.eps / 2
    axes.axhline(bound, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"eps / 2 = {_mathematics(bound)}",
        ((math.log2(fmt.min_normal) + math.log2(fmt.max)) / 2, bound),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
    )


def _zones(axes: Any, fmt: Format) -> None:
    low, high = _limits(fmt)
    smallest, normal, largest = (math.log2(v) for v in (fmt.min_subnormal, fmt.min_normal, fmt.max))
    axes.axvspan(low, smallest, color=LOST, alpha=0.07, linewidth=0)
    axes.axvspan(smallest, normal, color=SUBNORMAL, alpha=0.08, linewidth=0)
    axes.axvspan(largest, high, color=LOST, alpha=0.07, linewidth=0)


def _limits(fmt: Format) -> tuple[float, float]:
    """The ends of the axis, in octaves: the range of the format, and a tenth of it on either
    side."""
    low, high = math.log2(fmt.min_subnormal), math.log2(fmt.max)
    margin = max(2.0, (high - low) / 10)
    return low - margin, high + margin


def _power(exponent: float) -> str:
    return f"$2^{{{exponent:.0f}}}$"


def _mathematics(value: float) -> str:
    """`number(value)`, set as a formula."""
    factor, caret, power = number(value).rpartition("2^")
    factor = factor.replace("x", r"\times")
    return f"${factor}2^{{{power}}}$" if caret else power
