"""Collectives: gathers and broadcasts send elements with their scale, and sums send values.

The ranks may hold a tensor under different scales. So a gather or a broadcast sends the scale and
the RMS too. A sum is a sum of values in bfloat16 or float32, whose exponents hold every scale.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.algebra import elements, measured, value
from scaledtensor.ops.operators import c10d, fsdp
from scaledtensor.ops.operators import c10d_functional as functional
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import dequantized, store
from scaledtensor.tensors.callers import called_by
from scaledtensor.tensors.tensor import SENT_AS_ONE, ScaledTensor, from_plain
from scaledtensor.tensors.wrapper import as_bytes

__all__ = ["FUNCTIONS"]


# The second operator wraps a result that may not have arrived yet, in some releases of torch.
@rule(functional.wait_tensor.default, functional._wrap_tensor_autograd.default)
def wait_tensor(x: ScaledTensor) -> ScaledTensor:
    """The same tensor: the other collectives wait for their results themselves."""
    return x.viewed(x.qdata)


@rule(functional.all_gather_into_tensor.default)
def all_gather(x: ScaledTensor, size: int, group: Any) -> ScaledTensor:
    """Each rank sends its elements, scale and RMS in one message of bytes. The result has the
    largest of the scales. A gathered weight has the recipe of its parts, with its shifts."""
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
    """r sqrt(ranks) for a sum, r / sqrt(ranks) for a mean, since the terms of ranks are
    independent. The ranks add values."""
    total = _waited(functional.all_reduce.default(_carried(x), how, group))
    ranks = dist.get_world_size(_torch.process_group_named(group))
    return Raw(total, None, _reduced_rms(x, how, ranks))


@rule(functional.reduce_scatter_tensor.default)
def reduce_scatter(x: ScaledTensor, how: str, size: int, group: Any) -> Raw:
    """Same as `all_reduce`. Each rank gets a part of the sum."""
    total = _waited(functional.reduce_scatter_tensor.default(_carried(x), how, size, group))
    return Raw(total, None, _reduced_rms(x, how, size))


@rule(functional.all_to_all_single.default, functional.broadcast.default, pass_op=True)
def moved(op: Any, x: ScaledTensor, *args: Any) -> Raw:
    """Sends values, whose RMS is measured where they arrive."""
    return measured(_waited(op(_carried(x), *args)))


_COALESCED = {
    functional.all_reduce_coalesced.default: functional.all_reduce.default,
    functional.all_gather_into_tensor_coalesced.default: functional.all_gather_into_tensor.default,
    functional.reduce_scatter_tensor_coalesced.default: functional.reduce_scatter_tensor.default,
}


@rule(*_COALESCED, pass_op=True)
def coalesced(op: Any, inputs: Sequence[Tensor], *args: Any) -> list[Tensor]:
    """Sends the tensors one after another, as the operator for one tensor does."""
    return [_waited(_COALESCED[op](x, *args)) for x in inputs]


@rule(
    functional.all_reduce_.default,
    functional.all_reduce_coalesced_.default,
    functional.broadcast_.default,
    functional.all_gather_into_tensor_out.default,
    functional.reduce_scatter_tensor_out.default,
    pass_op=True,
)
def written_by_functional(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Sends values, and writes those that arrive with their measured RMS."""
    plain, named = tree_map(dequantized, (args, kwargs))
    targets = kwargs.get("out", args[0])
    for x, arrived in zip(tree_leaves(targets), tree_leaves(op(*plain, **named)), strict=True):
        _write(x, _waited(arrived))
    return targets


@rule(c10d.broadcast_.default)
def broadcast_(tensors: Sequence[Tensor], group: Any, root: int, index: int, *options: Any) -> Any:
    """Sends the scale, the RMS and the bytes of the elements, and writes them into the tensor."""
    work = None
    for x in tensors:
        parts = [x] if not isinstance(x, ScaledTensor) else [x.scale, x.rms, as_bytes(x.qdata)]
        for part in parts:
            _, work = c10d.broadcast_.default([part], group, root, index, *options)
            if part is not parts[-1]:
                work.wait()
        if isinstance(x, ScaledTensor):
            setattr(x.rms, SENT_AS_ONE, True)  # the parts of `x` share its RMS
    return list(tensors), work


@rule(c10d.allreduce_.default)
def allreduce_(tensors: Sequence[Tensor], *args: Any) -> Any:
    """Adds values, and writes the sum into the tensor with its measured RMS."""
    work = None
    for x in tensors:
        if not isinstance(x, ScaledTensor):
            _, work = c10d.allreduce_.default([x], *args)
            continue
        total = _carried(x)
        _, work = c10d.allreduce_.default([total], *args)
        work.wait()
        _write(x, total)
    return list(tensors), work


#: The collectives of values that write into their first argument.
_WRITING = (
    c10d.allgather_,
    c10d._allgather_base_,
    c10d.allgather_coalesced_,
    c10d.allgather_into_tensor_coalesced_,
    c10d.allreduce_coalesced_,
    c10d.alltoall_,
    c10d.alltoall_base_,
    c10d.gather_,
    c10d.reduce_,
    c10d.reduce_scatter_,
    c10d._reduce_scatter_base_,
    c10d.reduce_scatter_tensor_coalesced_,
)


@rule(*(operator.default for operator in _WRITING), pass_op=True)
def written(op: Any, outputs: Any, *args: Any) -> Any:
    """Sends values, and writes those that arrive with their measured RMS. The schemas of these
    operators do not say that they write."""
    plain, *sent = tree_map(dequantized, (outputs, *args))
    made = op(plain, *sent)
    work = made[-1] if isinstance(made, (tuple, list)) else made
    work.wait()
    for x, arrived in zip(tree_leaves(outputs), tree_leaves(plain), strict=True):
        _write(x, arrived)
    return (outputs, work) if isinstance(made, (tuple, list)) else work


@rule(c10d.send.default)
def send(tensors: Sequence[Tensor], *args: Any) -> Any:
    """Sends values. The message has no scale, because the receiver may have a plain tensor."""
    return c10d.send.default([dequantized(x) for x in tensors], *args)


@rule(c10d.recv_.default, c10d.recv_any_source_.default, functional.irecv.default)
def receive(*args: Any) -> Any:
    """Raises UnsupportedError. A message that arrives after `irecv` has returned is written into
    plain memory."""
    raise UnsupportedError(
        "a ScaledTensor receives no message of another rank: receive it into a plain tensor such "
        "as torch.empty(x.shape), and copy that into the ScaledTensor"
    )


@rule(c10d.scatter_.default)
def scatter_(*args: Any) -> Any:
    """Raises UnsupportedError outside of a backward pass, in which it sends values. torch's styles
    of tensor parallelism divide parameters with this operator, and a DTensor knows no recipe."""
    if _torch.is_within_backward():  # the derivative of an `all_gather` under gloo
        return written(c10d.scatter_.default, *args)
    raise UnsupportedError(
        "dist.scatter() takes no ScaledTensors: scatter x.dequantize(). If distribute_tensor() or "
        "torch's ColwiseParallel or RowwiseParallel scatters a parameter: a DTensor knows nothing "
        "of recipes, and the styles of the same names and arguments in scaledtensor.distributed do"
    )


@rule(fsdp.chunk_cat.default)
def chunk_cat(tensors: Sequence[Tensor], dim: int, chunks: int, out: Tensor) -> None:
    """Joins the plain values of the gradients of a group of `fully_shard`, which sums them in one
    message."""
    plain = [t.dequantize() if isinstance(t, ScaledTensor) else t for t in tensors]
    fsdp.chunk_cat.default(plain, dim, chunks, out=out)


def _to(x: ScaledTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Moves or converts a tensor. `set_model_state_dict(..., broadcast_from_rank0=True)` moves the
    tensors of rank 0 and sends them. All other ranks receive into plain tensors, so rank 0 sends
    values."""
    compiling = torch.compiler.is_compiling()
    if not compiling and called_by("torch.distributed._state_dict_utils", "_broadcast_tensors"):
        return x.dequantize().to(*args, **kwargs)
    return x.to(*args, **kwargs)


#: Functions of torch that have to know who calls them.
FUNCTIONS: dict[Any, Callable[..., Any]] = {Tensor.to: _to}


def _write(x: Any, arrived: Tensor) -> None:
    """Write values that arrived into `x`. A plain tensor has them already."""
    if isinstance(x, ScaledTensor):
        x.copy_(from_plain(arrived, x.format, x.dtype, x.recipe))


def _waited(x: Tensor) -> Tensor:
    return functional.wait_tensor.default(x)  # type: ignore[no-any-return]


def _carried(x: ScaledTensor) -> Tensor:
    """Return the value in a dtype with at least eight bits of exponent."""
    carried: Tensor = value(x).contiguous()
    return carried


def _reduced_rms(x: ScaledTensor, how: str, size: int) -> Tensor:
    expected: Tensor = x.rms * {"sum": size**0.5, "avg": size**-0.5}.get(how, 1.0)
    return expected
