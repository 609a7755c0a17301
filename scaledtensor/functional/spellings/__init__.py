"""Every spelling that torch has for a function of this package.

COUNTERPARTS maps a function that a model may call to a unit-scaled function with the same
parameters. A function of this package whose first parameters are torch's is its own counterpart.
The modules `arithmetic` and `layers` adapt the others. Each counterpart takes `constraint=` if its
unit-scaled function does.

A spelling does not tell which operands are weights, so the operands do. A matrix that is an
`nn.Parameter`, or a view of one, is a weight, and no constraint reaches its gradient. A parameter
that is a factor or a term of an elementwise operator is a gain or a bias. No counterpart writes
into its argument: the result of `inplace=True` and of `relu_` is a new tensor, which the caller may
copy.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.functional import (
    activations,
    convolutions,
    losses,
    norms,
    pooling,
    products,
    recurrent,
)
from scaledtensor.functional.spellings import arithmetic, layers
from scaledtensor.ops.products.table import PRODUCTS

__all__ = ["COUNTERPARTS"]

#: Name of a product in `scaledtensor.ops.products.table.PRODUCTS` -> its counterpart. The constant
#: of any other product is measured, like the constant of every function without a closed form here.
_BY_NAME: dict[str, Callable[..., Any]] = {
    "linear": products.linear,
    "bilinear": arithmetic.bilinear,
    "matmul": arithmetic.matmul,
    "reflected_matmul": arithmetic.reflected_matmul,
    "mm": arithmetic.mm,
    "mv": arithmetic.mv,
    "bmm": arithmetic.bmm,
    "inner": arithmetic.inner,
    "einsum": arithmetic.einsum,
    "tensordot": arithmetic.tensordot,
    "multi_dot": arithmetic.multi_dot,
    "chain_matmul": arithmetic.chain_matmul,
    "addmm": arithmetic.addmm,
    "addmv": arithmetic.addmv,
    "baddbmm": arithmetic.baddbmm,
    "addbmm": arithmetic.addbmm,
    "grouped_mm": arithmetic.grouped_mm,
    "conv1d": convolutions.conv1d,
    "conv2d": convolutions.conv2d,
    "conv3d": convolutions.conv3d,
    "conv_transpose1d": convolutions.conv_transpose1d,
    "conv_transpose2d": convolutions.conv_transpose2d,
    "conv_transpose3d": convolutions.conv_transpose3d,
    "convolution": layers.any_convolution,
    "conv_tbc": layers.conv_tbc,
    "scaled_dot_product_attention": layers.attention,
}

_PRODUCTS = {
    spelling: _BY_NAME[product.name]
    for spelling, product in PRODUCTS.items()
    if product.name in _BY_NAME
}

#: Function that a model may call -> its counterpart.
COUNTERPARTS: dict[Callable[..., Any], Callable[..., Any]] = {
    **_PRODUCTS,
    # sums and elementwise products
    torch.add: arithmetic.add,
    Tensor.add: arithmetic.add,
    Tensor.__add__: arithmetic.add,
    Tensor.__iadd__: arithmetic.add,
    Tensor.__radd__: arithmetic.radd,
    torch.sub: arithmetic.sub,
    torch.subtract: arithmetic.sub,
    Tensor.sub: arithmetic.sub,
    Tensor.subtract: arithmetic.sub,
    Tensor.__sub__: arithmetic.sub,
    Tensor.__isub__: arithmetic.sub,
    Tensor.__rsub__: arithmetic.rsub,
    torch.mul: arithmetic.mul,
    torch.multiply: arithmetic.mul,
    Tensor.mul: arithmetic.mul,
    Tensor.multiply: arithmetic.mul,
    Tensor.__mul__: arithmetic.mul,
    Tensor.__imul__: arithmetic.mul,
    Tensor.__rmul__: arithmetic.mul,
    # elementwise functions, softmax and dropout
    F.gelu: activations.gelu,
    F.silu: arithmetic.silu,
    F.relu: arithmetic.relu,
    torch.relu: arithmetic.relu,
    Tensor.relu: arithmetic.relu,
    torch.relu_: arithmetic.relu,
    Tensor.relu_: arithmetic.relu,
    F.leaky_relu: arithmetic.leaky_relu,
    torch.tanh: arithmetic.tanh,
    Tensor.tanh: arithmetic.tanh,
    torch.tanh_: arithmetic.tanh,
    Tensor.tanh_: arithmetic.tanh,
    F.tanh: arithmetic.tanh,
    torch.sigmoid: arithmetic.sigmoid,
    Tensor.sigmoid: arithmetic.sigmoid,
    torch.sigmoid_: arithmetic.sigmoid,
    Tensor.sigmoid_: arithmetic.sigmoid,
    F.sigmoid: arithmetic.sigmoid,
    torch.special.expit: arithmetic.sigmoid,
    F.softmax: arithmetic.f_softmax,
    torch.softmax: arithmetic.softmax,
    torch.special.softmax: arithmetic.softmax,
    Tensor.softmax: arithmetic.softmax,
    F.log_softmax: arithmetic.f_log_softmax,
    torch.log_softmax: arithmetic.log_softmax,
    torch.special.log_softmax: arithmetic.log_softmax,
    Tensor.log_softmax: arithmetic.log_softmax,
    F.dropout: arithmetic.f_dropout,
    torch.dropout: arithmetic.dropout,
    torch.dropout_: arithmetic.dropout,
    # averages
    F.avg_pool1d: pooling.avg_pool1d,
    F.avg_pool2d: pooling.avg_pool2d,
    F.avg_pool3d: pooling.avg_pool3d,
    F.adaptive_avg_pool1d: pooling.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d: pooling.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d: pooling.adaptive_avg_pool3d,
    torch.mean: layers.mean,
    Tensor.mean: layers.mean,
    # recurrent layers
    **recurrent.FUNCTIONS,
    # norms
    F.layer_norm: norms.layer_norm,
    torch.layer_norm: layers.layer_norm,
    F.rms_norm: layers.rms_norm,
    torch.rms_norm: layers.rms_norm,
    F.group_norm: norms.group_norm,
    torch.group_norm: layers.group_norm,
    F.batch_norm: norms.batch_norm,
    torch.batch_norm: layers.batch_norm,
    # look-ups, attention and losses
    F.embedding: products.embedding,
    torch.embedding: layers.embedding,
    F.cross_entropy: losses.cross_entropy,
    F.nll_loss: losses.nll_loss,
    F.mse_loss: layers.mse_loss,
    F.l1_loss: layers.l1_loss,
    F.smooth_l1_loss: losses.smooth_l1_loss,
    F.binary_cross_entropy_with_logits: losses.binary_cross_entropy_with_logits,
    F.kl_div: losses.kl_div,
}
