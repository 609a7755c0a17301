"""Passes of a model over data that leave the model as it was."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["as_it_was", "called"]


def called(model: nn.Module, batch: Any) -> Any:
    """The result of `model` for a batch: a mapping holds keyword arguments, a tuple or list holds
    positional arguments, and anything else is the only argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)


@contextmanager
def as_it_was(model: nn.Module, kept: Sequence[Tensor] = ()) -> Iterator[None]:
    """Evaluation mode within it. At the end the modes of all modules, the gradients, and all
    buffers except for those in `kept` are as before."""
    modes = [(m, m.training) for m in model.modules()]
    others = (b for b in model.buffers() if not any(b is one for one in kept))
    buffers = [(b, b.detach().clone()) for b in others]
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    model.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
        with torch.no_grad():
            for b, was in buffers:
                b.copy_(was)
        for p, grad in grads:
            p.grad = grad
