"""Doors for torch's data parallelism: a communication hook of DDP, a reduce-scatter of FSDP2."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaledtensor.distributed.reduce import (
    Group,
    ReduceOp,
    Stages,
    all_reduced,
    checked,
    fp8_reduce_scatter,
)
from scaledtensor.distributed.wire import AutoScales, Wire
from scaledtensor.errors import DTypeError, ModelError

__all__ = ["FP8ReduceScatter", "FP8State", "fp8_all_reduce_hook", "use_fp8_reduce_scatter"]

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
