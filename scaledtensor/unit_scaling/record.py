"""A recording of one run of a model: which function made which tensor, and from which tensors."""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.models.interpose import ENTERED
from scaledtensor.unit_scaling.calls import NAMES, Call, Family, family_of, is_counted

__all__ = [
    "CONSTANT",
    "MOVES",
    "PARAMETER",
    "VARIABLE",
    "Layout",
    "Node",
    "Recording",
    "attention_options",
    "copied",
    "leaves_of",
    "left_alone",
    "record",
]

CONSTANT, PARAMETER, VARIABLE = "constant", "parameter", "variable"


@dataclass(frozen=True)
class Layout:
    """The place of a tensor in memory, on which `view` and `contiguous` depend."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(x.shape, x.stride(), int(x.storage_offset()), x.dtype, x.device)

    @property
    def end(self) -> int:
        """The number of elements from the start of the memory to the end of the tensor."""
        if not self.shape.numel():
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + sum((n - 1) * step for n, step in steps) + 1

    def within(self, memory: Tensor) -> Tensor:
        """Return the tensor with this layout in a memory of one dimension."""
        return memory.as_strided(self.shape, self.stride, self.offset)

    def gaussian(self, rng: torch.Generator) -> Tensor:
        """Return a tensor of random numbers with this layout, in new memory."""
        drawn = torch.randn(self.end - self.offset, generator=rng, dtype=torch.float32)
        memory = drawn.to(self.device, self.dtype)
        return memory.as_strided(self.shape, self.stride)

    def overlaps(self, other: "Layout") -> bool:
        """Whether two tensors in the same memory have an element in common."""
        memory = torch.zeros(max(self.end, other.end), dtype=torch.bool)
        self.within(memory).fill_(True)
        return bool(other.within(memory).any())


@dataclass(eq=False)
class Node:
    """A float tensor of the run, up to the next write into it. After a write, each tensor that
    shares the memory has a new node.

    A constant depends on no parameter and no float input. A parameter's node depends on parameters
    alone. All other nodes are variable.
    """

    kind: str
    name: str  # the function's name, "input" or "parameter"
    func: Any = None
    args: tuple[Any, ...] = ()  # with nodes in place of variable tensors
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: Call | None = None
    output: int | None = None  # which of several results
    operands: tuple["Node", ...] = ()  # the tensors among the arguments, in order, of every kind
    layout: Layout | None = None  # set when the tensor is known
    users: list["Node"] = field(default_factory=list)
    returned: bool = False
    tensor: Tensor | None = None  # the parameter
    in_place: bool = False  # whether the call writes into its first argument
    is_view: bool = False  # whether it shares the memory of an operand
    is_overwritten: bool = False  # whether a later call writes into it

    @property
    def shape(self) -> torch.Size:
        return torch.Size() if self.layout is None else self.layout.shape

    @property
    def variables(self) -> tuple["Node", ...]:
        return tuple(n for n in self.operands if n.kind == VARIABLE)

    @property
    def family(self) -> Family | None:
        return family_of(self.func)

    @property
    def is_border(self) -> bool:
        return self.family is Family.BORDER

    @property
    def moves(self) -> bool:
        """Whether the call moves or casts the elements of a tensor and does not change them."""
        return self.name in MOVES


def attention_options(node: Node) -> dict[str, Any]:
    """Return the arguments of `scaled_dot_product_attention` after query, key and value, by
    name."""
    names = ("attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, node.args[3:], strict=False)) | node.kwargs


@dataclass
class Recording:
    """The nodes of a run, and the names of the counted calls, both in order."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


#: Functions whose result has the elements of one tensor.
MOVES = {
    *("view", "reshape", "transpose", "permute", "contiguous", "to", "type_as", "float"),
    *("flatten", "unflatten", "unsqueeze", "squeeze", "detach", "clone", "__get__", "alias"),
}

#: Functions whose result does not depend on the values of their operands.
_NOT_OF_VALUES = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


def _is_of_no_values(name: str) -> bool:
    return name in _NOT_OF_VALUES or name.startswith("new_")


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.counts = Counter[str]()
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # an id names a tensor only while the tensor lives
        self.memories: dict[int, list[Tensor]] = {}

    def know(self, x: Tensor, node: Node) -> None:
        node.layout = Layout.of(x)
        node.tensor = x if node.kind == PARAMETER else None
        self.nodes[id(x)] = node
        self.alive.append(x)
        memory = self.memories.setdefault(_torch.memory_of(x), [])
        if not any(x is known for known in memory):
            memory.append(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENTERED and func not in COUNTERPARTS:
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
        if _is_of_no_values(name):
            made_of = ()
        targets = [(a, a._version) for a in _targets(args, kwargs)]
        result = func(*args, **kwargs)
        written = [a for a, version in targets if a._version != version]
        several = isinstance(result, (tuple, list))
        outputs = tuple(result) if several else (result,)
        if written and not any(_is_among(out, written) for out in outputs):
            outputs, several = tuple(written), False  # `__setitem__` is such a call
        for i, out in enumerate(outputs):
            if not (isinstance(out, Tensor) and out.is_floating_point()):
                continue
            in_place = _is_among(out, written)
            if _is_among(out, given) and not in_place:
                continue  # a cast to the present dtype returns the tensor itself
            node = Node(
                self.kind_of(name, made_of),
                name,
                func,
                self.symbolic(args),
                self.symbolic(kwargs),
                # A named tuple (values, indices) has no step, because it is no plain list.
                call if not several or type(result) in (tuple, list) else None,
                i if several else None,
                made_of,
                in_place=in_place,
                is_view=not in_place
                and any(_torch.memory_of(out) == _torch.memory_of(a) for a in given),
            )
            self.add(node)
            if in_place:
                self.overwrite(out, node)
            self.know(out, node)
        return result

    def add(self, node: Node) -> None:
        for operand in dict.fromkeys(node.operands):
            operand.users.append(node)
        self.recording.nodes.append(node)

    def overwrite(self, x: Tensor, written: Node) -> None:
        """Note a write into `x`: `x` and all tensors that share its memory get new nodes."""
        layout = Layout.of(x)
        for other in self.memories.get(_torch.memory_of(x), ()):
            before = self.nodes[id(other)]
            if before.layout is None or not before.layout.overlaps(layout):
                continue
            before.is_overwritten = True
            if other is x:
                continue
            operands = (before, written)
            after = Node(
                self.kind_of("alias", operands),
                "alias",
                _overwritten,
                (*self.symbolic((other,)), written, before.layout, layout),
                operands=operands,
                is_view=True,
            )
            self.add(after)
            self.know(other, after)

    @staticmethod
    def kind_of(name: str, made_of: tuple[Node, ...]) -> str:
        kinds = {n.kind for n in made_of}
        if name == "embedding" and PARAMETER in kinds:  # integers of the input choose its rows
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


def _targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call may write into and return: its first argument, or `out`. A
    tensor that it writes elsewhere, such as the running statistics of a norm, is no result."""
    first = args[0] if args else kwargs.get("input")
    leaves = pytree.tree_leaves((first, kwargs.get("out")))
    return [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _is_among(x: Any, tensors: list[Tensor]) -> bool:
    return any(x is y for y in tensors)


def _overwritten(x: Tensor, written: Tensor, layout: Layout, by: Layout) -> Tensor:
    """Return `x` after a write into a tensor that shares its memory; `written` is the new
    tensor."""
    memory = x.new_zeros(max(layout.end, by.end))
    layout.within(memory).copy_(x)
    by.within(memory).copy_(written)
    return layout.within(memory)


@contextlib.contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """A context in which a run of `module` changes no buffer and no random generator."""
    devices = {p.device for p in module.parameters() if backend_of(p).own_generator}
    saved = [(b, b.detach().clone()) for b in module.buffers()]
    with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in saved:
                buffer.copy_(value)


def copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return copies of arguments for another run, which may write into a cache."""
    detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
    result: tuple[Any, Any] = copy.deepcopy(detached)
    return result


def record(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Recording:
    """Record a run of `forward` on copies of its inputs, without gradients.

    The module's buffers and the random generators keep their values. All activations of the run
    stay in memory until it ends.
    """
    recorder = _Recorder()
    # Tensors of inference mode do not tell whether a call has written into them.
    with torch.inference_mode(False):
        args, kwargs = copied(args, kwargs)
        for parameter in module.parameters():
            recorder.know(parameter, Node(PARAMETER, "parameter"))
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                recorder.know(leaf, Node(VARIABLE, "input"))
        with _torch.without_function_modes(), left_alone(module), recorder:
            result = forward(*args, **kwargs)
    for leaf in leaves_of(result):
        node = recorder.nodes.get(id(leaf)) if isinstance(leaf, Tensor) else None
        if node is not None:
            node.returned = True
    return recorder.recording


def leaves_of(result: Any) -> list[Any]:
    """Return the values in a model's result one by one, also of dataclasses and mappings, which
    pytree does not know."""
    if isinstance(result, dict):
        return pytree.tree_leaves(list(result.values()))
    if hasattr(result, "__dict__") and not isinstance(result, Tensor):
        return pytree.tree_leaves(list(vars(result).values()))
    return pytree.tree_leaves(result)
