"""Several processes on torch's own engine: `fully_shard`, DDP, tensor parallelism, FP8 messages."""

from scaledtensor.distributed import gather as _gather  # noqa: F401 - the hooks of fully_shard
from scaledtensor.distributed.placement import ShardedOptimizer, place
from scaledtensor.distributed.reduce import (
    FP8ReduceScatter,
    FP8State,
    fp8_all_reduce,
    fp8_all_reduce_hook,
    fp8_reduce_scatter,
    use_fp8_reduce_scatter,
)
from scaledtensor.distributed.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from scaledtensor.distributed.traffic import Collective, Traffic, count_traffic, sent_bytes
from scaledtensor.distributed.wire import AutoScales, Wire
from scaledtensor.models.delayed import share_histories

__all__ = [
    "AutoScales",
    "Collective",
    "ColwiseParallel",
    "FP8ReduceScatter",
    "FP8State",
    "PrepareModuleInput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardedOptimizer",
    "Traffic",
    "Wire",
    "count_traffic",
    "fp8_all_reduce",
    "fp8_all_reduce_hook",
    "fp8_reduce_scatter",
    "place",
    "sent_bytes",
    "share_histories",
    "use_fp8_reduce_scatter",
]
