"""A site: what is known of the operands of one weight's products.

Under `Unit` it is a shift of each role, which `scaledtensor.ops.products.sites` finds at the times
that
`scaledtensor.models.guard` chooses. Under `Delayed` it is a history of amaxes, which is a buffer
of the
weight's module (`scaledtensor.models.delayed`), and which
`scaledtensor.ops.products.delayed` reads and writes.

This module has what a weight keeps, and the form in which compiled code reads it: a graph is made
for no shift and no amax. Each weight lends it a tensor, as an inner tensor beside `qdata`, `scale`
and `rms`: two factors, 2^shift of inputs and of gradients, or its history. So what is found
compiles nothing anew, and layers of one shape share their code.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

#: How many products a new site looks at, one after another.
_FIRST = 10


class Seen(NamedTuple):
    """What operands in one role were in a step, in units of the scales that they carry."""

    largest: float = 0.0
    """The largest magnitude of an element."""
    squares: float = 0.0
    """The sum of the squares of all elements."""
    number: int = 0
    least: float = math.inf
    """The least RMS of an operand that is not zero."""

    def and_of(self, largest: float, squares: float, count: int) -> "Seen":
        """With another operand."""
        if squares < 2.0**-120:  # which were summed in float32, and may have been too small for it
            squares = max(squares, largest**2)
        least = min(self.least, math.sqrt(squares / count)) if squares else self.least
        return Seen(max(self.largest, largest), self.squares + squares, self.number + count, least)


_NOTHING = Seen()


@dataclass(eq=False)
class Site:
    """What one weight knows of the operands of its products."""

    name: str = ""
    """The fully qualified name of the weight, where `scale_model` gave one."""
    new: bool = False
    """Whether no step has ended since the weight was wrapped."""
    asked: int = 0
    """How many products it had while it was new."""
    looks: bool = False
    """Whether its products measure their operands in this step."""
    glanced: bool = False
    """Whether a product outside of training was looked at, as one is."""
    found: tuple[int, int] | None = None
    """The shifts that were found for the whole of a weight, of which this rank holds a part."""
    seen: list[Seen] = field(default_factory=lambda: [_NOTHING, _NOTHING])
    """What its operands were by role, in this step so far."""
    next: list[int | None] = field(default_factory=lambda: [None, None])
    """The shifts by role that compiled code found, for when it runs again, or a view of the weight,
    for when the step ends."""
    sought: list[int | None] = field(default_factory=lambda: [None, None])
    """The shifts by role that compiled code tries next, since it lost elements in this step."""
    between: list[tuple[int | None, int | None]] = field(
        default_factory=lambda: [(None, None), (None, None)]
    )
    """The largest shift by role under which elements saturated, and the least under which all of an
    operand vanished, since the first of these steps."""
    settling: list[bool] = field(default_factory=lambda: [False, False])
    """Whether it lost elements in the step before, by role. Then the shift is found anew."""
    lent: tuple[Any, Tensor] | None = None
    """What compiled code was lent, and what it was made of."""
    kept: tuple[int, Callable[[], Tensor | None] | None] | None = None
    """Where the history is, and at which count of `histories_moved` that was found."""
    own: Tensor | None = None
    """The history, for a weight that has left its module: a copy, or what a program was made of."""

    def is_due(self) -> bool:
        """Whether the next product is to be looked at; asked once for each. A new site looks at its
        first ten, and at each tenth until a step ends, which may be never where parameters are
        updated by hand."""
        if not self.new:
            return self.looks
        self.asked += 1
        return self.looks_now()

    def looks_now(self) -> bool:
        """What `is_due` answered last."""
        if not self.new:
            return self.looks
        return self.asked <= _FIRST or self.asked % _FIRST == 0

    def copied(self, copy: Any) -> "Site":
        """The site of a copy of the weight, which looks when this one does."""
        self.correct(copy)
        own = None if self.own is None else self.own.clone()
        return Site(self.name, self.new, self.asked, self.looks, own=own)

    def forget(self) -> None:
        """Begin another step, or another calibration."""
        self.seen, self.next = [_NOTHING, _NOTHING], [None, None]
        self.settling, self.sought = [n is not None for n in self.sought], [None, None]
        if not any(self.settling):
            self.between = [(None, None), (None, None)]

    def settle(self, weight: Any) -> None:
        """Take what compiled code or a view of the weight found into the recipe of `weight`."""
        if self.next != [None, None]:
            self.correct(weight)
            self.found, self.next = weight.recipe.shifts, [None, None]

    def correct(self, view: Any) -> None:
        """Let a view of the weight, or a copy, have what was found in this step."""
        view.recipe = self.corrected(view.recipe)

    def corrected(self, recipe: Any) -> Any:
        """A recipe of the weight with what was found in this step."""
        if self.next == [None, None] or not isinstance(recipe, Unit):
            return recipe
        of_inputs, of_gradients = (
            kept if found is None else found
            for kept, found in zip(recipe.shifts, self.next, strict=True)
        )
        return replace(recipe, shifts=(of_inputs, of_gradients))

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
        """What compiled code reads of this site, the site of `weight`: factors or a history. It is
        None if the casts of its products take neither."""
        recipe = weight.recipe
        if weight.dim() < 2 or recipe is None or recipe.gemms.once is None:
            return None
        if isinstance(recipe, Delayed):
            return self._lent_history()
        return self._lent_factors(weight) if isinstance(recipe, Unit) else None

    def _lent_history(self) -> Tensor | None:
        """The history under a count of writes of its own, since a graph that saves it for its
        backward pass is not invalid when the next one writes into it."""
        history = self.history()
        if history is None:
            return None
        if self.lent is None or self.lent[0] is not history:
            with _torch.outside_modes(), torch.inference_mode(False):
                self.lent = history, history.data
        return self.lent[1]

    def _lent_factors(self, weight: Any) -> Tensor:
        """2^shift of the inputs and of the gradients of `weight`, float32 of shape [2]. A graph in
        flight keeps the ones that it was given."""
        self.settle(weight)
        key = (weight.recipe.shifts, weight.device)
        if self.lent is None or self.lent[0] != key:
            with _torch.outside_modes(), torch.inference_mode(False):
                made = torch.tensor([2.0**n for n in weight.recipe.shifts], device=weight.device)
            if self.lent is not None:
                _lenders.pop(self.lent[1].data_ptr(), None)
            self.lent = key, made
            _lenders[made.data_ptr()] = self
        return self.lent[1]


def lend(weight: Any, made: Any) -> None:
    """Let a view or a conversion of a weight have what the weight lent to a graph."""
    lent = weight.memo.lent
    if lent is not None:
        note(made, viewed_lent=lent)


#: How often a module began or ceased to keep histories.
_moves = 0


def histories_moved() -> None:
    """Let every site look anew for the history of its weight."""
    global _moves
    _moves += 1


#: The site that lent the factors at an address. Where memory is used again, the last one counts.
_lenders: "weakref.WeakValueDictionary[int, Site]" = weakref.WeakValueDictionary()


def site_of(factors: Tensor) -> Site | None:
    """The site that lent these factors, if its weight is still there."""
    return _lenders.get(factors.data_ptr())
