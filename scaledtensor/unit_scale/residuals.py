"""Residual sums of a recorded run, and where the gradients of their branches are compensated."""

import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from scaledtensor.unit_scale.cuts import Cuts
from scaledtensor.unit_scale.plan import Place
from scaledtensor.unit_scale.record import CONSTANT, PARAMETER, VARIABLE, Node

__all__ = ["MOVES", "Residual", "find_residuals", "is_shared", "places_of"]

#: Functions whose result has the elements of one tensor.
MOVES = {
    *("view", "reshape", "transpose", "permute", "contiguous", "to", "type_as", "float"),
    *("flatten", "unflatten", "unsqueeze", "squeeze", "detach", "clone", "__get__", "alias"),
}
_ADDS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


@dataclass(frozen=True)
class Residual:
    """skip + branch, where the branch is a function of the skip and of parameters."""

    sum: Node
    skip: Node
    #: Whether the branch's gradient is compensated where the branch starts: along the branch it
    #: then is as large as that of the sum, and not as small as the branch's weight.
    waits: bool
    #: (call, place) of whatever else the branch is made from and others are too: their
    #: gradients leave the branch before it starts, and are compensated there.
    entries: tuple[tuple[Node, Place], ...] = ()


def find_residuals(nodes: Sequence[Node], cuts: Cuts, borders: Set[Any]) -> dict[Node, Residual]:
    """All x + branch(x), where the branch has parameters of functions in `borders`, in order."""
    order = {node: i for i, node in enumerate(nodes)}
    found: dict[Node, Residual] = {}
    for node in nodes:
        plain = len(node.operands) == 2 == len(node.args) and not node.kwargs
        if not (node.name in _ADDS and node.kind == VARIABLE and plain):
            continue
        left, right = node.operands
        if left.kind != VARIABLE or right.kind != VARIABLE or left.shape != right.shape:
            continue
        for skip, branch in ((left, right), (right, left)):
            source = _moved_from(skip)
            if not _leads(source, branch, borders, order):
                continue
            residual = Residual(node, skip, False)
            if source is skip and _may_be_split(skip):
                between = _between(nodes[order[skip] + 1 : order[node]], skip, branch)
                if cuts.is_only_used_by(skip, {*between, node}):
                    residual = _waiting(residual, between, found.keys())
            found[node] = residual
            break
    return found


def _may_be_split(skip: Node) -> bool:
    """Whether the model can go on with another tensor in the place of a skip connection."""
    if skip.call is None or skip.output is not None:
        return False
    return not (skip.is_view and skip.is_overwritten)


def _waiting(residual: Residual, between: Sequence[Node], sums: Set[Node]) -> Residual:
    """That residual sum with a branch that waits, if all entries can be compensated; those into
    another residual sum, whose terms have scales already, can not."""
    inside = {*between, residual.skip}
    entries = []
    for node in between:
        for operand in dict.fromkeys(node.operands):
            if operand in inside or not is_shared(operand):
                continue
            places = places_of(operand, node)
            if len(places) != node.operands.count(operand) or node.call is None or node.output:
                return residual
            if node in sums:
                return residual
            entries += [(node, place) for place in places]
    return Residual(residual.sum, residual.skip, True, tuple(entries))


def is_shared(operand: Node) -> bool:
    """Whether an operand from outside has gradients of other uses: not a parameter of one call."""
    if operand.kind == CONSTANT:
        return False
    while operand.kind == PARAMETER and len(operand.operands) == 1 and len(operand.users) == 1:
        (operand,) = operand.operands
    return operand.kind == VARIABLE or bool(operand.operands) or len(operand.users) > 1


def places_of(operand: Node, user: Node) -> list[Place]:
    """Where a call takes an operand, other than inside of lists."""
    wanted = operand if operand.kind == VARIABLE else operand.tensor
    names = _argument_names(user.func)
    positions = [i for i, a in enumerate(user.args) if a is wanted]
    by_name = [name for name, a in user.kwargs.items() if a is wanted]
    return [(i, names[i] if i < len(names) else None) for i in positions] + [
        (names.index(name) if name in names else None, name) for name in by_name
    ]


def _argument_names(function: Any) -> list[str]:
    """None of a builtin."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _between(nodes: Sequence[Node], skip: Node, branch: Node) -> list[Node]:
    """What lies on a way from the skip connection to the end of its branch."""
    below = {skip}
    for node in nodes:
        if any(n in below for n in node.operands):
            below.add(node)
    above, found = {branch}, []
    for node in reversed(nodes):
        if node in above and node in below:
            found.append(node)
            above.update(node.operands)
    return found


def _moved_from(node: Node) -> Node:
    """What a view or a cast is of: the nearest node of another number of variable operands or
    another function."""
    while node.name in MOVES and len(node.variables) == 1:
        node = node.variables[0]
    return node


def _leads(source: Node, target: Node, borders: Set[Any], order: dict[Node, int]) -> bool:
    """Whether `target` is made from `source` by way of a function of a parameter."""
    start = order.get(source, -1)
    if source is target:
        return False
    seen: set[tuple[Node, bool]] = set()
    todo = [(target, False)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        node, has_parameter = state
        if node is source:
            if has_parameter:
                return True
            continue
        has_parameter |= node.func in borders and any(n.kind == PARAMETER for n in node.operands)
        todo += [(n, has_parameter) for n in node.variables if order.get(n, -1) >= start]
    return False
