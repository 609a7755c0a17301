"""Convolutions and transposed convolutions.

An output is a sum over the input channels of its group times the taps that reach it. An input's
gradient is a sum over output channels times taps. A weight's gradient is a sum over batch times
positions (unit scaling, Blake et al. 2023, table A.2). Padding is counted as if it were data.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from scaledtensor.functional.products import unshrunk
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    batch_factor,
    parameter_scale,
    product,
    root,
    scale_bwd,
    scale_fwd,
)

__all__ = [
    "Sizes",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "spread",
]

Sizes: TypeAlias = int | Sequence[int]
Powers: TypeAlias = tuple[float, float, float]

_HALF: Powers = (0.5, 0.5, 0.5)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: Powers = _HALF,
) -> Tensor:
    """A convolution at unit scale, plus the bias as it is.

    Args:
        input: (batch, channels, length), or without a batch.
        weight: (channels out, channels / groups, taps), of unit variance.
        bias: (channels out,), or None. It is added to the scaled result.
        stride, padding, dilation, groups: see `torch.nn.functional.conv1d`.
        constraint: constrains the scales of the output and of the input's gradient.
        scale_power: powers of the scales of the output, of the input's gradient, and of the
            gradients of weight and bias.
    """
    shape = (stride, padding, dilation, groups)
    return _convolution(F.conv1d, input, weight, bias, shape, constraint, scale_power)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: Powers = _HALF,
) -> Tensor:
    """Same as `conv1d`, for input (batch, channels, height, width)."""
    shape = (stride, padding, dilation, groups)
    return _convolution(F.conv2d, input, weight, bias, shape, constraint, scale_power)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: Powers = _HALF,
) -> Tensor:
    """Same as `conv1d`, for input (batch, channels, depth, height, width)."""
    shape = (stride, padding, dilation, groups)
    return _convolution(F.conv3d, input, weight, bias, shape, constraint, scale_power)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: Powers = _HALF,
) -> Tensor:
    """The transpose of a convolution at unit scale, plus the bias as it is.

    Args:
        input: (batch, channels, length), or without a batch.
        weight: (channels, channels out / groups, taps), of unit variance.
        bias: (channels out,), or None. It is added to the scaled result.
        stride, padding, output_padding, groups, dilation: see
            `torch.nn.functional.conv_transpose1d`.
        constraint, scale_power: see `conv1d`.
    """
    shape = (stride, padding, output_padding, groups, dilation)
    return _transposed(F.conv_transpose1d, input, weight, bias, shape, constraint, scale_power)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: Powers = _HALF,
) -> Tensor:
    """Same as `conv_transpose1d`, for input (batch, channels, height, width)."""
    shape = (stride, padding, output_padding, groups, dilation)
    return _transposed(F.conv_transpose2d, input, weight, bias, shape, constraint, scale_power)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: Powers = _HALF,
) -> Tensor:
    """Same as `conv_transpose1d`, for input (batch, channels, depth, height, width)."""
    shape = (stride, padding, output_padding, groups, dilation)
    return _transposed(F.conv_transpose3d, input, weight, bias, shape, constraint, scale_power)


def _convolution(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: tuple[Any, ...],
    constraint: str | None,
    scale_power: Powers,
) -> Tensor:
    stride, padding, dilation, groups = shape
    fan_out, fan_in, *taps = weight.shape
    steps = spread(stride, len(taps))
    batch, sizes = _batch(input, taps), input.shape[-len(taps) :]
    positions = _positions(sizes, taps, steps, padding, dilation)
    count = product(taps)
    return _scaled(
        function,
        input,
        weight,
        bias,
        shape,
        terms=(
            fan_in * count,
            fan_out * count / (product(steps) * groups),
            batch * positions,
            batch * positions,
        ),
        constraint=constraint,
        scale_power=scale_power,
    )


def _transposed(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: tuple[Any, ...],
    constraint: str | None,
    scale_power: Powers,
) -> Tensor:
    stride, padding, output_padding, groups, dilation = shape
    fan_in, fan_out, *taps = weight.shape
    count = product(taps)
    # Of the taps at a position, one in `stride` meets an input.
    reached = count / product(spread(stride, len(taps)))
    batch, sizes = _batch(input, taps), input.shape[-len(taps) :]
    positions = _transposed_positions(sizes, taps, stride, padding, output_padding, dilation)
    return _scaled(
        function,
        input,
        weight,
        bias,
        shape,
        terms=(
            fan_in / groups * reached,
            fan_out * count,
            batch * product(sizes),
            batch * positions,
        ),
        constraint=constraint,
        scale_power=scale_power,
    )


def _scaled(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: tuple[Any, ...],
    terms: tuple[float, float, float, float],
    constraint: str | None,
    scale_power: Powers,
) -> Tensor:
    """`terms`: how many terms are summed in the output and in the gradients of input, weight and
    bias."""
    free = (root(n, power) for n, power in zip(terms[:2], scale_power, strict=False))
    output_scale, input_scale = apply_constraint(constraint, *free)
    of_weight, of_bias = (root(n * batch_factor(), scale_power[2]) for n in terms[2:])
    input = scale_bwd(input, input_scale)
    weight = scale_bwd(weight, parameter_scale(constraint, of_weight, output_scale))
    bias = unshrunk(bias, output_scale, parameter_scale(constraint, of_bias))
    return scale_fwd(function(input, weight, bias, *shape), output_scale)


def _batch(input: Tensor, taps: Sequence[int]) -> int:
    return input.shape[0] if input.dim() == len(taps) + 2 else 1


def _positions(
    sizes: Sequence[int], taps: Sequence[int], steps: Sequence[int], padding: Any, dilation: Any
) -> int:
    """Return the number of elements in a channel of the output (torch.nn.Conv1d's formula), or 0 if
    the kernel does not fit. torch then raises a good error."""
    if padding == "same":  # torch allows it at stride 1 only
        return product(sizes)
    pads = spread(0 if padding == "valid" else padding, len(taps))
    gaps = spread(dilation, len(taps))
    return product(
        [
            max((n + 2 * pad - gap * (tap - 1) - 1) // step + 1, 0)
            for n, tap, step, pad, gap in zip(sizes, taps, steps, pads, gaps, strict=True)
        ]
    )


def _transposed_positions(
    sizes: Sequence[int],
    taps: Sequence[int],
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    dilation: Sizes,
) -> int:
    """Return the number of elements in a channel of the output (torch.nn.ConvTranspose1d's
    formula)."""
    steps, pads, more, gaps = (
        spread(x, len(taps)) for x in (stride, padding, output_padding, dilation)
    )
    return product(
        [
            max((n - 1) * step - 2 * pad + gap * (tap - 1) + extra + 1, 0)
            for n, tap, step, pad, extra, gap in zip(
                sizes, taps, steps, pads, more, gaps, strict=True
            )
        ]
    )


def spread(sizes: Sizes, dims: int) -> Sequence[int]:
    """Return one number for each dimension. torch also takes one number for all dimensions, in a
    sequence or by itself."""
    if isinstance(sizes, int):
        return (sizes,) * dims
    return tuple(sizes) * dims if len(sizes) == 1 else sizes
