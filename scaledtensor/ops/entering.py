"""Plain tensors that meet scaled ones where a rule takes scaled ones alone."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scaledtensor import verbs
from scaledtensor.formats import FP32, from_dtype
from scaledtensor.recipes import Recipe
from scaledtensor.tensor import ScaledTensor, from_plain

__all__ = ["entered", "promoted", "with_scaled"]


def with_scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with plain tensors scaled where it declares that it takes a ScaledTensor.

    An operator comes here when one of its arguments is scaled. It need not be that one: the
    derivative of a plain activation that meets scaled tensors later has a scaled gradient.
    """
    parameters = list(inspect.signature(function).parameters.values())
    places = [i for i, p in enumerate(parameters) if p.annotation is ScaledTensor]
    tensors = [p for p in parameters if p.annotation is Any or "Tensor" in str(p.annotation)]
    if not places or len(tensors) < 2:  # dispatch sees to the only one
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for i in places:
            if i < len(args) and not isinstance(args[i], ScaledTensor) and _is_plain(args[i]):
                args = (*args[:i], _entered(args[i], (args, kwargs)), *args[i + 1 :])
        return function(*args, **kwargs)

    return call


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _entered(x: Tensor, arguments: Any) -> ScaledTensor:
    scaled = (other for other in tree_leaves(arguments) if isinstance(other, ScaledTensor))
    return entered(x, next(scaled).recipe)


def entered(x: Tensor, recipe: Recipe | None) -> ScaledTensor:
    """A plain tensor of floats where a scaled one is needed: its RMS is measured, once, at the
    door."""
    fmt = FP32 if x.dtype == torch.float64 else from_dtype(x.dtype)
    return from_plain(x, fmt, x.dtype, None if recipe is None else recipe.uncorrected)


def promoted(operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of a product, all scaled where one is."""
    scaled = [x for x in operands if isinstance(x, ScaledTensor)]
    if len(scaled) in (0, len(operands)):  # none but the bias, perhaps
        return operands
    # `like` gives its scale and recipe alone, so no gradient flows to it.
    like = scaled[0].detach()
    return [x if isinstance(x, ScaledTensor) else verbs.promote(x, like) for x in operands]
