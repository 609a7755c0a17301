"""Draw docs/pictures/*.svg: `python docs/draw.py`. A test compares.

Each drawing carries its colours for light and dark pages. The site puts the drawing into its page,
and there the reader's choice of a theme decides.
"""

import math
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 560
LIGHT = {
    "ink": "#1f2933",
    "soft": "#5b6770",
    "line": "#8a949c",
    "box": "#f3f6f9",
    "blue": "#0072b2",
    "green": "#00795a",
    "red": "#c04c00",
    "wash": "#dcebf6",
    "warm": "#fbe9de",
}
DARK = {
    "ink": "#e6eaee",
    "soft": "#a9b4bd",
    "line": "#76828c",
    "box": "#232a31",
    "blue": "#6cb8f0",
    "green": "#4fd0a8",
    "red": "#ff9a5c",
    "wash": "#17344a",
    "warm": "#45291a",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def colours(of: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in of.items())


STYLE = (
    f"<style>svg.drawing {{ {colours(LIGHT)} }} "
    f"@media (prefers-color-scheme: dark) {{ svg.drawing {{ {colours(DARK)} }} }} "
    f"body[data-theme=light] svg.drawing {{ {colours(LIGHT)} }} "
    f"body[data-theme=dark] svg.drawing {{ {colours(DARK)} }}</style>"
)
HEADS = "".join(
    f'<marker id="{{name}}-{c}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    f'markerHeight="7" orient="auto-start-reverse">'
    f'<path d="M0 0L8 4L0 8z" fill="var(--{c})"/></marker>'
    for c in ("line", "blue", "red")
)


def text(x: float, y: float, words: str, *, size: int = 15, at: str = "middle", c: str = "ink",
         bold: bool = False) -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" '
        f'fill="var(--{c})"{weight}>{words}</text>'
    )


def box(x: float, y: float, width: float, height: float, *lines: str, fill: str = "box",
        edge: str = "line") -> str:  # fmt: skip
    """A box with lines of text: the first one bold, the others smaller."""
    made = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="var(--{fill})" stroke="var(--{edge})"/>'
    ]
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    for i, line in enumerate(lines):
        size, colour = (15, "ink") if i == 0 else (13, "soft")
        made.append(text(x + width / 2, top + 18 * i, line, size=size, c=colour, bold=i == 0))
    return "".join(made)


def arrow(name: str, points: str, c: str = "line") -> str:
    return (
        f'<path d="{points}" fill="none" stroke="var(--{c})" stroke-width="1.6" '
        f'marker-end="url(#{name}-{c})"/>'
    )


def drawing(name: str, height: int, title: str, *parts: str) -> None:
    lines = [
        f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="{FONT}">',
        f"<title>{title}</title>",
        STYLE,
        f"<defs>{HEADS.format(name=name)}</defs>",
        *parts,
        "</svg>",
    ]
    (FOLDER / f"{name}.svg").write_text("\n".join(lines) + "\n")


def scale() -> None:
    """Gradients below the range of E4M3FN, and the same numbers over their scale."""
    low, high = -26, 12

    def x(exponent: float) -> float:
        return 20 + (exponent - low) / (high - low) * (WIDTH - 40)

    def curve(centre: float, base: float) -> str:
        """The density of log2 |z| for a normal z of RMS 2^centre."""
        points = []
        for i in range(121):
            e = -8 + 11 * i / 120
            density = 2.0**e * math.exp(-(4.0**e) / 2)
            points.append(f"{x(centre + e):.1f} {base - 110 * density:.1f}")
        return f"M{x(centre - 8):.1f} {base}L" + "L".join(points) + f"L{x(centre + 3):.1f} {base}z"

    def row(base: float, centre: float, c: str, fill: str) -> str:
        ticks = "".join(
            f'<path d="M{x(e):.1f} {base}v6" stroke="var(--line)"/>'
            + text(
                x(e), base + 21, f'2<tspan dy="-5" font-size="10">{e}</tspan>', size=13, c="soft"
            )
            for e in range(-24, 13, 6)
        )
        return (
            f'<rect x="{x(-9):.1f}" y="{base - 84}" width="{x(8.8) - x(-9):.1f}" height="84" '
            f'fill="var(--wash)"/>'
            f'<path d="{curve(centre, base)}" fill="var(--{fill})" fill-opacity="0.75" '
            f'stroke="var(--{c})" stroke-width="1.6"/>'
            f'<path d="M20 {base}H{WIDTH - 20}" stroke="var(--line)"/>{ticks}'
        )

    drawing(
        "scale",
        350,
        "A scale moves numbers into the range of a format",
        text(x(-15), 44, "a gradient", c="red", bold=True),
        text(x(-0.1), 30, "E4M3FN holds 2⁻⁹ to 448", c="blue"),
        row(130, -15, "red", "warm"),
        text(x(-0.1), 92, "nothing arrives here:", c="soft", size=14),
        text(x(-0.1), 112, "a cast makes zeros", c="soft", size=14),
        arrow("scale", f"M{x(-15):.1f} 160C{x(-15):.1f} 205 {x(0):.1f} 165 {x(0):.1f} 212", "blue"),
        text(x(1.6), 182, "divide by scale = 2⁻¹⁵", at="start", size=13),
        text(x(1.6), 201, "exact: no digit changes", at="start", size=13, c="soft"),
        row(316, 0, "blue", "box"),
        text(x(-6), 268, "qdata", c="blue", bold=True),
    )  # fmt: skip


def step() -> None:
    """Draw the tensors of a training step."""
    left, right, wide = 20, 310, 230
    centre, other = left + wide / 2, right + wide / 2
    drawing(
        "step",
        520,
        "What flows through a training step",
        text(centre, 24, "forward", c="blue", bold=True),
        text(other, 24, "backward", c="red", bold=True),
        box(left, 40, wide, 64, "parameters", "FP32 elements, scale 2ᵏ"),
        arrow("step", f"M{centre} 104V136", "blue"),
        box(left, 140, wide, 64, "cast to E4M3FN", "weight and input, 1 byte each", fill="wash",
            edge="blue"),
        arrow("step", f"M{centre} 204V236", "blue"),
        box(left, 240, wide, 64, "matrix product", "FP8 × FP8, sums in float32"),
        arrow("step", f"M{centre} 304V336", "blue"),
        box(left, 340, wide, 64, "other operators", "on BF16, computed in FP32"),
        arrow("step", f"M{centre} 404V436", "blue"),
        box(left, 440, wide, 64, "loss", "a plain float32 number"),
        arrow("step", f"M{left + wide} 472H{right - 4}", "red"),
        box(right, 440, wide, 64, "gradient of the loss", "1, plain"),
        arrow("step", f"M{other} 440V408", "red"),
        box(right, 340, wide, 64, "other gradients", "BF16 elements, a scale each"),
        arrow("step", f"M{other} 340V308", "red"),
        box(right, 240, wide, 64, "cast to E5M2", "once, for dgrad and wgrad", fill="warm",
            edge="red"),
        arrow("step", f"M{other} 240V208", "red"),
        box(right, 140, wide, 64, "dgrad and wgrad", "E5M2 × E4M3FN"),
        arrow("step", f"M{other} 140V108", "red"),
        box(right, 40, wide, 64, "p.grad", "FP32 elements, scale of its own"),
        arrow("step", f"M{right} 72H{left + wide + 4}"),
        text((left + wide + right) / 2, 62, "step", size=13, c="soft"),
        arrow("step", f"M{left + wide} 172H{right - 4}"),
        text((left + wide + right) / 2, 162, "kept", size=13, c="soft"),
    )  # fmt: skip


def casts() -> None:
    """Three tensors of a linear layer, three casts, three products."""
    rows = (80, 200, 320)
    parts = [
        text(70, 24, "tensor", c="soft"),
        text(250, 24, "one cast", c="soft"),
        text(462, 24, "two products each", c="soft"),
    ]
    tensors = (("x", "input, BF16"), ("w", "weight, FP32"), ("g", "gradient, BF16"))
    formats = ("E4M3FN", "E4M3FN", "E5M2")
    products = (("y = x wᵀ", "forward"), ("dx = g w", "dgrad"), ("dw = gᵀ x", "wgrad"))
    uses = ((0, 2), (0, 1), (1, 2))
    for i, y in enumerate(rows):
        c, fill = ("red", "warm") if i == 2 else ("blue", "wash")
        parts += [
            box(5, y - 36, 140, 72, *tensors[i]),
            arrow("casts", f"M145 {y}H191", c),
            box(195, y - 36, 110, 72, formats[i], "1 byte", fill=fill, edge=c),
            box(390, y - 36, 165, 72, *products[i]),
        ]
        for product in uses[i]:
            first = min(j for j in range(3) if product in uses[j])
            end = rows[product] + (-14 if i == first else 14)
            start = y + (-10 if product == uses[i][0] else 10)
            parts.append(arrow("casts", f"M305 {start}C350 {start} 345 {end} 386 {end}", c))
    drawing("casts", 376, "Where a cast happens", *parts)


def granularity() -> None:
    """Draw a matrix of 8 x 16 cells, and the elements that share a scale."""
    names = (
        ("one scale a tensor", "unit, current, delayed", 8, 16),
        ("one scale a row", 'Current(granularity="row")', 1, 16),
        ("blocks along the sum", "mxfp8: 1 × 32, nvfp4: 1 × 16", 1, 4),
        ("squares", "weights of blockwise and nvfp4", 4, 4),
    )
    tints = ("wash", "warm", "box")
    parts, cell = [], 15
    for n, (title, who, high, wide) in enumerate(names):
        left, top = 15 + 290 * (n % 2), 52 + 210 * (n // 2)
        parts += [
            text(left, top - 28, title, at="start", bold=True),
            text(left, top - 9, who, at="start", size=13, c="soft"),
        ]
        for i in range(0, 8, high):
            for j in range(0, 16, wide):
                tint = tints[(i // high + j // wide) % 2]
                parts.append(
                    f'<rect x="{left + cell * j}" y="{top + cell * i}" width="{cell * wide}" '
                    f'height="{cell * high}" fill="var(--{tint})" stroke="var(--blue)"/>'
                )
        lines = [f"M{left + cell * j} {top}v{cell * 8}" for j in range(1, 16)]
        lines += [f"M{left} {top + cell * i}h{cell * 16}" for i in range(1, 8)]
        parts.append(
            f'<path d="{"".join(lines)}" stroke="var(--line)" stroke-width="0.4" fill="none"/>'
        )
    drawing("granularity", 400, "Which elements share a scale", *parts)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (scale, step, casts, granularity):
        draw()
