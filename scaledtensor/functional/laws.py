"""What the closed forms are written in."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from scaledtensor import _torch
from scaledtensor.functional.scaling import positive

__all__ = [
    "gaussian_rms",
    "gaussian_std",
    "interpolate",
    "kept",
    "product",
    "repeats",
    "root",
    "sharpness",
]

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
