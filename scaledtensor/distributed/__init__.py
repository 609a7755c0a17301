"""Training on several devices, on torch's own engine: `fully_shard`, DDP, tensor parallelism."""

import torch.distributed as dist

__all__: list[str] = []

if dist.is_available():
    from scaledtensor.distributed import gather as _gather  # noqa: F401 - hooks of ScaledTensor
    from scaledtensor.distributed.tensor_parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    __all__ += ["ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"]
