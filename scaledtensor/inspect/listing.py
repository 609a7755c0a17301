"""Views of a recording: graphs with fewer nodes, and the code of a model with the scales beside
it."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from math import inf, isclose
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from scaledtensor.errors import ModelError
from scaledtensor.inspect.metrics import Data, Metrics
from scaledtensor.inspect.passes import differentiate, left_untouched, start_of_backward
from scaledtensor.inspect.places import Line, forward_code
from scaledtensor.inspect.scales import Scales
from scaledtensor.inspect.tracking import original, tracking
from scaledtensor.models.interpose import transforms
from scaledtensor.unit_scaling.plan import Plan
from scaledtensor.unit_scaling.verb import UnitScale

__all__ = [
    "analyse_module",
    "plans",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
]


# --- graphs with fewer nodes -----------------------------------------------------------------
# Nodes that are left out are bridged, so that the flow of data stays visible.


def prune_non_float_tensors(graph: fx.Graph) -> fx.Graph:
    """Copy a scales graph without the nodes that hold no tensor of floats.

    The users of such a node take its float input instead. If it has several, the elements of a
    tuple (from `chunk` or an LSTM) take all of them, and other users (of a mask) take none.

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
    """Copy a scales graph without the nodes that keep the scale of their one float input.

    Such nodes are views, for example. The mean absolute value is the same up to `rtol`, for the
    tensor and for its gradient (or neither has a gradient). Nodes with several float inputs stay.

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
    """Copy a scales graph without the nodes of some operators.

    Args:
        targets: functions or names. `torch.add`, `operator.add` and "add" all mean any `add`, since
            a graph of eager code does not show how it was spelled. A node with one float input is
            bridged.

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


# --- the code of a model ---------------------------------------------------------------------


class Span(NamedTuple):
    """The least and the largest of a number over the modules of a class."""

    low: float = inf
    high: float = -inf

    def with_(self, x: float) -> "Span":
        return Span(min(self.low, x), max(self.high, x))

    def __str__(self) -> str:
        if self.low > self.high:
            return "n/a"
        low, high = f"{self.low:.3g}", f"{self.high:.3g}"
        return low if low == high else f"{low}..{high}"


class Both(NamedTuple):
    """The range of a number, forward and backward."""

    forward: Span = Span()
    backward: Span = Span()

    def __str__(self) -> str:
        return f"(-> {self.forward}, <- {self.backward})"


def analyse_module(
    model: nn.Module,
    inputs: Any = (),
    backward: Tensor | None = None,
    *,
    metric: str = "std",
    library: bool = False,
    **options: Any,
) -> str:
    """Return the source of `forward` of every class in a model, with the scales of its tensors.

    Beside each line are the scale of the tensor that it computed last and of that tensor's
    gradient: `(-> 0.578, <- 0.204)`. Each class has one listing, with its parameters below. The
    model's own class is the first. If several modules are of one class, a scale is a range over
    them. A line that runs repeatedly shows its last time. The model runs once, forward and
    backward. Afterwards gradients, buffers and the state of the random number generators are as
    before.

    Args:
        model: any module, with or without ScaledTensors. A compiled one runs as eager code.
        inputs: its input, or a tuple of inputs. `options` are its arguments by name.
        backward: the gradient of the result, for the start of the backward pass. By default the
            pass starts from the loss (the result's `loss`, or a first result of one element), or
            from a Gaussian if there is no loss.
        metric: one of `Metrics.names()`.
        library: list classes of torch (such as `nn.Linear`) too.

    Raises:
        ModelError: no result is differentiable, or `metric` has another value.
    """
    if metric not in Metrics.names():
        raise ModelError(f"metric is one of {', '.join(Metrics.names())}; got {metric!r}")
    root = original(model)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    with left_untouched(root), tracking(root) as scales:
        result = root(*args, **options)
        out, seed = start_of_backward(result)
        if backward is not None:
            seed = backward
        leaves = [*root.parameters(), *tree_leaves((args, options))]
        differentiate(out, seed, [x for x in leaves if _is_source(x)])
    return "\n\n".join(_Listing(root, scales, metric).text(library))


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _is_source(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_leaf and x.requires_grad


def _heading(lines: list[str]) -> tuple[int, range]:
    """The last line of a function's signature, and the lines of its docstring."""
    try:
        function = ast.parse("\n".join(lines)).body[0]
    except SyntaxError:  # a lambda within an expression
        return 0, range(0)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return 0, range(0)
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        hidden = range(0)
    else:
        hidden = range(first.lineno - 1, first.end_lineno or first.lineno)
    return max(first.lineno - 2, function.lineno - 1), hidden


class _Listing:
    def __init__(self, root: nn.Module, scales: Scales, metric: str) -> None:
        self.root, self.metric = root, metric
        self.nodes = [n for n in scales.scales_graph().nodes if "metrics" in n.meta]
        self.given = scales.given
        #: (module, line) -> the last tensor computed there
        self.last = {line: n for n in self.nodes for line in n.meta["lines"]}

    def text(self, library: bool) -> Iterator[str]:
        classes: dict[type[nn.Module], list[str]] = {}
        for name, module in self.root.named_modules():
            classes.setdefault(type(module), []).append(name)
        ran = {line.module for line in self.last}
        for kind, names in classes.items():
            shown = library or kind is type(self.root) or not _is_torchs(kind)
            here = [name for name in names if name in ran]
            if shown and here:
                yield self._of_class(kind, here)

    def _of_class(self, kind: type[nn.Module], names: list[str]) -> str:
        code = forward_code(self.root.get_submodule(names[0]))
        head = f"# {kind.__module__}.{kind.__qualname__}"
        if names != [""]:
            head += f", {len(names)} of it: " + ", ".join(n or "the model" for n in names[:4])
            head += ", ..." if len(names) > 4 else ""
        try:
            source, first = inspect.getsourcelines(code) if code else ([], 0)
        except OSError:
            source, first = [], 0
        if not source:
            return f"{head}\n# its source cannot be read"
        lines = textwrap.dedent("".join(source)).splitlines()
        opening, hidden = _heading(lines)
        noted = [
            (line, self._note([self.last.get(Line(name, first + i)) for name in names]))
            for i, line in enumerate(lines)
        ]
        noted[opening] = (noted[opening][0], self._arguments(names))
        noted = [note for i, note in enumerate(noted) if i not in hidden]
        parameters = [(f"    # {name}", note) for name, note in self._parameters(names)]
        body = [*noted, *parameters]
        width = min(max((len(code) for code, note in body if note), default=0), 88)
        return "\n".join([head, *(f"{code:{width}}  {note}".rstrip() for code, note in body)])

    def _arguments(self, names: list[str]) -> str:
        by_argument: dict[str, list[fx.Node | None]] = {}
        for name in names:
            for argument, node in self.given.get(name, ()):
                by_argument.setdefault(argument, []).append(node)
        notes = ((argument, self._note(nodes)) for argument, nodes in by_argument.items())
        return ", ".join(f"{argument} {note}" for argument, note in notes if note)

    def _parameters(self, names: list[str]) -> Iterator[tuple[str, str]]:
        """The notes on parameters of these modules, and of layers of torch in them."""
        found: dict[str, list[fx.Node | None]] = {}
        held = {n.target: n for n in self.nodes if n.op == "get_attr"}
        for name in names:
            module = self.root.get_submodule(name)
            for path, _ in module.named_parameters():
                parts = path.split(".")[:-1]
                between = (".".join(parts[: i + 1]) for i in range(len(parts)))
                if all(_is_torchs(type(module.get_submodule(p))) for p in between):
                    full = f"{name}.{path}" if name else path
                    found.setdefault(path, []).append(held.get(full))
        for path, nodes in found.items():
            note = self._note(nodes)
            if note:
                yield path, note

    def _note(self, nodes: list[fx.Node | None]) -> str:
        both = Both()
        for node in nodes:
            if node is not None and "metrics" in node.meta:
                metrics = node.meta["metrics"]
                both = Both(self._wider(both[0], metrics.fwd), self._wider(both[1], metrics.bwd))
        return "" if both == Both() else str(both)

    def _wider(self, span: Span, data: Data | None) -> Span:
        return span if data is None else span.with_(float(getattr(data, self.metric)))


# --- the plans of unit scaling ---------------------------------------------------------------


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """Return the plans of a `unit_scale`d model, in the order in which they were made.

    There is one for each way in which the model was called. When printed, a plan lists the calls
    that it changes, and the changes.

    Raises:
        ModelError: the model is not unit-scaled, or was not called and had no inputs.
    """
    made = [
        plan for t in transforms(model) if isinstance(t, UnitScale) for plan in t.plans.values()
    ]
    if not made:
        raise ModelError(
            "this model has no plan of unit scaling: use scaledtensor.unit_scale(model, inputs), "
            "or call the unit-scaled model once"
        )
    return tuple(made)
