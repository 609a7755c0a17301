"""One run of a model that writes down which function made which tensor from which."""

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
from scaledtensor.unit_scaling.plan import NAMES, is_counted

__all__ = [
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
    """How a tensor of the run lies in memory. `view` and `contiguous` do by that what they do."""

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
        """The elements of memory from its begin to behind the last one that belongs to it."""
        if not self.shape.numel():
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + sum((n - 1) * step for n, step in steps) + 1

    def within(self, memory: Tensor) -> Tensor:
        """The tensor of this layout in a memory of one dimension."""
        return memory.as_strided(self.shape, self.stride, self.offset)

    def gaussian(self, rng: torch.Generator) -> Tensor:
        """A tensor that lies as this one does, in memory of its own, of random numbers."""
        drawn = torch.randn(self.end - self.offset, generator=rng)
        memory = drawn.to(self.device, self.dtype)
        return memory.as_strided(self.shape, self.stride)

    def overlaps(self, other: "Layout") -> bool:
        """Whether two tensors in the same memory have an element in common."""
        memory = torch.zeros(max(self.end, other.end), dtype=torch.bool)
        self.within(memory).fill_(True)
        return bool(other.within(memory).any())


@dataclass(eq=False)
class Node:
    """A float tensor of the run, as it is until a call writes into it: what it then holds has a
    node of its own, for each tensor that shares the memory. A constant depends on no parameter and
    no float input; a parameter's node on parameters alone; all else is variable."""

    kind: str
    name: str  # of the function, "input" or "parameter"
    func: Any = None
    args: tuple[Any, ...] = ()  # with nodes in place of variable tensors
    kwargs: dict[str, Any] = field(default_factory=dict)
    call: tuple[str, int] | None = None
    output: int | None = None  # which of several results
    operands: tuple["Node", ...] = ()  # of args, in order, of every kind
    layout: Layout | None = None  # known with the tensor
    users: list["Node"] = field(default_factory=list)
    returned: bool = False
    tensor: Tensor | None = None  # of a parameter's node
    in_place: bool = False  # whether the call writes into its first argument
    is_view: bool = False  # of a tensor that the model has
    is_overwritten: bool = False  # by a later call

    @property
    def shape(self) -> torch.Size:
        return torch.Size() if self.layout is None else self.layout.shape

    @property
    def variables(self) -> tuple["Node", ...]:
        return tuple(n for n in self.operands if n.kind == VARIABLE)


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


def _is_of_no_values(name: str) -> bool:
    return name in _NOT_OF_VALUES or name.startswith("new_")


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.counts = Counter[str]()
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []  # an id names a tensor only as long as that lives
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
            outputs, several = tuple(written), False  # such as of __setitem__
        for i, out in enumerate(outputs):
            if not (isinstance(out, Tensor) and out.is_floating_point()):
                continue
            in_place = _is_among(out, written)
            if _is_among(out, given) and not in_place:
                continue  # a cast to the dtype that a tensor has is that tensor
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
        """A call has written into `x`: it and all tensors that share its memory, views of it and
        what it is a view of, are others from now on."""
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


def _targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a call may write into and hand back: its first argument, or `out`. What it writes
    elsewhere, such as a norm into its running statistics, is no result."""
    first = args[0] if args else kwargs.get("input")
    leaves = pytree.tree_leaves((first, kwargs.get("out")))
    return [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _is_among(x: Any, tensors: list[Tensor]) -> bool:
    return any(x is y for y in tensors)


def _overwritten(x: Tensor, written: Tensor, layout: Layout, by: Layout) -> Tensor:
    """`x` after a write into a tensor that shares its memory, which now is `written`."""
    memory = x.new_zeros(max(layout.end, by.end))
    layout.within(memory).copy_(x)
    by.within(memory).copy_(written)
    return layout.within(memory)


@contextlib.contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Running `module` here changes no buffer, no generator and no mode of autograd."""
    devices = {p.device for p in module.parameters() if backend_of(p).own_generator}
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
    """What a model returns, one by one; of classes that pytree does not know (dataclasses,
    mappings) the values."""
    if isinstance(result, dict):
        return pytree.tree_leaves(list(result.values()))
    if hasattr(result, "__dict__") and not isinstance(result, Tensor):
        return pytree.tree_leaves(list(vars(result).values()))
    return pytree.tree_leaves(result)
