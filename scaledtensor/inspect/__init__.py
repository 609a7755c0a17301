"""Scales of tensors while a model runs: recorded, pruned, listed beside the code, drawn."""

from scaledtensor.inspect.listing import (
    analyse_module,
    plans,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from scaledtensor.inspect.metrics import Data, Metrics, measure
from scaledtensor.inspect.plot import plot
from scaledtensor.inspect.scales import Scales
from scaledtensor.inspect.sensitivity import Sensitivity, sensitivity
from scaledtensor.inspect.tracking import TrackedModule, track_scales, tracking

__all__ = [
    "Data",
    "Metrics",
    "Scales",
    "Sensitivity",
    "TrackedModule",
    "analyse_module",
    "measure",
    "plans",
    "plot",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "sensitivity",
    "track_scales",
    "tracking",
]
