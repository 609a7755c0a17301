"""Records one call of a model, for `track_scales`: a graph with the numbers of every tensor in it.

The recorder is told of each function as it runs: by `TrackingMode` in eager code, and by
`interpreter` in graphs that Dynamo captured. The identity of tensors shows which result feeds which
operator. Gradients are read by tensor hooks, which change nothing. (An identity function in between
would turn views into copies, and writes into a view would no longer reach its base.)

`scaledtensor.inspect.operators` has the recorder of `report`, and says what the two share.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from scaledtensor import _torch
from scaledtensor.formats import E4M3FN, E5M2, Format
from scaledtensor.inspect.metrics import Metrics, is_readable, measure
from scaledtensor.inspect.places import Place

__all__ = ["Recorder", "interpreter"]

#: Types that an argument of a node may have besides nodes. Any other object becomes the name of its
#: type, since a graph must not keep alive objects that the model does not keep.
_PLAIN = (int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device)


class _Known:
    """The node of a tensor, and whether a hook reads the tensor's gradient."""

    __slots__ = ("node", "probed")

    def __init__(self, node: fx.Node) -> None:
        self.node, self.probed = node, False


class Recorder:
    """Builds the graph of one call."""

    def __init__(
        self, model: nn.Module | None, forward: Format = E4M3FN, backward: Format = E5M2
    ) -> None:
        self.forward, self.backward = forward, backward
        self._graph = fx.Graph()
        self._known = WeakTensorKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._results: list[fx.Node] = []
        self._names: dict[int, str] = {}
        #: Whether the model runs now. After it has returned, a loss may follow.
        self.in_call = False
        #: How many operators the recorder was told of.
        self.calls = 0
        #: The name of a module -> its last arguments, as pairs of a name in `forward` and a node.
        self.given: dict[str, list[tuple[str, fx.Node]]] = {}
        if model is not None:
            for names in (model.named_buffers(), model.named_parameters()):
                self._names |= {id(tensor): name for name, tensor in names}

    @property
    def graph(self) -> fx.Graph:
        """All nodes so far, and an output as the last one. The output has the results of the model
        and, if operators ran after the model, the last of these."""
        body = [n for n in self._graph.nodes if n.op != "output"]
        for node in list(self._graph.nodes):
            if node.op == "output":
                self._graph.erase_node(node)
        ends = dict.fromkeys(self._results)
        if body and (not ends or all(body.index(end) < len(body) - 1 for end in ends)):
            ends[body[-1]] = None
        output = self._graph.output(tuple(ends))
        output.meta |= _meta("output", None, Place()) | {"outputs_float_tensor": False}
        return self._graph

    def close(self) -> None:
        """Remove the hooks that read gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known = WeakTensorKeyDictionary()

    # --- calls -------------------------------------------------------------------------------

    def input(self, name: str, x: Tensor) -> None:
        """Add an input of the model. A tensor that is given twice is one node."""
        if self._find(x) is None:
            self._add("placeholder", name, (), {}, x, name=name, place=Place())

    def call(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        place: Place,
        name: str | None = None,
    ) -> None:
        """Add an operator that has run. `result` is a tensor, or a nest of tuples of tensors.

        Operators inside a transform of torch.func are left out: tensors have no values there.
        """
        if _torch.is_transforming():
            return
        self.calls += 1
        if isinstance(result, Tensor):
            arguments, options = self._arguments(args), self._arguments(kwargs)
            self._add(op, target, arguments, options, result, name, place)
        elif isinstance(result, (tuple, list)) and _holds_tensors(result):
            node = self._node(op, target, self._arguments(args), self._arguments(kwargs), name)
            node.meta |= _meta(node.name, None, place) | {"is_tuple": True}
            self._unpack(node, result, place)

    def captured(self, x: Tensor, name: str) -> None:
        """Note the name that Dynamo gave the node of `x` in the graph that it captured."""
        known = self._find(x)
        if known is not None:
            known.node.meta.setdefault("captured", name)

    def entered(self, module: str, inputs: Iterable[tuple[str, Tensor]]) -> None:
        """Note that a module is about to run on `inputs`."""
        found = ((name, self._find(x)) for name, x in inputs)
        self.given[module] = [(name, known.node) for name, known in found if known is not None]

    def result(self, values: Any) -> None:
        """Note the results of the model."""
        self._results = [self.node_of(x) for x in _tensors(values)]

    def node_of(self, x: Tensor, name: str = "constant", op: str = "get_attr") -> fx.Node:
        """The node of `x`. If it has none yet, it gets one: a parameter or a buffer under its own
        name, any other tensor under `name` and as an `op`."""
        known = self._find(x)
        if known is None:
            owned = self._names.get(id(x))
            target, op = (name, op) if owned is None else (owned, "get_attr")
            return self._add(op, target, (), {}, x, target.replace(".", "_"), Place())
        self._probe(known, x)
        return known.node

    # --- nodes -------------------------------------------------------------------------------

    def _find(self, x: Tensor) -> _Known | None:
        return cast(_Known | None, self._known.get(x))

    def _unpack(self, node: fx.Node, values: Any, place: Place) -> None:
        for i, value in enumerate(values):
            args = (node, i)
            if isinstance(value, Tensor):
                name = f"{node.name}_{i}"
                self._add("call_function", operator.getitem, args, {}, value, name, place)
            elif isinstance(value, (tuple, list)) and _holds_tensors(value):
                inner = self._node("call_function", operator.getitem, args, {}, None)
                inner.meta |= _meta(inner.name, None, place) | {"is_tuple": True}
                self._unpack(inner, value, place)

    def _add(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        x: Tensor,
        name: str | None,
        place: Place,
    ) -> fx.Node:
        node = self._node(op, target, args, kwargs, name)
        node.meta |= _meta(node.name, x, place)
        if is_readable(x):
            node.meta["metrics"] = Metrics(measure(x, self.forward))
        known = _Known(node)
        self._known[x] = known
        self._probe(known, x)
        return node

    def _node(self, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> fx.Node:
        return self._graph.create_node(op, target, args, kwargs, name or _name(target))

    def _arguments(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return self.node_of(values)
        if isinstance(values, (tuple, list)):  # named tuples and sizes, too, become plain ones
            plain = tuple if isinstance(values, tuple) else list
            return plain(self._arguments(v) for v in values)
        if isinstance(values, dict):
            return {str(k): self._arguments(v) for k, v in values.items()}
        if isinstance(values, slice):
            return slice(*(self._arguments(v) for v in (values.start, values.stop, values.step)))
        return values if isinstance(values, _PLAIN) else f"<{type(values).__name__}>"

    def _probe(self, known: _Known, x: Tensor) -> None:
        # This is called when a tensor is used too. A result of a custom autograd.Function was made
        # while no tensor required a gradient.
        if known.probed or not x.requires_grad or "metrics" not in known.node.meta:
            return
        known.probed = True
        reader = _reader(known.node.meta["metrics"], self.backward)
        with _torch.disable_torch_function():
            # If the base of a view was written to, reading the view's `grad_fn` makes a new one.
            # register_hook reads it after it made room for the hook, and crashes: pytorch issue
            # 196459.
            _ = x.grad_fn
            self._handles.append(x.register_hook(reader))


def _reader(metrics: Metrics, fmt: Format) -> Callable[[Tensor], None]:
    # The function holds no tensor, so that memory is freed as it is without tracking.
    def read(gradient: Tensor) -> None:
        if is_readable(gradient):
            metrics.bwd = measure(gradient, fmt)

    return read


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_iter(values) if isinstance(x, Tensor))


def _holds_tensors(values: Any) -> bool:
    return next(_tensors(values), None) is not None


def _meta(name: str, x: Tensor | None, place: Place) -> dict[str, Any]:
    return {
        "clean_name": _clean_name(name),
        "outputs_float_tensor": x is not None and is_readable(x),
        "is_tuple": False,
        "requires_grad": isinstance(x, nn.Parameter) and x.requires_grad,
        "module": place.module,
        "source": place.source,
        "lines": place.lines,
        "shape": None if x is None else tuple(x.shape),
        "dtype": None if x is None else x.dtype,
    }


def _clean_name(name: str) -> str:
    """A name of Dynamo's without the marks of the place where it found the tensor:
    `l_self_modules_fc_parameters_weight_` becomes `fc_weight`."""
    if not name.startswith(("l_", "L_")):
        return name.strip("_") or name
    plain = re.sub(r"_(modules|parameters|buffers)(?=_)", "", name[1:])
    return re.sub(r"^_+(self|fn)(?=_)", "", plain).strip("_") or name


def _name(target: Any) -> str:
    """The name for the node of an operator: `linear`, `add`, `layer_norm`."""
    spelled = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return spelled.rpartition(".")[2].strip("_") or "op"


# --- graphs that Dynamo captured -------------------------------------------------------------


def interpreter(module: fx.GraphModule, recorder: Callable[[], Recorder]) -> Callable[..., Any]:
    """A function that runs `module` operator by operator and records it. Each run calls `recorder`
    for the recorder to tell."""

    def run(*args: Any) -> Any:
        return _Recorded(module, recorder()).run(*args)

    return cast(Callable[..., Any], torch.compiler.disable(run))


class _Recorded(fx.Interpreter):
    """Runs each node as it is. Autograd records it as in eager code."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            out = super().run_node(n)
            if n.op == "placeholder" and isinstance(out, Tensor):
                self.recorder.node_of(out, _clean_name(n.name), "placeholder")
                self.recorder.captured(out, n.name)
            elif n.op == "output":
                self.recorder.result(out)
            return out
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        out = super().run_node(n)
        taken = n.target is operator.getitem and not isinstance(args[0], Tensor)
        if not taken:  # `Recorder.call` made nodes for the elements of a tuple
            self.recorder.call(n.op, n.target, args, kwargs, out, _place(n), _clean_name(n.name))
        if isinstance(out, Tensor):
            self.recorder.captured(out, n.name)
        return out


def _place(n: fx.Node) -> Place:
    modules = list(n.meta.get("nn_module_stack", {}).values())
    # L['self'].layers.0
    module = re.sub(r"^L\[[^\]]*\]\.?", "", modules[-1][0]) if modules else ""
    frames = re.findall(r'File "([^"]*)", line (\d+)', n.meta.get("stack_trace") or "")
    return Place(module, ":".join(frames[-1]) if frames else "")
