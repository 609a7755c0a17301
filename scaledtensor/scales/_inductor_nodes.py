"""Nodes of a traced graph that have numbers, and the groups of nodes whose numbers share a tensor.

A kernel has the place of a number in its tensor in its source. Layers that do the same share the
source of a kernel, and its compilation, if each number has the same place in both. So a group ends
where a kernel does, at a cast. Nodes that differ from layer to layer, such as a part of a long form
that is a node of its own, then move the numbers of one group alone.

Inductor's scheduler makes a node of each tensor, and its code takes each tensor apart in each call,
so a tensor for each number would cost more.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = ["Program", "groups_of", "is_pair", "many", "program"]


class Program(NamedTuple):
    """The numbers of a node: its last `many` steps."""

    leaves: Any
    steps: str
    many: int


def program(node: Any) -> Program | None:
    """The program of a node of the graph, or None if it has none."""
    place, numbers = _programs().get(node.target, (0, 0))
    if not numbers:
        return None
    leaves, steps = node.args[place : place + 2]
    return Program(leaves, steps, numbers) if steps else None


def many(node: Any) -> int:
    """How many numbers a node has."""
    found = program(node)
    return 0 if found is None else found.many


def is_pair(node: Any) -> bool:
    """Whether a node is a scale and an RMS, which have a tensor of their own."""
    return node.target is torch.ops.scaledtensor.pair.default


@cache
def _programs() -> dict[Any, tuple[int, int]]:
    """Operator -> the place of its program among its arguments, and its number of numbers."""
    ops = torch.ops.scaledtensor
    one = dict.fromkeys((ops.times.default, *_casts()), (1, 1))
    return {ops.form.default: (0, 1), ops.pair.default: (0, 2), ops.total.default: (2, 2), **one}


@cache
def _casts() -> tuple[Any, ...]:
    ops = torch.ops.scaledtensor
    casts = ops.rounded, ops.encoded, ops.rounded_seen, ops.encoded_seen
    return tuple(op.default for op in casts)


# --- groups --------------------------------------------------------------------------------------

#: The numbers of at most this many nodes share a tensor.
_TOGETHER = 8


def groups_of(graph: Any, nodes: Iterable[Any]) -> list[list[Any]]:
    """The groups that contain some of these nodes. `graph` is Inductor's, which is lowered.

    A group is whole even if `nodes` has only a part of it, so a number keeps its place if another
    call makes the numbers before it. The forms that no kernel reads are one more group.
    """
    known: dict[Any, list[Any]] = vars(graph).setdefault("_scaledtensor_groups", {})
    if not known:
        known.update(_all_groups(graph.current_node.graph.nodes))
    nodes = list(nodes)
    found = {id(known[x]): known[x] for x in nodes if x in known}
    inner = [x for x in nodes if x not in known]
    return [*found.values(), inner] if inner else [*found.values()]


def _all_groups(nodes: Iterable[Any]) -> dict[Any, list[Any]]:
    """Node -> its group."""
    known: dict[Any, list[Any]] = {}
    group: list[Any] = []
    for node in filter(_is_read, nodes):
        known[node] = group
        group.append(node)
        if node.target in _casts() or len(group) == _TOGETHER:
            group = []
    return known


def _is_read(node: Any) -> bool:
    """Whether a kernel may read the numbers of a node as elements of a shared tensor."""
    if node.target is torch.ops.scaledtensor.form.default:
        return any(not many(user) and user.op != "output" for user in node.users)
    return bool(many(node)) and not is_pair(node)
