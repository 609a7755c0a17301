"""Scales of sharded weights: torchao's `float8.fsdp_utils`."""

import torch
from torch import nn

from scaledtensor.errors import UnsupportedError

__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all sharded weights, of which there are none here.

    In torchao it saves all-reduces, one for each sharded weight, and changes no value; without
    sharded weights it does nothing, and so it does here: a weight's amax is measured by its cast.

    Raises:
        UnsupportedError: a parameter is sharded.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    sharded = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise UnsupportedError(
            "precompute_float8_dynamic_scale_for_fsdp: sharded parameters are not supported, and "
            f"{', '.join(sharded[:3])} are; train on one device"
        )
