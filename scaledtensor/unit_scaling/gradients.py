"""Residual sums of a recorded run, and where the gradients of their branches are compensated."""

import inspect
import math
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from scaledtensor.functional.attention import attention_scales
from scaledtensor.scales.powers import power_of_two_near
from scaledtensor.unit_scaling.plan import Place, Step, Undo
from scaledtensor.unit_scaling.record import CONSTANT, PARAMETER, VARIABLE, Node, attention_options

__all__ = ["MOVES", "Cuts", "Residual", "delays", "find_residuals", "is_shared", "places_of"]


# Cut edges of a recorded run: where a gradient may have a scale of its own.  A tensor's gradient
# is the sum of what comes back along its uses. Multiply one of these terms and the sum points
# elsewhere; multiply the only way back and all above it become the same multiple, which no
# optimizer of unit updates sees. So a gradient may be rescaled at an edge of the graph if
# whatever lies above it reaches the loss through this edge alone (arXiv 2303.11257, section 4.2).
class Cuts:
    """The edges through which a run's results depend on its parameters and inputs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {node: i for i, node in enumerate(nodes)}
        self._live = _live(nodes)

    def is_cut(self, source: Node, user: Node) -> bool:
        """Whether `source`, and all that it is made from, has no effect but by being an operand of
        `user`, once."""
        if user.operands.count(source) != 1 or not self.is_only_used_by(source, {user}):
            return False
        above, todo = {source}, [source]
        while todo:
            for node in todo.pop().operands:
                if node.kind == CONSTANT or node in above:
                    continue
                if any(self._later(u, source) for u in self._users(node)):
                    return False
                above.add(node)
                todo.append(node)
        return all(u in above for node in above - {source} for u in self._users(node))

    def is_only_used_by(self, node: Node, users: Collection[Node]) -> bool:
        """Whether a result depends on `node`, and that through calls that made `users` alone."""
        found = self._users(node)
        return bool(found) and all(u in users for u in found)

    def _users(self, node: Node) -> list[Node]:
        return [u for u in node.users if u in self._live]

    def _later(self, node: Node, than: Node) -> bool:
        return self._order[node] > self._order.get(than, -1)


def _live(nodes: Sequence[Node]) -> set[Node]:
    """What a result of the model depends on. A result that another result is made from, such as
    the logits beside a loss, is none of its own."""
    live, returned = set[Node](), set[Node]()
    for node in reversed(nodes):
        if any(u in returned for u in node.users):
            returned.add(node)
        elif node.returned:
            returned.add(node)
            live.add(node)
        if any(u in live for u in node.users):
            live.add(node)
    return live


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


# Delayed compensation: gradients that are at unit scale on their way back to where they began.
# What a softmax lets pass of a gradient is small, so those of queries and keys come out of
# attention at 0.03 to 0.2 if they are to be summed with that of the values. But as long as
# nothing is added to such a gradient it may be larger by any power of two: from the attention
# back to the product that made the query, whose weights' gradient then is at unit scale too, and
# whose input's gradient is divided by that power again. The gradients that leave are the same.
def delays(
    user: Node, step: Step, cuts: Cuts, borders: Set[Any]
) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Of the queries and keys of an attention; none where their gradients, or those of what makes
    them, are of other uses too.

    Args:
        user: a call of `scaled_dot_product_attention` whose gradients share one scale.
        step: what becomes of it.
        cuts: of the run.
        borders: functions behind which a gradient is not followed.

    Returns:
        Calls, and what is added to their steps: where a gradient gets its factor, and where that is
        taken back.
    """
    if user.func is not scaled_dot_product_attention or len(user.args) < 3:
        return
    for position, factor in enumerate(_factors(user, step)):
        operand = user.args[position]
        if factor == 1 or not isinstance(operand, Node):
            continue
        inside = _inside(operand, user, cuts, borders)
        parameters = (n for node in inside for n in node.operands if n.kind == PARAMETER)
        if any(map(is_shared, parameters)):
            continue
        begins = [
            (node, _undo(node, 1 / factor, borders))
            for node in inside
            if node.func in borders or any(n not in inside for n in node.variables)
        ]
        if begins and all(undo is not None for _, undo in begins):
            yield user, {"delays": (((position, None), factor),)}
            yield from ((node, undo) for node, undo in begins if undo is not None)


def _factors(user: Node, step: Step) -> tuple[float, float]:
    """By what powers of two the gradients of query and key are too small."""
    query, key = user.args[:2]
    given = attention_options(user)
    d = query.shape[-1]
    scale = given.get("scale")
    out, dq, dk, _ = attention_scales(
        query.shape,
        key.shape,
        1 / d if scale is None else scale / math.sqrt(d),
        given.get("dropout_p", 0.0),
        step.causal,
        correlation=step.correlation or 0.0,
    )
    return power_of_two_near(dq / out), power_of_two_near(dk / out)


def _inside(operand: Node, user: Node, cuts: Cuts, borders: Set[Any]) -> dict[Node, None]:
    """The tensors that have no effect but by being this operand, back to the borders."""
    found: dict[Node, None] = {}
    if not cuts.is_only_used_by(operand, {user}) or user.operands.count(operand) != 1:
        return found
    found[operand] = None
    waiting = [operand]
    while waiting:
        node = waiting.pop()
        if node.func in borders:
            continue
        for source in node.variables:
            inside = source.kind == VARIABLE and source.func is not None and source not in found
            if inside and cuts.is_only_used_by(source, found.keys()):
                found[source] = None
                waiting.append(source)
    return _up_to_begins(operand, found, borders)


def _up_to_begins(operand: Node, found: dict[Node, None], borders: Set[Any]) -> dict[Node, None]:
    """Those of `found` that no call stands before at which the gradient gets its factor back: one
    that reads something else as well gives it back to all that it reads."""
    while True:
        reached = dict.fromkeys([operand])
        waiting = [operand]
        while waiting:
            node = waiting.pop()
            if node.func in borders or any(n not in found for n in node.variables):
                continue
            for source in node.variables:
                if source not in reached:
                    reached[source] = None
                    waiting.append(source)
        if len(reached) == len(found):
            return found
        found = reached


def _undo(node: Node, factor: float, borders: Set[Any]) -> dict[str, Any] | None:
    """The gradient of a border's one operand gets the factor, or that of the result. None where it
    would not reach what the model goes on with: the result of a call that writes into its argument,
    which a model need not look at."""
    if node.call is None:
        return None
    alone = len(node.variables) == 1 and bool(node.args) and node.args[0] is node.variables[0]
    if node.func in borders and alone:
        return {"delays": (((0, None), factor),)}
    if node.is_view and node.is_overwritten:
        return None  # the write is meant for what it is a view of, too
    return {"undo": (Undo(factor, node.output),)}
