"""Eager mode: every function of torch that Python calls, seen as it is called."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scaledtensor import _torch
from scaledtensor.inspect.places import Places
from scaledtensor.inspect.recorder import Recorder

__all__ = ["TrackingMode"]

#: They give tensors and compute none, or are the backward pass itself.
_NO_OPERATORS: set[Any] = {
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.requires_grad_,
    Tensor.retain_grad,
    vars(torch.Tensor.__base__)["grad"].__get__,
}


class TrackingMode(TorchFunctionMode):
    """Tells a recorder of every call. It sees calls by the names that the model uses:
    `F.cross_entropy` is one operator and not its parts.

    Not told: what runs in a backward pass (recomputed checkpoints), inside a transform of
    torch.func, whose tensors have no values to read, and, once the model has returned, what needs
    no gradient: a loss is, an optimizer's step is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorder: Recorder | None = None
        self.places: Places | None = None
        self.busy = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, calls pass unseen."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.busy or self.recorder is None or self.places is None:
            return func(*args, **kwargs)
        if _torch.is_within_backward() or func in _NO_OPERATORS:
            return func(*args, **kwargs)
        if func in _torch.BODIES:  # many operators: entered, where others are one node
            with self:
                return _torch.BODIES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        written = func is Tensor.__setitem__
        told = args[0] if written else result
        if self.recorder.in_call or _is_differentiable(told):
            op, target, arguments = _spelled(func, args)
            self.recorder.call(op, target, arguments, kwargs, told, self.places.here())
        return result


def _is_differentiable(result: Any) -> bool:
    # What an optimizer writes requires gradients, too, but it writes where none are recorded.
    return torch.is_grad_enabled() and isinstance(result, Tensor) and result.requires_grad


def _spelled(func: Any, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """(op, target, args) of the node: methods by their name, as torch.fx has them."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # x.mT, x.real
        return "call_function", getattr, (*args[:1], func.__self__.__name__)
    if isinstance(func, (MethodDescriptorType, WrapperDescriptorType)) or func is getattr(
        Tensor, name, None
    ):
        if name.startswith("__") and hasattr(operator, name):
            return "call_function", getattr(operator, name), args
        return "call_method", name, args
    return "call_function", func, args
