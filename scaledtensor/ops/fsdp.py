"""The one operator of `fully_shard` that meets ScaledTensors.

`scaledtensor.distributed.gather` loads this: `fully_shard` asks it before there are gradients, and
who does not use `fully_shard` need not wait for torch's engine of it.
"""

from collections.abc import Sequence

import torch
import torch.distributed.fsdp  # defines fsdp::chunk_cat
from torch import Tensor

from scaledtensor.ops.registry import rule
from scaledtensor.tensor import ScaledTensor

__all__: list[str] = []


@rule(torch.ops.fsdp.chunk_cat.default)
def chunk_cat(tensors: Sequence[Tensor], dim: int, chunks: int, out: Tensor) -> None:
    """The gradients of `fully_shard`, by value: those of a group are summed as one."""
    plain = [t.dequantize() if isinstance(t, ScaledTensor) else t for t in tensors]
    torch.ops.fsdp.chunk_cat.default(plain, dim, chunks, out=out)
