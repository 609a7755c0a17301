"""One forward and backward pass of a model that leaves the model as it was."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from scaledtensor import _torch
from scaledtensor.errors import ModelError
from scaledtensor.inspect.places import Place
from scaledtensor.inspect.recorder import Recorder, clean_name
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["differentiate", "interpreter", "left_untouched", "start_of_backward"]


#: torch calls these with `__torch_function__` off where a tensor is a ScaledTensor. A checkpoint
#: that ran its module again within them would then not cast as it did the first time.
_backward = _torch.inlined(torch.autograd.backward)


_grad = _torch.inlined(torch.autograd.grad)


@contextmanager
def left_untouched(model: nn.Module) -> Iterator[None]:
    """What a forward pass changes, changed back: buffers and random numbers."""
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, b in model.named_buffers():
                    if name in before:
                        b.copy_(before[name])


def start_of_backward(result: Any) -> tuple[Tensor, Tensor | None]:
    """Where the backward pass begins, and with which gradient.

    Raises:
        ModelError: no tensor in `result` requires a gradient.
    """
    loss = getattr(result, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else list(_tensors(result))
    found = [t for t in found if t.requires_grad]
    if not found:
        raise ModelError("no result of this model is a tensor that requires a gradient")
    out = next((t for t in found if t.dim() == 0), found[0])
    if out.dim() == 0:
        return out, None
    gradient = torch.randn(out.shape, device=out.device)
    if isinstance(out, ScaledTensor):
        return out, verbs.promote(gradient.to(out.dtype), out.detach())
    return out, gradient.to(out.dtype)


def differentiate(
    out: Tensor, seed: Tensor | None, leaves: list[Tensor], only: bool = False
) -> None:
    """A backward pass that leaves no gradients behind; `only` asks for those of `leaves` alone."""
    if any(getattr(x, "_post_accumulate_grad_hooks", None) for x in leaves):
        # Such hooks step optimizers. They run when gradients are accumulated, which this does not.
        _grad(out, leaves, seed, allow_unused=True)
        return
    # Checkpoints of the older, reentrant kind know no other way, and autograd.grad has no gradient
    # for a parameter that a module was given as its input.
    held = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    try:
        _backward(out, seed, inputs=leaves if only else None)
    finally:
        for x, grad in zip(leaves, held, strict=True):
            x.grad = grad


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors(value)


# Compiled form: graphs that Dynamo captured, run operator by operator and recorded.
def interpreter(module: fx.GraphModule, recorder: Callable[[], Recorder]) -> Callable[..., Any]:
    """What runs in the place of `module`. `recorder` is asked at each run for where to record."""

    def run(*args: Any) -> Any:
        return _Recorded(module, recorder()).run(*args)

    return cast(Callable[..., Any], torch.compiler.disable(run))  # type: ignore[no-untyped-call]


class _Recorded(fx.Interpreter):
    """Runs each node as it is; autograd follows as it would in eager mode."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            out = super().run_node(n)
            if n.op == "placeholder" and isinstance(out, Tensor):
                self.recorder.node_of(out, clean_name(n.name), "placeholder")
                self.recorder.captured(out, n.name)
            elif n.op == "output":
                self.recorder.result(out)
            return out
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        out = super().run_node(n)
        taken = n.target is operator.getitem and not isinstance(args[0], Tensor)
        if not taken:  # an element of a tuple is a node since the tuple was
            self.recorder.call(n.op, n.target, args, kwargs, out, _place(n), clean_name(n.name))
        if isinstance(out, Tensor):
            self.recorder.captured(out, n.name)
        return out


def _place(n: fx.Node) -> Place:
    modules = list(n.meta.get("nn_module_stack", {}).values())
    # L['self'].layers.0
    module = re.sub(r"^L\[[^\]]*\]\.?", "", modules[-1][0]) if modules else ""
    frames = re.findall(r'File "([^"]*)", line (\d+)', n.meta.get("stack_trace") or "")
    return Place(module, ":".join(frames[-1]) if frames else "")
