"""Multiplication by one constant forward and by another backward.

An operator that is scaled forward need not hand the same factor to its gradients: constants on the
edges that no cycle of the graph crosses are free (the cut edges of Blake et al. 2023, section 4.2),
and the gradient stays proportional to the true one. The functions of this package are written with
these two.

On a ScaledTensor the product is the ordinary rule of `mul`: the constant's power of two moves into
the carried scale, so that its elements stay as they are.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import ScaleError
from scaledtensor.setting import Setting

__all__ = [
    "CONSTRAINTS",
    "Constraint",
    "amean",
    "apply_constraint",
    "batch_factor",
    "gaussian_rms",
    "gaussian_std",
    "global_batch",
    "gmean",
    "hmean",
    "interpolate",
    "kept",
    "parameter_scale",
    "positive",
    "product",
    "repeats",
    "root",
    "scale",
    "scale_bwd",
    "scale_fwd",
    "sharpness",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_output_scale",
    "to_right_grad_scale",
]


# Which scales of an operator must be one and the same.  An operator has one scale forward and one
# for the gradient of each input. Unconstrained they hold every tensor at unit variance; but on an
# edge of a cycle (a hidden layer's input and output) a gradient is that of some function only if
# the scales agree (Blake et al. 2023, section 4.2).
#: A name below; None or "" leaves every scale free.
Constraint: TypeAlias = (
    Literal[
        "",
        "amean",
        "exact",
        "gmean",
        "hmean",
        "to_grad_input_scale",
        "to_left_grad_scale",
        "to_output_scale",
        "to_right_grad_scale",
    ]
    | None
)


def gmean(*scales: float) -> float:
    """The geometric mean."""
    mean: float = math.prod(scales) ** (1 / len(scales))
    return mean


def hmean(*scales: float) -> float:
    """The harmonic mean. Of 1/sqrt(fan) it is near the initialisation of Glorot and Bengio 2010."""
    return len(scales) / sum(1 / s for s in scales)


def amean(*scales: float) -> float:
    """The arithmetic mean."""
    return sum(scales) / len(scales)


def to_output_scale(output: float, *grads: float) -> float:
    """The scale of the output: activations have unit variance, gradients what follows."""
    return output


def to_grad_input_scale(output: float, grad_input: float) -> float:
    """The scale of the gradient, of an operator with one input."""
    return grad_input


def to_left_grad_scale(output: float, left: float, right: float) -> float:
    """The scale of the left input's gradient, of an operator with two."""
    return left


def to_right_grad_scale(output: float, left: float, right: float) -> float:
    """The scale of the right input's gradient, of an operator with two."""
    return right


#: name -> (what chooses the one scale, how many scales it takes; None is any number).
CONSTRAINTS: dict[str, tuple[Callable[..., float], int | None]] = {
    "amean": (amean, None),
    # And so are the scales that no constraint reaches, those of parameters: see `parameter_scale`.
    # Sensible on ScaledTensors, whose carried scale holds the range.
    "exact": (to_output_scale, None),
    "gmean": (gmean, None),
    "hmean": (hmean, None),
    "to_grad_input_scale": (to_grad_input_scale, 2),
    "to_left_grad_scale": (to_left_grad_scale, 3),
    "to_output_scale": (to_output_scale, None),
    "to_right_grad_scale": (to_right_grad_scale, 3),
}


def parameter_scale(constraint: str | None, free: float, true: float = 1.0) -> float:
    """The scale of a parameter's gradient, an edge that no cycle crosses: `free` under every
    constraint but "exact", by which it is the `true` one of the scaled function.

    Raises:
        ScaleError: the constraint's name is unknown.
    """
    _known(constraint)
    return true if constraint == "exact" else free


def apply_constraint(constraint: str | None, *scales: float) -> tuple[float, ...]:
    """The scales of (output, gradient of each constrained input) under a constraint.

    Args:
        constraint: a name of `CONSTRAINTS`; None or "" returns `scales` as they are.
        scales: that of the output first.

    Raises:
        ScaleError: the name is unknown, or is not for this number of scales.
    """
    _known(constraint)
    if not constraint:
        return scales
    choose, arity = CONSTRAINTS[constraint]
    if arity is not None and len(scales) != arity:
        raise ScaleError(
            f"constraint {constraint!r} chooses among {arity} scales (the output's and "
            f"{arity - 1} of gradients); this operator has {len(scales)}"
        )
    chosen = choose(*scales)
    return (chosen,) * len(scales)


def _known(constraint: str | None) -> None:
    if constraint and constraint not in CONSTRAINTS:
        raise ScaleError(
            f"unknown constraint {constraint!r}; allowed are {', '.join(sorted(CONSTRAINTS))}, "
            "and None for free scales"
        )


# What the closed forms are written in.
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def interpolate(alpha: float, lower: float, upper: float) -> float:
    """From `lower` (alpha = 0) to `upper` (alpha = 1) at a constant ratio."""
    # As powers, which a size that a compiler keeps symbolic has too.
    between: float = lower ** (1 - alpha) * upper**alpha
    return between


def sharpness(mult: float, middle: float) -> float:
    """From 0 at a small mult to 1 at a large one, 1/2 where mult^2 = middle: the abscissa of the
    fits in Blake et al. 2023, appendix G.

    Raises:
        ScaleError: `mult` is not a positive finite number.
    """
    return 1 / (1 + middle / positive(mult, "mult") ** 2)


def root(terms: float, power: float = 0.5) -> float:
    """terms^-power: what holds a sum of so many independent terms at unit scale; 1 for none."""
    scale: float = terms**-power if terms else 1.0
    return scale


def product(sizes: Sequence[int]) -> int:
    """Of sizes, of which a compiler may keep some symbolic."""
    total = 1
    for n in sizes:
        total = total * n
    return total


def repeats(*shapes: Sequence[int]) -> tuple[int, ...]:
    """How often an operand of each shape is used where all are broadcast against each other."""
    result = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return tuple(product(result) // max(product(shape), 1) for shape in shapes)


def kept(function: Callable[..., tuple[float, ...]]) -> Callable[..., tuple[float, ...]]:
    """A quadrature, done once for given arguments. In compiled code its result is a constant, and
    nothing of it is traced."""
    known = cache(function)

    @_torch.constant_if_compiled
    def look_up(*numbers: float) -> tuple[float, ...]:
        return known(*numbers)

    def scales(*numbers: float) -> tuple[float, ...]:
        if torch.compiler.is_compiling():
            # Under dynamic=True even the default of an argument is a symbol.
            from torch.fx.experimental.symbolic_shapes import guard_scalar

            numbers = tuple(guard_scalar(n) for n in numbers)
        found: tuple[float, ...] = look_up(*numbers)
        return found

    return scales


@cache
def _nodes() -> tuple[Array, Array]:
    # Ten standard deviations to each side. A uniform grid rather than Hermite nodes: the integrands
    # have kinks and, for a large mult, near steps.
    z = np.linspace(-10, 10, 100_001)
    weight = np.exp(-z * z / 2)
    return z, weight / weight.sum()


def gaussian_rms(function: Callable[[Array], Array]) -> float:
    """sqrt(E f(z)^2) for z ~ N(0, 1)."""
    z, weight = _nodes()
    return math.sqrt(float((weight * function(z) ** 2).sum()))


def gaussian_std(function: Callable[[Array], Array]) -> float:
    """The standard deviation of f(z) for z ~ N(0, 1)."""
    z, weight = _nodes()
    y = function(z)
    return math.sqrt(float((weight * (y - (weight * y).sum()) ** 2).sum()))


# How large the batch is that gradients are summed over.  The scale of a weight's gradient is one
# over the square root of the number of its terms. A process sees the terms of one micro-batch;
# data parallelism and accumulation add up more of them elsewhere.
def batch_factor() -> float:
    """Global over local batch size, as set by `global_batch`; 1 at first."""
    return global_batch._now


class global_batch(Setting):  # noqa: N801 - called like a function
    """From now on, or inside a `with` block, multiply every batch size in the closed forms.

    >>> U.global_batch(world_size * accumulation_steps)

    Gradients that are then summed over processes and micro-batches arrive at unit scale. Read when
    a function runs forward; a compiled function is compiled anew for another factor.

    Args:
        factor: global over local batch size, positive.

    Raises:
        ScaleError: `factor` is not a positive finite number.
    """

    _now: float = 1.0

    def __init__(self, factor: float) -> None:
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not (number and 0 < factor < float("inf")):
            raise ScaleError(
                f"global_batch takes world size times accumulation steps, a positive finite "
                f"number; got {factor!r}"
            )
        super().__init__(float(factor))


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
