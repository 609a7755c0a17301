"""The code of a model with the scales that its lines produce."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from scaledtensor.errors import ModelError
from scaledtensor.inspect.metrics import Data, Metrics
from scaledtensor.inspect.passes import differentiate, left_untouched, start_of_backward
from scaledtensor.inspect.places import Line, forward_code
from scaledtensor.inspect.scales import Scales
from scaledtensor.inspect.tracking import original, tracking

__all__ = ["analyse_module"]


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
    """Forward and backward."""

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
    """The source of `forward` of every class in a model, and beside each line the scale of the
    tensor that it computed last and of that tensor's gradient: `(-> 0.578, <- 0.204)`.

    One listing for each class, that of the model first, with its parameters below. Where several
    modules are of a class a scale is a range over them, and a line that runs repeatedly shows its
    last time. The model runs once, forward and backward, and is as before afterwards: gradients,
    buffers and the state of the random number generators.

    Args:
        model: any module, ScaledTensors or not; one of torch.compile is run as eager code.
        inputs: its input, or a tuple of them; `options` are its arguments by name.
        backward: the gradient of the result, where the backward pass starts. Without it, the loss
            if there is one (the result's `loss`, or a first result of one element), else a
            Gaussian.
        metric: one of `Metrics.names()`.
        library: list classes of torch (`nn.Linear`), too.

    Raises:
        ModelError: no result is differentiable, or `metric` is none.
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
    """Which line ends the signature of a function, and which hold its docstring."""
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
        """Those of the modules themselves and of the parts from torch in them."""
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
