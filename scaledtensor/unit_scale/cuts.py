"""Cut edges of a recorded run: where a gradient may have a scale of its own.

A tensor's gradient is the sum of what comes back along its uses. Multiply one of these terms and
the sum points elsewhere; multiply the only way back and all above it become the same multiple,
which no optimizer of unit updates sees. So a gradient may be rescaled at an edge of the graph if
whatever lies above it reaches the loss through this edge alone (arXiv 2303.11257, section 4.2).
"""

from collections.abc import Collection, Sequence

from scaledtensor.unit_scale.record import CONSTANT, Node

__all__ = ["Cuts"]


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
