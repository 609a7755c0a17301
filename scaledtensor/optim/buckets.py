"""Parameters that are stepped together: where what is kept of them lies, and views of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import ShapeError
from scaledtensor.formats import FP16, FP32, get
from scaledtensor.optim.keeping import GROUP, MASTERS, Kept
from scaledtensor.optim.updates import RULES, Plan, Units, goes_by_pieces, run, zeros_for
from scaledtensor.tensors.expanded import ExpandedTensor
from scaledtensor.tensors.shards import is_dtensor
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "ALONE",
    "COPIED",
    "TOGETHER",
    "Bucket",
    "Entry",
    "Parts",
    "Scratch",
    "as_spread",
    "check_alike",
    "groups_in",
    "part",
    "parts_of",
]


# Parameters and states that are spread over ranks, for steps that are by element: each rank steps
# its part, and what it keeps of it is a part of a DTensor laid out as the parameter is.
def part(x: Any) -> Any:
    """What this rank has of a DTensor; anything else as it is."""
    return _torch.local_part(x) if is_dtensor(x) else x


def as_spread(x: Any, like: Tensor) -> Any:
    """A part, as the DTensor that it is one of, if `like` is one."""
    if not is_dtensor(like) or not isinstance(x, Tensor):
        return x
    mesh, cut = like.device_mesh, like.placements
    options: Any = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like).from_local(x, mesh, cut, **options)


def check_alike(name: str, x: Any, p: Tensor) -> None:
    """Raises ShapeError where a state is not laid out as its parameter is."""
    layouts = [(t.device_mesh, t.placements) if is_dtensor(t) else None for t in (x, p)]
    if layouts[0] != layouts[1]:
        raise ShapeError(
            f"state {name!r} of a parameter of shape {tuple(p.shape)} is {_told(x)}, and the "
            f"parameter is {_told(p)}: load it by scaledtensor.checkpoint, which cuts anew"
        )


def _told(x: Any) -> str:
    return f"spread over ranks as {x.placements}" if is_dtensor(x) else "whole"


class Parts:
    """The state of one parameter, as this rank's parts."""

    def __init__(self, state: dict[str, Any], parameter: Tensor) -> None:
        self.state, self.parameter = state, parameter

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def __getitem__(self, name: str) -> Any:
        return part(self.state[name])

    def get(self, name: str) -> Any:
        return part(self.state.get(name))

    def put(self, name: str, x: Tensor) -> Any:
        """Keep a part; what is kept, whose part shares the memory of `x`."""
        self.state[name] = kept = as_spread(x, self.parameter)
        return part(kept)


def parts_of(states: Mapping[Tensor, dict[str, Any]], parameter: Tensor) -> Parts:
    """The state of `parameter`, empty where there is none yet."""
    return Parts(states[parameter], parameter)


#: From this many elements on, a parameter of whole groups is stepped where it is: a call costs as
#: much as copying that many.
ALONE = 1 << 17


#: So many elements are kept at most in one bucket, if there are more parameters than one in it.
TOGETHER = 1 << 20


#: So many groups are copied at once where steps go by pieces, to be in a cache when they are read.
COPIED = 1 << 11


class Entry(NamedTuple):
    """A parameter that is to be stepped, checked."""

    owner: Tensor
    """The parameter that the optimizer has."""
    parameter: Tensor
    """Itself, or this rank's part of it."""
    state: Parts
    group: dict[str, Any]
    plan: Plan
    elements: Tensor
    """Plain, of the parameter's shape: itself, or the `qdata` of a ScaledTensor."""
    gradient: Tensor
    """Likewise."""
    units: Units
    fresh: bool
    """Whether it is a ScaledTensor known to be zero, whose scale is that of what comes."""
    first: bool
    """Whether it has no states yet."""

    @property
    def alone(self) -> bool:
        whole = self.elements.numel() % GROUP == 0 and not self.fresh
        dense = self.elements.is_contiguous() and self.gradient.is_contiguous()
        return self.elements.numel() >= ALONE and whole and dense


def groups_in(x: Tensor) -> int:
    return -(-x.numel() // GROUP)


class Scratch:
    """Memory for copies of elements and gradients, one for all buckets of an optimizer."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def rows(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (name, dtype, device)
        held = self._held.get(key)
        if held is None or len(held) < count:
            held = self._held[key] = torch.zeros(count, GROUP, dtype=dtype, device=device)
        return held[:count]


class Bucket:
    """Parameters of one plan and one device."""

    def __init__(self, plan: Plan, entries: Sequence[Entry]) -> None:
        self.plan = plan
        self.parameters = [e.parameter for e in entries]
        counts = [groups_in(p) for p in self.parameters]
        self.groups = sum(counts)
        self.ragged = any(p.numel() % GROUP for p in self.parameters)
        device = entries[0].elements.device
        self.device = device
        ends = torch.tensor(counts).cumsum(0).tolist()
        self.spans = [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]
        self.owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
        self.states, self.master = zeros_for(plan, self.groups, device)
        self.pieces = [(slice(0, len(counts)), slice(0, self.groups))]
        if goes_by_pieces(plan, device):
            self.pieces = list(_pieces(self.spans))
        self.seen: list[dict[str, Tensor]] = []
        self._viewed: dict[Any, list[Tensor]] = {}

    def holds(self, entries: Sequence[Entry]) -> bool:
        """Whether what the optimizer has of each parameter is what this made."""
        for entry, seen in zip(entries, self.seen, strict=True):
            for name, x in seen.items():
                if entry.state.get(name) is not x:
                    return False
        return True

    def adopt(self, entries: Sequence[Entry]) -> None:
        """Take over what the optimizer has, zeros where it has nothing, and show views of it."""
        for entry, span in zip(entries, self.spans, strict=True):
            state = entry.state
            seen = {}
            for name, kept in self._parts(span).items():
                view = self._view(name, kept, entry)
                if name in state:
                    _copy(state[name], view)
                seen[name] = state.put(name, view)
            if RULES[self.plan.rule].counts and "step" not in state:
                state.state["step"] = torch.zeros(())
            self.seen.append(seen)

    def step(
        self,
        entries: Sequence[Entry],
        numbers: list[list[float]],
        scratch: Scratch,
        keys: Tensor | None,
        compiled: bool,
    ) -> None:
        """`numbers`: the columns of each parameter."""
        if not self.groups:  # this rank has no part of any
            return
        columns = self._columns(numbers)
        if len(entries) == 1 and entries[0].alone:
            (entry,) = entries
            rows = [x.detach().view(-1, GROUP) for x in (entry.elements, entry.gradient)]
            run(self.plan, rows[0], rows[1], columns, self.states, self.master, keys, compiled)
            return
        for batch, span in self.pieces:
            part = entries[batch]
            elements, gradient, views = self._copies(part, batch, span, scratch)
            states = [tuple(t[span] for t in kept) for kept in self.states]
            master = tuple(t[span] for t in self.master)
            run(self.plan, elements, gradient, columns[span], states, master, keys, compiled)
            self._put_back(part, views)

    def _copies(
        self, entries: Sequence[Entry], batch: slice, span: slice, scratch: Scratch
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Elements and gradients in groups, and the places of each parameter's elements in them."""
        formats = get(self.plan.elements), get(self.plan.gradient)
        count = span.stop - span.start
        elements, gradient = (
            scratch.rows(name, count, fmt.storage_dtype, self.device)
            for name, fmt in zip(("elements", "gradient"), formats, strict=True)
        )
        if self.ragged:  # the padding of a parameter is stepped as well
            elements.zero_()
            gradient.zero_()
        views = self._views(elements, batch, span.start)
        _torch.foreach_copy(views, [e.elements for e in entries])
        places = self._views(gradient, batch, span.start)
        _torch.foreach_copy(places, [e.gradient for e in entries])
        return elements, gradient, views

    def _columns(self, numbers: list[list[float]]) -> Tensor:
        if all(row is numbers[0] for row in numbers):  # of one group: nothing to look up
            row = torch.tensor(numbers[:1], dtype=torch.float32).to(self.device)
            return row.expand(self.groups, -1).contiguous()
        table = torch.tensor(numbers, dtype=torch.float32)
        return table.to(self.device).index_select(0, self.owner)

    def _put_back(self, entries: Sequence[Entry], views: list[Tensor]) -> None:
        old = [(e.elements, v) for e, v in zip(entries, views, strict=True) if not e.fresh]
        _torch.foreach_copy([e for e, _ in old], [v for _, v in old])
        for e, v in zip(entries, views, strict=True):
            if e.fresh:
                e.parameter.copy_(v.float())

    def _views(self, rows: Tensor, batch: slice, first: int) -> list[Tensor]:
        """Of each parameter's place in scratch memory: kept, since they take as long as a step."""
        key = (rows.data_ptr(), rows.dtype, batch.start)
        if key not in self._viewed:
            flat = rows.view(-1)
            self._viewed[key] = [
                flat[(span.start - first) * GROUP :][: p.numel()].view(p.shape)
                for p, span in zip(self.parameters[batch], self.spans[batch], strict=True)
            ]
        return self._viewed[key]

    def _parts(self, span: slice) -> dict[str, Kept]:
        named = dict(zip(self.plan.states, self.states, strict=True))
        beside = MASTERS[self.plan.master].state
        if beside is not None:
            named[beside] = self.master
        return {name: tuple(t[span] for t in kept) for name, kept in named.items()}

    def _view(self, name: str, kept: Kept, entry: Entry) -> Tensor:
        p = entry.parameter
        first = kept[0].view(-1)[: p.numel()].view(p.shape)
        if name in ("remainder",) or (name == "master" and len(kept) == 1):
            return first
        fmt = FP16 if name == "master" else get(self.plan.state_format)
        unit = 1.0 if name == "master" else entry.units.moment
        if name in RULES[self.plan.rule].squared:
            unit *= unit
        scale = torch.tensor(unit, dtype=torch.float32, device=self.device)
        if fmt is not FP32:
            rest: Any = (fmt, torch.float32, None, False, GROUP)
            return ExpandedTensor.keep(first, *kept[1:], scale, p.shape, *rest)
        if not isinstance(p, ScaledTensor):
            return first
        return ScaledTensor.make(first, scale, scale.clone(), FP32, torch.float32, None)


def _pieces(spans: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """Parameters whose copies lie in the scratch memory at once, and their groups. A rest that is
    small is no piece: compiled code of one group would be code of its own."""
    first, end = 0, spans[-1].stop
    for i in range(1, len(spans)):
        size, rest = spans[i].stop - spans[first].start, end - spans[i].start
        if size > COPIED and rest > COPIED // 8:
            yield slice(first, i), slice(spans[first].start, spans[i].start)
            first = i
    yield slice(first, len(spans)), slice(spans[first].start, end)


def _copy(source: Tensor, target: Tensor) -> None:
    """What is kept of one parameter, part by part: the same bits."""
    if not isinstance(target, ScaledTensor):
        target.copy_(source)
        return
    for name in target.INNER:
        if name != "rms":
            getattr(target, name).copy_(getattr(source, name))
