"""Which scales of an operator must be one and the same.

An operator has one scale forward and one for the gradient of each input. Unconstrained they hold
every tensor at unit variance; but on an edge of a cycle (a hidden layer's input and output) a
gradient is that of some function only if the scales agree (Blake et al. 2023, section 4.2).
"""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from scaledtensor.errors import ScaleError

__all__ = [
    "CONSTRAINTS",
    "Constraint",
    "amean",
    "apply_constraint",
    "gmean",
    "hmean",
    "parameter_scale",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_output_scale",
    "to_right_grad_scale",
]

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
