"""Convolutions, norms, look-ups, attention and losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.functional import losses, norms, pooling, products
from scaledtensor.functional.attention import scaled_dot_product_attention
from scaledtensor.functional.convolutions import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from scaledtensor.functional.spellings.arithmetic import OUTPUT, refuse_out


def convolution(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        constraint: Any = OUTPUT,
    ) -> Tensor:
        return function(input, weight, bias, stride, padding, dilation, groups, constraint)

    return convolution


def transposed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
        *,
        constraint: Any = OUTPUT,
    ) -> Tensor:
        shape = (stride, padding, output_padding, groups, dilation)
        return function(input, weight, bias, *shape, constraint)

    return convolution


def any_convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *,
    constraint: Any = OUTPUT,
) -> Tensor:
    """`torch.convolution`, which names every argument of all the others."""
    dims = weight.dim() - 2
    if transposed:
        back = (conv_transpose1d, conv_transpose2d, conv_transpose3d)[dims - 1]
        shape = (stride, padding, output_padding, groups, dilation)
        return back(input, weight, bias, *shape, constraint)
    forward = (conv1d, conv2d, conv3d)[dims - 1]
    return forward(input, weight, bias, stride, padding, dilation, groups, constraint)


def conv_tbc(
    input: Any, weight: Any, bias: Any, pad: int = 0, *, constraint: Any = OUTPUT
) -> Tensor:
    """Of (time, batch, channel), by (tap, in, out)."""
    x, w = input.permute(1, 2, 0), weight.permute(2, 1, 0)
    return conv1d(x, w, bias, padding=pad, constraint=constraint).permute(2, 0, 1)


def f_layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.layer_norm(input, normalized_shape, weight, bias, eps, constraint)


def layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.layer_norm(input, normalized_shape, weight, bias, eps, constraint)


def rms_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.rms_norm(input, normalized_shape, weight, eps, constraint)


def f_group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.group_norm(input, num_groups, weight, bias, eps, constraint)


def group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.group_norm(input, num_groups, weight, bias, eps, constraint)


def f_batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, constraint
    )


def batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    constraint: Any = None,
) -> Tensor:
    return norms.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, constraint
    )


# --- look-ups, attention and losses ----------------------------------------------------------


def f_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    constraint: Any = None,
) -> Tensor:
    return products.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, constraint
    )


def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    constraint: Any = None,
) -> Tensor:
    # Of this spelling -1 is no row, and no negative number counts from the end.
    padding = None if padding_idx < 0 else padding_idx
    return f_embedding(
        indices,
        weight,
        padding,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
        constraint=constraint,
    )


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    constraint: Any = OUTPUT,
    context_length: int | None = None,
    correlation: float = 0.0,
) -> Tensor:
    """A scale of 1/sqrt(d), given or torch's own, becomes 1/d; any other is in that proportion.
    `context_length` says of a mask that it is causal."""
    mult = 1.0 if scale is None else scale * math.sqrt(query.shape[-1])
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        mult,
        enable_gqa=enable_gqa,
        constraint=constraint,
        context_length=context_length,
        correlation=correlation,
    )


def _error(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def error(
        input: Any,
        target: Any,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        weight: Any = None,
        *,
        constraint: Any = None,
    ) -> Tensor:
        if weight is not None:
            raise UnsupportedError(
                "unit-scaled errors take no weight for each element; multiply both tensors by its "
                "square root (mse_loss) or by it (l1_loss)"
            )
        return function(input, target, size_average, reduce, reduction, constraint)

    return error


mse_loss = _error(losses.mse_loss)
l1_loss = _error(losses.l1_loss)


def mean(
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    out: Any = None,
    constraint: Any = OUTPUT,
    correlation: float = 0.0,
) -> Tensor:
    refuse_out(out)
    return pooling.mean(
        input, dim, keepdim, dtype=dtype, constraint=constraint, correlation=correlation
    )
