"""The names of the `unit-scaling` library (Graphcore, 0.3.5), for programs that were written to it.

    import scaledtensor.compat.unit_scaling as uu
    from scaledtensor.compat.unit_scaling import functional as U
    from scaledtensor.compat.unit_scaling.transforms import compile, simulate_fp8, unit_scale

A change of the import is all that its documented examples need. What these modules hold is this
library's: functions and modules from `scaledtensor.functional` and `scaledtensor.nn`, whose forward
and gradients agree with the published ones to 1e-5, and adapters where a name is called otherwise.

What differs, on purpose:

============================== ================================  =================================
what                           published                         here
============================== ================================  =================================
`FPFormat(4, 3)`, `(5, 2)`     no NaN, largest 240 and 57344,    OCP's E4M3FN (448) and E5M2;
                               smallest normals 2^-7 and 2^-15   `FPFormat(5, 10)`, `(8, 7)` and
                                                                 `(8, 23)` are FP16, BF16, FP32
`rounding="nearest"`           ties toward zero                  ties to even
`quantise` of 16-bit floats    half of the last dimension        its shape and dtype
`simulate_format`              always rounds stochastically,     rounds as the formats say, in
                               in `linear` and attention alone   every product and convolution
transforms                     graphs that Dynamo captures       modes around the model's own
                                                                 code, eager or compiled
`torch.compile(unit_scale(m))` recurses without end              works, after one call of the
                                                                 model; `compile(unit_scale(m))`
                                                                 makes that itself
`unit_scale`: residual sums    tau = 0.01 for attention, 0.5     the transformer rule of u-muP
`unit_scale`: `x * y`, tanh,   left as they are                  of unit scale; a single number
`@`, a gelu by hand                                              stays what it is
`unit_scale`: parameters       of `Linear` and `Embedding`       all weights and biases, and
                                                                 tagged for u-muP's optimizers,
                                                                 vectors with 1/32 of the rate
`unit_scale(replace=)`         calls of Python functions are     a wrapper takes the place of the
                               found in the graph                function where the model's code
                                                                 finds it by a name
`track_scales`                 inputs keep `requires_grad`       inputs stay as they were; a model
                                                                 with transforms is recorded as
                                                                 eager code, with its names
`Metrics`                      made from a tensor by hand        made by `track_scales`, with more
                                                                 numbers
`prune_selected_nodes`         changes the graph it is given     a copy, bridged; "add" and
                                                                 `operator.add` mean any addition
`analyse_module`               traced code, a line per           the model's own source, class by
                               operation                         class
`plot`                         draws on pyplot's current figure  draws on a figure of its own
`visualiser`, `example_batch`  download a data set               take a batch, or say so
`scale_fwd`, `scale_bwd`       any factor                        a positive one
`weight`, `label_smoothing`    ValueError                        taken
of cross entropy; `sparse`
of an embedding
logs of transforms             at level INFO                     none
`apply_constraint`             any name in the module            the names of a table, and "exact"
`copy.deepcopy(parameter)`     keeps tags                        the copy of its *module* does;
                                                                 see `scaledtensor.mup`
biases, ignored tokens,        shrunk by 1/sqrt(fan_in),         not shrunk, not counted,
dropout in evaluation          counted, scaled                   the identity
============================== ================================  =================================

Errors are this library's (`scaledtensor.errors`). What takes the place of a ValueError is one, and
so is what takes the place of an `assert`; a missing matplotlib or pandas is an UnsupportedError.
Modules are those of the published package but for `docs` and `transforms.utils`, which hold what it
is made with.
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
