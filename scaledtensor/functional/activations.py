"""Elementwise functions, softmax and dropout.

The closed forms assume inputs of unit variance. `mult` sharpens a function, f(mult x) / mult, as a
temperature does: the scale of unit-scaled inputs cannot do it.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import OptionError
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    cached_constants,
    gaussian_rms,
    gaussian_std,
    interpolate,
    parameter_scale,
    positive,
    scale,
    scale_bwd,
    scale_fwd,
    sharpness,
)

__all__ = [
    "dropout",
    "gelu",
    "leaky_relu",
    "log_softmax",
    "relu",
    "sigmoid",
    "silu",
    "silu_glu",
    "softmax",
    "tanh",
]


def _elementwise(
    function: Callable[[Tensor], Tensor],
    input: Tensor,
    mult: float,
    constraint: str | None,
    output_scale: float,
    grad_scale: float,
) -> Tensor:
    """Return function(mult x) / mult, with one scale forward and one backward."""
    output_scale, grad_scale = apply_constraint(constraint, output_scale, grad_scale)
    # The chain rule's mult and 1 / mult cancel.
    input = scale(input, mult, grad_scale)
    return scale_fwd(function(input), output_scale / mult)


def gelu(
    input: Tensor,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
    approximate: str = "none",
) -> Tensor:
    """gelu(mult x) / mult at unit scale.

    The function is x/2 at a small mult and relu at a large one. The standard deviation of relu is
    sqrt((1 - 1/pi) / 2). Between the ends a fit interpolates in the log domain (Blake et al. 2023,
    appendix G).
    """
    sharp = sharpness(mult, 0.25)
    return _elementwise(
        partial(F.gelu, approximate=approximate),
        input,
        mult,
        constraint,
        output_scale=interpolate(sharp, 2, _RELU),
        grad_scale=interpolate(sharp, 2, 2**0.5),
    )


def silu(
    input: Tensor,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
    inplace: bool = False,
) -> Tensor:
    """silu(mult x) / mult at unit scale. The fit is like the fit of `gelu`, but the derivative
    turns at a larger mult.

    Raises:
        OptionError: `inplace`.
    """
    _refuse_inplace("silu", inplace)
    return _elementwise(
        F.silu,
        input,
        mult,
        constraint,
        output_scale=interpolate(sharpness(mult, 0.25), 2, _RELU),
        grad_scale=interpolate(sharpness(mult, 1), 2, 2**0.5),
    )


def silu_glu(
    input: Tensor, gate: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> Tensor:
    """input * gate * sigmoid(mult gate) at unit scale, for `input` and `gate` of one shape.

    The output and both gradients have one scale. The RMS of a gate goes from 1/2 at a small mult to
    1/sqrt(2), the RMS of relu, at a large one.
    """
    both = interpolate(sharpness(mult, 1), 2, 2**0.5)
    output_scale, input_scale, gate_scale = apply_constraint(constraint, both, both, both)
    # The last constant has 1 / mult, as in `_elementwise`. Here only the gate's gradient also has
    # the chain rule's mult; the input's gradient has 1 / mult alone.
    input = scale_bwd(input, input_scale / mult)
    gate = scale(gate, mult, gate_scale)
    return scale_fwd(input * F.silu(gate), output_scale / mult)


def relu(
    input: Tensor, constraint: Constraint = "to_output_scale", inplace: bool = False
) -> Tensor:
    """relu at unit scale.

    max(z, 0) has mean 1/sqrt(2 pi) and second moment 1/2. Its derivative has second moment 1/2.

    Raises:
        OptionError: `inplace`.
    """
    return leaky_relu(input, 0.0, inplace, constraint)


def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
    constraint: Constraint = "to_output_scale",
) -> Tensor:
    """leaky_relu at unit scale.

    For slope a the mean is (1 - a) / sqrt(2 pi). The function and its derivative have the second
    moment (1 + a^2) / 2.

    Raises:
        OptionError: `inplace`.
    """
    _refuse_inplace("relu", inplace)
    square = (1 + negative_slope**2) / 2
    variance = square - (1 - negative_slope) ** 2 / (2 * math.pi)
    function = partial(F.leaky_relu, negative_slope=negative_slope) if negative_slope else F.relu
    return _elementwise(function, input, 1.0, constraint, variance**-0.5, square**-0.5)


def tanh(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> Tensor:
    """tanh(mult x) / mult at unit scale. A quadrature over a Gaussian computes both moments."""
    return _elementwise(torch.tanh, input, mult, constraint, *_tanh_scales(float(mult)))


def sigmoid(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> Tensor:
    """sigmoid(mult x) / mult at unit RMS. A quadrature over a Gaussian computes both moments.

    The RMS is 1, and not the standard deviation, since a sigmoid is often a gate: a value and a
    gate of unit RMS have a product of unit RMS.
    """
    return _elementwise(torch.sigmoid, input, mult, constraint, *_sigmoid_scales(float(mult)))


def softmax(
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    constraint: Constraint = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """softmax(mult x) over `dim`, at unit scale.

    Over N logits each probability is 1/N at a small mult. At a large mult one logit wins, and the
    RMS is 1/sqrt(N). Blake et al. 2023, appendix G, have the fit between the two. So flat
    probabilities come out near 1 each: their mean counts as scale.

    Args:
        input: logits of unit variance, of any shape.
        dim: the dimension over which probabilities sum to a constant.
        dtype: the dtype to which `input` is cast first.
    """
    n = max(input.shape[dim], 1)
    sharp = sharpness(mult, 4)
    output_scale, grad_scale = apply_constraint(
        constraint, interpolate(sharp, n, n**0.5), interpolate(sharp, n / mult, (n / mult) ** 0.5)
    )
    input = scale(input, mult, mult * grad_scale)
    return scale_fwd(F.softmax(input, dim, dtype=dtype), output_scale)


def log_softmax(
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
    constraint: Constraint = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """log_softmax(mult x) over `dim`, with the gradient of mult = 1.

    The logarithms are not scaled, since a loss reads their values. The gradient
    g - softmax * sum(g) has unit scale already. `constraint="exact"` gives the true gradient.
    """
    input = scale(input, mult, parameter_scale(constraint, 1.0, mult))
    return F.log_softmax(input, dim, dtype=dtype)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """dropout at unit scale. The elements that stay are multiplied by 1/(1 - p), so the result has
    variance 1/(1 - p).

    In evaluation dropout is the identity and has no scale.

    Raises:
        OptionError: `inplace`.
    """
    _refuse_inplace("dropout", inplace)
    if not training or not 0 < p < 1:
        return F.dropout(input, p, training)
    keep = (1 - p) ** 0.5
    return scale_fwd(F.dropout(scale_bwd(input, keep), p), keep)


#: 1 / std of relu of a Gaussian.
_RELU = (2 / (1 - 1 / math.pi)) ** 0.5


@cached_constants
def _tanh_scales(mult: float) -> tuple[float, ...]:
    positive(mult, "mult")
    derivative = gaussian_rms(lambda z: 1 - np.tanh(mult * z) ** 2)
    return mult / gaussian_std(lambda z: np.tanh(mult * z)), 1 / derivative


@cached_constants
def _sigmoid_scales(mult: float) -> tuple[float, ...]:
    positive(mult, "mult")
    # sigmoid(x) = (1 + tanh(x / 2)) / 2, which does not overflow.
    derivative = gaussian_rms(lambda z: (1 - np.tanh(mult * z / 2) ** 2) / 4)
    return mult / gaussian_rms(lambda z: (1 + np.tanh(mult * z / 2)) / 2), 1 / derivative


def _refuse_inplace(name: str, inplace: bool) -> None:
    if inplace:
        raise OptionError(
            f"{name}(inplace=True): its scaled result has another value than its input may be "
            "left with; assign the result instead"
        )
