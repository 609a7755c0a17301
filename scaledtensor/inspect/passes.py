"""One forward and backward pass of a model that leaves the model as it was."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.errors import ModelError
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["differentiate", "left_untouched", "start_of_backward"]

#: torch calls these functions with `__torch_function__` off if a tensor is a ScaledTensor. A
#: checkpoint that ran its module again within them would then not cast as it did the first time.
_backward = _torch.inlined(torch.autograd.backward)
_grad = _torch.inlined(torch.autograd.grad)


@contextmanager
def left_untouched(model: nn.Module) -> Iterator[None]:
    """Restores buffers and the states of random number generators at the end of the `with`."""
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
    """The tensor at which the backward pass begins, and its gradient (None for a scalar loss).

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
    gradient = torch.randn(out.shape, device=out.device, dtype=torch.float32)
    if isinstance(out, ScaledTensor):
        return out, verbs.promote(gradient.to(out.dtype), out.detach())
    return out, gradient.to(out.dtype)


def differentiate(
    out: Tensor, seed: Tensor | None, leaves: list[Tensor], only: bool = False
) -> None:
    """Run a backward pass that leaves no gradients behind. With `only`, no gradients are computed
    except for `leaves`."""
    if any(getattr(x, "_post_accumulate_grad_hooks", None) for x in leaves):
        # These hooks step optimizers. They run when gradients are accumulated, and `grad`
        # accumulates none.
        _grad(out, leaves, seed, allow_unused=True)
        return
    # `backward` serves two cases that `grad` does not: checkpoints of the older, reentrant kind,
    # and a parameter that is the input of a module.
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
