"""One run of a model that writes down which function made which tensor from which."""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from scaledtensor import _torch
from scaledtensor.interpose import ENTERED
from scaledtensor.unit_scale.plan import NAMES, is_counted

__all__ = [
    "Node",
    "Recording",
    "attention_options",
    "copied",
    "is_in_place",
    "left_alone",
    "record",
]

CONSTANT, PARAMETER, VARIABLE = "constant", "parameter", "variable"


@dataclass(eq=False)
class Node:
    """A float tensor of the run. A constant depends on no parameter and no float input; a
    parameter's node on parameters alone; all else is variable."""

    kind: str
    name: str  # of the function, "input" or "parameter"
    func: Any = None
    args: tuple[Any, ...] = ()  # with nodes in place of variable tensors
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: tuple[str, int] | None = None
    output: int | None = None  # which of several results
    operands: tuple["Node", ...] = ()  # of args, in order, of every kind
    shape: torch.Size = field(default_factory=torch.Size)
    users: list["Node"] = field(default_factory=list)
    returned: bool = False
    tensor: Tensor | None = None  # of a parameter's node

    @property
    def variables(self) -> tuple["Node", ...]:
        return tuple(n for n in self.operands if n.kind == VARIABLE)


def is_in_place(node: Node) -> bool:
    """Whether the call writes into its first argument."""
    return node.name.endswith("_") and not node.name.endswith("__")


def attention_options(node: Node) -> dict[str, Any]:
    """What a call of `scaled_dot_product_attention` has beside query, key and value, by name."""
    names = ("attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, node.args[3:], strict=False)) | node.kwargs


@dataclass
class Recording:
    """The nodes of a run, and the names of the calls that were counted, both in order."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


#: Results whose values do not depend on the values of what they are made from.
_NOT_OF_VALUES = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.counts = Counter[str]()
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # an id names a tensor only as long as that lives

    def know(self, x: Tensor, node: Node) -> None:
        node.shape = x.shape
        node.tensor = x if node.kind == PARAMETER else None
        self.nodes[id(x)] = node
        self.alive.append(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENTERED:
            with self:
                return ENTERED[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        call = None
        if func in NAMES and is_counted(args, kwargs):
            call = name, self.counts[name]
            self.counts[name] += 1
            self.recording.calls.append(name)
        given = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        made_of = tuple(self.nodes[id(a)] for a in given if id(a) in self.nodes)
        result = func(*args, **kwargs)
        if name == "__setitem__":
            outputs, several = (args[0],), False
        else:
            several = isinstance(result, (tuple, list))
            outputs = tuple(result) if several else (result,)
        for i, out in enumerate(outputs):
            # A cast to the dtype that a tensor has is that tensor. In place, names end in "_".
            same = not name.endswith("_") and any(out is a for a in given)
            if isinstance(out, Tensor) and out.is_floating_point() and not same:
                node = Node(
                    self.kind_of(name, made_of),
                    name,
                    func,
                    self.symbolic(args),
                    self.symbolic(kwargs),
                    # A result with names (values and indices) has no step: it is no plain list.
                    call if not several or type(result) in (tuple, list) else None,
                    i if several else None,
                    made_of,
                )
                for operand in dict.fromkeys(made_of):
                    operand.users.append(node)
                self.recording.nodes.append(node)
                self.know(out, node)
        return result

    @staticmethod
    def kind_of(name: str, made_of: tuple[Node, ...]) -> str:
        if name in _NOT_OF_VALUES or name.startswith("new_"):
            return CONSTANT
        kinds = {n.kind for n in made_of}
        if name == "embedding" and PARAMETER in kinds:  # a choice of rows by integers of the input
            return VARIABLE
        for kind in (VARIABLE, PARAMETER):
            if kind in kinds:
                return kind
        return CONSTANT

    def symbolic(self, tree: Any) -> Any:
        def replace(leaf: Any) -> Any:
            node = self.nodes.get(id(leaf)) if isinstance(leaf, Tensor) else None
            return node if node is not None and node.kind == VARIABLE else leaf

        return pytree.tree_map(replace, tree)


@contextlib.contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Running `module` here changes no buffer, no generator and no mode of autograd."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    saved = [(b, b.detach().clone()) for b in module.buffers()]
    with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in saved:
                buffer.copy_(value)


def copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments for one more run, which may write into a cache."""
    detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
    result: tuple[Any, Any] = copy.deepcopy(detached)
    return result


def record(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Recording:
    """Run `forward` on copies of its inputs, without gradients, and write it down.

    The module's buffers and the random generators are afterwards as they were. Memory: all
    activations of the run live until it ends.
    """
    recorder = _Recorder()
    args, kwargs = copied(args, kwargs)
    for parameter in module.parameters():
        recorder.know(parameter, Node(PARAMETER, "parameter"))
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            recorder.know(leaf, Node(VARIABLE, "input"))
    with _torch.without_function_modes(), left_alone(module), recorder:
        result = forward(*args, **kwargs)
    for leaf in pytree.tree_leaves(_plain(result)):
        node = recorder.nodes.get(id(leaf)) if isinstance(leaf, Tensor) else None
        if node is not None:
            node.returned = True
    return recorder.recording


def _plain(result: Any) -> Any:
    """Outputs in classes that pytree does not know (dataclasses, mappings): their values."""
    if isinstance(result, dict):
        return list(result.values())
    if hasattr(result, "__dict__") and not isinstance(result, Tensor):
        return list(vars(result).values())
    return result
