"""Training on several devices, on torch's own engine: `fully_shard`, DDP, tensor parallelism."""

from scaledtensor.distributed import gather as _gather  # noqa: F401 - gives ScaledTensor its hooks

__all__: list[str] = []
