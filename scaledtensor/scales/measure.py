"""Numbers that are measured on the elements of a plain tensor. Each of them is defined here, once.

    RMS           root mean square; it chooses the scale of a plain tensor (`measured_rms`)
    amax          largest finite magnitude; 0 for a tensor without elements (`amax`)
    beyond        elements whose magnitude is over the largest value of a format
    at the limit  elements whose magnitude is that largest value, or over it
    underflowed   elements that are not zero and that the format rounds to zero

All of them leave infinities and NaNs out: one of those must not spoil the scale, or the statistics,
of all other elements. `beyond` is for elements before a cast. A cast saturates, so only `at_limit`
finds these elements after it.

`measured_rms` divides by the number of all elements, as a scale needs. `root_mean_square` divides
by the number of finite ones, as statistics need. The two agree for a tensor of finite elements.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of, is_readable
from scaledtensor.formats import Format
from scaledtensor.formats.tensors import pieces
from scaledtensor.native import elements
from scaledtensor.scales import _inductor
from scaledtensor.scales.singles import Single, rounded, single_of

__all__ = [
    "amax",
    "amax_and_squares",
    "at_limit",
    "beyond",
    "finite_magnitudes",
    "finite_norm",
    "measured_if_real",
    "measured_rms",
    "root_mean_square",
    "rounds_to_zero",
    "underflowed",
    "within",
]

_LARGEST = torch.finfo(torch.float32).max


# --- the RMS by which a scale is chosen ------------------------------------------------------


def measured_rms(x: Tensor, below: float = float("inf")) -> Tensor:
    """RMS of the elements of a plain tensor whose magnitude is under `below`, 0-dim float32.

    The sum is in float64, where no square of a float32 overflows. Elements that are left out count
    as zeros.
    """
    x = x.detach() if x.requires_grad else x
    if torch.compiler.is_compiling() and not _torch.is_transforming():
        node: Tensor = torch.ops.scaledtensor.measured(x, below)  # one node of the graph
        return node
    seen = finite_norm(x) if below == float("inf") else None
    if seen is not None:
        # The root of a sum of squares may be just above the largest number that is in the sum.
        found = min(seen / max(x.numel(), 1) ** 0.5, _LARGEST)
        return torch.scalar_tensor(found, dtype=torch.float32)
    return of_elements(x, below)


def measured_if_real(rms: Single, q: Tensor, held: Any, waits: bool = False) -> Single:
    """Return the measured RMS of elements under the scale `held`, in place of an expected one. Zero
    is kept, since it is exact. So is any number where the measurement has to be traced, or, without
    `waits`, where reading the elements would cost a wait."""
    held = single_of(held)
    known = type(held) is Single and type(q) is Tensor and q.layout is torch.strided
    if not (rms and known):
        return rms
    read = is_readable(q) if waits else backend_of(q).host
    if not read or _torch.is_transforming():
        return rms
    return Single(rounded(float.__mul__(held, measured_rms(q).item())))


def of_elements(x: Tensor, below: float) -> Tensor:
    """The same as `measured_rms`, in operators of torch."""
    magnitude = x.double().abs()
    norm = torch.linalg.vector_norm(torch.where(magnitude < below, magnitude, 0.0))
    rms: Tensor = norm / max(x.numel(), 1) ** 0.5
    return rms.float()


def finite_norm(x: Tensor) -> float | None:
    """The 2-norm of a plain tensor in one pass. None if it is not finite, or if reading it would
    cost a wait.

    Reading costs nothing on a CPU, outside of tracing and of transforms. torch makes a copy in
    float64, so it takes the norm of pieces.
    """
    if type(x) is not Tensor or not backend_of(x).host or _torch.is_transforming():
        return None
    squares = elements.squares(x)
    if squares is not None:
        return math.sqrt(squares) if math.isfinite(squares) else None
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in pieces(x)]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    seen = norm.item()
    return seen if math.isfinite(seen) else None


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define("measured(Tensor x, float below) -> Tensor")
_LIBRARY.impl("measured", of_elements, "CompositeExplicitAutograd")


@_inductor.imagined("measured", _LIBRARY)
def _measured_fake(x: Tensor, below: float) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


# --- amax ------------------------------------------------------------------------------------


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of `x`, 0-dim, in its dtype; 0 if it has no elements."""
    size = x.abs().nan_to_num(0.0, 0.0, 0.0)
    return size.amax() if size.numel() else size.sum()


#: float32 holds the sum of squares of elements below this, however many there are.
_SQUARES = 2.0**40


def amax_and_squares(x: Tensor) -> tuple[Tensor, float, float]:
    """`x` with zeros for infinities and NaNs, its amax, and the sum of its squares.

    The guard measures operands in training steps. So in the usual case this takes one pass on a
    CPU, and two vectorised passes elsewhere. It waits for the device. `x` has elements.
    """
    found = elements.magnitudes(x)
    if found is not None and found[0] < _SQUARES:
        return x, *found
    largest = _largest(x)
    if not math.isfinite(largest):
        x = x.nan_to_num(0.0, 0.0, 0.0)
        largest = _largest(x)
    if largest < _SQUARES:
        norm = float(torch.linalg.vector_norm(x.float()))
        return x, largest, norm**2
    return x, largest, float(measured_rms(x)) ** 2 * x.numel()


def within(x: Tensor, limit: float) -> int:
    """The number of magnitudes up to `limit`, which is not negative. It waits for the device."""
    found = elements.within(x, limit)
    return int((x.abs() <= limit).sum()) if found is None else found


def _largest(x: Tensor) -> float:
    low, high = map(float, torch.aminmax(x))
    return math.nan if math.isnan(low) else max(-low, high)


# --- statistics of magnitudes ----------------------------------------------------------------


def finite_magnitudes(x: Tensor) -> Tensor:
    """The magnitudes of the finite elements of a float64 tensor, as one dimension."""
    size = x.abs()
    return size[size.isfinite()]


def root_mean_square(size: Tensor) -> Tensor:
    """The RMS of finite magnitudes, 0-dim in their dtype; 0 if there are none."""
    return size.square().mean().sqrt() if size.numel() else size.new_zeros(())


def beyond(size: Tensor, fmt: Format, factor: float = 1.0) -> Tensor:
    """The number of magnitudes that `fmt` saturates under a scale that is `factor`, a power of two,
    times theirs. 0-dim, int64."""
    return (size > fmt.max * factor).sum()


def at_limit(size: Tensor, fmt: Format) -> Tensor:
    """The number of magnitudes that are the largest value of `fmt` or larger. 0-dim, int64."""
    return (size >= fmt.max).sum()


def underflowed(size: Tensor, fmt: Format, factor: float = 1.0) -> Tensor:
    """The number of magnitudes that are not zero and that `fmt` rounds to zero, under a scale that
    is `factor`, a power of two, times theirs. 0-dim, int64."""
    return ((size > 0) & (size <= rounds_to_zero(fmt) * factor)).sum()


def rounds_to_zero(fmt: Format) -> float:
    """The largest magnitude that `fmt` rounds to zero, to nearest even; -1 if it has no zero.

    The middle between zero and the smallest value is a tie, and zero is the even one.
    """
    return fmt.min_subnormal / 2 if fmt.has_zero else -1.0
