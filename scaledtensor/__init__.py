"""scaledtensor: tensors that carry their own power-of-two scale. `import scaledtensor as sct`."""

from scaledtensor import errors, formats, ops, recipes
from scaledtensor._version import __version__
from scaledtensor.coded import CodedTensor
from scaledtensor.formats import Format, PerAxis, PerBlock, PerTensor
from scaledtensor.model import scale_model, unscale_model
from scaledtensor.ops import on_missing
from scaledtensor.rebalance import rebalance, rebalance_every, statistics
from scaledtensor.report import report
from scaledtensor.tensor import ScaledTensor
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
    "drop",
    "errors",
    "formats",
    "on_missing",
    "ops",
    "rebalance",
    "rebalance_every",
    "recipes",
    "report",
    "scale_model",
    "scaled",
    "statistics",
    "unscale_model",
]
