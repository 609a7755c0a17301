"""Casts under scales by history: `scaledtensor.recipes.Delayed`.

The history of a weight is a plain float32 tensor, [3, length + 2]: a row for its inputs, one for
itself and one for the gradients of its results. In a row,

    0             the largest amax of this step so far
    1 .. length   those of earlier steps, the latest first; 0 where there was none
    length + 1    how many casts were of more than their scale holds

A cast reads the earlier steps and writes the first and the last column, so that it gives the same
however often it runs in a step: a checkpoint's second forward pass casts as the first did. It is an
argument of the operator that the operator changes, which torch.compile knows how to carry out,
forward and backward.
"""

from typing import Any

import torch
from torch import Tensor

from scaledtensor import verbs
from scaledtensor.formats import PerTensor, encode_blocks
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.quantize import recoded, rounding_options
from scaledtensor.ops.registry import rule
from scaledtensor.recipes.casts import Cast, parsed_cast
from scaledtensor.recipes.scales import History
from scaledtensor.scale import MAX_SCALE, MIN_SCALE
from scaledtensor.tensor import ScaledTensor

__all__ = ["GRADIENT", "INPUT", "WEIGHT", "advance", "cast", "gradient_cast", "new"]

#: Rows of a history.
INPUT, WEIGHT, GRADIENT = 0, 1, verbs.GRADIENT


def new(length: int, device: torch.device) -> Tensor:
    return torch.zeros(3, length + 2, device=device)


def advance(history: Tensor) -> None:
    """A step ends: what was seen in it becomes the latest of the earlier ones."""
    seen = history[:, :1] > 0
    moved = torch.cat([torch.zeros_like(history[:, :1]), history[:, :-2], history[:, -1:]], 1)
    history.copy_(torch.where(seen, moved, history))


def cast(x: ScaledTensor, history: Tensor, cast: Cast, row: int) -> Any:
    """`x` cast by a row of a history, which is written to where gradients are recorded; or by its
    own amax, where the recipe says so of that operand."""
    if not isinstance(cast.scale, History):
        return verbs.quantize(x, cast.spec)
    record = torch.is_grad_enabled()
    with torch.no_grad():
        held = verbs.delayed_scale(x.detach(), history, cast.spec, row, record)
    return verbs.quantize_under(x, held, cast.spec)


def gradient_cast(y: ScaledTensor, history: Tensor, cast: Cast) -> Any:
    """`y` itself, its gradient cast by its row, or by its own amax."""
    if not isinstance(cast.scale, History):
        return verbs.gradient_quantize(y, cast.spec)
    return verbs.gradient_delayed(y, history, cast.spec)


@rule(verbs.delayed_scale)
def delayed_scale(x: ScaledTensor, history: Tensor, cast: str, row: int, record: bool) -> Tensor:
    """The scale of a cast by the amax of earlier steps, plain; this step's is written down."""
    how = parsed_cast(cast)
    scale = _how(how)
    size = elements(x).detach().abs().double().nan_to_num(0.0, 0.0, 0.0)
    # Of the value: the tensor's own scale may be another in the next step.
    amax = (size.amax() if size.numel() else size.sum()) * x.scale.double()
    past = history[row, 1:-1].double()
    expected = past.amax() if scale.choose == "max" else past[0]
    expected = torch.where(expected > 0, expected, amax)
    limit = expected * 2.0**scale.margin
    exceeded = amax > limit
    if record:
        seen, count = history[row, 0], history[row, -1]
        seen.copy_(torch.maximum(seen, amax.float()))
        count.copy_(count + exceeded)
    if scale.guard:
        limit = torch.where(exceeded, amax, limit)
    found = torch.where(limit > 0, limit / how.format.max, x.scale.double())
    return found.clamp(MIN_SCALE, MAX_SCALE).float()


def _how(cast: Cast) -> History:
    scale = cast.scale
    return scale if isinstance(scale, History) else History()


@rule(verbs.quantize_under)
def quantize_under(x: ScaledTensor, scale: Tensor, cast: str) -> ScaledTensor:
    """The elements are cast under one given scale, which then is the tensor's and need be no power
    of two."""
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
