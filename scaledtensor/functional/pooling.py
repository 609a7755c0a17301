"""Average pooling, and means over positions.

The mean of k independent elements is 1 / sqrt(k) times as large as they are. If two elements of a
window have a mean product r, they do not average out: the mean of k elements of unit RMS has the
RMS sqrt(r + (1 - r) / k). After a relu r is the square of its mean, 1/pi of the mean square.

An element's gradient is a sum over the h = k / stride windows that contain the element. Each window
adds 1 / k of its output's gradient, so the RMS is sqrt(h) / k. All elements of a window get the
same gradient from it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import ScaleError
from scaledtensor.functional.convolutions import Sizes, spread
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    product,
    scale_bwd,
    scale_fwd,
)

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "mean",
]

AdaptiveSizes: TypeAlias = int | Sequence[int | None] | None


def avg_pool1d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """F.avg_pool1d at unit scale. Padding is counted as if it were data.

    Args:
        input: (batch, channels, length), or without a batch, of unit RMS.
        kernel_size, stride, padding, ceil_mode, count_include_pad: see
            `torch.nn.functional.avg_pool1d`.
        constraint: constrains the scales of the output and of the input's gradient.
        correlation: the mean product of two elements of a window; 0 if they are independent.

    Raises:
        ScaleError: `correlation` is negative or not finite.
    """
    options = (padding, ceil_mode, count_include_pad)
    return _pooled(F.avg_pool1d, 1, input, kernel_size, stride, options, constraint, correlation)


def avg_pool2d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """Same as `avg_pool1d`, for input (batch, channels, height, width)."""
    options = (padding, ceil_mode, count_include_pad, divisor_override)
    return _pooled(F.avg_pool2d, 2, input, kernel_size, stride, options, constraint, correlation)


def avg_pool3d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """Same as `avg_pool1d`, for input (batch, channels, depth, height, width)."""
    options = (padding, ceil_mode, count_include_pad, divisor_override)
    return _pooled(F.avg_pool3d, 3, input, kernel_size, stride, options, constraint, correlation)


def adaptive_avg_pool1d(
    input: Tensor,
    output_size: AdaptiveSizes,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """F.adaptive_avg_pool1d at unit scale. The closed form assumes that all windows have one size.

    Args:
        input: (batch, channels, length), or without a batch, of unit RMS.
        output_size: length of the result; None keeps the length.
        constraint, correlation: see `avg_pool1d`.
    """
    return _adapted(F.adaptive_avg_pool1d, 1, input, output_size, constraint, correlation)


def adaptive_avg_pool2d(
    input: Tensor,
    output_size: AdaptiveSizes,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """Same as `adaptive_avg_pool1d`, for input (batch, channels, height, width)."""
    return _adapted(F.adaptive_avg_pool2d, 2, input, output_size, constraint, correlation)


def adaptive_avg_pool3d(
    input: Tensor,
    output_size: AdaptiveSizes,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """Same as `adaptive_avg_pool1d`, for input (batch, channels, depth, height, width)."""
    return _adapted(F.adaptive_avg_pool3d, 3, input, output_size, constraint, correlation)


def mean(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    constraint: Constraint = "to_output_scale",
    correlation: float = 0.0,
) -> Tensor:
    """torch.mean over `dim` at unit scale, for means over positions.

    Args:
        input: of any shape and of unit RMS.
        dim: dimensions of the mean; None is all dimensions.
        keepdim, dtype: see `torch.mean`.
        constraint, correlation: see `avg_pool1d`.
    """
    dims = (dim,) if isinstance(dim, int) else tuple(range(input.dim()) if dim is None else dim)
    count = product([input.shape[d] for d in dims])
    return _scaled(
        lambda x: torch.mean(x, dims, keepdim, dtype=dtype),
        input,
        count,
        count,
        1,
        constraint,
        correlation,
    )


def _pooled(
    function: Callable[..., Tensor],
    dims: int,
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None,
    options: tuple[Any, ...],
    constraint: str | None,
    correlation: float,
) -> Tensor:
    count = product(spread(kernel_size, dims))
    # torch reads an empty stride as the kernel's size, too.
    apart = kernel_size if stride is None or stride in ((), []) else stride
    steps = product(spread(apart, dims))
    divisor = options[3] if len(options) > 3 and options[3] else count
    return _scaled(
        lambda x: function(x, kernel_size, stride, *options),
        input,
        count,
        divisor,
        count / steps,
        constraint,
        correlation,
    )


def _adapted(
    function: Callable[..., Tensor],
    dims: int,
    input: Tensor,
    output_size: AdaptiveSizes,
    constraint: str | None,
    correlation: float,
) -> Tensor:
    one = output_size is None or isinstance(output_size, int)
    given: Any = (output_size,) * dims if one else output_size
    sizes = input.shape[-dims:]
    wanted = [n if out is None else out for n, out in zip(sizes, given, strict=True)]
    pairs = [(max(n, 1), max(out, 1)) for n, out in zip(sizes, wanted, strict=True)]
    # A window smaller than one element is this element, and several windows then share it.
    count = math.prod(max(n / out, 1) for n, out in pairs)
    windows = math.prod(max(out / n, 1) for n, out in pairs)
    return _scaled(
        lambda x: function(x, output_size), input, count, count, windows, constraint, correlation
    )


def _scaled(
    function: Callable[[Tensor], Tensor],
    input: Tensor,
    count: float,
    divisor: float,
    windows: float,
    constraint: str | None,
    correlation: float,
) -> Tensor:
    """Pool by `function`: sums of `count` elements, divided by `divisor`. Each element is in
    `windows` sums."""
    if not 0 <= correlation < math.inf:
        raise ScaleError(f"correlation is a number from 0 on; got {correlation!r}")
    count = max(count, 1)
    output_scale, grad_scale = apply_constraint(
        constraint,
        divisor / count * (correlation + (1 - correlation) / count) ** -0.5,
        divisor / windows**0.5,
    )
    return scale_fwd(function(scale_bwd(input, grad_scale)), output_scale)
