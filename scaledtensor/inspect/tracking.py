"""The entry points for recording a model: `track_scales(model)` and `with tracking(model)`."""

import inspect
import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from scaledtensor import _torch
from scaledtensor.errors import ModelError, UnsupportedError
from scaledtensor.formats import E4M3FN, E5M2, FormatLike
from scaledtensor.inspect.metrics import is_readable
from scaledtensor.inspect.places import Calls, Places
from scaledtensor.inspect.recorder import Recorder
from scaledtensor.inspect.scales import Scales

__all__ = ["TrackedModule", "TrackingMode", "original", "track_scales", "tracking"]


#: Functions that return tensors and compute none, and functions that are the backward pass.
_NO_OPERATORS: set[Any] = {
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.requires_grad_,
    Tensor.retain_grad,
    vars(torch.Tensor.__base__)["grad"].__get__,
}


class TrackingMode(Calls):
    """Tells a recorder of every call, by the name that the model uses: `F.cross_entropy` is one
    operator, and its parts are not seen.

    It does not tell of operators in a backward pass (recomputed checkpoints). After the model has
    returned, it tells only of operators whose result requires a gradient: of a loss, but not of an
    optimizer's step.
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

    def ignores(self, func: Any) -> bool:
        if self.busy or self.recorder is None or self.places is None:
            return True
        return _torch.is_within_backward() or func in _NO_OPERATORS

    def returned(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        recorder, places = cast(Recorder, self.recorder), cast(Places, self.places)  # see `ignores`
        told = args[0] if func is Tensor.__setitem__ else result
        if recorder.in_call or _is_differentiable(told):
            op, target, arguments = _spelled(func, args)
            recorder.call(op, target, arguments, kwargs, told, places.here())


def _is_differentiable(result: Any) -> bool:
    # The tensors that an optimizer writes require gradients too, but its step records none.
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


@contextmanager
def tracking(
    model: nn.Module,
    forward: FormatLike = E4M3FN,
    backward: FormatLike = E5M2,
    *,
    input_gradients: bool = False,
) -> Iterator[Scales]:
    """Record every call of `model` within a `with`; the last one is kept.

        with tracking(model) as scales:
            loss_function(model(x), y).backward()
        print(scales)

    Operators that follow the call and need a gradient, such as the loss, are recorded with it.
    Afterwards the model is as before, and the recording can still be read.

    Args:
        model: any module. A compiled one, and any compiled part, runs as eager code here: the
            kernels of a compiler have no operators to look at.
        forward, backward: formats for values and for gradients, whose losses are counted.
        input_gradients: have autograd find the gradients of float inputs too. That needs more
            memory, and the model may then not write into its inputs.

    The model computes the same numbers, forward and backward, with one exception. In eval mode
    without gradients, `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run fused kernels.
    Here they run the operators that these kernels stand for.

    Two kinds of gradients are not seen: gradients inside a checkpoint of the reentrant kind (the
    gradient shown for a parameter is then the part that came last), and the gradient of a view's
    elements before the view was written to.
    """
    scales = Scales(forward, backward)
    try:
        with _watching(scales, model, input_gradients):
            yield scales
    finally:
        scales.close()


def track_scales(
    model: nn.Module,
    forward: FormatLike = E4M3FN,
    backward: FormatLike = E5M2,
    *,
    capture: Literal["eager", "dynamo"] = "eager",
    input_gradients: bool = False,
) -> "TrackedModule":
    """Return a module that computes the same as `model` and records every tensor of its last call.

        tracked = track_scales(model)
        tracked(x).sum().backward()
        print(tracked.scales)
        graph = tracked.scales_graph()

    Args:
        model: any module. It is not copied. Only hooks on its parameters stay on it, until the
            next call or `close()`.
        forward, backward, input_gradients: same as in `tracking`.
        capture: "eager" sees the functions of torch as Python calls them. "dynamo" has
            torch.compile capture the model, and runs the captured graph. Its operators include
            everything that Dynamo inlined. Code that Dynamo left to Python is not seen.

    Under torch.compile the tracked module runs as eager code. Inside a larger compiled module it is
    a graph break, which is an error with `fullgraph=True`.

    Raises:
        ModelError: `model` is no module, is tracked already, or `capture` is not one of the two.
        UnsupportedError: (when called) Dynamo captured nothing.
    """
    return TrackedModule(model, Scales(forward, backward), capture, input_gradients)


class TrackedModule(nn.Module):
    """A module that `track_scales` made around a model, which is its attribute `module`.

    Parameters, buffers, submodules and the state dict are the model's, under the same names. Other
    attributes are looked up in the model.
    """

    module: nn.Module

    def __init__(
        self, model: nn.Module, scales: Scales, capture: str = "eager", gradients: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ModelError(f"a module can be tracked; got {type(model).__name__}")
        if isinstance(model, TrackedModule):
            raise ModelError("this model is tracked already: it is in the `module` attribute")
        if capture not in ("eager", "dynamo"):
            raise ModelError(f"capture is 'eager' or 'dynamo'; got {capture!r}")
        self.scales = scales
        self.capture, self.input_gradients = capture, gradients
        self.training = model.training
        # A submodule would put its name in front of the names of all parameters.
        vars(self)["module"] = model
        shared = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
        vars(self).update({name: getattr(original(model), name) for name in shared})

    # Dynamo would trace the bookkeeping, and then run the graph without it.
    @_torch.uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.capture == "eager":
            with _watching(self.scales, self.module, self.input_gradients):
                return self.module(*args, **kwargs)
        root = original(self.module)
        compiled = torch.compile(root, backend=self.scales.backend)
        with _one_call(self.scales, root, args, kwargs, self.input_gradients) as recorder:
            result = compiled(*args, **kwargs)
            recorder.result(result)
        if not recorder.calls:
            raise UnsupportedError(
                "Dynamo captured no operator of this model: it may have reached its limit of "
                "recompilations (torch.compiler.reset() forgets them), or cannot trace the model; "
                "capture='eager' sees every operator"
            )
        return result

    def scales_graph(self) -> fx.Graph:
        """`scales.scales_graph()`."""
        return self.scales.scales_graph()

    def close(self) -> nn.Module:
        """Remove the hooks that read gradients, and return the model."""
        self.scales.close()
        return self.module

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in vars(self):
                raise
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return original(self.module).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return original(self.module).load_state_dict(*args, **kwargs)


def original(model: nn.Module) -> nn.Module:
    """The module inside one that `torch.compile` made."""
    return cast(nn.Module, getattr(model, "_orig_mod", model))


@contextmanager
def _watching(scales: Scales, model: nn.Module, input_gradients: bool) -> Iterator[None]:
    """Record the calls of `model` within it."""
    root = original(model)
    if not isinstance(root, nn.Module):
        raise ModelError(f"a module can be tracked; got {type(root).__name__}")
    call = ExitStack()
    mode = TrackingMode()

    def entered(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _torch.is_within_backward():
            return  # a checkpoint that runs again
        with mode.paused():
            if module is root and not (mode.recorder and mode.recorder.in_call):
                mode.recorder = call.enter_context(
                    _one_call(scales, root, args, kwargs, input_gradients)
                )
            if mode.recorder is not None and mode.recorder.in_call:
                mode.recorder.entered(name, _inputs(module, args, kwargs))

    def left(name: str, result: Any) -> None:
        recorder = mode.recorder
        if not _torch.is_within_backward() and not places.stack and recorder and recorder.in_call:
            with mode.paused():
                recorder.result(result)
                call.close()

    places = mode.places = Places(root, entered, left)
    with ExitStack() as stack:
        stack.enter_context(places.followed())
        stack.callback(call.close)
        stack.enter_context(mode)
        yield


@contextmanager
def _one_call(
    scales: Scales, root: nn.Module, args: Any, kwargs: Any, input_gradients: bool
) -> Iterator[Recorder]:
    """Begin a new recording, with the inputs as its first nodes."""
    named = list(_inputs(root, args, kwargs))
    marked = [
        x
        for _, x in named
        if input_gradients and is_readable(x) and x.is_leaf and not x.requires_grad
    ]
    recorder = scales.begin(root)
    recorder.in_call = True
    try:
        for x in marked:
            x.requires_grad_(True)
        for name, x in named:
            recorder.input(name, x)
        yield recorder
    finally:
        recorder.in_call = False
        for x in marked:
            x.requires_grad_(False)


def _inputs(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, each under the name of its parameter of `forward`."""
    try:
        bound = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call itself will say so
        bound = {f"arg_{i}": x for i, x in enumerate(args)} | kwargs
    for name, value in bound.items():
        found = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        for i, x in enumerate(found):
            yield (name if isinstance(value, Tensor) else f"{name}_{i}"), x
