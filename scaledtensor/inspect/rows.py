"""A row of a report: one operator in one module, its numbers, and the problems that they show.

Layers that repeat with the same rows are folded into one (`fold`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

__all__ = ["HELD", "LIMITS", "PROBLEMS", "Folded", "Ran", "Row", "aligned", "fold"]

#: The range in which the rules hold RMS(qdata).
HELD = (0.5, 2.0)

#: Shares of the elements of a cast above which the loss is a problem. Underflow costs less: it
#: takes the smallest elements, whose squares hardly count.
LIMITS = {"saturated": 1e-4, "underflowed": 1e-2}

#: The problems that a row can have, worst first.
PROBLEMS = {
    "saturated": "elements beyond the largest value of the format",
    "underflowed": "elements that are not zero and that the format rounds to zero",
    "fallback": "an operator without a rule, which runs in float32",
    "drifted": "an operand of products that is cast with an RMS(qdata) outside [1/2, 2]",
    "excluded": "a product with a weight that is left plain",
    "uncast": "a product whose operands the recipe casts elsewhere, and not here",
}


Ran = Literal["recipe", "rule", "fallback", "plain"]
"""How an operator ran: on operands that the recipe cast; by a rule on 16- or 32-bit elements; in
float32 for want of a rule; on plain tensors alone."""


@dataclass
class Row:
    """One operator in one module, forward or backward. Fields are built-in types only."""

    module: str
    op: str
    backward: bool
    ran: Ran
    rule: str = ""
    """The family of the rule (a module of scaledtensor.ops.rules); empty without a rule."""
    operand: str = ""
    """The operand that was cast: "input", "weight" or "gradient"; empty for other operators."""
    format: str = ""
    """Name of the format of a cast to 8 bits or fewer; empty for other operators."""
    hits: int = 0
    flops: int = 0
    """Multiplications and additions of products, as torch's FlopCounterMode counts them."""
    bytes: int = 0
    """Bytes of floats that operators other than products and views read and wrote."""
    narrow_bytes: int = 0
    """The part of `bytes` in elements of 8 bits or fewer."""
    low: float | None = None
    """The least RMS(qdata) of a result; None if no result was scaled, or all were zero."""
    high: float | None = None
    """The largest RMS(qdata) of a result."""
    elements: int = 0
    """Elements that were cast to 8 bits, for the shares below."""
    saturated: float = 0.0
    """Share of the elements cast to 8 bits that were beyond the largest value."""
    underflowed: float = 0.0
    """Share of these elements that were not zero and became zero."""
    reach: float = 0.0
    """The largest magnitude that was cast, divided by the largest value of the format."""
    amax_underflowed: float = 0.0
    """Share that would underflow if the tensor's amax were the largest value of the format. Then no
    element saturates."""
    carried_saturated: float = 0.0
    """Share that would saturate under the scale that the rules carry."""
    carried_underflowed: float = 0.0
    """Share that would underflow under it."""
    e4m3fn_saturated: float = 0.0
    """Share that would saturate as E4M3FN, under the scale that the rules carry."""
    e4m3fn_underflowed: float = 0.0
    """Share that would underflow as E4M3FN, under this scale."""
    problem: str = ""
    """Names of its problems, out of `PROBLEMS`, separated by commas; empty without a problem."""

    @property
    def in_range(self) -> bool:
        if self.low is None or self.high is None:
            return True
        return self.low >= HELD[0] and self.high <= HELD[1]

    @property
    def problems(self) -> list[str]:
        return self.problem.split(", ") if self.problem else []

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, in types that JSON has."""
        return asdict(self)

    def add_range(self, rms: float) -> None:
        """Widen [low, high] to hold the RMS(qdata) of another result."""
        self.low = rms if self.low is None else min(self.low, rms)
        self.high = rms if self.high is None else max(self.high, rms)

    def add_cast(self, count: int, reach: float, **shares: float) -> None:
        """Add a cast of `count` elements. `shares` has a share for each field of that name."""
        n = self.elements + count
        for name, share in shares.items():
            total = getattr(self, name) * self.elements + share * count
            setattr(self, name, total / max(n, 1))
        self.elements, self.reach = n, max(self.reach, reach)

    def judge(self, is_excluded: bool) -> None:
        """Fill in `problem`. `is_excluded` tells whether the module's own weight is plain."""
        self.problem = ", ".join(self._found(is_excluded))

    def _found(self, is_excluded: bool) -> Iterator[str]:
        # An amax scale is rounded, so the largest element may lie one ulp beyond the format.
        if self.saturated > LIMITS["saturated"] and self.reach > 1.01:
            yield "saturated"
        if self.underflowed > LIMITS["underflowed"]:
            yield "underflowed"
        if self.ran == "fallback":
            yield "fallback"
        # A drift loses nothing between products, since BF16 has the exponents of FP32.
        if self.operand and not self.in_range:
            yield "drifted"
        if self.flops and self.ran in ("rule", "plain"):
            if is_excluded:
                yield "excluded"
            elif self.ran == "rule" and self.rule in ("matmul", "convolution"):
                yield "uncast"


# --- repeated layers with the same rows ------------------------------------------------------

_Part = str | tuple[int, ...]
"""A component of a module's name: a name, or the numbers of the layers that are folded into one."""

_SUMS = ("hits", "flops", "bytes", "narrow_bytes", "elements")
_MOST = (
    *("saturated", "underflowed", "reach", "amax_underflowed"),
    *("carried_saturated", "carried_underflowed", "e4m3fn_saturated", "e4m3fn_underflowed"),
)


@dataclass
class Folded:
    """The rows of layers that repeat, as one row."""

    path: tuple[_Part, ...]
    rows: list[Row]

    @property
    def module(self) -> str:
        """`blocks.0..11.mlp`, `blocks.{0,2,5}.mlp`, or the module's name if it is only one."""
        return ".".join(map(_spelled, self.path))

    @property
    def row(self) -> Row:
        """One row for all: sums of counts, the range of the RMS, and the largest of each share."""
        first = self.rows[0]
        found = {name: sum(getattr(r, name) for r in self.rows) for name in _SUMS}
        most = {name: max(getattr(r, name) for r in self.rows) for name in _MOST}
        lows = [r.low for r in self.rows if r.low is not None]
        highs = [r.high for r in self.rows if r.high is not None]
        ends = {"low": min(lows, default=None), "high": max(highs, default=None)}
        return replace(first, module=self.module, **found, **most, **ends)  # type: ignore[arg-type]


def fold(rows: Iterable[Row]) -> list[Folded]:
    """Fold the rows of numbered layers that have the same rows; the order stays.

    Rows are the same if their operators ran by the same rules, equally often, and have the same
    problems.
    """
    folded = [Folded(_path(r.module), [r]) for r in rows]
    depth = max((len(f.path) for f in folded), default=0)
    for i in reversed(range(depth)):  # experts in a layer, then the layers
        folded = _folded_at(folded, i)
    return folded


def _folded_at(folded: list[Folded], i: int) -> list[Folded]:
    """Fold layers that differ in component `i` of their names."""
    layers: dict[tuple[tuple[_Part, ...], _Part], list[Folded]] = defaultdict(list)
    for f in folded:
        if len(f.path) > i and isinstance(f.path[i], tuple):
            layers[f.path[:i], f.path[i]].append(f)
    alike: dict[object, list[list[Folded]]] = defaultdict(list)
    for (outside, _), own in layers.items():
        alike[outside, frozenset((f.path[i + 1 :], _signature(f)) for f in own)].append(own)
    merged: dict[int, Folded] = {}
    gone: set[int] = set()
    for groups in alike.values():
        twins = [{(f.path[i + 1 :], _signature(f)): f for f in own} for own in groups]
        for key, f in twins[0].items():
            same = [of[key] for of in twins]
            numbers = tuple(sorted(n for t in same for n in t.path[i]))
            path = (*f.path[:i], numbers, *f.path[i + 1 :])
            merged[id(f)] = Folded(path, [r for t in same for r in t.rows])  # type: ignore[arg-type]
            gone |= {id(t) for t in same[1:]}
    return [merged.get(id(f), f) for f in folded if id(f) not in gone]


def _signature(f: Folded) -> tuple[object, ...]:
    r = f.rows[0]
    return r.op, r.backward, r.ran, r.rule, r.operand, r.format, r.hits, r.problem


def _path(module: str) -> tuple[_Part, ...]:
    if not module:
        return ()
    return tuple((int(p),) if p.isdecimal() else p for p in module.split("."))


def _spelled(part: _Part) -> str:
    if isinstance(part, str):
        return part
    if len(part) == 1:
        return str(part[0])
    first, last = part[0], part[-1]
    if len(part) == last - first + 1:
        return f"{first}..{last}"
    return "{" + ",".join(map(str, part)) + "}"


# --- text ------------------------------------------------------------------------------------


def aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table, whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (c.ljust(w) for c, w in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
