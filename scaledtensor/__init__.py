"""scaledtensor: tensors that carry their own power-of-two scale. `import scaledtensor as sct`."""

from scaledtensor import (
    checkpoint,
    distributed,
    errors,
    formats,
    functional,
    inspect,
    mup,
    nn,
    ops,
    optim,
    recipes,
)
from scaledtensor._version import __version__
from scaledtensor.coded import CodedTensor
from scaledtensor.formats import Format, PerAxis, PerBlock, PerTensor
from scaledtensor.inspect import track_scales
from scaledtensor.machine import hardware
from scaledtensor.model import scale_model, unscale_model
from scaledtensor.ops import on_missing, products_in
from scaledtensor.rebalance import rebalance, rebalance_every, statistics
from scaledtensor.report import report
from scaledtensor.simulate import simulate_format, simulate_fp8
from scaledtensor.tensor import ScaledTensor
from scaledtensor.unit_scale import unit_scale
from scaledtensor.verbs import drop
from scaledtensor.wrap import scaled

__all__ = [
    "CodedTensor",
    "Format",
    "PerAxis",
    "PerBlock",
    "PerTensor",
    "ScaledTensor",
    "__version__",
    "checkpoint",
    "distributed",
    "drop",
    "errors",
    "formats",
    "functional",
    "hardware",
    "inspect",
    "mup",
    "nn",
    "on_missing",
    "ops",
    "optim",
    "products_in",
    "rebalance",
    "rebalance_every",
    "recipes",
    "report",
    "scale_model",
    "scaled",
    "simulate_format",
    "simulate_fp8",
    "statistics",
    "track_scales",
    "unit_scale",
    "unscale_model",
]
