"""Smaller graphs: what is left out is bridged, so that the flow of data stays visible."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from math import isclose
from typing import Any

from torch import fx

from scaledtensor.errors import ModelError
from scaledtensor.inspect.metrics import Data, Metrics

__all__ = ["prune_non_float_tensors", "prune_same_scale_tensors", "prune_selected_nodes"]


def prune_non_float_tensors(graph: fx.Graph) -> fx.Graph:
    """A copy of a scales graph without the nodes that hold no tensor of floats.

    Where a node had one float input, its users take that instead; of several inputs, a tuple's
    elements (a `chunk`, an LSTM) take all, and other users (of a mask) none.

    Raises:
        ModelError: `graph` is not from `scales_graph()`.
    """

    def bridge(node: fx.Node) -> Any:
        inputs = float_inputs(node)
        if len(inputs) > 1 and not node.meta.get("is_tuple", False):
            return None
        return inputs[0] if len(inputs) == 1 else tuple(inputs) or None

    return _pruned(graph, lambda n: not _holds_floats(n), bridge)


def prune_same_scale_tensors(graph: fx.Graph, rtol: float = 2**-16) -> fx.Graph:
    """A copy of a scales graph without the nodes that keep the scale of their one float input.

    Views and the like: the mean absolute value is the same up to `rtol`, of the tensor and of its
    gradient (or neither has one). Nodes of several float inputs stay.

    Raises:
        ModelError: `graph` is not from `scales_graph()`.
    """

    def keeps(node: fx.Node) -> bool:
        used: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), used.append)  # x + x has two inputs
        used = [n for n in used if _holds_floats(n)]
        if len(used) != 1 or not _holds_floats(node):
            return False
        before, after = used[0].meta["metrics"], node.meta["metrics"]
        return _same_scale(before, after, rtol)

    return _pruned(graph, keeps, lambda n: float_inputs(n)[0])


def prune_selected_nodes(graph: fx.Graph, targets: Iterable[Any]) -> fx.Graph:
    """A copy of a scales graph without the nodes of some operators.

    Args:
        targets: functions or names; `torch.add`, `operator.add` and "add" all mean any `add`,
            for a graph of eager code does not tell how it was spelled. A node of one float input
            is bridged.

    Raises:
        ModelError: `graph` is not from `scales_graph()`.
    """
    names = {_operator(t) for t in targets}

    def selected(node: fx.Node) -> bool:
        return node.op.startswith("call_") and _operator(node.target) in names

    def bridge(node: fx.Node) -> Any:
        inputs = float_inputs(node)
        return inputs[0] if len(inputs) == 1 else None

    return _pruned(graph, selected, bridge)


def float_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that hold floats, each once."""
    return [n for n in node.all_input_nodes if _holds_floats(n)]


def _holds_floats(node: fx.Node) -> bool:
    return bool(node.meta.get("outputs_float_tensor", False))


def _pruned(
    graph: fx.Graph, goes: Callable[[fx.Node], bool], bridge: Callable[[fx.Node], Any]
) -> fx.Graph:
    if any("clean_name" not in n.meta for n in graph.nodes):
        raise ModelError(
            "this graph has no scales: take it from scales_graph() of a tracked model, after a call"
        )
    graph = deepcopy(graph)
    for node in list(graph.nodes):
        if node.op != "output" and goes(node):
            instead = bridge(node)
            for user in list(node.users):
                _replace(user, node, instead)
            graph.erase_node(node)
    graph.lint()
    return graph


def _replace(user: fx.Node, node: fx.Node, instead: Any) -> None:
    def swap(n: fx.Node) -> Any:
        return instead if n is node else n

    user.args = fx.map_arg(user.args, swap)
    user.kwargs = fx.map_arg(user.kwargs, swap)


def _same_scale(a: Metrics, b: Metrics, rtol: float) -> bool:
    if (a.bwd is None) != (b.bwd is None):
        return False
    return _close(a.fwd, b.fwd, rtol) and (
        a.bwd is None or b.bwd is None or _close(a.bwd, b.bwd, rtol)
    )


def _close(a: Data, b: Data, rtol: float) -> bool:
    return isclose(a.mean_abs, b.mean_abs, rel_tol=rtol)


def _operator(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return str(name).strip("_")
