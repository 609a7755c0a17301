"""Multiplication by one constant forward and by another backward.

An operator that is scaled forward need not hand the same factor to its gradients: constants on the
edges that no cycle of the graph crosses are free (the cut edges of Blake et al. 2023, section 4.2),
and the gradient stays proportional to the true one. The functions of this package are written with
these two.

On a ScaledTensor the product is the ordinary rule of `mul`: the constant's power of two moves into
the carried scale, so that its elements stay as they are.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import ScaleError

__all__ = ["positive", "scale", "scale_bwd", "scale_fwd"]


def scale_fwd(x: Tensor, c: float) -> Tensor:
    """`x * c`, whose gradient passes as it is.

    Args:
        x: plain or ScaledTensor, real floating point, of any shape; its dtype stays.
        c: positive and finite. 1 returns `x` itself.

    Raises:
        ScaleError: `c` is not a positive finite number.
    """
    return scale(x, c, 1.0)


def scale_bwd(x: Tensor, c: float) -> Tensor:
    """`x` as it is, whose gradient is multiplied by `c`.

    Args:
        x: plain or ScaledTensor, real floating point, of any shape. The result shares its elements.
        c: positive and finite. 1 returns `x` itself, and so does any where no gradient is due.

    Raises:
        ScaleError: `c` is not a positive finite number.
    """
    return scale(x, 1.0, c)


def scale(x: Tensor, forward: float, backward: float) -> Tensor:
    """`x * forward`, whose gradient is multiplied by `backward`: both of the above in one step."""
    positive(forward, "a scale factor")
    positive(backward, "a scale factor")
    if forward == 1 and backward == 1:
        return x
    if _torch.is_transforming():
        if torch.compiler.is_compiling():
            return _traced(x, forward, backward)
        return cast(Tensor, _Transformed.apply(x, forward, backward))  # type: ignore[no-untyped-call]
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x if forward == 1 else x * forward
    return cast(Tensor, _Scaled.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def positive(c: float, name: str) -> float:
    """`c` itself.

    Raises:
        ScaleError: `c` is not a positive finite number.
    """
    # By comparison alone, which a compiler can guard on where the sizes behind `c` are symbolic.
    if not (isinstance(c, (int, float, torch.SymFloat)) and 0 < c < math.inf):
        raise ScaleError(f"{name} is a positive finite number; got {c!r}")
    return c


def _times(x: Tensor, c: float) -> Tensor:
    return x.view_as(x) if c == 1 else x * c


def _traced(x: Tensor, forward: float, backward: float) -> Tensor:
    """The same in terms of `detach`. Under a compiled transform of torch.func, Dynamo (torch 2.13)
    leaves out the backward pass of an `autograd.Function`, without a word."""
    value = x.detach()
    nothing = torch.where(value.isfinite(), x - value, 0.0)  # but it has a gradient
    return value * forward + nothing * backward


class _Scaled(torch.autograd.Function):
    """As eager and compiled code run it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return _times(x, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.factor == 1 else grad * ctx.factor), None, None


class _Transformed(torch.autograd.Function):
    """The same for `torch.func` and forward-mode derivatives, at 15 us more a call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: float, backward: float) -> Tensor:
        return _times(x, forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.factor == 1 else grad * ctx.factor), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        # The transpose of `backward`, so that both modes give one derivative.
        return _times(tangent, ctx.factor)
