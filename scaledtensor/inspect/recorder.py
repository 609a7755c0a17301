"""A recording: the graph of one call of a model, with the numbers of every tensor in it; or, one
floor below, a row for each operator that ran in each module.

Functions are told to it as they run, by whoever sees them (`mode` in eager mode, `compiled` for
graphs that Dynamo captured). Which result feeds which operator follows from the identity of
tensors. Gradients are read by tensor hooks, which change nothing: an identity function in between
would turn views into copies, and so break what writes into them.
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
from scaledtensor.inspect.rows import Ran, Row, floats, flops, is_narrow, is_view, traffic
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.registry import is_missing, rule_of
from scaledtensor.recipes.casts import parsed_gemms
from scaledtensor.tensors import verbs
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter

__all__ = ["Recorder", "clean_name"]

#: What an argument of a node may be besides nodes; anything else is kept as its type's name, for a
#: graph must not keep alive what the model does not.
_PLAIN = (int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device)


class _Known:
    """A tensor's node, and whether its gradient is being listened to."""

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
        #: Whether the model runs now. It may have returned, and a loss still follow.
        self.in_call = False
        #: How many operators were told.
        self.calls = 0
        #: The nodes that a module was given last, by its name and theirs in its `forward`.
        self.given: dict[str, list[tuple[str, fx.Node]]] = {}
        #: What operators ran: rows by what tells one from another.
        self.rows: dict[tuple[Any, ...], Row] = {}
        if model is not None:
            for names in (model.named_buffers(), model.named_parameters()):
                self._names |= {id(tensor): name for name, tensor in names}

    @property
    def graph(self) -> fx.Graph:
        """All nodes so far and, last, an output: the results of the model and, where more ran
        after it, the last node of all."""
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
        """Stop listening to gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known = WeakTensorKeyDictionary()

    # --- what is told ------------------------------------------------------------------------

    def input(self, name: str, x: Tensor) -> None:
        """An input of the model. A tensor given twice is one node."""
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
        """An operator that has run. `result` is its tensor, or a nest of tuples of them.

        Inside a transform of torch.func tensors have no values to read: it is passed over there.
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
        """The name that Dynamo gave the node of `x` in the graph that it captured."""
        known = self._find(x)
        if known is not None:
            known.node.meta.setdefault("captured", name)

    def entered(self, module: str, inputs: Iterable[tuple[str, Tensor]]) -> None:
        """A module is about to run on `inputs`."""
        found = ((name, self._find(x)) for name, x in inputs)
        self.given[module] = [(name, known.node) for name, known in found if known is not None]

    def result(self, values: Any) -> None:
        """What the model gave back."""
        self._results = [self.node_of(x) for x in _tensors(values)]

    def node_of(self, x: Tensor, name: str = "constant", op: str = "get_attr") -> fx.Node:
        """The node of `x`: a parameter or buffer, or a tensor from elsewhere, is one from now,
        the latter by `name` and as an `op`."""
        known = self._find(x)
        if known is None:
            owned = self._names.get(id(x))
            target, op = (name, op) if owned is None else (owned, "get_attr")
            return self._add(op, target, (), {}, x, target.replace(".", "_"), Place())
        self._probe(known, x)
        return known.node

    def operator(
        self, op: Any, args: tuple[Any, ...], result: Any, module: str, backward: bool
    ) -> None:
        """An operator that has run in a module, on ScaledTensors or on plain ones."""
        rule = rule_of(op)
        operands = list(floats(args))
        scaled = any(isinstance(x, ScaledTensor) for x in operands)
        if scaled and rule is None and not is_missing(op):
            return  # a composite: its parts came before it
        results = list(floats(result))
        if not scaled and not operands and not results:
            return
        family = rule.family if scaled and rule is not None else ""
        ran: Ran = _ran(op, args, operands) if family else "fallback" if scaled else "plain"
        cast_to = results[0] if op in CASTS and results and is_narrow(results[0]) else None
        operand = "" if cast_to is None else _role(args[0], backward)
        key = (module, str(op), backward, ran, operand)
        row = self.rows.setdefault(key, Row(*key[:4], rule=family, operand=operand))
        row.hits += 1
        count = flops(op, args, result)
        row.flops += count
        if not count and not is_view(op):
            moved, narrow = traffic([*operands, *results])
            row.bytes += moved
            row.narrow_bytes += narrow
        if isinstance(cast_to, ScaledTensor):
            _take_cast(row, args[0], cast_to)
        if op not in FILLING:  # the scale of such a cast fills the format, and keeps no RMS
            for x in results:
                if isinstance(x, ScaledTensor) and x.rms and is_readable(x):
                    _take_range(row, x)

    # --- nodes -------------------------------------------------------------------------------

    def _find(self, x: Tensor) -> _Known | None:
        return cast(_Known | None, self._known.get(x))  # type: ignore[no-untyped-call]

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
        # Also when it is used, not only when it was made: what a custom autograd.Function returns
        # was made where nothing required a gradient.
        if known.probed or not x.requires_grad or "metrics" not in known.node.meta:
            return
        known.probed = True
        reader = _reader(known.node.meta["metrics"], self.backward)
        with _torch.disable_torch_function():
            # A view whose base was written to has its history made anew when that is asked for.
            # register_hook asks after it made room for the hook, and crashes: pytorch issue 196459.
            _ = x.grad_fn
            self._handles.append(x.register_hook(reader))  # type: ignore[no-untyped-call]


def _reader(metrics: Metrics, fmt: Format) -> Callable[[Tensor], None]:
    # It holds no tensor, so that memory is freed as it is without tracking.
    def read(gradient: Tensor) -> None:
        if is_readable(gradient):
            metrics.bwd = measure(gradient, fmt)

    return read


#: Operators that cast an operand of products; those of them under a scale that fills the format.
FILLING = {verbs.quantize, verbs.quantize_under}
CASTS = {verbs.to_format, *FILLING}


def _ran(op: Any, args: tuple[Any, ...], operands: list[Tensor]) -> Ran:
    """Whether an operator with a rule had what the recipe cast for all of its operands."""
    if op in (verbs.product, verbs.product_gradient):  # which cast for themselves
        gemm = args[6] if op is verbs.product_gradient else "forward"
        how = getattr(parsed_gemms(args[-1]), gemm)
        return "rule" if how.left is None or how.right is None else "recipe"
    return "recipe" if operands and all(map(_is_cast, operands)) else "rule"


def _is_cast(x: Tensor) -> bool:
    """Whether a tensor is in a format that its recipe casts operands of products to."""
    if is_narrow(x):
        return True
    once = x.recipe.gemms.once if isinstance(x, ScaledTensor) and x.recipe is not None else None
    return once is not None and any(cast.format == x.format for cast in once)  # type: ignore[attr-defined]


def _role(x: Any, backward: bool) -> str:
    if is_parameter(x):
        return "weight"
    return "gradient" if backward else "input"


def _take_cast(row: Row, before: Tensor, after: ScaledTensor) -> None:
    """What a cast to 8 bits lost, and what others would have."""
    fmt, own = after.format, float(before.scale) if isinstance(before, ScaledTensor) else 1.0
    now = measure(before, fmt, float(after.scale))
    if not now.numel:
        return
    filling = now.abs_max * float(after.scale) / fmt.max
    by_amax = measure(before, fmt, filling) if filling else now
    carried = measure(before, fmt, own)
    narrow = measure(before, E4M3FN, own)
    row.format = fmt.name
    row.add_cast(
        now.numel,
        now.abs_max / fmt.max,
        saturated=now.saturated,
        underflowed=now.underflowed,
        amax_underflowed=by_amax.underflowed,
        carried_saturated=carried.saturated,
        carried_underflowed=carried.underflowed,
        e4m3fn_saturated=narrow.saturated,
        e4m3fn_underflowed=narrow.underflowed,
    )


def _take_range(row: Row, x: ScaledTensor) -> None:
    plain = x.widened() if isinstance(x, CodedTensor) else x
    rms = measure(elements(plain).detach(), plain.format).rms
    if rms:
        row.add_range(rms)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_iter(values) if isinstance(x, Tensor))


def _holds_tensors(values: Any) -> bool:
    return next(_tensors(values), None) is not None


def _meta(name: str, x: Tensor | None, place: Place) -> dict[str, Any]:
    return {
        "clean_name": clean_name(name),
        "outputs_float_tensor": x is not None and is_readable(x),
        "is_tuple": False,
        "requires_grad": isinstance(x, nn.Parameter) and x.requires_grad,
        "module": place.module,
        "source": place.source,
        "lines": place.lines,
        "shape": None if x is None else tuple(x.shape),
        "dtype": None if x is None else x.dtype,
    }


def clean_name(name: str) -> str:
    """A name of Dynamo's without the marks of where it found the tensor:
    `l_self_modules_fc_parameters_weight_` is `fc_weight`."""
    if not name.startswith(("l_", "L_")):
        return name.strip("_") or name
    plain = re.sub(r"_(modules|parameters|buffers)(?=_)", "", name[1:])
    return re.sub(r"^_+(self|fn)(?=_)", "", plain).strip("_") or name


def _name(target: Any) -> str:
    """What the node of an operator is called: `linear`, `add`, `layer_norm`."""
    spelled = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return spelled.rpartition(".")[2].strip("_") or "op"
