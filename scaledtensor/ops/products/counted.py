"""Casts in compiled code: their shifts are data, and operators of the graph look at operands.

The rules run while a graph is traced, when there is nothing to measure. So the operator that casts
an operand calls another one, `look`, which reads the result in the steps in which the site of the
weight looks. It counts the elements that are the largest value of the format, and measures their
RMS. The site takes the new shifts before compiled code runs again (`scaledtensor.tensors.site`).

A cast operand does not show how far beyond the format its largest elements were. So a shift grows
by steps, which are larger if more elements saturate. All sites look in every step until few
elements saturate. The shift is then the one that eager code would have found.

The operator finds a site by the address of the factors that the site lent to the graph as an input.
Any other mark would be among the guards of the graph, and each layer would be compiled for itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.formats import get as get_format
from scaledtensor.ops.products import sites
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.recipes.casts import Cast
from scaledtensor.tensors import verbs
from scaledtensor.tensors.site import INPUT, site_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["Traced", "traced"]


class Traced:
    """A product of a weight in code that is being compiled."""

    def __init__(self, operands: Sequence[Any], at: int, factors: Tensor, recipe: Recipe) -> None:
        self.weight, self.at, self.factors = operands[at], at, factors
        exported = torch.compiler.is_exporting() or _torch.is_transforming()
        guarded = isinstance(recipe, Unit) and recipe.guard
        self.counts = guarded and not exported and len(operands) > 1

    def cast(self, x: Any, cast: Cast, at: int) -> Any:
        """Return operand `at`, an input, cast. The site looks at the first input."""
        looks = self._looks(cast) and at == int(self.at == 0)
        how = cast.format.name, "nearest_even", self.factors, INPUT, looks
        return verbs.to_format_at(x, *how, torch.is_grad_enabled())

    def gradient(self, cast: Cast) -> tuple[Any, ...]:
        """Return the arguments of the cast of the gradient after format and rounding."""
        return () if cast.format.bits > 8 else (0, self.factors, self._looks(cast))

    def _looks(self, cast: Cast) -> bool:
        return self.counts and cast.format.bits == 8


def traced(operands: Sequence[Any], recipe: Recipe) -> Traced | None:
    """Return the product of these operands, if one of them is a weight that lent its factors to a
    graph, or a view of such a weight."""
    for name in ("traced_lent", "viewed_lent"):
        for i, x in enumerate(operands):
            lent = getattr(x.memo, name) if isinstance(x, ScaledTensor) else None
            if lent is not None:
                return Traced(operands, i, lent, recipe)
    return None


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define("look(Tensor q, Tensor factors, str format, int role, bool trains) -> ()")
_LIBRARY.define("seen(Tensor q, Tensor factors, str format, int role, bool trains) -> Tensor")


def _seen(q: Tensor, factors: Tensor, format: str, role: int, trains: bool) -> Tensor:
    _look(q, factors, format, role, trains)
    return q.clone()


def _look(q: Tensor, factors: Tensor, format: str, role: int, trains: bool) -> None:
    site = site_of(factors)
    if site is None or backend_of(q).is_capturing():
        return
    trains = trains or sites.trains()  # a pass that will be recomputed
    if not trains:
        due = site.new and not site.glanced
    else:
        due = site.is_due() if role == INPUT else site.looks_now()
    if due and q.numel():
        sites.look_at_cast(site, role, q, factors, get_format(format), trains)


_LIBRARY.impl("look", _look, "CompositeExplicitAutograd")
torch.fx.has_side_effect(torch.ops.scaledtensor.look.default)
_LIBRARY.impl("seen", _seen, "CompositeExplicitAutograd")


@torch.library.register_fake("scaledtensor::look", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _look_fake(q: Tensor, factors: Tensor, format: str, role: int, trains: bool) -> None:
    return None


@torch.library.register_fake("scaledtensor::seen", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _seen_fake(q: Tensor, factors: Tensor, format: str, role: int, trains: bool) -> Tensor:
    return torch.empty_like(q)
