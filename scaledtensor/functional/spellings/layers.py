"""Adapters for torch's spellings of convolutions, norms, look-ups, attention, losses and means."""

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

__all__ = [
    "any_convolution",
    "attention",
    "batch_norm",
    "conv_tbc",
    "embedding",
    "group_norm",
    "l1_loss",
    "layer_norm",
    "mean",
    "mse_loss",
    "rms_norm",
]


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
    """`torch.convolution`, which has the arguments of all convolutions."""
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
    """`torch.conv_tbc`: input (time, batch, channel), weight (tap, in, out)."""
    x, w = input.permute(1, 2, 0), weight.permute(2, 1, 0)
    return conv1d(x, w, bias, padding=pad, constraint=constraint).permute(2, 0, 1)


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


def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    constraint: Any = None,
) -> Tensor:
    # Here -1 means no padding row, and negative numbers do not count from the end.
    padding = None if padding_idx < 0 else padding_idx
    return products.embedding(
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
    """A scale of 1/sqrt(d), given or by default, becomes 1/d. Other scales change by the same
    factor. `context_length` declares that a mask is causal."""
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


def _without_weight(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
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


mse_loss = _without_weight(losses.mse_loss)
l1_loss = _without_weight(losses.l1_loss)


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
