"""Second moments under a Gaussian, by quadrature: for functions whose integral has no closed form.

`gaussian_rms("atan", r)` is sqrt(E atan(r z)^2) for z ~ N(0, 1), from nothing but r: no element of
a tensor is read. The trapezoid rule runs over ln|z|, from 2^-40 to 4.75, so that it resolves what a
function does near zero under any r (1 / (1 + x^2) is a needle where r is large), and stops where a
tensor of a million elements stops. Beyond that the moment of an exponential lives in elements that
no tensor has.

It is an operator of its own, so that eager and compiled code get the same bits: compilers do not
look inside. On a CPU each answer is remembered by its r.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from scaledtensor.verbs import LIBRARY

__all__ = ["gaussian_rms", "integrand"]

_STEP = 1 / 8
_FIRST, _COUNT = -40, 339  # of |z|, up to 2^2.25
_LARGEST = 2.0**100
_LEAST = 2.0**-60


class Integrand(NamedTuple):
    function: Callable[..., Tensor]
    """Elementwise, (v, *parameters). NaN marks what is outside its domain, which is left out."""
    heavy: bool
    """Without a second moment (1 / z): the median of |f| stands for its root."""


_INTEGRANDS: dict[str, Integrand] = {}


def integrand(name: str, function: Callable[..., Tensor], *, heavy: bool = False) -> str:
    """Name an elementwise function for `gaussian_rms`; returns the name."""
    _INTEGRANDS[name] = Integrand(function, heavy)
    return name


def gaussian_rms(name: str, rms: Tensor, *parameters: float, nonnegative: bool = False) -> Tensor:
    """RMS of the named function of a Gaussian of RMS `rms`, or of its absolute value.

    0-dim float32 in and out. Zero only where `rms` is zero and the function vanishes there.
    """
    numbers = tuple(float(p) for p in parameters)
    if type(rms) is Tensor and rms.is_cpu and not torch.compiler.is_compiling():
        number = _remembered(rms.item(), name, numbers, nonnegative)
        return torch.scalar_tensor(number, dtype=torch.float32)
    result: Tensor = torch.ops.scaledtensor.gaussian_rms(rms, name, numbers, nonnegative)
    return result


LIBRARY.define(  # type: ignore[no-untyped-call]
    "gaussian_rms(Tensor rms, str name, float[] parameters, bool nonnegative) -> Tensor"
)


def _compute(rms: Tensor, name: str, parameters: list[float], nonnegative: bool) -> Tensor:
    if rms.is_cpu:
        number = _remembered(rms.item(), name, tuple(parameters), nonnegative)
        return torch.scalar_tensor(number, dtype=torch.float32)
    return _integral(rms, name, parameters, nonnegative)


@lru_cache(maxsize=8192)
def _remembered(rms: float, name: str, parameters: tuple[float, ...], nonnegative: bool) -> float:
    single = torch.scalar_tensor(rms, dtype=torch.float32)
    return _integral(single, name, list(parameters), nonnegative).item()


def _integral(rms: Tensor, name: str, parameters: list[float], nonnegative: bool) -> Tensor:
    function, heavy = _INTEGRANDS[name]
    # Made on the device: a copy from the host cannot be captured in a CUDA graph.
    t = torch.arange(_COUNT, dtype=torch.float64, device=rms.device) * _STEP + _FIRST
    z = torch.exp2(t)
    weight = z * torch.exp(-z.square() / 2)
    v = z * rms
    if not nonnegative:
        v, weight = torch.cat((v, -v)), torch.cat((weight, weight))
    f = function(v, *parameters).double().abs()
    counted = f.isfinite()
    weight = torch.where(counted, weight, 0.0)
    f = torch.where(counted, f, 0.0).clamp_max(_LARGEST)
    total = weight.sum().clamp_min(1e-300)
    if heavy:
        ordered, index = f.sort()
        half = (weight[index].cumsum(0) < total / 2).sum().clamp_max(f.numel() - 1)
        result = ordered.index_select(0, half.view(1))[0]
    else:
        result = ((weight * f.square()).sum() / total).sqrt()
    floor = torch.where(rms > 0, _LEAST, 0.0)
    return torch.maximum(result.clamp_max(_LARGEST), floor).float()


LIBRARY.impl(  # type: ignore[no-untyped-call]
    "gaussian_rms", _compute, "CompositeExplicitAutograd"
)


@torch.library.register_fake("scaledtensor::gaussian_rms", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(rms: Tensor, name: str, parameters: list[float], nonnegative: bool) -> Tensor:
    return torch.empty_like(rms)
