"""Gradients summed over ranks in 8-bit floats, by public collectives of any backend.

1. `fp8_reduce_scatter` and `fp8_all_reduce` have the arguments of torch's collectives.
2. `fp8_all_reduce_hook` is a communication hook of DistributedDataParallel.
3. `FP8ReduceScatter` is a reduce-scatter for `fully_shard` (FSDP2).

No backend adds FP8 numbers, and a sum that is rounded to FP8 at each step loses its small terms. So
codes travel, and the rank that owns a part of the result adds float32 numbers:

    reduce-scatter    all-to-all of the codes of each rank's part, then a local sum in float32
    all-reduce        the same, then an all-gather of the sum, which is coded again

Codes travel as bytes, which every backend has. Each element crosses a link as often as in a ring,
in 8 bits. All ranks decode the sum of an all-reduce from the same bytes, and so does the rank that
made it: replicas stay equal bit for bit. An infinity or NaN of one rank arrives as NaN on all
ranks, in that element and no other, so `GradScaler` sees it. `wire.py` defines the codes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaledtensor.backends import backend_of
from scaledtensor.distributed.wire import BLOCK, AutoScales, Blocks, Bucket, Wire
from scaledtensor.errors import (
    DistributedError,
    DTypeError,
    FormatError,
    ModelError,
    ShapeError,
    UnsupportedError,
)
from scaledtensor.formats import BF16, encode

__all__ = [
    "FP8ReduceScatter",
    "FP8State",
    "Group",
    "checked_group",
    "fp8_all_reduce",
    "fp8_all_reduce_hook",
    "fp8_reduce_scatter",
    "use_fp8_reduce_scatter",
]

Group: TypeAlias = dist.ProcessGroup
ReduceOp: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType
Finish: TypeAlias = Callable[[Tensor], Tensor]
"""Makes the result from a float32 sum."""
Stages: TypeAlias = Generator[dist.Work, None, None]
"""A reduction. It stops after it launches a collective, and is resumed when that is done."""

#: The most elements that are decoded at once, so that a sum of many ranks needs little memory.
_SUMMED_AT_ONCE = 1 << 22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # <2.13


# --- collectives -----------------------------------------------------------------------------


def fp8_reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    op: ReduceOp = dist.ReduceOp.SUM,
    group: Group | None = None,
    wire: Wire | None = None,
    scales: AutoScales | None = None,
    bucket: str = "",
    async_op: bool = False,
) -> dist.Work | None:
    """Sum `input` over ranks. Rank r gets the r-th part of the sum in `output`.

    Same as `torch.distributed.reduce_scatter_single`, with 8-bit floats on the wire and float32
    sums.

    Args:
        output: a tensor of float32, bfloat16 or float16; the sum is rounded to its dtype once.
        input: a tensor of one of these dtypes, with `output.numel()` elements for each rank.
        op: SUM, AVG, or PREMUL_SUM(factor), which is applied to the sum.
        group: the process group; None is the default group. A group of one copies `input` without
            rounding.
        wire: the options of the codes; None is `Wire()`.
        scales, bucket: the `AutoScales` that keeps mu for scaling "auto", and the name of the
            bucket in it. Without `scales`, mu is 1.
        async_op: returns a Work, whose `wait()` computes the sum. `input` must not change before.
            With scaling "auto", all ranks must wait for several Works in the same order.

    Raises:
        DistributedError: there is no process group, or this rank is not in it.
        DTypeError: a tensor is not a plain tensor of these dtypes.
        ShapeError: the sizes do not fit.
        UnsupportedError: another `op`.
    """
    group, finish, wire = _checked((input, output), op, group, wire)
    world = group.size()
    if input.numel() != world * output.numel():
        raise ShapeError(
            f"rank r gets the r-th of {world} parts of the input: {input.numel()} elements are not"
            f" {world} times {output.numel()}"
        )
    source, target = input.detach(), output.detach()

    def stages() -> Stages:
        total = yield from _sum_of_parts(source.reshape(world, -1), group, wire, scales, bucket)
        target.copy_(finish(total).view(target.shape))

    return _run(stages() if world > 1 else _alone(target, source, finish), input, async_op)


def fp8_all_reduce(
    tensor: Tensor,
    *,
    op: ReduceOp = dist.ReduceOp.SUM,
    group: Group | None = None,
    wire: Wire | None = None,
    scales: AutoScales | None = None,
    bucket: str = "",
    async_op: bool = False,
) -> dist.Work | None:
    """Sum `tensor` over ranks, in place. All ranks get the same bits.

    Same as `torch.distributed.all_reduce`, with 8-bit floats on the wire and float32 sums. The
    arguments and the errors are the same as for `fp8_reduce_scatter`. With `async_op`, all ranks
    must wait for several Works in the same order, because `wait()` launches the second collective.
    """
    group, finish, wire = _checked((tensor,), op, group, wire)
    stages = _all_reduced(tensor.detach(), group, finish, wire, scales, bucket)
    return _run(stages, tensor, async_op)


def _checked(
    tensors: tuple[Tensor, ...], op: ReduceOp, group: Group | None, wire: Wire | None
) -> tuple[Group, Finish, Wire]:
    """Check the arguments; return them with defaults filled in and `op` as a function."""
    group = checked_group(group)
    if wire is not None and not isinstance(wire, Wire):
        raise FormatError(f"wire is a sct.distributed.Wire, or None; got {wire!r}")
    for x in tensors:
        if type(x) not in (Tensor, nn.Parameter) or x.dtype not in _DTYPES or x.is_sparse:
            raise DTypeError(
                "gradients are reduced as plain dense tensors of float32, bfloat16 or float16; got"
                f" {type(x).__name__} of {x.dtype}, {x.layout}"
            )
    return group, _finish(op, group.size()), wire if wire is not None else Wire()


def checked_group(group: Group | None) -> Group:
    """Return `group`, or the default group for None.

    Raises:
        DistributedError: torch.distributed is not initialised, or this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DistributedError(
            "there is no process group: call torch.distributed.init_process_group() first, in a"
            " program that torchrun starts"
        )
    group = group if group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group that was given")
    return group


def _finish(op: ReduceOp, world: int) -> Finish:
    """Return the function for `op`. A mean over 2^n ranks is exact."""
    whole: Any = dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
    kind, factor = whole.__getstate__()
    if kind == dist.ReduceOp.SUM:
        return lambda total: total
    if kind == dist.ReduceOp.AVG:
        return lambda total: total / world
    if kind == dist.ReduceOp.PREMUL_SUM:
        return lambda total: total * factor
    raise UnsupportedError(f"gradients are reduced by SUM, AVG or PREMUL_SUM; got {kind}")


# --- a reduction, stage by stage -------------------------------------------------------------


class _Pending(dist.Work):
    """A reduction under way. `wait` launches and awaits its remaining collectives."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages
        self._launched = next(stages, None)

    def wait(self, timeout: Any = None) -> bool:
        while self._launched is not None:
            self._launched.wait() if timeout is None else self._launched.wait(timeout)
            self._launched = next(self._stages, None)
        return True

    def is_completed(self) -> bool:
        return self._launched is None


def _run(stages: Stages, first: Tensor, async_op: bool) -> dist.Work | None:
    pending = _Pending(stages if first.numel() else _nothing())
    if async_op:
        return pending
    pending.wait()
    return None


def _nothing() -> Stages:
    yield from ()


def _alone(target: Tensor, source: Tensor, finish: Finish) -> Stages:
    """The reduction in a group of one: nothing is sent, and nothing is rounded to 8 bits."""
    target.copy_(finish(source.float()).view(target.shape))
    yield from ()


def _all_reduced(
    target: Tensor,
    group: Group,
    finish: Finish,
    wire: Wire,
    scales: AutoScales | None,
    bucket: str,
) -> Stages:
    """Replace `target` by `finish` of its sum over ranks."""
    world = group.size()
    if world == 1:
        yield from _alone(target, target, finish)
        return
    length = -(-target.numel() // world)
    parts = target.reshape(-1)
    if world * length > target.numel():
        parts = torch.cat([parts, parts.new_zeros(world * length - target.numel())])
    total = yield from _sum_of_parts(parts.view(world, length), group, wire, scales, bucket)
    back = Blocks(wire, BLOCK if wire.scaling == "block" else -1, group.rank())
    narrow = wire.gather == "bf16"
    send = (
        encode(finish(total), BF16, overflow="ieee")
        if narrow
        else back.encode(finish(total)[None])[0]
    )
    received = send.new_empty(world, send.numel())
    yield _all_gather(received.view(-1), send, group=group, async_op=True)
    values = received if narrow else back.decode(received, length)
    target.copy_(values.view(-1)[: target.numel()].view(target.shape))


def _sum_of_parts(
    parts: Tensor, group: Group, wire: Wire, scales: AutoScales | None, bucket: str
) -> Generator[dist.Work, None, Tensor]:
    """Return the sum over ranks of this rank's row of `parts`, (ranks, n), in float32."""
    length = parts.shape[1]
    if wire.scaling == "block":
        blocks = Blocks(wire, BLOCK, group.rank())
        received = yield from _exchanged(blocks.encode(parts), group)
        return _sum(received, lambda rows: blocks.decode(rows, length), length)
    most = Bucket.most(parts)
    yield dist.all_reduce(most, dist.ReduceOp.MAX, group=group, async_op=True)
    shared = Bucket(wire, most, scales, bucket, group.rank())
    received = yield from _exchanged(shared.encode(parts), group)
    shared.decide(received, length)
    return shared.finish(_sum(received, lambda rows: shared.decode(rows, length), length))


def _exchanged(send: Tensor, group: Group) -> Generator[dist.Work, None, Tensor]:
    received = torch.empty_like(send)
    yield dist.all_to_all_single(received.view(-1), send.view(-1), group=group, async_op=True)
    return received


def _sum(received: Tensor, values: Finish, length: int) -> Tensor:
    """Return the sum of the rows that all ranks sent."""
    at_once = max(1, _SUMMED_AT_ONCE // length)
    first, *others = (values(rows).sum(0) for rows in torch.split(received, at_once))
    for more in others:
        first.add_(more)
    return first


# --- DistributedDataParallel -----------------------------------------------------------------

UnderWay: TypeAlias = tuple[dist.Work | None, Stages, Callable[[], None]]
"""The last collective launched for a bucket, the next stages, and the call at the end."""


class FP8State:
    """The state of `fp8_all_reduce_hook` for a model: options, group, and mu in `scales`.

    Args:
        wire: the options of the codes; None is `Wire()`.
        group: the process group of the DistributedDataParallel; None is the default group.
    """

    def __init__(self, wire: Wire | None = None, group: Group | None = None) -> None:
        self.wire = wire if wire is not None else Wire()
        self.group = group
        self.scales = AutoScales()
        self._under_way: list[UnderWay] = []

    def state_dict(self) -> dict[str, Tensor]:
        """Return mu of each bucket; see `AutoScales`.

        DDP makes new buckets after its first step, so a restarted run takes one step with mu at 1.
        """
        return self.scales.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set mu of each bucket; see `AutoScales`."""
        self.scales.load_state_dict(state)


def fp8_all_reduce_hook(
    state: FP8State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel that averages gradients in 8-bit floats.

        model = DistributedDataParallel(model)
        model.register_comm_hook(sct.distributed.FP8State(), sct.distributed.fp8_all_reduce_hook)

    A reduction is two or three collectives, and each is launched after the one before it arrived.
    Only this function launches them. DDP calls it when a bucket is ready, and it then continues all
    earlier buckets too. So all ranks launch collectives in the same order, which callbacks of
    futures do not guarantee, and gradients of the next bucket are computed meanwhile.

    Raises:
        DTypeError: `state` is no FP8State, or gradients are not float32, bfloat16 or float16.
        DistributedError: there is no process group, or this rank is not in it.
    """
    if not isinstance(state, FP8State):
        raise DTypeError(
            "the state of fp8_all_reduce_hook is an FP8State: register_comm_hook(FP8State(),"
            f" fp8_all_reduce_hook); got {type(state).__name__}"
        )
    buffer = bucket.buffer()
    group, finish, wire = _checked((buffer,), dist.ReduceOp.AVG, state.group, state.wire)
    if bucket.index() == 0:
        state._under_way.clear()  # an error may have ended the last backward pass
    devices = None if backend_of(buffer).host else [buffer.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    name = f"{bucket.index()}:{buffer.numel()}"
    stages = _all_reduced(buffer, group, finish, wire, state.scales, name)
    state._under_way.append((None, stages, lambda: future.set_result(buffer)))
    _advance(state)
    while bucket.is_last() and state._under_way:
        _advance(state)
    return future


def _advance(state: FP8State) -> None:
    """Resume each reduction under way, the oldest first, until it launches a collective."""
    left: list[UnderWay] = []
    for launched, stages, done in state._under_way:
        if launched is not None:
            launched.wait()
        upcoming = next(stages, None)
        if upcoming is None:
            done()
        else:
            left.append((upcoming, stages, done))
    state._under_way = left


# --- fully_shard -----------------------------------------------------------------------------


class FP8ReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, one object for each module.

    FSDP2 hands over gradients in its `reduce_dtype`. With
    `MixedPrecisionPolicy(reduce_dtype=torch.float32)` they are rounded once, to 8 bits, and no more
    bytes are sent than with bfloat16.

    Args:
        wire: the options of the codes; None is `Wire()`. `gather` has no effect here.
    """

    def __init__(self, wire: Wire | None = None) -> None:
        self.wire = wire if wire is not None else Wire()
        self.scales = AutoScales()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor, in which FSDP2 puts gradients or their sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Group,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Call `fp8_reduce_scatter`. The size of the input is the name of the bucket of mu."""
        return fp8_reduce_scatter(
            output_tensor,
            input_tensor,
            op=op,
            group=group,
            wire=self.wire,
            scales=self.scales,
            bucket=str(input_tensor.numel()),
            async_op=async_op,
        )


def use_fp8_reduce_scatter(
    model: nn.Module, wire: Wire | None = None
) -> dict[str, FP8ReduceScatter]:
    """Set an `FP8ReduceScatter` for each module of `model` that `fully_shard` was applied to.

    Returns:
        The reduce-scatters by the names of the modules. Their `scales` belong in a checkpoint.

    Raises:
        ModelError: `fully_shard` was applied to no module.
    """
    from torch.distributed.fsdp import FSDPModule  # half the time of `import torch`

    sharded = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not sharded:
        raise ModelError("no module of this model is sharded; call fully_shard(model) first")
    reductions = {name: FP8ReduceScatter(wire) for name in sharded}
    for name, module in sharded.items():
        module.set_custom_reduce_scatter(reductions[name])  # type: ignore[arg-type]
    return reductions
