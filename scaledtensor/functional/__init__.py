"""Unit-scaled functions. `import scaledtensor.functional as U`, and write U.linear for F.linear.

Each function is torch's function with one constant forward and another backward. The constants are
closed forms of the shapes. They give the result and every gradient unit scale if inputs and weights
have unit scale (Blake et al. 2023, "Unit Scaling"; Blake et al. 2024, "u-muP"). Plain tensors give
plain tensors. ScaledTensors give ScaledTensors, and a constant's power of two moves into the scale
that they carry.
"""

from scaledtensor.functional.activations import (
    dropout,
    gelu,
    leaky_relu,
    log_softmax,
    relu,
    sigmoid,
    silu,
    silu_glu,
    softmax,
    tanh,
)
from scaledtensor.functional.attention import scaled_dot_product_attention
from scaledtensor.functional.convolutions import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from scaledtensor.functional.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from scaledtensor.functional.norms import batch_norm, group_norm, layer_norm, rms_norm
from scaledtensor.functional.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    mean,
)
from scaledtensor.functional.products import (
    apply_rotary,
    bmm,
    einsum,
    embedding,
    grouped_linear,
    linear,
    linear_readout,
    matmul,
    moe_route,
)
from scaledtensor.functional.residual import (
    add,
    mul,
    residual_add,
    residual_apply,
    residual_split,
    transformer_residual_scaling_rule,
)
from scaledtensor.functional.scaling import global_batch, scale_bwd, scale_fwd

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "add",
    "apply_rotary",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "dropout",
    "einsum",
    "embedding",
    "gelu",
    "global_batch",
    "group_norm",
    "grouped_linear",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_readout",
    "log_softmax",
    "matmul",
    "mean",
    "moe_route",
    "mse_loss",
    "mul",
    "nll_loss",
    "relu",
    "residual_add",
    "residual_apply",
    "residual_split",
    "rms_norm",
    "scale_bwd",
    "scale_fwd",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "silu_glu",
    "smooth_l1_loss",
    "softmax",
    "tanh",
    "transformer_residual_scaling_rule",
]
