"""Where an operator was called: in which module, and on which line of whose `forward`."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import scaledtensor._version as anchor

__all__ = ["Line", "Place", "Places", "forward_code"]

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
