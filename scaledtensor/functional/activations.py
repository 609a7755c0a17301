"""Elementwise functions, softmax and dropout.

Closed forms are for inputs of unit variance. `mult` sharpens a function (f(mult x) / mult) as a
temperature would, since unit-scaled inputs have no scale of their own to do it with.
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
    gaussian_rms,
    gaussian_std,
    interpolate,
    kept,
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
    """function(mult x) / mult, under one scale forward and one backward."""
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

    From x/2 at a small mult to relu at a large one, whose standard deviation is
    sqrt((1 - 1/pi) / 2); between them a fit, in the log domain (Blake et al. 2023, appendix G).
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
    """silu(mult x) / mult at unit scale. As gelu; the derivative turns at a larger mult.

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

    One scale for the output and both gradients: a gate's RMS from 1/2 to that of relu, 1/sqrt(2).
    """
    both = interpolate(sharpness(mult, 1), 2, 2**0.5)
    output_scale, input_scale, gate_scale = apply_constraint(constraint, both, both, both)
    # As in `_elementwise`, 1 / mult is in the last constant; here one gradient has it to itself.
    input = scale_bwd(input, input_scale / mult)
    gate = scale(gate, mult, gate_scale)
    return scale_fwd(input * F.silu(gate), output_scale / mult)


def relu(
    input: Tensor, constraint: Constraint = "to_output_scale", inplace: bool = False
) -> Tensor:
    """relu at unit scale.

    max(z, 0) has mean 1/sqrt(2 pi) and second moment 1/2, its derivative second moment 1/2.

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

    For slope a: mean (1 - a) / sqrt(2 pi), second moment of itself and of its derivative
    (1 + a^2) / 2.

    Raises:
        OptionError: `inplace`.
    """
    _refuse_inplace("relu", inplace)
    square = (1 + negative_slope**2) / 2
    variance = square - (1 - negative_slope) ** 2 / (2 * math.pi)
    function = partial(F.leaky_relu, negative_slope=negative_slope) if negative_slope else F.relu
    return _elementwise(function, input, 1.0, constraint, variance**-0.5, square**-0.5)


def tanh(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> Tensor:
    """tanh(mult x) / mult at unit scale. Both moments by quadrature over a Gaussian."""
    return _elementwise(torch.tanh, input, mult, constraint, *_tanh_scales(float(mult)))


def sigmoid(input: Tensor, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> Tensor:
    """sigmoid(mult x) / mult at unit RMS. Both moments by quadrature over a Gaussian.

    Of the RMS and not of the standard deviation, since a gate is multiplied: so that value and gate
    of unit RMS give a product of unit RMS.
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

    Over N logits: from 1/N each at a small mult to one winner, of RMS 1/sqrt(N), at a large one;
    the fit between is that of Blake et al. 2023, appendix G. So flat probabilities come out near 1
    each, and their mean counts as scale.

    Args:
        input: logits of unit variance, of any shape.
        dim: over which probabilities sum to a constant.
        dtype: to cast `input` to first.
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

    The logarithms are not scaled: they mean something to the loss that reads them. The gradient
    g - softmax * sum(g) is at unit scale by itself. `constraint="exact"` gives the true one.
    """
    input = scale(input, mult, parameter_scale(constraint, 1.0, mult))
    return F.log_softmax(input, dim, dtype=dtype)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """dropout at unit scale: what is kept, 1/(1 - p) times as large, has variance 1/(1 - p).

    In evaluation it is the identity, without a scale.

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


@kept
def _tanh_scales(mult: float) -> tuple[float, ...]:
    positive(mult, "mult")
    derivative = gaussian_rms(lambda z: 1 - np.tanh(mult * z) ** 2)
    return mult / gaussian_std(lambda z: np.tanh(mult * z)), 1 / derivative


@kept
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
