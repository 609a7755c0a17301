"""The search for places where a gradient may have another scale.

A tensor's gradient is the sum of the gradients along its uses. If one of these terms is multiplied,
the sum points elsewhere. If the only way back is multiplied, all gradients above it become the same
multiple of the true ones, which no optimizer of unit updates sees. So a gradient may be rescaled at
an edge of the graph if everything above the edge reaches the loss through this edge alone
(arXiv 2303.11257, section 4.2). `Cuts` finds these edges.

Elsewhere a gradient may still have another scale between two places, if the second place undoes the
factor of the first. There are two such cases:

- Residual branches (`find_residuals`). The branch of a residual sum has a small weight, and so has
  its gradient. The gradient's factor is delayed up to the start of the branch. Gradients that leave
  the branch earlier get the factor where they leave.
- Attention (`delays`). A softmax passes on little of a gradient, so the gradients of queries and
  keys come out of attention at 0.03 to 0.2, if they must be summed with the gradient of the values.
  As long as nothing is added to such a gradient, it may be larger by any power of two: from the
  attention back to the product that made the query. The weights of this product then have gradients
  at unit scale too, and the gradient of its input is divided by the power again.
"""

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from scaledtensor.functional.attention import attention_scales
from scaledtensor.scales.powers import power_of_two_near
from scaledtensor.unit_scaling.calls import Place
from scaledtensor.unit_scaling.plan import Counterpart, Undo
from scaledtensor.unit_scaling.record import CONSTANT, PARAMETER, VARIABLE, Node, attention_options

__all__ = [
    "Cuts",
    "ResidualSum",
    "delays",
    "find_residuals",
    "is_shared",
    "owner_of",
    "places_of",
    "uses_of",
]


# --- operands and parameters -----------------------------------------------------------------


def is_shared(operand: Node) -> bool:
    """Whether an operand's gradient has terms of other uses. A parameter of one call has none."""
    if operand.kind == CONSTANT:
        return False
    while operand.kind == PARAMETER and len(operand.operands) == 1 and len(operand.users) == 1:
        (operand,) = operand.operands
    return operand.kind == VARIABLE or bool(operand.operands) or len(operand.users) > 1


def owner_of(node: Node) -> Node | None:
    """Return the parameter that a node is, or is a view of."""
    while node.kind == PARAMETER and len(node.operands) == 1:
        (node,) = node.operands
    return node if node.kind == PARAMETER and not node.operands else None


def uses_of(parameter: Node) -> list[Node]:
    """Return the calls on a parameter or on a view of it."""
    found = []
    for user in parameter.users:
        found += uses_of(user) if user.kind == PARAMETER else [user]
    return found


def places_of(operand: Node, user: Node) -> list[Place]:
    """Return the places at which a call takes an operand, except inside lists."""
    wanted = operand if operand.kind == VARIABLE else operand.tensor
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # a builtin has no names
        names += inspect.signature(user.func).parameters
    positions = [i for i, a in enumerate(user.args) if a is wanted]
    by_name = [name for name, a in user.kwargs.items() if a is wanted]
    return [(i, names[i] if i < len(names) else None) for i in positions] + [
        (names.index(name) if name in names else None, name) for name in by_name
    ]


# --- cut edges -------------------------------------------------------------------------------


class Cuts:
    """The edges through which a run's results depend on its parameters and inputs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {node: i for i, node in enumerate(nodes)}
        self._live = _live(nodes)

    def is_cut(self, source: Node, user: Node) -> bool:
        """Whether `source`, and everything it is made from, has an effect only as one operand of
        `user`."""
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
        """Whether a result depends on `node`, and only through the calls that made `users`."""
        found = self._users(node)
        return bool(found) and all(u in users for u in found)

    def _users(self, node: Node) -> list[Node]:
        return [u for u in node.users if u in self._live]

    def _later(self, node: Node, than: Node) -> bool:
        return self._order[node] > self._order.get(than, -1)


def _live(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes on which a result of the model depends. A result from which another result
    is made, such as the logits beside a loss, does not count as a result."""
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


# --- residual branches -----------------------------------------------------------------------

_ADDS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


@dataclass(frozen=True)
class ResidualSum:
    """skip + branch, where the branch is a function of the skip and of parameters."""

    sum: Node
    skip: Node
    #: Whether the branch's gradient gets its factor where the branch starts. Along the branch, the
    #: gradient is then as large as the gradient of the sum, and not as small as the branch's
    #: weight.
    waits: bool
    #: (call, place) of the branch's other operands that have other uses. Their gradients leave the
    #: branch before it starts, and get the factor there.
    entries: tuple[tuple[Node, Place], ...] = ()


def find_residuals(nodes: Sequence[Node], cuts: Cuts) -> dict[Node, ResidualSum]:
    """Return all x + branch(x), in order. The branch must contain a border with a parameter."""
    order = {node: i for i, node in enumerate(nodes)}
    found: dict[Node, ResidualSum] = {}
    for node in nodes:
        plain = len(node.operands) == 2 == len(node.args) and not node.kwargs
        if not (node.name in _ADDS and node.kind == VARIABLE and plain):
            continue
        left, right = node.operands
        if left.kind != VARIABLE or right.kind != VARIABLE or left.shape != right.shape:
            continue
        for skip, branch in ((left, right), (right, left)):
            source = _moved_from(skip)
            if not _leads(source, branch, order):
                continue
            found[node] = ResidualSum(node, skip, False)
            if source is skip and _may_be_split(skip):
                between = _between(nodes[order[skip] + 1 : order[node]], skip, branch)
                if cuts.is_only_used_by(skip, {*between, node}):
                    found[node] = _waiting(found[node], between, found.keys())
            break
    return found


def _moved_from(node: Node) -> Node:
    """Return the tensor whose elements a chain of views and casts has."""
    while node.moves and len(node.variables) == 1:
        node = node.variables[0]
    return node


def _leads(source: Node, target: Node, order: dict[Node, int]) -> bool:
    """Whether `target` is made from `source` through a border with a parameter."""
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
        has_parameter |= node.is_border and any(n.kind == PARAMETER for n in node.operands)
        todo += [(n, has_parameter) for n in node.variables if order.get(n, -1) >= start]
    return False


def _may_be_split(skip: Node) -> bool:
    """Whether the model can continue with another tensor in place of a skip connection."""
    if skip.call is None or skip.output is not None:
        return False
    return not (skip.is_view and skip.is_overwritten)


def _between(nodes: Sequence[Node], skip: Node, branch: Node) -> list[Node]:
    """Return the nodes between the skip connection and the end of its branch."""
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


def _waiting(residual: ResidualSum, between: Sequence[Node], sums: Set[Node]) -> ResidualSum:
    """Return the residual sum with a branch that waits, if the gradients of all entries can get the
    factor. An entry into another residual sum cannot, because its terms have scales already."""
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
    return ResidualSum(residual.sum, residual.skip, True, tuple(entries))


# --- queries and keys of attention -----------------------------------------------------------


def delays(user: Node, work: Counterpart, cuts: Cuts) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Delay the gradients of an attention's queries and keys, unless they have other uses.

    Args:
        user: a call of `scaled_dot_product_attention` whose gradients share one scale.
        work: the work of its step.
        cuts: the cut edges of the run.

    Yields:
        Calls and additions to their steps: the place where a gradient gets its factor, and the
        places where the factor is undone.
    """
    if user.func is not scaled_dot_product_attention or len(user.args) < 3:
        return
    for position, factor in enumerate(_factors(user, work)):
        operand = user.args[position]
        if factor == 1 or not isinstance(operand, Node):
            continue
        inside = _inside(operand, user, cuts)
        parameters = (n for node in inside for n in node.operands if n.kind == PARAMETER)
        if any(map(is_shared, parameters)):
            continue
        begins = [(node, _undo(node, 1 / factor)) for node in inside if _begins(node, inside)]
        if begins and all(undo is not None for _, undo in begins):
            yield user, {"delays": (((position, None), factor),)}
            yield from ((node, undo) for node, undo in begins if undo is not None)


def _factors(user: Node, work: Counterpart) -> tuple[float, float]:
    """Return the powers of two by which the gradients of query and key are too small."""
    query, key = user.args[:2]
    given = attention_options(user)
    d = query.shape[-1]
    scale = given.get("scale")
    out, dq, dk, _ = attention_scales(
        query.shape,
        key.shape,
        1 / d if scale is None else scale / math.sqrt(d),
        given.get("dropout_p", 0.0),
        work.causal,
        correlation=work.correlation or 0.0,
    )
    return power_of_two_near(dq / out), power_of_two_near(dk / out)


def _begins(node: Node, inside: Collection[Node]) -> bool:
    """Whether the delay begins at a node: a border, or a call with operands from outside."""
    return node.is_border or any(n not in inside for n in node.variables)


def _inside(operand: Node, user: Node, cuts: Cuts) -> dict[Node, None]:
    """Return the tensors that have an effect only as this operand, back to the nearest borders."""
    found: dict[Node, None] = {}
    if not cuts.is_only_used_by(operand, {user}) or user.operands.count(operand) != 1:
        return found
    found[operand] = None
    waiting = [operand]
    while waiting:
        node = waiting.pop()
        if node.is_border:
            continue
        for source in node.variables:
            inside = source.kind == VARIABLE and source.func is not None and source not in found
            if inside and cuts.is_only_used_by(source, found.keys()):
                found[source] = None
                waiting.append(source)
    return _up_to_begins(operand, found)


def _up_to_begins(operand: Node, found: dict[Node, None]) -> dict[Node, None]:
    """Return the nodes of `found` below all calls at which the delay begins. Such a call undoes the
    factor for all its operands."""
    while True:
        reached = dict.fromkeys([operand])
        waiting = [operand]
        while waiting:
            node = waiting.pop()
            if _begins(node, found):
                continue
            for source in node.variables:
                if source not in reached:
                    reached[source] = None
                    waiting.append(source)
        if len(reached) == len(found):
            return found
        found = reached


def _undo(node: Node, factor: float) -> dict[str, Any] | None:
    """Return the addition to a step that gives the gradient its factor back: at the only operand of
    a border, or at the result. Returns None if the model does not continue with the result. This is
    so for a view that is overwritten, because the write is meant for its source too."""
    if node.call is None:
        return None
    alone = len(node.variables) == 1 and bool(node.args) and node.args[0] is node.variables[0]
    if node.is_border and alone:
        return {"delays": (((0, None), factor),)}
    if node.is_view and node.is_overwritten:
        return None
    return {"undo": (Undo(factor, node.output),)}
