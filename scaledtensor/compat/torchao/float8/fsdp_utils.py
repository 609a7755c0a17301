"""Scales of sharded weights: torchao's `float8.fsdp_utils`."""

from torch import nn

__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all sharded weights, which is done already.

    In torchao it saves all-reduces, one for each sharded weight, and changes no value. Here every
    step of an optimizer ends with the one collective that it would be
    (`scaledtensor.distributed.gather`); weights that are not sharded are measured by their cast.
    """
