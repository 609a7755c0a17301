"""Buckets: parameters that are stepped together, in flat memory.

A bucket owns the memory of its parameters' states, each parameter padded to whole groups of 128.
`optimizer.state` shows views of this memory. A step copies the elements of parameters and gradients
into scratch memory, calls `kernel.run`, and copies the elements back. A large parameter is a bucket
by itself and is stepped in place. The C++ loop of `loops.py` steps all parameters in place.

A step is by element. If a parameter is a DTensor, each rank steps its part, and the states that the
rank keeps are parts of DTensors with the parameter's layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import ShapeError
from scaledtensor.formats import get
from scaledtensor.optim.kernel import Plan, goes_by_pieces, run
from scaledtensor.optim.loops import Loop, serve
from scaledtensor.optim.masters import MASTERS
from scaledtensor.optim.states import GROUP, STATES
from scaledtensor.optim.updates import RULES, Group, Units
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.shards import is_dtensor

__all__ = [
    "Bucket",
    "Entry",
    "Scratch",
    "as_spread",
    "batches",
    "check_alike",
    "part",
    "stands_alone",
]

#: From this number of elements on, a parameter of whole groups is stepped in place: a call costs as
#: much as a copy of so many elements.
ALONE = 1 << 17

#: The largest number of elements in one bucket of several parameters.
TOGETHER = 1 << 20

#: The largest number of groups that are copied at once if a step goes by pieces, so that they are
#: still in a cache when they are read.
COPIED = 1 << 11


def part(x: Any) -> Any:
    """Return this rank's part of a DTensor, and any other object unchanged."""
    return _torch.local_part(x) if is_dtensor(x) else x


def as_spread(x: Any, like: Tensor) -> Any:
    """Return the DTensor whose part on this rank is `x`, if `like` is a DTensor."""
    if not is_dtensor(like) or not isinstance(x, Tensor):
        return x
    mesh, cut = like.device_mesh, like.placements
    options: Any = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like).from_local(x, mesh, cut, **options)


def check_alike(name: str, x: Any, p: Tensor) -> None:
    """Raise ShapeError if a state has another layout over ranks than its parameter."""
    layouts = [(t.device_mesh, t.placements) if is_dtensor(t) else None for t in (x, p)]
    if layouts[0] != layouts[1]:
        told = [
            f"spread over ranks as {t.placements}" if is_dtensor(t) else "whole" for t in (x, p)
        ]
        raise ShapeError(
            f"state {name!r} of a parameter of shape {tuple(p.shape)} is {told[0]}, and the "
            f"parameter is {told[1]}: load it by scaledtensor.checkpoint, which cuts anew"
        )


class Entry(NamedTuple):
    """A checked parameter with a gradient."""

    owner: Tensor
    """The parameter of the optimizer."""
    parameter: Tensor
    """The parameter, or this rank's part of it."""
    state: dict[str, Any]
    """The parameter's entry in `optimizer.state`."""
    group: Group
    plan: Plan
    elements: Tensor
    """A plain tensor of the parameter's shape: the parameter, or the `qdata` of a ScaledTensor."""
    gradient: Tensor
    """The elements of the gradient, likewise."""
    units: Units
    fresh: bool
    """Whether the parameter is a ScaledTensor of zeros: it adopts the scale of the first value."""
    first: bool
    """Whether the parameter has no states yet."""
    alone: bool
    """Whether the parameter is stepped in place, in a bucket of its own."""


def stands_alone(elements: Tensor, gradient: Tensor, fresh: bool) -> bool:
    """Whether a parameter is large enough to be stepped in place, and can be."""
    count = elements.numel()
    if count < ALONE or count % GROUP or fresh:
        return False
    return elements.is_contiguous() and gradient.is_contiguous()


def batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Divide the entries of a step into the entries of each bucket."""
    open_: dict[Any, tuple[list[Entry], int]] = {}
    key: Any = (None, None)
    for entry in entries:
        if entry.alone:
            yield [entry]
            continue
        device = entry.elements.device
        if entry.plan is not key[0] or device != key[1]:
            key = (entry.plan, device)
        batch, size = open_.get(key, ([], 0))
        more = _groups_in(entry.elements) * GROUP
        if batch and size + more > TOGETHER:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        open_[key] = batch, size + more
    for batch, _ in open_.values():
        yield batch


def _groups_in(x: Tensor) -> int:
    return -(-x.numel() // GROUP)


class Scratch:
    """Memory for copies of elements and gradients; the buckets of an optimizer share it."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def rows(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (name, dtype, device)
        held = self._held.get(key)
        if held is None or len(held) < count:
            held = self._held[key] = torch.zeros(count, GROUP, dtype=dtype, device=device)
        return held[:count]


class Bucket:
    """The states of parameters that have one plan and one device.

    The states that the optimizer has for these parameters are copied into the bucket, and
    `optimizer.state` then shows views of the bucket. The bucket is valid as long as
    `optimizer.state` contains these views.
    """

    def __init__(self, plan: Plan, entries: Sequence[Entry]) -> None:
        self.plan = plan
        self.owners = [e.owner for e in entries]  # alive, so that no other object gets their ids
        self.device = entries[0].elements.device
        self.shapes = [e.elements.shape for e in entries]
        counts = [_groups_in(e.elements) for e in entries]
        self.groups = sum(counts)
        self.ragged = any(shape.numel() % GROUP for shape in self.shapes)
        ends = torch.tensor(counts).cumsum(0).tolist()
        #: The groups of each parameter.
        self.spans = [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]
        #: The parameter of each group, by its place in `entries`.
        self.owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self.owner = self.owner.to(self.device)
        #: (parameters, groups) that are copied at once.
        self.pieces = [(slice(0, len(counts)), slice(0, self.groups))]
        if goes_by_pieces(plan, self.device):
            self.pieces = list(_pieces(self.spans))

        self.format, self.holder = STATES[plan.state_format], MASTERS[plan.master]
        self.states = [self.format.empty(self.groups, self.device) for _ in plan.states]
        self.master = self.holder.empty(self.groups, self.device)
        #: For each parameter, the views that `optimizer.state` shows.
        self.shown = [self._adopt(e, span) for e, span in zip(entries, self.spans, strict=True)]
        self._places: dict[Any, list[Tensor]] = {}
        self._loop: Loop | None = None

    def _adopt(self, entry: Entry, span: slice) -> dict[str, Tensor]:
        """Copy the states of a parameter into the bucket, and show views in their place."""
        p, unit, squared = entry.parameter, entry.units.moment, RULES[self.plan.rule].squared
        views = {}
        for name, kept in zip(self.plan.states, self.states, strict=True):
            its = unit * unit if name in squared else unit
            views[name] = self.format.shown(tuple(t[span] for t in kept), p, its)
        if self.holder.state is not None:
            views[self.holder.state] = self.holder.shown(tuple(t[span] for t in self.master), p)
        shown = {}
        for name, view in views.items():
            if name in entry.state:
                _copy(part(entry.state[name]), view)
            shown[name] = entry.state[name] = as_spread(view, entry.owner)
        if RULES[self.plan.rule].counts and "step" not in entry.state:
            entry.state["step"] = torch.zeros((), dtype=torch.float32)
        return shown

    def holds(self, entries: Sequence[Entry]) -> bool:
        """Whether `optimizer.state` still contains the views of this bucket."""
        for entry, shown in zip(entries, self.shown, strict=True):
            for name, x in shown.items():
                if entry.state.get(name) is not x:
                    return False
        return True

    def step(
        self,
        entries: Sequence[Entry],
        numbers: list[list[float]],
        scratch: Scratch,
        keys: Tensor | None,
        compiled: bool,
        loops: bool,
    ) -> None:
        """Make one step.

        Args:
            entries: the parameters that the bucket was made for.
            numbers: the columns of each parameter.
            scratch: memory for copies.
            keys: keys of stochastic rounding.
            compiled: whether to compile the step.
            loops: whether the C++ loop makes the step instead, if it can.
        """
        if not self.groups:  # this rank has no part of any parameter
            return
        if loops and serve(self.plan, entries):
            if self._loop is None:
                firsts = [span.start for span in self.spans]
                self._loop = Loop(self.plan, self.states, self.master, firsts, self.groups)
            _put_back(*self._loop.step(entries, numbers))
            return
        columns = self._columns(numbers)
        above = [self.format.watch(kept) for kept in self.states]
        if entries[0].alone:
            elements = entries[0].elements.detach().view(-1, GROUP)
            gradient = entries[0].gradient.detach().view(-1, GROUP)
            its = (self.states, self.master, above, keys, compiled)
            run(self.plan, elements, gradient, columns, *its)
            return
        for batch, span in self.pieces:
            elements, gradient, places = self._copies(entries[batch], batch, span, scratch)
            *states, master = (tuple(t[span] for t in k) for k in (*self.states, self.master))
            bounds = [None if x is None else x[span] for x in above]
            own = (states, master, bounds, keys, compiled)
            run(self.plan, elements, gradient, columns[span], *own)
            _put_back(entries[batch], places)

    def _columns(self, numbers: list[list[float]]) -> Tensor:
        if all(row is numbers[0] for row in numbers):  # one parameter group: all rows are equal
            row = torch.tensor(numbers[:1], dtype=torch.float32).to(self.device)
            return row.expand(self.groups, -1).contiguous()
        table = torch.tensor(numbers, dtype=torch.float32)
        return table.to(self.device).index_select(0, self.owner)

    def _copies(
        self, entries: Sequence[Entry], batch: slice, span: slice, scratch: Scratch
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return elements and gradients in groups, and the place of each parameter's elements."""
        copies = []
        for name, fmt in (("elements", self.plan.elements), ("gradient", self.plan.gradient)):
            count = span.stop - span.start
            rows = scratch.rows(name, count, get(fmt).storage_dtype, self.device)
            if self.ragged:  # the padding of a parameter is stepped as well
                rows.zero_()
            sources = [getattr(e, name) for e in entries]
            places = self._views(rows, batch, span.start)
            _torch.foreach_copy(places, sources)
            copies.append((rows, places))
        (elements, places), (gradient, _) = copies
        return elements, gradient, places

    def _views(self, rows: Tensor, batch: slice, first: int) -> list[Tensor]:
        """Return the place of each parameter in scratch memory. The views are cached, because
        making them takes as long as a step."""
        key = (rows.data_ptr(), rows.dtype, batch.start)
        if key not in self._places:
            flat = rows.view(-1)
            self._places[key] = [
                flat[(span.start - first) * GROUP :][: shape.numel()].view(shape)
                for shape, span in zip(self.shapes[batch], self.spans[batch], strict=True)
            ]
        return self._places[key]


def _put_back(entries: Sequence[Entry], places: list[Tensor]) -> None:
    """Copy the new elements of parameters from scratch memory."""
    old = [(e.elements, place) for e, place in zip(entries, places, strict=True) if not e.fresh]
    _torch.foreach_copy([e for e, _ in old], [place for _, place in old])
    for e, place in zip(entries, places, strict=True):
        if e.fresh:
            e.parameter.copy_(place.float())


def _pieces(spans: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """Divide parameters into pieces whose copies are in the scratch memory at once. A small rest
    joins the last piece, because one group would need separate compiled code."""
    first, end = 0, spans[-1].stop
    for i in range(1, len(spans)):
        size, rest = spans[i].stop - spans[first].start, end - spans[i].start
        if size > COPIED and rest > COPIED // 8:
            yield slice(first, i), slice(spans[first].start, spans[i].start)
            first = i
    yield slice(first, len(spans)), slice(spans[first].start, end)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a state to the bit, inner tensor by inner tensor."""
    if not isinstance(target, Ruled):
        target.copy_(source)
        return
    for name in target.INNER:
        if name != "rms":
            getattr(target, name).copy_(getattr(source, name))
