"""Counts the bytes that collectives send, at the operators by which torch launches them.

    with sct.distributed.count_traffic() as traffic:
        loss.backward()
    print(traffic)

Every collective of torch.distributed is an operator of the dispatcher. This holds for collectives
from Python, from DDP's reducer in C++ and from FSDP, and for the functional ones in DTensor. The
counter adds up their tensors. For a group of n ranks it derives the bytes that one rank sends, by
the algorithms of textbooks (Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009):

    collective        payload S                             sent by a rank
    all-gather        the result of every rank              (n-1)/n S      ring
    reduce-scatter    the input of every rank               (n-1)/n S      ring
    all-reduce        the tensor                            2 (n-1)/n S    the two above
    all-to-all        the input of this rank                S less its own part    pairwise
    broadcast         the tensor                            (n-1)/n S      chain, mean over ranks
    reduce            the tensor                            (n-1)/n S      chain, mean over ranks
    gather, scatter   the root's parts, all of them         (n-1)/n^2 S    direct, mean over ranks
    send, receive     the tensor                            S, 0
    barrier           0                                     0

A backend may use other algorithms, which send more, and it adds headers. An operator of
torch.distributed that this module does not know has its own row, with NaN bytes sent. The totals
are then NaN too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaledtensor import _torch

__all__ = ["Collective", "Traffic", "count_traffic", "sent_bytes"]

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


@dataclass(frozen=True)
class Collective:
    """All calls of one collective with tensors of one dtype in groups of one size."""

    name: str
    dtype: torch.dtype
    ranks: int
    calls: int
    payload: int
    """S of the module's table, in bytes, summed over the calls."""
    sent: float
    """Bytes that a rank sends, summed over the calls."""


class Traffic:
    """The counts of `count_traffic` so far. `print` shows them as a table."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, torch.dtype, int], Collective] = {}

    @property
    def collectives(self) -> list[Collective]:
        """The counts of each collective, in the order of the first calls."""
        return list(self._rows.values())

    @property
    def calls(self) -> int:
        """The number of calls."""
        return sum(row.calls for row in self._rows.values())

    @property
    def payload(self) -> int:
        """The sum of the payloads S, in bytes."""
        return sum(row.payload for row in self._rows.values())

    @property
    def sent(self) -> float:
        """The bytes that this rank sends."""
        return sum(row.sent for row in self._rows.values())

    def by_dtype(self) -> dict[torch.dtype, float]:
        """Return the bytes that this rank sends, by the dtype of the tensors."""
        out: dict[torch.dtype, float] = {}
        for row in self._rows.values():
            out[row.dtype] = out.get(row.dtype, 0) + row.sent
        return out

    def add(self, name: str, dtype: torch.dtype, ranks: int, payload: int, sent: float) -> None:
        """Count one call."""
        key = name, dtype, ranks
        before = self._rows.get(key, Collective(*key, 0, 0, 0))
        self._rows[key] = Collective(
            *key, before.calls + 1, before.payload + payload, before.sent + sent
        )

    def __repr__(self) -> str:
        head = ("collective", "dtype", "ranks", "calls", "payload, bytes", "sent, bytes")
        rows = [
            (r.name, _short(r.dtype), f"{r.ranks}", f"{r.calls}", f"{r.payload:,}", _bytes(r.sent))
            for r in self._rows.values()
        ]
        total = ("total", "", "", f"{self.calls}", f"{self.payload:,}", _bytes(self.sent))
        table = [head, *rows, total]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        by_dtype = ", ".join(f"{_short(d)} {_bytes(n)}" for d, n in self.by_dtype().items())
        return "\n".join([*lines, f"sent by dtype: {by_dtype or 'nothing'}"])


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """A context that counts the collectives that this rank launches on this thread.

    A backward pass on a CPU is included. On other devices, autograd takes the context along to its
    own threads. The context does not change compiled code, whose collectives are counted too.
    Contexts nest.
    """
    traffic = Traffic()
    with _Counter(traffic):
        yield traffic


def sent_bytes(name: str, payload: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a collective of `payload` bytes.

    `name` is a row of the module's table. The parts of an all-to-all count as equal. Raises
    KeyError for a name that is not in the table.
    """
    share = (ranks - 1) / ranks
    return payload * _SHARES[name](share, ranks)


_Share = Callable[[float, int], float]
_SHARES: dict[str, _Share] = {
    "all-reduce": lambda share, n: 2 * share,
    "all-gather": lambda share, n: share,
    "reduce-scatter": lambda share, n: share,
    "all-to-all": lambda share, n: share,
    "broadcast": lambda share, n: share,
    "reduce": lambda share, n: share,
    "gather": lambda share, n: share / n,
    "scatter": lambda share, n: share / n,
    "send": lambda share, n: 1,
    "receive": lambda share, n: 0,
    "barrier": lambda share, n: 0,
}


class _Known(NamedTuple):
    name: str
    tensors: int
    """The index of the argument with the tensors."""
    parts: bool = False
    """Whether the tensors are one rank's part of the payload."""


# The name of each operator -> the collective. In c10d, if the first argument is the output, the
# second is the input.
_KNOWN = {
    "c10d": {
        "allreduce_": _Known("all-reduce", 0),
        "allreduce_coalesced_": _Known("all-reduce", 0),
        "broadcast_": _Known("broadcast", 0),
        "reduce_": _Known("reduce", 0),
        "allgather_": _Known("all-gather", 0),
        "_allgather_base_": _Known("all-gather", 0),
        "allgather_coalesced_": _Known("all-gather", 0),
        "allgather_into_tensor_coalesced_": _Known("all-gather", 0),
        "reduce_scatter_": _Known("reduce-scatter", 1),
        "_reduce_scatter_base_": _Known("reduce-scatter", 1),
        "reduce_scatter_tensor_coalesced_": _Known("reduce-scatter", 1),
        "gather_": _Known("gather", 1, parts=True),
        "scatter_": _Known("scatter", 0, parts=True),
        "alltoall_": _Known("all-to-all", 1),
        "alltoall_base_": _Known("all-to-all", 1),
        "send": _Known("send", 0),
        "recv_": _Known("receive", 0),
        "recv_any_source_": _Known("receive", 0),
        "barrier": _Known("barrier", 0),
        "monitored_barrier_": _Known("barrier", 0),
    },
    "functional": {
        "all_reduce": _Known("all-reduce", 0),
        "all_reduce_": _Known("all-reduce", 0),
        "all_reduce_coalesced": _Known("all-reduce", 0),
        "all_reduce_coalesced_": _Known("all-reduce", 0),
        "all_gather_into_tensor": _Known("all-gather", 0, parts=True),
        "all_gather_into_tensor_out": _Known("all-gather", 0, parts=True),
        "all_gather_into_tensor_coalesced": _Known("all-gather", 0, parts=True),
        "reduce_scatter_tensor": _Known("reduce-scatter", 0),
        "reduce_scatter_tensor_out": _Known("reduce-scatter", 0),
        "reduce_scatter_tensor_coalesced": _Known("reduce-scatter", 0),
        "all_to_all_single": _Known("all-to-all", 0),
        "broadcast": _Known("broadcast", 0),
        "broadcast_": _Known("broadcast", 0),
        "isend": _Known("send", 0),
        "irecv": _Known("receive", 0),
        "shard_dim_alltoall": _Known("all-to-all", 0),
    },
}
#: Operators that launch nothing.
_SILENT = {"wait_tensor", "check_for_nan", "_wrap_tensor_autograd"}
_SPLITS = {"alltoall_base_": 4, "all_to_all_single": 2}
"""The index of the argument with the sizes of the parts for each rank."""


class _Counter(_torch.DispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code compile as it does without this mode: graphs launch collectives as operators."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        fake = any(issubclass(t, _torch.FakeTensor) for t in types)  # nothing is sent
        if not fake and any(t not in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # the subclass calls operators on its plain tensors, counted here
        out = func(*args, **(kwargs or {}))
        if not fake and getattr(func, "namespace", None) in _NAMESPACES:
            self._count(func, args)
        return out

    def _count(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        operator = func._schema.name.split("::")[1]
        if operator in _SILENT:
            return
        known = _KNOWN["c10d" if func.namespace == "c10d" else "functional"].get(operator)
        ranks, rank = _group(func, args)
        tensors = list(_flat(args if known is None else args[known.tensors]))
        dtype = tensors[0].dtype if tensors else torch.uint8
        payload = sum(t.numel() * t.element_size() for t in tensors)
        if known is None:
            self.traffic.add(operator, dtype, ranks, payload, nan)
            return
        if known.parts:
            payload *= ranks
        elif known.name == "barrier":
            payload = 0
        sent = sent_bytes(known.name, payload, ranks)
        if operator == "alltoall_":
            sent = payload - tensors[rank].numel() * tensors[rank].element_size()
        elif operator in _SPLITS and (splits := args[_SPLITS[operator]]):
            sent = payload - splits[rank] * payload // sum(splits)
        self.traffic.add(known.name, dtype, ranks, payload, sent)


def _group(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the size of an operator's group, and this rank in it."""
    for parameter, given in zip(func._schema.arguments, args, strict=False):
        if parameter.name in ("process_group", "group_name"):
            if isinstance(given, str):
                group = _torch.process_group_named(given)
            else:
                group = dist.ProcessGroup.unbox(given)
            return group.size(), group.rank()
    return 1, 0


def _flat(tensors: Any) -> Iterable[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        for t in tensors:
            yield from _flat(t)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(n: float) -> str:
    return f"{n:,.1f}".removesuffix(".0")
