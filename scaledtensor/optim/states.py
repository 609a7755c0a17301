"""State formats: how an optimizer keeps a state, such as a momentum, between two steps.

A step sees a state as a float32 matrix whose rows are groups of 128 elements. `read` makes these
rows, and `write` stores new rows in place. Both trace under `torch.compile`. The format also makes
the tensor that `optimizer.state` shows, and converts a state that a file contains.

`Float32State` keeps float32 numbers. `GroupedState` keeps codes of 8 or 16 bits, as
`formats.expansion` describes them. To add a format, add its name to `STATES`. A new way to keep a
state is one more class with the methods of `Float32State`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.formats import FP32, Expanded, Format, get
from scaledtensor.formats.expansion import (
    can_hold_apart,
    holds_any,
    narrow_rows,
    value_table,
    watched_from,
    widen_rows,
)
from scaledtensor.tensors.coded import CodedTensor, is_expanded
from scaledtensor.tensors.coding import Coding
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.tensors.wrap import scaled

__all__ = [
    "GROUP",
    "LARGEST_UNIT",
    "LEAST_UNIT",
    "STATES",
    "STATE_FORMATS",
    "Float32State",
    "GroupedState",
    "Kept",
    "Key",
    "unit_of",
    "values_of",
]

GROUP = 128

#: Limits of a state's unit. The square of a unit is a power of two and a float32 number too.
LEAST_UNIT, LARGEST_UNIT = 2.0**-60, 2.0**60

Kept = tuple[Tensor, ...]
"""A stored state: codes of shape (groups, 128), then one tensor for each number of a group."""

Key = Tensor | None
"""A key of stochastic rounding; None rounds to nearest even."""


class Float32State:
    """Float32 numbers."""

    def empty(self, groups: int, device: torch.device) -> Kept:
        """Return zeros."""
        return (torch.zeros(groups, GROUP, device=device, dtype=torch.float32),)

    def table(self, device: torch.device) -> Tensor | None:
        """Return the table in which `read` looks up values, if the format has one."""
        return None

    def read(self, kept: Kept, table: Tensor | None, spikes: bool) -> Tensor:
        """Return the float32 rows. `spikes` is the result of `has_spikes`."""
        return kept[0]

    def write(
        self, kept: Kept, rows: Tensor, key: Key, start: int, watched: Tensor | None
    ) -> Tensor | None:
        """Store float32 rows in place. Draws of stochastic rounding count elements from `start`.

        Returns:
            The groups that `write_spikes` must write again, if `watched` is the result of `watch`.
        """
        kept[0].copy_(rows)
        return None

    def watch(self, kept: Kept) -> Tensor | None:
        """Return the largest magnitude of each group above which the group may have a spike. None
        makes `write` look for spikes itself."""
        return None

    def has_spikes(self, states: Sequence[Kept]) -> bool:
        """Whether a group of these states may hold a spike."""
        return False

    def write_spikes(self, kept: Kept, rows: Tensor, found: Tensor, key: Key, start: int) -> None:
        """Write the groups in `found` again, and look for a spike in each."""

    def shown(self, kept: Kept, p: Tensor, unit: float) -> Tensor:
        """Return the tensor in `optimizer.state` for parameter `p`: a view of `kept`."""
        first = kept[0].view(-1)[: p.numel()].view(p.shape)
        if not isinstance(p, ScaledTensor):
            return first
        scale = torch.tensor(unit, dtype=torch.float32, device=first.device)
        return ScaledTensor.make(first, scale, scale.clone(), FP32, torch.float32, None)

    def converted(self, x: Tensor, p: Tensor, unit: float) -> Tensor:
        """Return a copy of a state in any format, in this format and in units of `unit`."""
        values = values_of(x)
        if not isinstance(p, ScaledTensor):
            return values.to(p.device, torch.float32, copy=True)
        return scaled(values.to(p.device, torch.float32), scale=unit)


@dataclass(frozen=True)
class GroupedState(Float32State):
    """Codes of a format of 8 or 16 bits, in groups of 128.

    A group can have one spike: a magnitude far above all others, which `formats.expansion` keeps
    apart from the codes. The search for spikes takes a CPU half as long as the whole step, and
    nearly no group has one. On a CPU, a step therefore writes all groups without the search. Only
    the groups whose largest magnitude exceeds a bound are searched and written again.
    """

    format: Format

    def empty(self, groups: int, device: torch.device) -> Kept:
        codes = torch.zeros(groups, GROUP, dtype=self.format.storage_dtype, device=device)
        power = torch.full((groups,), 16, dtype=torch.uint8, device=device)
        return codes, torch.ones(groups, device=device, dtype=torch.float32), power

    def table(self, device: torch.device) -> Tensor | None:
        return value_table(self.format, device) if self.format.bits == 8 else None

    def read(self, kept: Kept, table: Tensor | None, spikes: bool) -> Tensor:
        return narrow_rows(Expanded(*kept), self.format, table, spikes)

    def write(
        self, kept: Kept, rows: Tensor, key: Key, start: int, watched: Tensor | None
    ) -> Tensor | None:
        made = widen_rows(rows, self.format, key, start, spikes=watched is None)
        for held, new in zip(kept, made, strict=True):
            held.copy_(new)
        return None if watched is None else made.amax > watched

    def watch(self, kept: Kept) -> Tensor | None:
        searched = can_hold_apart(self.format) and backend_of(kept[1]).host
        return watched_from(kept[1]) if searched else None

    def has_spikes(self, states: Sequence[Kept]) -> bool:
        return can_hold_apart(self.format) and any(holds_any(kept[1]) for kept in states)

    def write_spikes(self, kept: Kept, rows: Tensor, found: Tensor, key: Key, start: int) -> None:
        found = found & (kept[1] != 1.0)  # Groups of zeros have 1.
        if not found.any():
            return
        (places,) = found.nonzero(as_tuple=True)
        made = widen_rows(rows[places], self.format, key, start)
        for held, new in zip(kept, made, strict=True):
            held[places] = new

    def shown(self, kept: Kept, p: Tensor, unit: float) -> Tensor:
        first = kept[0].view(-1)[: p.numel()].view(p.shape)
        scale = torch.tensor(unit, dtype=torch.float32, device=first.device)
        context = (self.format, torch.float32, None, False, Coding(GROUP, expanded=True))
        return CodedTensor.put_together((first, *kept[1:], scale), p.shape, context)

    def converted(self, x: Tensor, p: Tensor, unit: float) -> Tensor:
        if is_expanded(x) and x.format.name == self.format.name and x.granularity == GROUP:
            return x.detach().to(p.device, copy=True)
        values = values_of(x).to(p.device)
        name = self.format.name
        return CodedTensor.expanded(values, name, GROUP, dtype=torch.float32, tensor_scale=unit)


#: The formats that `state_format` names.
STATES: Mapping[str, Float32State] = {
    "fp32": Float32State(),
    **{name: GroupedState(get(name)) for name in ("bf16", "fp16", "e4m3fn", "e5m2", "int8")},
}

STATE_FORMATS = tuple(STATES)


def unit_of(x: Any) -> float:
    """Return the power of two by which the elements of a state are multiplied; 1 if it is plain."""
    if is_expanded(x):
        return float(x.tensor_scale)
    return float(x.scale) if isinstance(x, ScaledTensor) else 1.0


def values_of(x: Tensor) -> Tensor:
    """Return the elements of a state as a plain tensor."""
    return x.detach().dequantize() if isinstance(x, Ruled) else x.detach()
