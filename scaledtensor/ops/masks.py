"""Numbers that mask: what is so large that it says "not this one", and no datum."""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.tensor import ScaledTensor

__all__ = ["FILL", "HUGE", "LARGEST", "is_table", "saturated"]

#: The largest finite bfloat16: the fill of a mask is held to it.
LARGEST = torch.finfo(torch.bfloat16).max

#: The mildest fill that masks in use have (BERT's -10000): at or under it a logit is masked.
FILL = -1e4
HUGE = 2.0**63  # no datum: a running extremum starts there, or a fill lets through


def is_table(x: Any) -> bool:
    """A plain float tensor of some extent among the operands: an additive mask, perhaps."""
    if isinstance(x, ScaledTensor) or not isinstance(x, Tensor):
        return False
    return x.dim() > 0 and x.dtype.is_floating_point


def saturated(source: Tensor, q: Tensor) -> Tensor:
    """`q`, a rescaled `source`, where what was finite stays finite; -inf in a mask is meant."""
    return torch.where(source.isinf(), source, q.clamp(-LARGEST, LARGEST))
