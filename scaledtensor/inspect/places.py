"""The places of calls: the module that runs, the line of its `forward`, and in a backward pass the
module that recorded the node.

`Places` follows the modules of a model while they run, `Origins` follows the nodes of autograd's
graph, and `Calls` is a mode that sees the functions of torch that Python calls. `track_scales` and
`report` both build on these.
"""

import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

import scaledtensor._version as anchor
from scaledtensor import _torch

__all__ = ["Calls", "Line", "Origins", "Place", "Places", "forward_code"]


#: The folders of torch and of this library. A frame in them is no user's code, so an operator in
#: `nn.Linear` has the place of the call of the layer.
LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(of.__file__))) + os.sep for of in (torch, anchor)
)


class Line(NamedTuple):
    """A line of a module's `forward` that was being run."""

    module: str
    number: int


class Place(NamedTuple):
    """The place of a call of an operator."""

    module: str = ""
    """The innermost module, by its qualified name; empty for the model itself and outside it."""
    source: str = ""
    """`file:line` of the innermost frame outside of torch and of this library."""
    lines: tuple[Line, ...] = ()
    """A line for each module that was running, innermost first."""


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of a class's `forward` below its decorators; None if it is not written in Python.

    A `forward` of the instance (a transform's, or one for offloading) usually calls the class's.
    """
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


class Places:
    """Follows the modules of a model while they run, by hooks on each of them.

    Args:
        entered: called with a module's name, the module, and its positional and named arguments.
        left: called with a module's name and its result, which is None if the module raised.
    """

    def __init__(
        self,
        model: nn.Module,
        entered: Callable[[str, nn.Module, Any, Any], None],
        left: Callable[[str, Any], None],
    ) -> None:
        self.model, self.entered, self.left = model, entered, left
        self.stack: list[tuple[str, CodeType | None]] = []

    @property
    def module(self) -> str:
        """The innermost module that runs; empty for the model itself and outside of it."""
        return self.stack[-1][0] if self.stack else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within it, modules are followed, and compiled parts run as eager code: the kernels of a
        compiler have no modules and no operators to see."""
        handles = []
        try:
            for name, module in self.model.named_modules():
                plain = name.replace("._orig_mod", "")  # a part that is compiled by itself
                enter, leave = self._hooks(plain, forward_code(module))
                handles += [
                    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                    module.register_forward_hook(leave, with_kwargs=True, always_call=True),
                ]
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()

    def _hooks(
        self, name: str, code: CodeType | None
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append((name, code))
            self.entered(name, module, args, kwargs)

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if self.stack:
                self.stack.pop()
                self.left(name, result)

        return enter, leave

    def here(self) -> Place:
        """The place of the innermost call in progress."""
        lines: list[Line] = []
        source = ""
        pending = len(self.stack) - 1
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (pending >= 0 or not source):
            file = frame.f_code.co_filename
            if not source and not file.startswith(LIBRARIES):
                source = f"{file}:{frame.f_lineno}"
            for i in range(pending, -1, -1):
                name, code = self.stack[i]
                if frame.f_code is code:
                    lines.append(Line(name, frame.f_lineno))
                    pending = i - 1
                    break
            frame = frame.f_back
        return Place(self.module, source, tuple(lines))


class Calls(TorchFunctionMode):
    """A mode that sees each function of torch that Python calls, by the name that the model uses.

    Functions of torch that are written in Python and stand for many others (`_torch.BODIES`) are
    entered, and the functions in them are seen instead.
    """

    def ignores(self, func: Any) -> bool:
        """Whether a call is to pass unseen, with everything that it calls."""
        return False

    def returned(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Called when `func` has returned `result`."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.ignores(func):
            return func(*args, **kwargs)
        if func in _torch.BODIES:
            with self:
                return _torch.BODIES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        self.returned(func, args, kwargs, result)
        return result


# --- backward --------------------------------------------------------------------------------

#: A node of autograd's graph, and the number of one of its inputs.
_Edge = tuple[Any, int]


class Origins:
    """Follows the nodes of autograd's graph: the module that recorded each, and the node that runs.

    Torch's own tracker of modules hooks the tensors that modules take and give. A module whose
    inputs need no gradient then never ends, and the sum of the gradients of a tensor that several
    modules read counts for the one that ran last. Here each node belongs to the module that was
    running when a function returned it. The sum of the gradients of a tensor belongs to the
    innermost module around all its uses.
    """

    def __init__(self) -> None:
        #: A node -> the name of its module. The nodes are kept alive, since Python gives a node of
        #: C++ another identity after it let go of the node.
        self._owners: dict[Any, str] = {}
        self._uses: dict[_Edge, list[str]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []
        self._running = ""
        #: The node that has just run. The engine adds up its gradients now.
        self._left: Any = None

    @contextmanager
    def followed(self, model: nn.Module) -> Iterator[Places]:
        """Within it, the modules of `model` and the nodes that they record are followed."""

        # A mode does not see an autograd.Function. Its nodes are found at the tensors that a module
        # takes and gives.
        def entered(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            outer = places.stack[-2][0] if len(places.stack) > 1 else ""
            self.claim((args, kwargs), outer)

        def left(name: str, result: Any) -> None:
            self.claim(result, name)

        places = Places(model, entered, left)
        try:
            with places.followed(), _Returned(self, lambda: places.module):
                yield places
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._owners.clear()
            self._uses.clear()
            self._left = None

    def claim(self, values: Any, owner: str) -> None:
        """Assign each node behind `values` that has no owner yet to the module `owner`."""
        with _torch.disable_torch_function():
            found = [x.grad_fn for x in tree_iter(values) if isinstance(x, Tensor)]
        pending = [node for node in found if node is not None]
        while pending:
            node = pending.pop()
            if node in self._owners:
                continue
            self._owners[node] = owner
            self._handles += [
                node.register_prehook(self._begins(owner)),
                node.register_hook(self._ends(node)),
            ]
            for target, slot in node.next_functions:
                if target is not None:
                    self._uses[target, slot].append(owner)
                    pending.append(target)

    @property
    def running(self) -> str:
        """The module of the operator of a backward pass that runs now."""
        if self._left is None:
            return self._running
        summed = [self._uses[edge] for edge in self._left.next_functions if edge in self._uses]
        users = [module for uses in summed if len(uses) > 1 for module in uses]
        return _around(users) if users else self._running

    def _begins(self, owner: str) -> Any:
        def begin(gradients: Any) -> None:
            self._running, self._left = owner, None

        return begin

    def _ends(self, node: Any) -> Any:
        def end(of_inputs: Any, of_outputs: Any) -> None:
            self._left = node

        return end


class _Returned(Calls):
    """Claims the nodes behind the result of every function of torch."""

    def __init__(self, origins: Origins, module: Callable[[], str]) -> None:
        super().__init__()
        self.origins, self.module = origins, module

    def returned(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        if torch.is_grad_enabled():
            written = result is None and args  # index assignment returns nothing
            self.origins.claim(args[0] if written else result, self.module())


def _around(modules: list[str]) -> str:
    """The innermost module that contains all of `modules`, or is all of them."""
    paths = [module.split(".") if module else [] for module in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
