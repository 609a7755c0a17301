"""ExpandedTensor: a tensor kept in groups that are widened to the range of an 8-bit format.

For the states of an optimizer (`formats.expansion` has the formula): a byte an element, and five
for each group of 128. As a `CodedTensor` it is for keeping: a copy, a device, a file. Any other
operator reads it as an ordinary ScaledTensor, and nothing is written into its codes.
"""

from typing import Any, Self

import torch
from torch import Tensor

from scaledtensor.coded import CodedTensor
from scaledtensor.errors import ShapeError
from scaledtensor.formats import (
    Expanded,
    Format,
    dequantize_expanded,
    pack,
    quantize_expanded,
)
from scaledtensor.formats import get as get_format
from scaledtensor.formats.packing import packed_shape
from scaledtensor.formats.rounding import Rounding
from scaledtensor.formats.stochastic import Randomness
from scaledtensor.tensor import appearance, is_parameter, measured_rms, with_autograd

__all__ = ["ExpandedTensor"]


class ExpandedTensor(CodedTensor):
    """The values of a plain tensor in groups of consecutive elements, each widened to the range of
    `format`: `formats.quantize_expanded`.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape. No gradient flows through.
        format: a signed format of 8 bits or fewer with a zero, or its name.
        group: how many elements are a group.
        dtype: what autograd and optimizers see; by default `x.dtype`.
        rounding, generator: of the codes, as `formats.encode` takes them.

    Attributes:
        qdata: the codes, contiguous, those under 8 bits packed.
        scale: the largest magnitude of each group, float32.
        tensor_scale: the power of each group in sixteenths, uint8.
        granularity: the number of elements in a group.

    Raises:
        DTypeError, FormatError, ShapeError: an argument is outside what is allowed.
    """

    granularity: int  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        x: Tensor,
        format: Format | str = "e4m3fn",
        group: int = 128,
        *,
        dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest_even",
        generator: Randomness = None,
    ) -> Self:
        fmt = get_format(format)
        made = quantize_expanded(x, fmt, group, rounding=rounding, generator=generator)
        seen = appearance(dtype or x.dtype)
        return cls.of(made, fmt, group, seen, measured_rms(x.detach()))

    @classmethod
    def of(cls, made: Expanded, fmt: Format, group: int, dtype: torch.dtype, rms: Tensor) -> Self:
        """What `quantize_expanded` made, unchecked."""
        packed = pack(made.codes, fmt).contiguous()
        context: Any = (fmt, dtype, None, False, group)
        return cls.keep(packed, made.amax, rms, made.power, made.codes.shape, *context)

    def value_in(self, dtype: torch.dtype) -> Tensor:
        held = Expanded(self.codes, self.scale, self.tensor_scale)
        return dequantize_expanded(held, self.format, self.granularity, dtype)

    def _spelled_scale(self) -> str:
        return f"groups of {self.granularity}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        context = (self.format.name, self.dtype, self.granularity)
        inner = tuple(_as_bytes(getattr(self, name)) for name in self.INNER)
        return _rebuild, (inner, tuple(self.shape), context, self.requires_grad, is_parameter(self))


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _rebuild(
    inner: tuple[Tensor, Tensor, Tensor, Tensor],
    shape: tuple[int, ...],
    context: tuple[str, torch.dtype, int],
    requires_grad: bool,
    is_param: bool,
) -> ExpandedTensor:
    """Unpickle. A module-level function, so that `weights_only` loading can allow it by name."""
    (qdata, amax, rms, power), (name, dtype, group) = inner, context
    fmt = get_format(name)
    if fmt.bits >= 8:
        qdata = qdata.view(fmt.storage_dtype)
    if tuple(qdata.shape) != packed_shape(fmt, shape):
        raise ShapeError(f"codes of {fmt.name} for {shape} do not have shape {tuple(qdata.shape)}")
    whole: Any = (fmt, dtype, None, False, group)
    made = ExpandedTensor.keep(qdata, amax, rms, power, shape, *whole)
    made.value_in(dtype)  # raises where there is not one M and p a group
    return with_autograd(made, requires_grad, is_param)


torch.serialization.add_safe_globals([_rebuild, ExpandedTensor])
