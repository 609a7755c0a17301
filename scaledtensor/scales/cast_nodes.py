"""Casts as single nodes of a graph.

As torch's operators, a cast to 8 bits is eight to forty nodes. Most codes in a traced graph are
never read, since an emulated product takes the values. So in traced code a cast is one of the
operators here. Inductor writes the torch operators of the cast into the kernels around it
(`scaledtensor.scales._inductor`). Other backends call the operator.
"""

import typing

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import encode, get
from scaledtensor.formats.bits import Overflow
from scaledtensor.formats.rounding import round_by_arithmetic
from scaledtensor.scales import _inductor

__all__ = ["codes_of", "encoded", "rounded", "values_of"]


def values_of(x: Tensor, format: str) -> Tensor:
    """The rounded values of `x` (`round_by_arithmetic`) in bfloat16, which holds every value of an
    8-bit format."""
    if _torch.is_transforming():
        return rounded(x, format)
    made: Tensor = torch.ops.scaledtensor.rounded(x, format)
    return made


def codes_of(x: Tensor, format: str, overflow: Overflow) -> Tensor:
    """The codes of `x` (`encode`), to nearest even."""
    if _torch.is_transforming():
        return encoded(x, format, overflow)
    made: Tensor = torch.ops.scaledtensor.encoded(x, format, overflow)
    return made


def rounded(x: Tensor, format: str) -> Tensor:
    return round_by_arithmetic(x, get(format)).to(torch.bfloat16)


def encoded(x: Tensor, format: str, overflow: str) -> Tensor:
    return encode(x, format, overflow=typing.cast(Overflow, overflow))


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("rounded(Tensor x, str format) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "encoded(Tensor x, str format, str overflow) -> Tensor"
)
_LIBRARY.impl("rounded", rounded, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("encoded", encoded, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::rounded", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _rounded_fake(x: Tensor, format: str) -> Tensor:
    _inductor.teach()
    return x.abs().to(torch.bfloat16)  # has the strides of an elementwise operator's result


@torch.library.register_fake("scaledtensor::encoded", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _encoded_fake(x: Tensor, format: str, overflow: str) -> Tensor:
    _inductor.teach()
    return x.abs().to(get(format).storage_dtype)
