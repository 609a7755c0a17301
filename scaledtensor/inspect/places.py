"""Where an operator was called: in which module, and on which line of whose `forward`."""

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

__all__ = ["Line", "Origins", "Place", "Places", "forward_code"]


#: Frames in these folders are no user's: an operator in `nn.Linear` is told by who called it.
LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(of.__file__))) + os.sep for of in (torch, anchor)
)


class Line(NamedTuple):
    """A line of a module's `forward` that was being run."""

    module: str
    number: int


class Place(NamedTuple):
    """Where an operator was called."""

    module: str = ""
    """The innermost module, by its qualified name; empty for the model itself and outside it."""
    source: str = ""
    """`file:line` of the innermost frame outside of torch and of this library."""
    lines: tuple[Line, ...] = ()
    """A line for each module that was running, innermost first."""


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of a class's `forward` below its decorators; None where it is not in Python.

    What an instance has for a `forward` of its own (transforms, offloading) mostly calls that.
    """
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


class Places:
    """Follows the modules of a model while they run, by hooks on each for the time of a `with`.

    Args:
        entered: called with the module's name, itself, its positional and its named arguments.
        left: called with the module's name and its result, None where it raised.
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
        handles = []
        try:
            for name, module in self.model.named_modules():
                plain = name.replace("._orig_mod", "")  # a part that is compiled by itself
                enter, leave = self._hooks(plain, forward_code(module))
                handles += [
                    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                    module.register_forward_hook(leave, with_kwargs=True, always_call=True),
                ]
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


# Which module an operator of a backward pass belongs to: the one that recorded it forward.
_Edge = tuple[Any, int]


class Origins:
    """Follows the nodes of autograd's graph: who recorded each, and which of them runs.

    Torch's own tracker of modules hooks the tensors that modules take and give. A module whose
    inputs need no gradient then never ends, and the sum of the gradients of a tensor that several
    modules read counts for the one that ran last. Here each node belongs to the module that was
    running when a function returned it. The sum of the gradients of a tensor belongs to the
    innermost module around all its uses.
    """

    def __init__(self) -> None:
        #: Kept alive, since Python sees a node of C++ under another identity once it let go of it.
        self._owners: dict[Any, str] = {}
        self._uses: dict[_Edge, list[str]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []
        self._running = ""
        #: The node that has just run, whose gradients the engine adds up now.
        self._left: Any = None

    @contextmanager
    def followed(self, model: nn.Module) -> Iterator[Places]:
        """Within it, the modules of `model` and the nodes that they record are followed."""

        # An autograd.Function is no function of torch: its nodes show where a module takes or gives
        # tensors.
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
        """Give every node behind `values` that has no owner yet to the module called `owner`."""
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
        """The module to which an operator of the backward pass belongs that runs now."""
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


class _Returned(TorchFunctionMode):
    """Claims what every function of torch returns."""

    def __init__(self, origins: Origins, module: Callable[[], str]) -> None:
        super().__init__()
        self.origins, self.module = origins, module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _torch.BODIES:  # many functions: entered, where others are one
            with self:
                return _torch.BODIES[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            # Index assignment returns nothing.
            told = args[0] if result is None and args else result
            self.origins.claim(told, self.module())
        return result


def _around(modules: list[str]) -> str:
    """The innermost module that all of `modules` are, or are parts of."""
    paths = [module.split(".") if module else [] for module in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
