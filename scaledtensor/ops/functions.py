"""Python-level functions whose operands are cast before autograd saves them.

Autograd saves what an operator was given. A cast below it, in the ATen rule, would save 16-bit
operands; so the matrix products are caught one level above, in every spelling that torch has, and
called on cast operands. What the recipe does not govern (a tensor without a recipe, a plain
`nn.Parameter` that a filter left out) passes as it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor import verbs
from scaledtensor.errors import UnsupportedError
from scaledtensor.recipes import Recipe
from scaledtensor.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


def _governing(*operands: Any) -> Recipe | None:
    """The recipe of a product: that of its scaled operands, none where one is kept out."""
    found: Recipe | None = None
    for x in operands:
        if isinstance(x, ScaledTensor):
            if x.recipe is None:
                return None
            found = found or x.recipe
        elif isinstance(x, torch.nn.Parameter):
            return None
    return found


def _cast(x: Any, recipe: Recipe, like: ScaledTensor) -> Any:
    if not isinstance(x, ScaledTensor):
        # Detached: a product needs no gradient for the sake of what it is promoted by.
        x = verbs.promote(x, like.detach())
    return verbs.to_format(x, recipe.forward.name)


def _product(function: Callable[..., Any], *operands: Any, **kwargs: Any) -> Any:
    """`function(*operands)` with every operand cast, and its gradient cast once on the way back."""
    recipe = _governing(*operands)
    if recipe is None:
        return function(*operands, **kwargs)
    like = next(x for x in operands if isinstance(x, ScaledTensor))
    out = function(*(_cast(x, recipe, like) for x in operands), **kwargs)
    return (
        verbs.gradient_to_format(out, recipe.gradient.name)
        if isinstance(out, ScaledTensor)
        else out
    )


def _reflected(function: Callable[..., Any], a: Any, b: Any) -> Any:
    return _product(function, b, a)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """The bias is added outside, so that its gradient sums uncast terms."""
    y = _product(torch.nn.functional.linear, input, weight)
    return y if bias is None else y + bias


def addmm(input: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """As linear: what is added stays uncast."""
    y = _product(torch.matmul, a, b)
    y = y if alpha == 1 else y * alpha
    return y + (input if beta == 1 else input * beta)


def einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return torch.einsum(equation, *operands)
    return _product(partial(torch.einsum, equation), *operands)


def _binary(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.pop("out", None) is not None:
        raise UnsupportedError(
            f"{function.__name__}(..., out=) on ScaledTensors: autograd has no out= either; "
            "assign the result instead"
        )
    operands = (*args, *kwargs.values())  # torch.matmul(input=a, other=b)
    return _product(function, *operands)


#: function that a user may call -> the same on cast operands.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: linear,
    torch.addmm: addmm,
    torch.baddbmm: addmm,
    Tensor.addmm: addmm,
    Tensor.baddbmm: addmm,
    torch.einsum: einsum,
    torch.functional.einsum: einsum,
    Tensor.__matmul__: partial(_binary, torch.matmul),
    Tensor.__rmatmul__: partial(_reflected, torch.matmul),
    **{
        spelling: partial(_binary, getattr(torch, name))
        for name in ("matmul", "mm", "bmm", "mv", "inner")
        for spelling in (getattr(torch, name), getattr(Tensor, name))
    },
    torch.linalg.matmul: partial(_binary, torch.matmul),
    torch.tensordot: lambda a, b, dims=2: _product(partial(torch.tensordot, dims=dims), a, b),
}
