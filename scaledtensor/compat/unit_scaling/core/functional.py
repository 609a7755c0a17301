"""`unit_scaling.core.functional`: tools for writing your own unit-scaled functions."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from scaledtensor.errors import ScaleError
from scaledtensor.functional import transformer_residual_scaling_rule
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    interpolate,
    scale_bwd,
    scale_fwd,
)

__all__ = [
    "logarithmic_interpolation",
    "rms",
    "scale_elementwise",
    "transformer_residual_scaling_rule",
]


def scale_elementwise(
    f: Callable[..., Tensor],
    output_scale: float,
    grad_input_scale: float,
    constraint: Constraint = "to_output_scale",
) -> Callable[..., Tensor]:
    """Return `f` with its output times `output_scale` and its gradient times `grad_input_scale`.

    Args:
        f: a function whose first argument is a tensor.
        constraint: makes the two scales equal, see `scaledtensor.functional.scaling`.

    Raises:
        ScaleError: the constraint is unknown or takes three scales. The returned function raises it
            for a factor that is not positive.
    """
    forward, backward = apply_constraint(constraint, output_scale, grad_input_scale)

    def scaled(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return scale_fwd(f(scale_bwd(input, backward), *args, **kwargs), forward)

    return scaled


def logarithmic_interpolation(alpha: float, lower: float, upper: float) -> float:
    """Interpolate from `lower` (alpha = 0) to `upper` (alpha = 1) in the log domain.

    Raises:
        ScaleError: `lower` or `upper` is not positive.
    """
    if not (lower > 0 and upper > 0):
        raise ScaleError(f"both ends are positive numbers; got {lower!r} and {upper!r}")
    return interpolate(alpha, lower, upper)


def rms(
    x: Tensor, dims: tuple[int, ...] | None = None, keepdim: bool = False, eps: float = 0.0
) -> Tensor:
    """Return sqrt(mean(x^2) + eps) over `dims` (default: all), computed in float32 and cast to the
    dtype of `x`."""
    return (x.float().square().mean(dims, keepdim=keepdim) + eps).sqrt().to(x.dtype)
