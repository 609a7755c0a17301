"""The memo of a tensor: facts that other floors note beside its value.

A ScaledTensor has its value in `qdata` and `scale`. Rules, gathers and compiled code know more
about some tensors: an 8-bit copy of the elements, or the amax over all ranks. They note such facts
in the tensor's one memo, `x.memo`, by `note(x, field=...)`. A memo is a tuple that never changes.
Most tensors share the empty one, `NOTHING`, so a new tensor takes no more time.

A new tensor begins with `NOTHING`, and so does a view, a copy, a moved or a loaded tensor, and a
tensor that leaves a trace. A rule that can say a field of its result notes it again. A write into a
tensor ends the fields that this table names:

| field | its subject | a write by an operator | an overwrite |
|---|---|---|---|
| `decoded`, `passing`, `source`, `copies`, `towards`, `whole_amax` | the elements | lost | lost |
| `agreed` | the scale | stays | lost |
| `traced_lent`, `viewed_lent` | the weight | stays | stays |

An overwrite (`copy_`, `.data = ...`, a loaded state) brings another scale. An operator that writes
in place leaves the scale of a part alone. A weight's `Site` is not in the memo: views of the weight
share it, and copies get a copy of it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.scales.singles import counted_base

__all__ = [
    "NOTHING",
    "Memo",
    "Source",
    "after_overwrite",
    "after_write",
    "count_write",
    "note",
]


class Source(NamedTuple):
    """A matrix of parameters, or its transpose if it is `turned`."""

    q: Tensor
    turned: bool = False

    @property
    def matrix(self) -> Tensor:
        return self.q.t() if self.turned else self.q


class Memo(NamedTuple):
    """The facts that other floors noted about one tensor."""

    decoded: Tensor | None = None
    """The elements of an 8-bit tensor in the dtype of products, in a graph that is traced
    (`rules/casts.py`)."""
    passing: bool = False
    """Whether only the forward pass may read `decoded`. The backward pass then saves the codes."""
    copies: tuple[Any, ...] | None = None
    """Format, version, and weak references to the codes and scales of the 8-bit copy that operators
    keep for the backward pass (`ops/copies.py`)."""
    source: Source | None = None
    """The elements of a matrix of parameters that `decoded` rounds. A traced backward pass rounds
    them again, so that no copy of a weight is kept (`algebra.factor`)."""
    towards: Any = None
    """The start and the end of a difference, while a graph is traced (`ops/results.py`)."""
    whole_amax: Tensor | None = None
    """The largest finite magnitude of all parts of a sharded tensor (`distributed/gather.py`)."""
    agreed: bool = False
    """Whether the other ranks, with other parts of the same tensor, rely on this part's scale
    (`distributed/gather.py`)."""
    traced_lent: Tensor | None = None
    """The tensor that this weight lent to the graph that is traced (`Site.lends`)."""
    viewed_lent: Tensor | None = None
    """The tensor that another weight lent to the graph, if this is a view of that weight."""

    @property
    def lent(self) -> Tensor | None:
        """The tensor that this weight, or the base of this view, lent to the graph."""
        return self.viewed_lent if self.traced_lent is None else self.traced_lent


#: The memo of a tensor about which nothing was noted.
NOTHING = Memo()


def note(x: Any, **fields: Any) -> None:
    """Set fields of the memo of `x`."""
    x.memo = x.memo._replace(**fields)


def count_write(x: Any) -> None:
    """Count a write into the elements of `x`, for compiled code (`counted_base`)."""
    base = counted_base(x)
    if base is not None and not base.qdata.is_inference():
        torch.autograd.graph.increment_version(base.qdata)


def after_write(x: Any) -> None:
    """Record that an operator wrote into the elements of `x`."""
    count_write(x)
    if x.memo is not NOTHING:
        x.memo = Memo(
            agreed=x.memo.agreed,
            traced_lent=x.memo.traced_lent,
            viewed_lent=x.memo.viewed_lent,
        )


def after_overwrite(x: Any) -> None:
    """Record that `x` was overwritten, and has another scale."""
    if x.memo is not NOTHING:
        x.memo = Memo(traced_lent=x.memo.traced_lent, viewed_lent=x.memo.viewed_lent)
