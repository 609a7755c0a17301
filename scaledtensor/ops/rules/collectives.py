"""What goes from rank to rank: elements and their scale, or values where ranks are summed.

Ranks need not hold what they exchange under the same scale. What is moved brings its scale along,
in the same message; what is summed is so by value, in bfloat16 or float32, whose exponents hold
every scale. `fully_shard` asks the ScaledTensors themselves, here, and is answered by
`scaledtensor.distributed.gather`, which is loaded when it first asks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.algebra import elements, value
from scaledtensor.ops.operators import c10d, fsdp
from scaledtensor.ops.operators import c10d_functional as functional
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import store
from scaledtensor.tensors.tensor import SENT_AS_ONE, ScaledTensor, from_plain
from scaledtensor.tensors.wrapper import as_bytes

__all__: list[str] = []


# The second is what a release of torch wraps around a result that may not have arrived.
@rule(functional.wait_tensor.default, functional._wrap_tensor_autograd.default)
def wait_tensor(x: ScaledTensor) -> ScaledTensor:
    """The results of the rules below have arrived."""
    return x.viewed(x.qdata)


@rule(functional.all_gather_into_tensor.default)
def all_gather(x: ScaledTensor, size: int, group: Any) -> ScaledTensor:
    """Elements with their scale and RMS, in one message of bytes; then all are held under the
    largest scale. The whole of a weight has the recipe of its parts, with its shifts."""
    q = x.qdata.contiguous()
    numbers = torch.stack([x.scale, x.rms])
    message = torch.cat([q.reshape(-1).view(torch.uint8), numbers.view(torch.uint8)])
    every = _waited(functional.all_gather_into_tensor.default(message, size, group))
    every = every.view(size, -1)
    codes, tail = every[:, : q.nbytes], every[:, q.nbytes :]
    scales, rms = tail.contiguous().view(torch.float32).unbind(1)
    held = ScaledTensor.make(
        codes.contiguous().view(q.dtype).view(size, *q.shape),
        scales.max(),
        rms.square().mean().sqrt(),
        x.format,
        x.dtype,
        x.recipe,
    )
    ratios = (scales / held.scale).view(size, *[1] * q.dim())
    wide = elements(held) * ratios.to(elements(held).dtype)
    aligned = store(wide, x.format).flatten(0, 1) if q.dim() else store(wide, x.format)
    return ScaledTensor.make(aligned, held.scale, held.rms, *x.context)


@rule(functional.all_reduce.default)
def all_reduce(x: ScaledTensor, how: str, group: Any) -> Raw:
    """By value. The terms of ranks are independent: r sqrt(ranks), over ranks for a mean."""
    total = _waited(functional.all_reduce.default(_carried(x), how, group))
    ranks = dist.get_world_size(_torch.process_group_named(group))
    return Raw(total, None, _reduced_rms(x, how, ranks))


@rule(functional.reduce_scatter_tensor.default)
def reduce_scatter(x: ScaledTensor, how: str, size: int, group: Any) -> Raw:
    """As all_reduce, each rank its part."""
    total = _waited(functional.reduce_scatter_tensor.default(_carried(x), how, size, group))
    return Raw(total, None, _reduced_rms(x, how, size))


@rule(c10d.broadcast_.default)
def broadcast_(tensors: Sequence[Tensor], group: Any, root: int, index: int, *options: Any) -> Any:
    """Elements as bytes, the scale and the RMS, into the tensor as it is."""
    work = None
    for x in tensors:
        parts = [x] if not isinstance(x, ScaledTensor) else [x.scale, x.rms, as_bytes(x.qdata)]
        for part in parts:
            _, work = c10d.broadcast_.default([part], group, root, index, *options)
            if part is not parts[-1]:
                work.wait()
        if isinstance(x, ScaledTensor):
            setattr(x.rms, SENT_AS_ONE, True)  # which its parts share
    return list(tensors), work


@rule(c10d.allreduce_.default)
def allreduce_(tensors: Sequence[Tensor], *args: Any) -> Any:
    """By value, into the scale of the tensor."""
    work = None
    for x in tensors:
        if not isinstance(x, ScaledTensor):
            _, work = c10d.allreduce_.default([x], *args)
            continue
        total = _carried(x)
        _, work = c10d.allreduce_.default([total], *args)
        work.wait()
        x.copy_(from_plain(total, x.format, x.dtype, x.recipe))
    return list(tensors), work


@rule(c10d.scatter_.default)
def scatter_(*args: Any) -> Any:
    """torch's styles of tensor parallelism cut parameters so: UnsupportedError."""
    raise UnsupportedError(
        "a DTensor knows nothing of recipes, so that distribute_tensor() and torch's "
        "ColwiseParallel and RowwiseParallel take no ScaledTensors: the styles of the same names "
        "and arguments in scaledtensor.distributed do. For dist.scatter(), scatter x.dequantize()"
    )


@rule(fsdp.chunk_cat.default)
def chunk_cat(tensors: Sequence[Tensor], dim: int, chunks: int, out: Tensor) -> None:
    """The gradients of `fully_shard`, by value: those of a group are summed as one."""
    plain = [t.dequantize() if isinstance(t, ScaledTensor) else t for t in tensors]
    fsdp.chunk_cat.default(plain, dim, chunks, out=out)


def _waited(x: Tensor) -> Tensor:
    return functional.wait_tensor.default(x)  # type: ignore[no-any-return]


def _carried(x: ScaledTensor) -> Tensor:
    """The value in a dtype of eight bits of exponent or more."""
    carried: Tensor = value(x).contiguous()
    return carried


def _reduced_rms(x: ScaledTensor, how: str, size: int) -> Tensor:
    expected: Tensor = x.rms * {"sum": size**0.5, "avg": size**-0.5}.get(how, 1.0)
    return expected
