"""Tensors for tests: fixed random numbers, all that a tensor holds, to compare by bits, and a mode
that sees operators."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scaledtensor import CodedTensor, ScaledTensor


class Looking(TorchDispatchMode):
    """A mode that sees all operators. A layer that no mode sees runs as one node of autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def gaussian(
    *shape: int, seed: int = 0, power: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return Gaussian numbers of RMS 2**power, the same for each seed at every call."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 2.0**power).to(dtype)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return Gaussian numbers that differ between shapes of different sums."""
    return gaussian(*shape, seed=seed + sum(shape))


def value_of(x: Tensor) -> Tensor:
    """Return the value of a tensor as a plain tensor."""
    return x.dequantize() if isinstance(x, (ScaledTensor, CodedTensor)) else x


def parts(x: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of."""
    return [getattr(x, name) for name in x.INNER] if hasattr(x, "INNER") else [x]


def bits(x: Tensor) -> tuple[Any, ...]:
    """Return all that a tensor holds on this rank, so that `==` compares its bits and its facts."""
    x = x.to_local() if hasattr(x, "to_local") else x.detach()
    if hasattr(x, "INNER"):
        inner = tuple(bits(part) for part in parts(x))
        return type(x).__name__, inner, x.format.name, x.dtype, str(x.recipe), x.nonnegative
    raw = x.contiguous().reshape(-1).view(torch.uint8)
    return x.dtype, tuple(x.shape), raw.numpy().tobytes()


def saved_and_loaded(x: Any) -> Any:
    """Save an object by `torch.save`, and return it as `torch.load(weights_only=True)` reads it."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def prompts(padding: slice) -> dict[str, torch.Tensor]:
    """Return two prompts of 12 tokens for a model of transformers; the second has padding."""
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, padding] = 0
    return {"input_ids": ids, "attention_mask": mask}
