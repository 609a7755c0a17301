"""What is measured where plain tensors enter: the RMS, by which a scale is chosen."""

import math

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats.tensors import pieces
from scaledtensor.scales import _inductor

__all__ = ["measured_rms"]


def measured_rms(x: Tensor, below: float = float("inf")) -> Tensor:
    """RMS of the elements of a plain tensor whose magnitude is under `below`, 0-dim float32.

    Summed in float64, where no square of a float32 overflows. Infinities and NaNs are left out: one
    of them must not spoil the scale of all others.
    """
    x = x.detach()
    if torch.compiler.is_compiling() and not _torch.is_transforming():
        found: Tensor = torch.ops.scaledtensor.measured(x, below)  # one node of the graph
        return found
    seen = _finite_norm(x) if below == float("inf") else None
    if seen is not None:
        return torch.scalar_tensor(seen / max(x.numel(), 1) ** 0.5, dtype=torch.float32)
    return of_elements(x, below)


def of_elements(x: Tensor, below: float) -> Tensor:
    """`measured_rms` by torch's operators."""
    magnitude = x.double().abs()
    norm = torch.linalg.vector_norm(torch.where(magnitude < below, magnitude, 0.0))
    rms: Tensor = norm / max(x.numel(), 1) ** 0.5
    return rms.float()


def _finite_norm(x: Tensor) -> float | None:
    """The norm in one pass, where seeing that it is finite costs nothing: on a CPU, outside tracing
    and transforms. None elsewhere. By pieces, since the norm makes a copy in float64."""
    if type(x) is not Tensor or not x.is_cpu or _torch.is_transforming():
        return None
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in pieces(x)]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    seen = norm.item()
    return seen if math.isfinite(seen) else None


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("measured(Tensor x, float below) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("measured", of_elements, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::measured", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _measured_fake(x: Tensor, below: float) -> Tensor:
    _inductor.teach()
    return x.new_empty((), dtype=torch.float32)
