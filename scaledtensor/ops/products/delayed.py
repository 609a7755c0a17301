"""Casts under scales from a history of amaxes: `scaledtensor.recipes.Delayed`.

The history of a weight is a plain float32 tensor, [3, length + 2], with one row for its inputs, one
for the weight itself and one for the gradients of its results. The columns of a row:

    0             the largest amax of this step so far
    1 .. length   the amaxes of earlier steps, the latest first; 0 if there are fewer
    length + 1    the number of casts whose amax was larger than their scale allowed

A cast reads the columns of earlier steps, and writes the first and the last column. So every cast
of a step has the same scale: a checkpoint's second forward pass casts as the first pass did.

The history belongs to the site of the weight. A graph gets it from the site, as it gets the factors
of `Unit` (`scaledtensor.tensors.site`). The operator that reads the history also writes it. The
graph does not see the write, which changes no number that this step reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import PerTensor, encode_blocks
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.products import linear, sites
from scaledtensor.ops.products.quantize import recoded, rounding_options
from scaledtensor.ops.registry import rule
from scaledtensor.recipes.casts import Cast, History, parsed_cast
from scaledtensor.scales.measure import amax
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.tensors import verbs
from scaledtensor.tensors.site import Site
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter

__all__ = [
    "GRADIENT",
    "INPUT",
    "WEIGHT",
    "advance",
    "new",
    "product",
    "remembered",
]

#: Rows of a history.
INPUT, WEIGHT, GRADIENT = 0, 1, verbs.GRADIENT


def new(length: int, device: torch.device) -> Tensor:
    return torch.zeros(3, length + 2, device=device, dtype=torch.float32)


def advance(history: Tensor) -> None:
    """End a step: its amaxes become the latest of the earlier steps."""
    seen = history[:, :1] > 0
    moved = torch.cat([torch.zeros_like(history[:, :1]), history[:, :-2], history[:, -1:]], 1)
    history.copy_(torch.where(seen, moved, history))


def remembered(operands: Sequence[Any], casts: Sequence[Cast]) -> tuple[Any, Tensor | None]:
    """Return the weight, or the part or view of a weight, among the operands of a product that is
    cast by history, and its history."""
    if any(isinstance(c.scale, History) for c in casts):
        for x in operands:
            history = _history_of(x)
            if history is not None:
                return x, history
    return None, None


def _history_of(x: Any) -> Tensor | None:
    if not isinstance(x, ScaledTensor) or _torch.is_transforming():
        return None
    if torch.compiler.is_compiling() or _torch.is_tracing(x.qdata):
        return x.memo.lent
    if x.site is None and is_parameter(x):
        x.site = Site()
    return None if x.site is None else x.site.history()


def product(
    function: Callable[..., Any],
    operands: Sequence[Any],
    weight: Any,
    history: Tensor,
    casts: tuple[Cast, Cast, Cast],
) -> Any:
    """Return `function` of operands that are cast by the history of `weight`, one of them."""
    first, own, gradient = casts
    cast = [
        _weight_cast(x, history, own) if x is weight else _cast(x, history, first, INPUT)
        for x in operands
    ]
    if function is torch.nn.functional.linear and linear.serves(*cast):
        y = linear.linear(cast[0], cast[1], casts)
    else:
        y = function(*map(linear.wide_gradient, cast))
    return _gradient_cast(y, history, gradient)


def _weight_cast(weight: Any, history: Tensor, own: Cast) -> Any:
    # The amax of a stored frozen weight is always the same.
    return weight if weight.format == own.format else _cast(weight, history, own, WEIGHT)


def _cast(x: ScaledTensor, history: Tensor, cast: Cast, row: int) -> Any:
    """Cast `x` by a row of a history, or by its own amax if the recipe says so. The history is
    written if gradients are recorded."""
    if not isinstance(cast.scale, History):
        return verbs.quantize(x, cast.spec)
    record = torch.is_grad_enabled() or sites.is_calibrating()
    record = record and not torch.compiler.is_exporting()
    with torch.no_grad():
        held = verbs.delayed_scale(x.detach(), history, cast.spec, row, record)
    return verbs.quantize_under(x, held, cast.spec)


def _gradient_cast(y: ScaledTensor, history: Tensor, cast: Cast) -> Any:
    """Return `y`; its gradient is cast by its row of the history, or by its own amax."""
    if not isinstance(cast.scale, History):
        return verbs.gradient_quantize(y, cast.spec)
    return verbs.gradient_delayed(y, history, cast.spec)


@rule(verbs.delayed_scale)
def delayed_scale(x: ScaledTensor, history: Tensor, cast: str, row: int, record: bool) -> Tensor:
    """The scale of a cast by the amaxes of earlier steps, plain. The amax of this step is written
    into the history."""
    how = parsed_cast(cast)
    scale = _how(how)
    # The amax of the value, since the tensor's scale may change until the next step.
    largest = amax(elements(x).detach().double()) * x.scale.double()
    limit: Tensor = torch.ops.scaledtensor.recall(
        largest, history, row, scale.choose == "max", scale.margin, scale.guard, record
    )
    found = torch.where(limit > 0, limit / how.format.max, x.scale.double())
    return found.clamp(MIN_SCALE, MAX_SCALE).float()


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define(
    "recall(Tensor amax, Tensor history, int row, bool largest, int margin, bool guard, "
    "bool record) -> Tensor"
)


def _recall(
    amax: Tensor, history: Tensor, row: int, largest: bool, margin: int, guard: bool, record: bool
) -> Tensor:
    """Return the magnitude that a cast has to represent, 0-dim float64; 0 without any history."""
    held = history.data  # a write into this tensor invalidates no graph that saved the history
    past = held[row, 1:-1].double()
    expected = past.amax() if largest else past[0]
    expected = torch.where(expected > 0, expected, amax)
    limit = expected * 2.0**margin
    exceeded = amax > limit
    if record:
        seen, count = held[row, 0], held[row, -1]
        seen.copy_(torch.maximum(seen, amax.float()))
        count.copy_(count + exceeded)
    return torch.where(exceeded, amax, limit) if guard else limit


_LIBRARY.impl("recall", _recall, "CompositeExplicitAutograd")


@torch.library.register_fake("scaledtensor::recall", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _recall_fake(amax: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(amax)


def _how(cast: Cast) -> History:
    scale = cast.scale
    return scale if isinstance(scale, History) else History()


@rule(verbs.quantize_under)
def quantize_under(x: ScaledTensor, scale: Tensor, cast: str) -> ScaledTensor:
    """Elements are cast under one given scale, which becomes the tensor's. It may be any number,
    not only a power of two."""
    how = parsed_cast(cast)
    source = elements(x)
    options = rounding_options(how, source)
    relative = (scale.double() / x.scale.double()).clamp(MIN_SCALE, MAX_SCALE).float()
    codes = encode_blocks(source, how.format, PerTensor(), relative, **options)
    return recoded(x, codes, scale.clone(), how.format)


@rule(verbs.gradient_delayed)
def gradient_delayed(x: ScaledTensor, history: Tensor, cast: str) -> ScaledTensor:
    """The identity forward; the cast happens to the gradient."""
    return x.like(x.qdata, x.scale, x.rms)
