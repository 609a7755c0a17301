"""A site: measurements of the operands of one weight's products.

Under `Unit` a site holds a shift for each role. `scaledtensor.ops.products.sites` finds the shifts
in the steps that `scaledtensor.models.guard` chooses. Under `Delayed` it holds a history of amaxes,
which is a buffer of the weight's module (`scaledtensor.models.delayed`).
`scaledtensor.ops.products.delayed` reads and writes the history.

This module has the record that a weight keeps, and the form in which compiled code reads it. A
graph does not depend on a shift or an amax. Each weight lends the graph one tensor, as an inner
tensor beside `qdata`, `scale` and `rms`: two factors, 2^shift of inputs and of gradients, or its
history. So new measurements need no new compilation, and layers of one shape share their code.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.recipes import Delayed, Unit
from scaledtensor.tensors.memo import note

__all__ = ["GRADIENT", "INPUT", "Seen", "Site", "histories_moved", "lend", "site_of"]

#: Places in `Unit.shifts`.
INPUT, GRADIENT = 0, 1

#: The number of products that a new site looks at, one after another.
_FIRST = 10


class Seen(NamedTuple):
    """A summary of the operands in one role in a step, in units of the scales that they carry."""

    largest: float = 0.0
    """The largest magnitude of an element."""
    squares: float = 0.0
    """The sum of the squares of all elements."""
    number: int = 0
    least: float = math.inf
    """The least RMS of an operand that is not zero."""

    def and_of(self, largest: float, squares: float, count: int) -> "Seen":
        """The summary with another operand."""
        if squares < 2.0**-120:  # they were summed in float32, and may be too small for it
            squares = max(squares, largest**2)
        least = min(self.least, math.sqrt(squares / count)) if squares else self.least
        return Seen(max(self.largest, largest), self.squares + squares, self.number + count, least)


_NOTHING = Seen()


@dataclass(eq=False)
class Site:
    """Measurements of the operands of one weight's products, and the shifts found by them."""

    name: str = ""
    """The fully qualified name of the weight, if `scale_model` gave one."""
    new: bool = False
    """Whether no step has ended since the weight was wrapped."""
    asked: int = 0
    """The number of products that the weight had while the site was new."""
    looks: bool = False
    """Whether its products measure their operands in this step."""
    followed: bool = False
    """Whether its products measured their operands in the step before, too."""
    glanced: bool = False
    """Whether the site has looked at its one product outside of training."""
    found: tuple[int, int] | None = None
    """The shifts that were found for the whole weight, if this rank holds a part of it."""
    seen: list[Seen] = field(default_factory=lambda: [_NOTHING, _NOTHING])
    """The summaries of the operands by role, in this step so far."""
    next: list[int | None] = field(default_factory=lambda: [None, None])
    """The shifts by role that take effect later: when compiled code, which found them, runs again,
    or at the end of the step, if a view of the weight found them."""
    sought: list[int | None] = field(default_factory=lambda: [None, None])
    """The shifts by role that compiled code tries next, because it lost elements in this step."""
    between: list[tuple[int | None, int | None]] = field(
        default_factory=lambda: [(None, None), (None, None)]
    )
    """By role, the largest shift under which elements saturated and the least shift under which an
    operand vanished, since the first of these steps."""
    settling: list[bool] = field(default_factory=lambda: [False, False])
    """Whether elements were lost in the step before, by role. Then the shift is found again."""
    lent: tuple[Any, Tensor] | None = None
    """The key and the value of the tensor that was lent to compiled code last."""
    kept: tuple[int, Callable[[], Tensor | None] | None] | None = None
    """The count of `histories_moved`, and at that count the function that returns the history."""
    own: Tensor | None = None
    """The history for a weight that has left its module, such as a copy or an exported weight."""

    def is_due(self) -> bool:
        """Whether the site looks at the next product. This is called once for each product. A new
        site looks at its first ten, and then at each tenth until a step ends. Without an optimizer,
        no step ends."""
        if not self.new:
            return self.looks
        self.asked += 1
        return self.looks_now()

    def looks_now(self) -> bool:
        """The last answer of `is_due`."""
        if not self.new:
            return self.looks
        return self.asked <= _FIRST or self.asked % _FIRST == 0

    def copied(self, copy: Any) -> "Site":
        """The site of a copy of the weight, which looks when this one does."""
        self.correct(copy)
        own = None if self.own is None else self.own.clone()
        return Site(self.name, self.new, self.asked, self.looks, own=own)

    def forget(self) -> None:
        """Begin the next step, or a calibration."""
        self.seen, self.next = [_NOTHING, _NOTHING], [None, None]
        self.settling, self.sought = [n is not None for n in self.sought], [None, None]
        if not any(self.settling):
            self.between = [(None, None), (None, None)]

    def settle(self, weight: Any) -> None:
        """Put the shifts that compiled code or a view found into the recipe of the weight."""
        if self.next != [None, None]:
            self.correct(weight)
            self.found, self.next = weight.recipe.shifts, [None, None]

    def correct(self, view: Any) -> None:
        """Put the shifts that were found in this step into the recipe of a view or a copy."""
        view.recipe = self.corrected(view.recipe)

    def corrected(self, recipe: Any) -> Any:
        """The given recipe of the weight, with the shifts that were found in this step."""
        if self.next == [None, None] or not isinstance(recipe, Unit):
            return recipe
        of_inputs, of_gradients = (
            kept if found is None else found
            for kept, found in zip(recipe.shifts, self.next, strict=True)
        )
        return recipe.with_shifts((of_inputs, of_gradients))

    def history(self) -> Tensor | None:
        """The amaxes of earlier steps, float32 of shape [3, length + 2]. It is None if no module
        keeps them for the weight of this site."""
        if self.kept is None or self.kept[0] != _moves:
            keeper_of = import_module("scaledtensor.models.delayed").keeper_of
            self.kept = _moves, keeper_of(self, _moves)
        found = None if self.kept[1] is None else self.kept[1]()
        if found is None:
            return self.own
        self.own = found
        return found

    def lends(self, weight: Any) -> Tensor | None:
        """The tensor by which compiled code reads this site of `weight`: factors or a history. None
        if the casts of its products take neither."""
        recipe = weight.recipe
        if weight.qdata.dim() < 2 or recipe is None or recipe.gemms.once is None:
            return None
        if isinstance(recipe, Delayed):
            return self._lent_history()
        return self._lent_factors(weight) if isinstance(recipe, Unit) else None

    def _lent_history(self) -> Tensor | None:
        """The history as a tensor with its own count of writes. A graph that saves it for its
        backward pass stays valid when the next graph writes into it."""
        history = self.history()
        if history is None:
            return None
        if self.lent is None or self.lent[0] is not history:
            with _torch.outside_modes(), torch.inference_mode(False):
                self.lent = history, history.data
        return self.lent[1]

    def _lent_factors(self, weight: Any) -> Tensor:
        """2^shift of the inputs and of the gradients of `weight`, float32 of shape [2]. A running
        graph keeps the factors that it was given."""
        self.settle(weight)
        key = (weight.recipe.shifts, weight.device)
        if self.lent is None or self.lent[0] != key:
            with _torch.outside_modes(), torch.inference_mode(False):
                factors = [2.0**n for n in weight.recipe.shifts]
                made = torch.tensor(factors, dtype=torch.float32, device=weight.device)
            if self.lent is not None:
                _lenders.pop(self.lent[1].data_ptr(), None)
            self.lent = key, made
            _lenders[made.data_ptr()] = self
        return self.lent[1]


def lend(weight: Any, made: Any) -> None:
    """Note in a view or a conversion of a weight the tensor that the weight lent to a graph."""
    lent = weight.memo.lent
    if lent is not None:
        note(made, viewed_lent=lent)


#: The number of times that a module began or stopped to keep histories.
_moves = 0


def histories_moved() -> None:
    """Make every site look again for the history of its weight."""
    global _moves
    _moves += 1


#: The site that lent the factors at an address. If memory is used again, the last site counts.
_lenders: "weakref.WeakValueDictionary[int, Site]" = weakref.WeakValueDictionary()


def site_of(factors: Tensor) -> Site | None:
    """The site that lent these factors, if its weight is still there."""
    return _lenders.get(factors.data_ptr())
