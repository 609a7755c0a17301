"""Optimizer states divided among ranks by whole tensors, each with its scale.

FP8-LM (arXiv 2310.18313, section 2.3) divides states as ZeRO does (arXiv 1910.02054), but never
divides a tensor, whose elements share a scale. Tensors go to ranks, largest first, each to the rank
with the fewest bytes. No rank then holds more than 4/3 of its share in the best division (Graham
1969), or it holds the largest tensor alone.

`torch.distributed.optim.ZeroRedundancyOptimizer` does not work here, for three reasons. It refuses
parameters of two classes, which a model has if only its products are scaled. It sends each
parameter in its own broadcast, which ignores scales. Hooks of all optimizers count its steps twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from scaledtensor.backends import backend_of
from scaledtensor.distributed.reduce import Group, checked_group
from scaledtensor.errors import CheckpointError, ShapeError, UnsupportedError
from scaledtensor.models.rebalance import COUNT
from scaledtensor.tensors.codec import parts_of
from scaledtensor.tensors.ruled import Ruled

__all__ = ["ShardedOptimizer", "place"]

#: A tensor of at least this many bytes gets a broadcast of its own, which needs no copy.
_ALONE = 1 << 20


def place(tensors: Iterable[Tensor], ranks: int, held: Sequence[int] | None = None) -> list[int]:
    """Return the rank of each tensor: largest first, each to the rank with the fewest bytes.

    Every rank gets the same result. Equal tensors go in their order, to the lowest of equal ranks.

    Args:
        tensors: plain tensors or ScaledTensors, which count with their scales.
        ranks: the number of ranks.
        held: the bytes that each rank holds already; by default 0.

    Raises:
        ShapeError: `ranks` is not positive, or `held` has another length than `ranks`.
    """
    held = [0] * max(ranks, 0) if held is None else list(held)
    if ranks < 1 or len(held) != ranks:
        raise ShapeError(
            f"place takes 1 or more ranks; got {ranks}, of which {len(held)} hold some"
        )
    sizes = [sum(part.nbytes for part in parts(t)) for t in tensors]
    out = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        out[i] = held.index(min(held))
        held[out[i]] += sizes[i]
    return out


class ShardedOptimizer(Optimizer):
    """An optimizer in which each rank steps its own whole tensors, and keeps only their states.

        optimizer = sct.distributed.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    After a step every rank broadcasts the tensors that it stepped: elements as bytes, with scale
    and expected RMS. Before a step, parameters and gradients must be the same on all ranks, as they
    are under DistributedDataParallel. Each parameter then gets the bits that one optimizer for all
    parameters would give it, if that optimizer treats parameters one by one.

    Args:
        params: parameters, or groups of them.
        optimizer_class: makes the local optimizer; it is called with groups and `defaults`.
        group: the process group; None is the default group.
        defaults: options of the groups, such as `lr`.

    Attributes:
        local: the optimizer of this rank's own parameters.
        owner: the rank of each parameter.

    `param_groups` holds all parameters; schedulers and hooks work on them. `state` holds the states
    of this rank. `state_dict` and `load_state_dict` cover all parameters, as in torch.optim: a
    checkpoint loads on any number of ranks, and into an optimizer that is not sharded.

    Raises:
        DistributedError: there is no process group, or this rank is not in it.
        UnsupportedError: a parameter is a DTensor, so its states are divided already.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *,
        group: Group | None = None,
        **defaults: Any,
    ) -> None:
        self.group = checked_group(group)
        self.owner: dict[Tensor, int] = {}
        self.local: Optimizer | None = None
        super().__init__(params, defaults)
        self._place(list(self._parameters()))
        self.local = optimizer_class([self._own(group) for group in self.param_groups], **defaults)
        self.state = self.local.state
        for ours, local in zip(self.param_groups, self.local.param_groups, strict=True):
            _copy_options(local, ours)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its parameters are placed after the present ones, which do not move."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        sharded = [p for p in group["params"] if hasattr(p, "full_tensor")]
        if sharded:
            self.param_groups.pop()
            raise UnsupportedError(
                f"{len(sharded)} parameters are DTensors, whose states are divided already: step"
                " them with an ordinary optimizer"
            )
        if self.local is not None:
            self._place(group["params"])
            self.local.add_param_group(self._own(group))
            _copy_options(self.local.param_groups[-1], group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's parameters and share all. Return the loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self._local()
        for ours, own in zip(self.param_groups, local.param_groups, strict=True):
            _copy_options(ours, own)
        local.step()
        for ours, own in zip(self.param_groups, local.param_groups, strict=True):
            _copy_options(own, ours)
        self._share()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, copied to every rank's CPU. All ranks must call this."""
        whole = super().state_dict()
        own = {i: _on_cpu(state) for i, state in whole["state"].items()}
        everyones: list[Any] = [None] * self.group.size()
        dist.all_gather_object(everyones, own, group=self.group)
        whole["state"] = dict(sorted(chain.from_iterable(part.items() for part in everyones)))
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep this rank's part of the states of all ranks.

        Raises:
            CheckpointError: the groups have other sizes; nothing is changed then.
        """
        saved = state_dict["param_groups"]
        sizes = [[len(g["params"]) for g in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"the checkpoint has groups of {sizes[0]} parameters, the optimizer of {sizes[1]}"
            )
        local = self._local()
        rank, groups, count = self.group.rank(), [], 0
        states: dict[int, Any] = {}
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            mine = [
                i
                for i, p in zip(theirs["params"], ours["params"], strict=True)
                if self.owner[p] == rank
            ]
            own = range(count, count := count + len(mine))
            groups.append({**theirs, "params": list(own)})
            states |= {
                j: state_dict["state"][i]
                for i, j in zip(mine, own, strict=True)
                if i in state_dict["state"]
            }
        local.load_state_dict({"state": states, "param_groups": groups})
        self.state = local.state
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            ours.update({k: v for k, v in theirs.items() if k != "params"})

    def _local(self) -> Optimizer:
        if self.local is None:
            raise UnsupportedError("this optimizer is still being made")
        return self.local

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _place(self, new: list[Tensor]) -> None:
        held = [0] * self.group.size()
        for p, rank in self.owner.items():
            held[rank] += sum(part.nbytes for part in parts(p))
        self.owner |= dict(zip(new, place(new, len(held), held), strict=True))

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        rank = self.group.rank()
        return {**group, "params": [p for p in group["params"] if self.owner[p] == rank]}

    def _share(self) -> None:
        """Broadcast the tensors of each rank: a large one in place, the others in one message."""
        arrivals: list[tuple[dist.Work, Callable[[], None]]] = []
        for rank in range(self.group.size()):
            source = dist.get_global_rank(self.group, rank)
            small: list[Tensor] = []
            for p in self._parameters():
                if self.owner[p] == rank and p.requires_grad:
                    for part in parts(p):
                        if part.nbytes < _ALONE or not part.is_contiguous():
                            small.append(part)
                        else:
                            arrivals.append((self._sent(_bytes(part), source), _nothing))
            for device in dict.fromkeys(part.device for part in small):
                there = [part for part in small if part.device == device]
                packed = torch.cat([_bytes(part) for part in there])
                work = self._sent(packed, source)
                done = _nothing if rank == self.group.rank() else _unpacking(packed, there)
                arrivals.append((work, done))
        for work, done in arrivals:
            work.wait()
            done()

    def _sent(self, what: Tensor, source: int) -> dist.Work:
        work: dist.Work = dist.broadcast(what, source, group=self.group, async_op=True)
        return work


def parts(x: Tensor) -> list[Tensor]:
    """Return the plain tensors in `x`: `x`, or the elements, scale and RMS of a ScaledTensor."""
    return list(parts_of(x).values()) if isinstance(x, Ruled) else [x.detach()]


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _unpacking(packed: Tensor, into: list[Tensor]) -> Callable[[], None]:
    def unpack() -> None:
        received = torch.split(packed, [part.nbytes for part in into])
        for part, own in zip(into, received, strict=True):
            # A copy: a view in another dtype must start at a multiple of the dtype's size.
            part.copy_(own.clone().view(part.dtype).view(part.shape))

    return unpack


def _nothing() -> None:
    pass


def _copy_options(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy all options except the parameters, and the steps that a hook counts per optimizer."""
    target.update({k: v for k, v in source.items() if k not in ("params", COUNT)})


def _on_cpu(state: Any) -> Any:
    """Return a copy on the CPU, also of a tensor on the CPU: the next step writes into that."""
    if isinstance(state, Tensor):
        return state.detach().clone() if backend_of(state).host else state.detach().cpu()
    if isinstance(state, dict):
        return {k: _on_cpu(v) for k, v in state.items()}
    return state
