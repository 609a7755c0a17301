"""Scales of sharded weights: torchao's `float8.fsdp_utils`."""

from torch import nn

__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Do nothing: the scales of all sharded weights are computed already.

    In torchao this function replaces an all-reduce for each sharded weight by a single one, and
    changes no value. Here every step of an optimizer ends with this single collective
    (`scaledtensor.distributed.gather`). The cast of a weight that is not sharded measures it.
    """
