"""Several processes: FP8 reduction of gradients, bytes on the wire, placement of whole tensors."""

from scaledtensor.distributed.data_parallel import (
    FP8ReduceScatter,
    FP8State,
    fp8_all_reduce_hook,
    use_fp8_reduce_scatter,
)
from scaledtensor.distributed.placement import ShardedOptimizer, place
from scaledtensor.distributed.reduce import fp8_all_reduce, fp8_reduce_scatter
from scaledtensor.distributed.traffic import Collective, Traffic, count_traffic, sent_bytes
from scaledtensor.distributed.wire import AutoScales, Wire

__all__ = [
    "AutoScales",
    "Collective",
    "FP8ReduceScatter",
    "FP8State",
    "ShardedOptimizer",
    "Traffic",
    "Wire",
    "count_traffic",
    "fp8_all_reduce",
    "fp8_all_reduce_hook",
    "fp8_reduce_scatter",
    "place",
    "sent_bytes",
    "use_fp8_reduce_scatter",
]
