"""Gradients summed over ranks by way of 8-bit floats, on public collectives of any backend.

No backend adds FP8 numbers, and a sum that is rounded to FP8 at each of its steps loses what is
small beside it. So codes travel and float32 numbers are added, by the rank that owns the result:

    reduce-scatter    all-to-all of the codes of each rank's part, then a local sum in float32
    all-reduce        the same; the sum, coded again, in an all-gather

Codes travel as bytes, which every backend has; each element crosses a link as often as in a ring,
in 8 bits. The sum of an all-reduce is decoded from the same bytes on all ranks, also on the one
that made it: replicas stay equal bit for bit. An infinity or NaN of one rank arrives as NaN on all,
in that element and no other, so that `GradScaler` sees it. `wire.py` says what the codes are.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    "checked_group",
    "fp8_all_reduce",
    "fp8_all_reduce_hook",
    "fp8_reduce_scatter",
    "use_fp8_reduce_scatter",
]


_SUMMED_AT_ONCE = 1 << 22  # elements, so that a sum of many ranks needs no tensor of them all


_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # <2.13


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


Group: TypeAlias = dist.ProcessGroup


ReduceOp: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType


Finish: TypeAlias = Callable[[Tensor], Tensor]


Stages: TypeAlias = Generator[dist.Work, None, None]


"""A reduction that stops at each collective that it has launched; to be resumed when it is done."""


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
    """The sum over ranks of `input`, of which rank r gets the r-th part in `output`.

    As `torch.distributed.reduce_scatter_single`, with 8-bit floats on the wire and float32 sums.

    Args:
        output: of float32, bfloat16 or float16; the sum is rounded to it once.
        input: of one of these, with as many elements for each rank as `output` has.
        op: SUM, AVG, or PREMUL_SUM(factor), which is applied to the sum.
        group: None is the default group. In a group of one the input is copied, unrounded.
        wire: None is `Wire()`.
        scales, bucket: for scaling "auto", where mu is kept and under which name; without, mu is 1.
        async_op: return a Work. The sum is computed in its `wait()`, which all ranks have to call
            in the same order if there are several with scaling "auto"; until then `input` has to
            stay as it is.

    Raises:
        DistributedError: there is no process group, or this rank is not in it.
        DTypeError: a tensor is not a plain one of these dtypes.
        ShapeError: the sizes do not fit.
        UnsupportedError: another `op`.
    """
    group, finish, wire = checked((input, output), op, group, wire)
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
    """The sum over ranks of `tensor`, in place: the same bits on all ranks.

    As `torch.distributed.all_reduce`, with 8-bit floats on the wire and float32 sums. Takes and
    raises what `fp8_reduce_scatter` does. If `async_op`, all ranks have to call `wait()` of several
    in the same order, as the second collective is launched there.
    """
    group, finish, wire = checked((tensor,), op, group, wire)
    stages = all_reduced(tensor.detach(), group, finish, wire, scales, bucket)
    return _run(stages, tensor, async_op)


class _Pending(dist.Work):
    """A reduction under way, of which `wait` launches and awaits what is left."""

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
    """A group of one: nothing travels and nothing is rounded on the way."""
    target.copy_(finish(source.float()).view(target.shape))
    yield from ()


def all_reduced(
    target: Tensor,
    group: Group,
    finish: Finish,
    wire: Wire,
    scales: AutoScales | None,
    bucket: str,
) -> Stages:
    """Replace `target` by the sum over ranks and what `finish` makes of it."""
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
    """Of `parts`, (ranks, n), on each rank: the sum of the row that is this rank's, float32."""
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
    """The sum of what all ranks sent."""
    at_once = max(1, _SUMMED_AT_ONCE // length)
    first, *others = (values(rows).sum(0) for rows in torch.split(received, at_once))
    for more in others:
        first.add_(more)
    return first


def checked(
    tensors: tuple[Tensor, ...], op: ReduceOp, group: Group | None, wire: Wire | None
) -> tuple[Group, Finish, Wire]:
    """What the doors were given, with defaults filled in and `op` as a function."""
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
    """`group`, or the default one.

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
    """What a float32 sum becomes: by world size exactly, where that is a power of two."""
    whole: Any = dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
    kind, factor = whole.__getstate__()
    if kind == dist.ReduceOp.SUM:
        return lambda total: total
    if kind == dist.ReduceOp.AVG:
        return lambda total: total / world
    if kind == dist.ReduceOp.PREMUL_SUM:
        return lambda total: total * factor
    raise UnsupportedError(f"gradients are reduced by SUM, AVG or PREMUL_SUM; got {kind}")


# Doors for torch's data parallelism: a communication hook of DDP, a reduce-scatter of FSDP2.
UnderWay: TypeAlias = tuple[dist.Work | None, Stages, Callable[[], None]]


"""The collective that was launched last, what comes after it, and what to do in the end."""


class FP8State:
    """What `fp8_all_reduce_hook` keeps for a model: options, group, mu of each bucket in `scales`.

    Args:
        wire: None is `Wire()`.
        group: the process group of the DistributedDataParallel; None is the default one.
    """

    def __init__(self, wire: Wire | None = None, group: Group | None = None) -> None:
        self.wire = wire if wire is not None else Wire()
        self.group = group
        self.scales = AutoScales()
        self._under_way: list[UnderWay] = []

    def state_dict(self) -> dict[str, Tensor]:
        """mu by bucket; see `AutoScales`. DDP makes new buckets after its first step, so that a
        run that was restarted takes one step with mu at 1."""
        return self.scales.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.scales.load_state_dict(state)


def fp8_all_reduce_hook(
    state: FP8State,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel: gradients averaged by way of 8-bit floats.

        model = DistributedDataParallel(model)
        model.register_comm_hook(sct.distributed.FP8State(), sct.distributed.fp8_all_reduce_hook)

    A reduction is two or three collectives, each launched when the one before it has arrived. They
    are launched from this function alone, each time that a bucket is ready, for the buckets before
    it and for itself: in an order that is the same on all ranks, where the callbacks of futures
    have none, and while the gradients of the next bucket are computed.

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
    group, finish, wire = checked((buffer,), dist.ReduceOp.AVG, state.group, state.wire)
    if bucket.index() == 0:
        state._under_way.clear()  # of a backward pass that an error ended
    devices = None if buffer.device.type == "cpu" else [buffer.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    name = f"{bucket.index()}:{buffer.numel()}"
    stages = all_reduced(buffer, group, finish, wire, state.scales, name)
    state._under_way.append((None, stages, lambda: future.set_result(buffer)))
    _advance(state)
    while bucket.is_last() and state._under_way:
        _advance(state)
    return future


class FP8ReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, one object for each module.

    Gradients come as FSDP2 hands them over: with `MixedPrecisionPolicy(reduce_dtype=torch.float32)`
    they are rounded once, to 8 bits, and no more bytes are sent than with bfloat16.

    Args:
        wire: None is `Wire()`. `gather` has no meaning here.
    """

    def __init__(self, wire: Wire | None = None) -> None:
        self.wire = wire if wire is not None else Wire()
        self.scales = AutoScales()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where FSDP2 puts gradients, and their sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Group,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`fp8_reduce_scatter`, with mu kept by the size of the input."""
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
    """Give each module of `model` that `fully_shard` was applied to an `FP8ReduceScatter`.

    Returns them by the module's name, for their `scales`.

    Raises:
        ModelError: there is no such module.
    """
    from torch.distributed.fsdp import FSDPModule  # half of what `import torch` takes

    sharded = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not sharded:
        raise ModelError("no module of this model is sharded; call fully_shard(model) first")
    reductions = {name: FP8ReduceScatter(wire) for name in sharded}
    for name, module in sharded.items():
        module.set_custom_reduce_scatter(reductions[name])  # type: ignore[arg-type]
    return reductions


def _advance(state: FP8State) -> None:
    """Resume each reduction under way, oldest first, up to its next collective."""
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
