"""Kinds of devices, each with the facts that this library needs: one `Backend` in one file.

`backend_of(x)` returns the backend of a tensor or a device. A kind of device without a file gets
`OTHER`, in which every field has its default. To add a backend, write a file with one `Backend` and
add it to `BACKENDS` (CONTRIBUTING.md).
"""

import torch
from torch import Tensor

from scaledtensor.backends.backend import Backend, Choice, Codes, Sharing, Units
from scaledtensor.backends.cpu import CPU
from scaledtensor.backends.cuda import CUDA

__all__ = [
    "BACKENDS",
    "CPU",
    "CUDA",
    "META",
    "OTHER",
    "Backend",
    "Choice",
    "Codes",
    "Sharing",
    "Units",
    "backend_of",
    "is_readable",
    "units_of",
]

#: Tensors that have a shape and no elements.
META = Backend("meta", has_elements=False)

#: Every other kind of device.
OTHER = Backend("other")

#: `torch.device.type` -> its backend, in the order in which `scaledtensor.hardware` lists them.
BACKENDS = {backend.name: backend for backend in (CPU, CUDA, META)}


def backend_of(x: Tensor | torch.device) -> Backend:
    """Return the backend of a tensor or a device."""
    if isinstance(x, torch.device):
        return BACKENDS.get(x.type, OTHER)
    if x.is_cpu:
        return CPU
    return BACKENDS.get(x.device.type, OTHER)


def is_readable(x: Tensor) -> bool:
    """Whether the host can read the elements of `x` now. It waits for a device that has its own
    memory. A graph of kernels that is being recorded computes nothing yet."""
    backend = backend_of(x)
    return backend.host or (backend.has_elements and not backend.is_capturing())


def units_of(x: Tensor) -> Units | None:
    """Return the FP8 units of the device of `x`; None if this library knows of none."""
    find = backend_of(x).units
    return None if find is None else find(x.device)
