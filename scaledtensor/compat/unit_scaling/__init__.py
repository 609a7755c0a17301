"""The names of the `unit-scaling` library (Graphcore, 0.3.5), for programs that were written to it.

    import scaledtensor.compat.unit_scaling as uu
    from scaledtensor.compat.unit_scaling import functional as U
    from scaledtensor.compat.unit_scaling.transforms import compile, simulate_fp8, unit_scale

Users of Graphcore's library change its imports, and its documented examples run. The functions and
modules are the ones in `scaledtensor.functional` and `scaledtensor.nn`. Their results and gradients
agree with the published ones to 1e-5. Adapters take the published arguments if these differ.

The intended differences:

============================== ================================  =================================
name                           published                         here
============================== ================================  =================================
`FPFormat(4, 3)`, `(5, 2)`     no NaN, largest 240 and 57344,    OCP's E4M3FN (448) and E5M2;
                               smallest normals 2^-7 and 2^-15   `FPFormat(5, 10)`, `(8, 7)` and
                                                                 `(8, 23)` are FP16, BF16, FP32
`rounding="nearest"`           ties toward zero                  ties to even
`quantise` of 16-bit floats    half of the last dimension        the input's shape and dtype
`simulate_format`              always rounds stochastically,     uses the formats' rounding, in
                               only in `linear` and attention    every product and convolution
transforms                     graphs that Dynamo captures       modes around the model's own
                                                                 code, eager or compiled
`torch.compile(unit_scale(m))` recurses without end              works after one call of the
                                                                 model; `compile(unit_scale(m))`
                                                                 makes this call itself
`unit_scale`: residual sums    tau = 0.01 for attention, 0.5     the transformer rule of u-muP
`unit_scale`: `x * y`, tanh,   unchanged                         unit scale; a single number is
`@`, a gelu by hand                                              unchanged
`unit_scale`: parameters       only in `Linear`, `Embedding`     all weights and biases, tagged
                                                                 for u-muP's optimizers; vectors
                                                                 learn at 1/32 of the rate
`unit_scale(replace=)`         finds calls of Python functions   a wrapper takes the function's
                               in the graph                      place where the model's code
                                                                 finds it by a name
`track_scales`                 sets `requires_grad` of inputs    leaves inputs unchanged; records
                                                                 a model with transforms as eager
                                                                 code, with its names
`Metrics`                      made from a tensor by hand        made by `track_scales`, with more
                                                                 numbers
`prune_selected_nodes`         changes the given graph           returns a copy, bridged; "add"
                                                                 and `operator.add` mean any
                                                                 addition
`analyse_module`               traced code, one line for each    the model's own source, class by
                               operation                         class
`plot`                         draws on pyplot's current figure  draws on a new figure
`visualiser`                   downloads a data set              takes a batch
`example_batch`                downloads a data set              raises UnsupportedError
`scale_fwd`, `scale_bwd`       any factor                        a positive factor
`weight`, `label_smoothing`    ValueError                        supported
of cross entropy; `sparse`
of an embedding
logs of transforms             at level INFO                     none
`apply_constraint`             any name in the module            the names of a table, and "exact"
`copy.deepcopy(parameter)`     keeps tags                        loses tags; copies of its module
                                                                 keep them: see `scaledtensor.mup`
biases                         shrunk by 1/sqrt(fan_in)          not shrunk
ignored tokens                 counted                           not counted
dropout in evaluation          scaled                            the identity
============================== ================================  =================================

Errors are the classes in `scaledtensor.errors`. The errors in place of a ValueError, or of an
`assert`, are ValueErrors. A missing matplotlib or pandas raises UnsupportedError. All modules of
the published package are here except `docs` and `transforms.utils`, its internal tools.
"""

from scaledtensor._version import __version__
from scaledtensor.compat.unit_scaling import (
    analysis,
    constraints,
    core,
    formats,
    functional,
    optim,
    parameter,
    scale,
    transforms,
    utils,
)
from scaledtensor.functional import transformer_residual_scaling_rule
from scaledtensor.nn import (
    GELU,
    MHSA,
    MLP,
    Conv1d,
    CrossEntropyLoss,
    DepthModuleList,
    DepthSequential,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    LinearReadout,
    MupType,
    Parameter,
    RMSNorm,
    SiLU,
    Softmax,
    TransformerDecoder,
    TransformerLayer,
    TransformerStack,
)

__all__ = [
    "GELU",
    "MHSA",
    "MLP",
    "Conv1d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "MupType",
    "Parameter",
    "RMSNorm",
    "SiLU",
    "Softmax",
    "TransformerDecoder",
    "TransformerLayer",
    "TransformerStack",
    "__version__",
    "analysis",
    "constraints",
    "core",
    "formats",
    "functional",
    "optim",
    "parameter",
    "scale",
    "transformer_residual_scaling_rule",
    "transforms",
    "utils",
]
