"""The means by which unit-scaled functions are written.

A unit-scaled function multiplies its result by one constant, and the gradient of each input by
another. The two may differ on cut edges, the edges that no cycle of the graph crosses (Blake et al.
2023, section 4.2): there the gradient stays proportional to the true one. This module has

- `scale`, `scale_fwd` and `scale_bwd`, which multiply by these constants;
- constraints, which make some of an operator's constants equal;
- the formulas of the constants: roots of numbers of terms, interpolations, quadratures;
- `global_batch`, for gradients that are summed over more than one local batch.

On a ScaledTensor a multiplication is the ordinary rule of `mul`: the constant's power of two moves
into the carried scale, and the elements stay as they are.
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
    "cached_constants",
    "gaussian_rms",
    "gaussian_std",
    "global_batch",
    "gmean",
    "hmean",
    "interpolate",
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


# --- one constant forward, another backward --------------------------------------------------


def scale_fwd(x: Tensor, c: float) -> Tensor:
    """Return `x * c`; the gradient passes unchanged.

    Args:
        x: plain or ScaledTensor, real floating point, of any shape; its dtype stays.
        c: positive and finite. 1 returns `x` itself.

    Raises:
        ScaleError: `c` is not a positive finite number.
    """
    return scale(x, c, 1.0)


def scale_bwd(x: Tensor, c: float) -> Tensor:
    """Return `x` unchanged; its gradient is multiplied by `c`.

    Args:
        x: plain or ScaledTensor, real floating point, of any shape. The result shares its elements.
        c: positive and finite. 1 returns `x` itself. So does every `c` if `x` needs no gradient.

    Raises:
        ScaleError: `c` is not a positive finite number.
    """
    return scale(x, 1.0, c)


def scale(x: Tensor, forward: float, backward: float) -> Tensor:
    """Return `x * forward`; its gradient is multiplied by `backward`."""
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
    """Return `c`, or raise an error that calls it `name`.

    Raises:
        ScaleError: `c` is not a positive finite number.
    """
    # Comparisons only: a compiler can guard on them if the sizes behind `c` are symbolic.
    if not (isinstance(c, (int, float, torch.SymFloat)) and 0 < c < math.inf):
        raise ScaleError(f"{name} is a positive finite number; got {c!r}")
    return c


def _times(x: Tensor, c: float) -> Tensor:
    return x.view_as(x) if c == 1 else x * c


def _traced(x: Tensor, forward: float, backward: float) -> Tensor:
    """`scale`, written with `detach`. Under a compiled transform of torch.func, Dynamo (torch 2.13)
    leaves out the backward pass of an `autograd.Function`, and raises no error."""
    value = x.detach()
    zero = torch.where(value.isfinite(), x - value, 0.0)  # its gradient is the gradient of x
    return value * forward + zero * backward


class _Scaled(torch.autograd.Function):
    """`scale` in eager and in compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return _times(x, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.factor == 1 else grad * ctx.factor), None, None


class _Transformed(torch.autograd.Function):
    """`scale` under `torch.func` and in forward mode. A call takes 15 us longer."""

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


# --- constraints: which constants of an operator are equal -----------------------------------

# An operator has one scale for its output and one for the gradient of each input. If all are free,
# every tensor has unit variance. But a hidden layer's input and output are edges of a cycle. There
# a gradient is the gradient of some function only if the scales are equal (Blake et al. 2023,
# section 4.2).

#: The name of a constraint, see `CONSTRAINTS`; None or "" leaves every scale free.
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
    """The harmonic mean. For scales 1/sqrt(fan) it is near the initialisation of Glorot and Bengio
    (2010)."""
    return len(scales) / sum(1 / s for s in scales)


def amean(*scales: float) -> float:
    """The arithmetic mean."""
    return sum(scales) / len(scales)


def to_output_scale(output: float, *grads: float) -> float:
    """The scale of the output. Activations have unit variance; gradients may not."""
    return output


def to_grad_input_scale(output: float, grad_input: float) -> float:
    """The scale of the gradient, for an operator with one input."""
    return grad_input


def to_left_grad_scale(output: float, left: float, right: float) -> float:
    """The scale of the left input's gradient, for an operator with two inputs."""
    return left


def to_right_grad_scale(output: float, left: float, right: float) -> float:
    """The scale of the right input's gradient, for an operator with two inputs."""
    return right


#: name -> (the function that chooses the one scale, how many scales it takes; None is any number).
CONSTRAINTS: dict[str, tuple[Callable[..., float], int | None]] = {
    "amean": (amean, None),
    # "exact" gives the output's scale to the gradients of parameters too (`parameter_scale`), which
    # no other constraint reaches. It suits ScaledTensors, whose carried scale holds the range.
    "exact": (to_output_scale, None),
    "gmean": (gmean, None),
    "hmean": (hmean, None),
    "to_grad_input_scale": (to_grad_input_scale, 2),
    "to_left_grad_scale": (to_left_grad_scale, 3),
    "to_output_scale": (to_output_scale, None),
    "to_right_grad_scale": (to_right_grad_scale, 3),
}


def apply_constraint(constraint: str | None, *scales: float) -> tuple[float, ...]:
    """Return the scales of (output, gradient of each constrained input) under a constraint.

    Args:
        constraint: a name of `CONSTRAINTS`; None or "" returns `scales` unchanged.
        scales: the output's scale, then a scale for each gradient.

    Raises:
        ScaleError: the name is unknown, or is not for this number of scales.
    """
    _check_name(constraint)
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


def parameter_scale(constraint: str | None, free: float, true: float = 1.0) -> float:
    """Return the scale of a parameter's gradient. A parameter is an edge that no cycle crosses.

    Returns:
        `true`, which gives the true gradient of the scaled function, under "exact"; `free` under
        every other constraint.

    Raises:
        ScaleError: the constraint's name is unknown.
    """
    _check_name(constraint)
    return true if constraint == "exact" else free


def _check_name(constraint: str | None) -> None:
    if constraint and constraint not in CONSTRAINTS:
        raise ScaleError(
            f"unknown constraint {constraint!r}; allowed are {', '.join(sorted(CONSTRAINTS))}, "
            "and None for free scales"
        )


# --- formulas of the constants ---------------------------------------------------------------


def root(terms: float, power: float = 0.5) -> float:
    """Return terms^-power, which gives a sum of `terms` independent terms unit scale; 1 for no
    terms."""
    scale: float = terms**-power if terms else 1.0
    return scale


def product(sizes: Sequence[int]) -> int:
    """Return the product of `sizes`. A compiler may keep some of them symbolic."""
    total = 1
    for n in sizes:
        total = total * n
    return total


def repeats(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return how often each shape's elements are used if all shapes are broadcast together."""
    result = torch.broadcast_shapes(*shapes)
    return tuple(product(result) // max(product(shape), 1) for shape in shapes)


def interpolate(alpha: float, lower: float, upper: float) -> float:
    """Interpolate from `lower` (alpha = 0) to `upper` (alpha = 1) in the log domain."""
    # Written with powers, which a compiler's symbolic sizes have too.
    between: float = lower ** (1 - alpha) * upper**alpha
    return between


def sharpness(mult: float, middle: float) -> float:
    """Return a number from 0 at a small mult to 1 at a large one, with 1/2 at mult^2 = middle.

    The fits in Blake et al. 2023, appendix G, are functions of it.

    Raises:
        ScaleError: `mult` is not a positive finite number.
    """
    return 1 / (1 + middle / positive(mult, "mult") ** 2)


#: The nodes of a quadrature, or a function's values at them.
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@cache
def _nodes() -> tuple[Array, Array]:
    # The nodes reach ten standard deviations to each side. The grid is uniform (no Hermite nodes),
    # since the integrands have kinks and, for a large mult, near steps.
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


def cached_constants(
    function: Callable[..., tuple[float, ...]],
) -> Callable[..., tuple[float, ...]]:
    """Decorate a quadrature, so that it runs once for given arguments. A compiler does not trace
    it: the result is a constant of compiled code."""
    known = cache(function)

    @_torch.constant_if_compiled
    def look_up(*numbers: float) -> tuple[float, ...]:
        return known(*numbers)

    def constants(*numbers: float) -> tuple[float, ...]:
        if torch.compiler.is_compiling():
            # Under dynamic=True even the default of an argument is a symbol.
            from torch.fx.experimental.symbolic_shapes import guard_scalar

            numbers = tuple(guard_scalar(n) for n in numbers)
        found: tuple[float, ...] = look_up(*numbers)
        return found

    return constants


# --- the size of the batch -------------------------------------------------------------------

# The scale of a weight's gradient is one over the square root of the number of its terms. A process
# sees the terms of one micro-batch. Data parallelism and gradient accumulation add more of them.


def batch_factor() -> float:
    """Return global over local batch size, as set by `global_batch`; 1 by default."""
    return global_batch._now


class global_batch(Setting):  # noqa: N801 - called like a function
    """From now on, or inside a `with` block, multiply every batch size in the closed forms.

    >>> U.global_batch(world_size * accumulation_steps)

    Gradients that are then summed over processes and micro-batches arrive at unit scale. A function
    reads the factor when it runs forward. A compiled function compiles again for another factor.

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
