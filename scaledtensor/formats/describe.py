"""Formats in words: facts, values and policies, for `scaledtensor formats` and `docs/formats.md`.

All texts are made from the records, and from the codes that `encode` gives for a few probes. So
they cannot differ from the code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import torch

from scaledtensor.formats.format import Format, FormatLike, get
from scaledtensor.formats.rounding import Overflow, encode

__all__ = [
    "columns",
    "facts",
    "markdown",
    "number",
    "outcome",
    "policies",
    "specials",
    "unsigned",
    "values",
]

_SHORT = 6  # a decimal of so many characters is easier to read than a power of two
_ROW = 8  # values in a line


def number(value: float) -> str:
    """`value` exactly: a short decimal, 2^k, or an odd integer times 2^k."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    decimal = _decimal(abs(value))
    if len(decimal) <= _SHORT:
        return sign + decimal
    exact = Fraction(abs(value))
    shift = exact.denominator.bit_length() - 1
    odd = exact.numerator
    while odd % 2 == 0:
        odd, shift = odd // 2, shift - 1
    return f"{sign}2^{-shift}" if odd == 1 else f"{sign}{odd} x 2^{-shift}"


def _decimal(value: float) -> str:
    text = f"{Decimal(value):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def facts(fmt: FormatLike) -> dict[str, str]:
    """The fields of the record of `fmt`, and the numbers that follow from them."""
    fmt = get(fmt)
    return {
        "name": fmt.name,
        "bits": str(fmt.bits),
        "sign-exponent-mantissa": f"{int(fmt.signed)}-{fmt.exponent_bits}-{fmt.mantissa_bits}",
        "bias": str(fmt.bias),
        "max": number(fmt.max),
        "min normal": "none" if fmt.is_integer else number(fmt.min_normal),
        "min subnormal": number(fmt.min_subnormal) if fmt.has_subnormals else "none",
        "eps": number(fmt.eps),
        "inf": _yes(fmt.has_inf),
        "NaN": _yes(fmt.has_nan),
        "-0": _yes(fmt.has_signed_zero),
        "torch dtype of codes": str(fmt.storage_dtype).removeprefix("torch."),
        "ml_dtypes type": _type_name(fmt),
    }


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _type_name(fmt: Format) -> str:
    if fmt.ml_dtype is None:
        return "none"
    module = fmt.ml_dtype.__module__
    return f"{module}.{fmt.ml_dtype.__name__}" if module == "numpy" else fmt.ml_dtype.__name__


def policies(fmt: FormatLike) -> dict[str, str]:
    """The results of inputs that have no nearest value, found by encoding them."""
    fmt = get(fmt)
    beyond = (math.nextafter(2 * fmt.max, math.inf), math.inf)
    low = fmt.min_subnormal
    return {
        "name": fmt.name,
        "NaN": outcome(fmt, [math.nan]),
        "beyond max, inf: saturate": outcome(fmt, beyond),
        "beyond max, inf: ieee": outcome(fmt, beyond, "ieee"),
        "0": outcome(fmt, [0.0]),
        "-0": outcome(fmt, [-0.0]),
        "-1": outcome(fmt, [-1.0]),
        "1/2, 3/4 of the smallest": ", ".join(outcome(fmt, [x]) for x in (low / 2, 0.75 * low)),
    }


def specials(fmt: FormatLike) -> dict[str, str]:
    """The codes that are not finite numbers."""
    fmt = get(fmt)
    half = fmt.num_codes >> int(fmt.signed)
    inf = [fmt.max_code + 1, fmt.max_code + 1 + half] if fmt.has_inf else []
    return {
        "name": fmt.name,
        "inf, -inf": ", ".join(_hex(code, fmt) for code in inf) or "none",
        "NaN": ", ".join(_span(s.start, s.stop - 1, fmt) for s in fmt.nan_codes) or "none",
    }


def outcome(fmt: FormatLike, inputs: Sequence[float], overflow: Overflow = "saturate") -> str:
    """The value that all `inputs` are encoded to. Several values are joined by "or"."""
    fmt = get(fmt)
    found = encode(torch.tensor(inputs, dtype=torch.float64), fmt, overflow=overflow)
    words = [number(fmt.value(code)) for code in unsigned(found)]
    return " or ".join(dict.fromkeys(words))


def unsigned(codes: torch.Tensor) -> list[int]:
    """A 1-dim tensor of codes as a list of ints."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.element_size()]
    mask = (1 << 8 * codes.element_size()) - 1
    return [code & mask for code in codes.view(dtype).tolist()]


def values(fmt: FormatLike) -> list[str]:
    """Lines with the value of every code: each value up to 8 bits, else ranges of codes."""
    fmt = get(fmt)
    half = fmt.num_codes >> int(fmt.signed)
    if fmt.bits > 8:
        return _ranges(fmt, half)
    exceptions = [c for c in range(half, fmt.num_codes) if not _negates(fmt, c, c - half)]
    if len(exceptions) > 1:
        return _grid(fmt, fmt.num_codes)
    lines = _grid(fmt, half)
    if fmt.signed:
        lines.append(_mirror(fmt, half, exceptions))
    return lines


def _grid(fmt: Format, count: int) -> list[str]:
    cells = [number(fmt.value(code)) for code in range(count)]
    width = max(map(len, cells))
    return [
        f"{_hex(start, fmt)}  " + "  ".join(f"{c:>{width}}" for c in cells[start : start + _ROW])
        for start in range(0, count, _ROW)
    ]


def _negates(fmt: Format, code: int, other: int) -> bool:
    a, b = fmt.value(code), fmt.value(other)
    return (math.isnan(a) and math.isnan(b)) or (
        a == -b and math.copysign(1.0, a) != math.copysign(1.0, b)
    )


def _mirror(fmt: Format, half: int, exceptions: Sequence[int]) -> str:
    line = f"{_span(half, fmt.num_codes - 1, fmt)}  the same in this order, negative"
    for code in exceptions:
        line += f"; but {_hex(code, fmt)} is {number(fmt.value(code))}"
    return line


def _ranges(fmt: Format, half: int) -> list[str]:
    """Lines with the ranges of codes of a signed format: zero, subnormals, normals, inf, NaN."""
    first, top = 1 << fmt.mantissa_bits, fmt.max_code

    def ends(low: int, high: int) -> str:
        return f"{number(fmt.value(low))} to {number(fmt.value(high))}"

    rows = [
        (0, 0, "0"),
        (1, first - 1, f"subnormals, {ends(1, first - 1)} in steps of {number(fmt.value(1))}"),
        (first, top, f"normals, {ends(first, top)}, {first} to an octave"),
    ]
    if fmt.has_inf:
        rows.append((top + 1, top + 1, "inf"))
    rows += [(s.start, s.stop - 1, "NaN") for s in fmt.nan_codes if s.start < half]
    rows.append((half, fmt.num_codes - 1, "the same in this order, negative"))
    width = max(len(_span(low, high, fmt)) for low, high, _ in rows)
    return [f"{_span(low, high, fmt):{width}}  {words}" for low, high, words in rows if low <= high]


def _span(low: int, high: int, fmt: Format) -> str:
    return _hex(low, fmt) if low == high else f"{_hex(low, fmt)} to {_hex(high, fmt)}"


def _hex(code: int, fmt: Format) -> str:
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


def columns(rows: Sequence[dict[str, str]]) -> str:
    """Rows with the same keys, as aligned columns of text."""
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """The same rows as a Markdown table."""
    table = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)
