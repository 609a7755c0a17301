"""Every spelling that torch has for a function of this package.

COUNTERPARTS maps what a model calls to a function of the same signature that is unit-scaled. Each
also takes `constraint=` where its unit-scaled function does.

What a spelling does not say is read from its operands: a matrix that is an `nn.Parameter`, or a
view of one, is a weight, whose gradient no constraint reaches; as a factor or a term of an
elementwise operator it is a gain or a bias. No function here writes into its argument: the result
of `inplace=True` and of `relu_` is a new tensor. Whoever wants it there writes it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.functional import convolutions, losses, pooling, recurrent
from scaledtensor.functional.spellings import arithmetic, layers
from scaledtensor.functional.spellings import arithmetic as elementwise
from scaledtensor.ops.products.table import PRODUCTS

__all__ = ["COUNTERPARTS"]

#: Products by the name that `scaledtensor.ops.products.table.PRODUCTS` gives them -> the same at
#: unit
#: scale. None: the constant is measured, as for any function that has no closed form here.
_BY_NAME: dict[str, Callable[..., Any] | None] = {
    "linear": arithmetic.linear,
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
    "conv1d": layers.convolution(convolutions.conv1d),
    "conv2d": layers.convolution(convolutions.conv2d),
    "conv3d": layers.convolution(convolutions.conv3d),
    "conv_transpose1d": layers.transposed(convolutions.conv_transpose1d),
    "conv_transpose2d": layers.transposed(convolutions.conv_transpose2d),
    "conv_transpose3d": layers.transposed(convolutions.conv_transpose3d),
    "convolution": layers.any_convolution,
    "conv_tbc": layers.conv_tbc,
    "scaled_dot_product_attention": layers.attention,
    "dot": None,
    "outer": None,
    "sparse_mm": None,
    "sparse_addmm": None,
}

_PRODUCTS = {
    spelling: counterpart
    for spelling, product in PRODUCTS.items()
    if (counterpart := _BY_NAME[product.name]) is not None
}

#: What a model may call -> the same at unit scale.
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
    F.gelu: elementwise.gelu,
    F.silu: elementwise.silu,
    F.relu: elementwise.relu,
    torch.relu: elementwise.relu,
    Tensor.relu: elementwise.relu,
    torch.relu_: elementwise.relu,
    Tensor.relu_: elementwise.relu,
    F.leaky_relu: elementwise.leaky_relu,
    torch.tanh: elementwise.tanh,
    Tensor.tanh: elementwise.tanh,
    torch.tanh_: elementwise.tanh,
    Tensor.tanh_: elementwise.tanh,
    F.tanh: elementwise.tanh,
    torch.sigmoid: elementwise.sigmoid,
    Tensor.sigmoid: elementwise.sigmoid,
    torch.sigmoid_: elementwise.sigmoid,
    Tensor.sigmoid_: elementwise.sigmoid,
    F.sigmoid: elementwise.sigmoid,
    torch.special.expit: elementwise.sigmoid,
    F.softmax: elementwise.f_softmax,
    torch.softmax: elementwise.softmax,
    torch.special.softmax: elementwise.softmax,
    Tensor.softmax: elementwise.softmax,
    F.log_softmax: elementwise.f_log_softmax,
    torch.log_softmax: elementwise.log_softmax,
    torch.special.log_softmax: elementwise.log_softmax,
    Tensor.log_softmax: elementwise.log_softmax,
    F.dropout: elementwise.f_dropout,
    torch.dropout: elementwise.dropout,
    torch.dropout_: elementwise.dropout,
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
    F.layer_norm: layers.f_layer_norm,
    torch.layer_norm: layers.layer_norm,
    F.rms_norm: layers.rms_norm,
    torch.rms_norm: layers.rms_norm,
    F.group_norm: layers.f_group_norm,
    torch.group_norm: layers.group_norm,
    F.batch_norm: layers.f_batch_norm,
    torch.batch_norm: layers.batch_norm,
    # look-ups, attention and losses
    F.embedding: layers.f_embedding,
    torch.embedding: layers.embedding,
    F.cross_entropy: losses.cross_entropy,
    F.nll_loss: losses.nll_loss,
    F.mse_loss: layers.mse_loss,
    F.l1_loss: layers.l1_loss,
    F.smooth_l1_loss: losses.smooth_l1_loss,
    F.binary_cross_entropy_with_logits: losses.binary_cross_entropy_with_logits,
    F.kl_div: losses.kl_div,
}
