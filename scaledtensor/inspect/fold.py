"""Repeated layers with the same rows, told once."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scaledtensor.inspect.rows import Row

__all__ = ["Folded", "fold"]

Part = str | tuple[int, ...]
"""A component of a module's name: a name, or the numbers of layers that are told as one."""

_SUMS = ("hits", "flops", "bytes", "narrow_bytes", "elements")
_MOST = (
    *("saturated", "underflowed", "reach", "amax_underflowed"),
    *("carried_saturated", "carried_underflowed", "e4m3fn_saturated", "e4m3fn_underflowed"),
)


@dataclass
class Folded:
    """Rows of layers that repeat, as one."""

    path: tuple[Part, ...]
    rows: list[Row]

    @property
    def module(self) -> str:
        """`blocks.0..11.mlp`, `blocks.{0,2,5}.mlp`, or the name itself where nothing is folded."""
        return ".".join(map(_spelled, self.path))

    @property
    def row(self) -> Row:
        """Sums of counts, the range of the RMS, and the largest of each share."""
        first = self.rows[0]
        found = {name: sum(getattr(r, name) for r in self.rows) for name in _SUMS}
        most = {name: max(getattr(r, name) for r in self.rows) for name in _MOST}
        lows = [r.low for r in self.rows if r.low is not None]
        highs = [r.high for r in self.rows if r.high is not None]
        ends = {"low": min(lows, default=None), "high": max(highs, default=None)}
        return replace(first, module=self.module, **found, **most, **ends)  # type: ignore[arg-type]


def fold(rows: Iterable[Row]) -> list[Folded]:
    """Rows in their order, those of numbered layers together where such layers have the same ones:
    the same operators by the same rules, as often, and with the same problems."""
    folded = [Folded(_path(r.module), [r]) for r in rows]
    depth = max((len(f.path) for f in folded), default=0)
    for i in reversed(range(depth)):  # experts in a layer, then the layers
        folded = _folded_at(folded, i)
    return folded


def _folded_at(folded: list[Folded], i: int) -> list[Folded]:
    """Layers that are told apart by component `i` of their names."""
    layers: dict[tuple[tuple[Part, ...], Part], list[Folded]] = defaultdict(list)
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


def _path(module: str) -> tuple[Part, ...]:
    if not module:
        return ()
    return tuple((int(p),) if p.isdecimal() else p for p in module.split("."))


def _spelled(part: Part) -> str:
    if isinstance(part, str):
        return part
    if len(part) == 1:
        return str(part[0])
    first, last = part[0], part[-1]
    if len(part) == last - first + 1:
        return f"{first}..{last}"
    return "{" + ",".join(map(str, part)) + "}"
