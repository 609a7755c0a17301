"""Casts in compiled code: their shifts are data, and an operator of the graph looks at operands.

The rules run while a graph is traced, when there is nothing to measure. So the graph contains an
operator that reads an operand after its cast, in the steps in which the site of the weight looks.
It counts the elements that are the largest value of the format, and measures their RMS. The site
takes the new shifts before compiled code runs again (`scaledtensor.tensors.site`).

A cast operand does not show how far beyond the format its largest elements were. So a shift grows
by steps, which are larger if more elements saturate. All sites look in every step until few
elements saturate. The shift is then the one that eager code would have found.

The operator finds a site by the address of the factors that the site lent to the graph as an input.
Any other mark would be among the guards of the graph, and each layer would be compiled for itself.
The product takes its scale from the operator, because a compiler would drop an operator without a
result.
"""

import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.formats import get as get_format
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.products import sites
from scaledtensor.ops.products.dtype import product_dtype
from scaledtensor.ops.registry import rule
from scaledtensor.ops.results import store
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.recipes.casts import Cast
from scaledtensor.scales.forms import Form
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.scales.singles import copied, rms_of, scale_of, scaled_by
from scaledtensor.tensors import verbs
from scaledtensor.tensors.memo import note
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

    def held(self, operands: Sequence[Any], cast: Cast) -> list[Any]:
        """Return the operands, with the inputs under the scale for `cast`."""
        return [
            x
            if x is self.weight or x.format == cast.format or cast.format.bits > 8
            else verbs.corrected(x, self.factors, INPUT)
            for x in operands
        ]

    def watched(self, cast: list[Any]) -> list[Any]:
        """Return the cast operands: the input, the weight and any others. When the code runs, the
        input is counted."""
        at = int(self.at == 0)
        x = cast[at]
        if not self.counts or not isinstance(x, ScaledTensor) or x.format.bits != 8:
            return cast
        trains = torch.is_grad_enabled()
        counted = verbs.counted(x, self.factors, INPUT, trains, self._as_rows(x))
        return [*cast[:at], counted, *cast[at + 1 :]]

    def gradient(self, y: Any, cast: Cast) -> tuple[Any, ...]:
        """Return the arguments of the cast of the gradient of `y` after format and rounding."""
        if cast.format.bits > 8:
            return ()
        return 0, self.factors, self.counts and cast.format.bits == 8, self._as_rows(y)

    def _as_rows(self, x: Any) -> bool:
        """Whether products read `x` as a matrix."""
        return bool(self.weight.dim() == 2 and x.dim() > 2)


def traced(operands: Sequence[Any], recipe: Recipe) -> Traced | None:
    """Return the product of these operands, if one of them is a weight that lent its factors to a
    graph, or a view of such a weight."""
    for name in ("traced_lent", "viewed_lent"):
        for i, x in enumerate(operands):
            lent = getattr(x.memo, name) if isinstance(x, ScaledTensor) else None
            if lent is not None:
                return Traced(operands, i, lent, recipe)
    return None


@rule(verbs.corrected)
def corrected(x: ScaledTensor, factors: Tensor, role: int) -> ScaledTensor:
    """The same value under the scale times a power of two, within the range of float32."""
    held = scale_of(x)
    scale = (held * Form.element(factors, role)).clamp_min(MIN_SCALE).clamp_max(MAX_SCALE)
    return x.like(store(scaled_by(elements(x), held / scale), x.format), scale, copied(rms_of(x)))


@rule(verbs.counted)
def counted(x: ScaledTensor, factors: Tensor, role: int, trains: bool, rows: bool) -> ScaledTensor:
    """The identity."""
    q = _as_read(x, rows)
    scale = torch.ops.scaledtensor.count(x.scale, q, factors, x.format.name, role, trains)
    made = x.like(x.qdata, scale, copied(rms_of(x)))
    note(made, decoded=x.memo.decoded, passing=x.memo.passing)
    return made


def _as_read(x: ScaledTensor, rows: bool) -> Tensor:
    """Return the elements in the form that the product reads. Any other form would be written to
    memory for this operator alone."""
    if not backend_of(x.qdata).writes_cpp:
        return x.qdata
    held = typing.cast(ScaledTensor, x.flatten(0, -2)) if rows else x
    return elements(held).to(product_dtype(x.device))


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "count(Tensor scale, Tensor q, Tensor factors, str format, int role, bool trains) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "look(Tensor q, Tensor factors, str format, int role, bool trains) -> ()"
)


def _count(
    scale: Tensor, q: Tensor, factors: Tensor, format: str, role: int, trains: bool
) -> Tensor:
    _look(q, factors, format, role, trains)
    return scale.clone()


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


_LIBRARY.impl("look", _look, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.fx.has_side_effect(torch.ops.scaledtensor.look.default)
_LIBRARY.impl("count", _count, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::look", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _look_fake(q: Tensor, factors: Tensor, format: str, role: int, trains: bool) -> None:
    return None


@torch.library.register_fake("scaledtensor::count", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _count_fake(
    scale: Tensor, q: Tensor, factors: Tensor, format: str, role: int, trains: bool
) -> Tensor:
    return torch.empty_like(scale)
