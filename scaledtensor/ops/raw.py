"""What a rule gives back, before it is a tensor."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import Format
from scaledtensor.singles import ONE, Amount
from scaledtensor.tensor import ScaledTensor

__all__ = ["Raw", "Towards", "starts_at"]


class Towards(NamedTuple):
    """What is known of a difference y - x besides its value."""

    start: Tensor
    """The elements of x."""
    rms: Tensor
    """The RMS of y."""


def starts_at(difference: Any, x: Any) -> bool:
    """Whether `difference` is y - x."""
    towards = getattr(difference, "towards", None)
    return towards is not None and isinstance(x, ScaledTensor) and towards.start is x.qdata


class Raw(NamedTuple):
    """What a rule computed: the value is `q * scale`, and its RMS should come out near `rms`."""

    q: Tensor
    scale: Amount | None
    """Any positive float32 number, 0-dim; None is 1."""
    rms: Amount
    """A float32 number that is not negative, 0-dim."""
    settled: bool = False
    """`scale` is the power of two to keep. False derives it from `rms`."""
    format: Format | None = None
    """None is the narrowest compute format among the operands."""
    dtype: torch.dtype | None = None
    """The appearance; None promotes those of the operands."""
    nonnegative: bool = False
    towards: Towards | None = None

    @property
    def held(self) -> Any:
        """The scale that `q` is held under: an Amount, as `rms` is."""
        if self.scale is not None:
            return self.scale
        return torch.ones_like(self.rms) if isinstance(self.rms, Tensor) else ONE
