"""ExpandedTensor: a tensor kept in groups that are widened to the range of an 8-bit format.

For the states of an optimizer (`formats.expansion` has the formula): a byte an element, and five
for each group of 128. As a `CodedTensor` it is for keeping: a copy, a device, a file. Any other
operator reads it as an ordinary ScaledTensor of the same value, and nothing is written into its
codes by one: the optimizer that owns them does that.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from scaledtensor.errors import ScaleError, ShapeError
from scaledtensor.formats import (
    Expanded,
    Format,
    FormatLike,
    dequantize_expanded,
    pack,
    quantize_expanded,
)
from scaledtensor.formats import get as get_format
from scaledtensor.formats.layouts import packed_shape
from scaledtensor.formats.rounding import Rounding
from scaledtensor.formats.stochastic import Randomness
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import checked_scale
from scaledtensor.tensors.coded import CodedTensor, as_bytes
from scaledtensor.tensors.storable import appearance
from scaledtensor.tensors.tensor import is_parameter, with_autograd

__all__ = ["ExpandedTensor"]


class ExpandedTensor(CodedTensor):
    """The values of a plain tensor in groups of consecutive elements, each widened to the range of
    `format`: `formats.quantize_expanded`.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape. No gradient flows through.
        format: a signed format of 8 bits or fewer with a zero, bf16 or fp16, or its name.
        group: how many elements are a group.
        dtype: what autograd and optimizers see; by default `x.dtype`.
        tensor_scale: a power of two that `x` is held in units of.
        rounding, generator: as `formats.quantize_expanded` takes them.

    Attributes:
        qdata: the codes, contiguous, those under 8 bits packed.
        scale: the largest magnitude of each group, float32; in 16 bits a power of two. Negative
            where a magnitude that stands out is held apart (`formats.spikes`).
        power: the power of each group in sixteenths, uint8.
        tensor_scale: the unit of all of it, 0-dim float32.
        granularity: the number of elements in a group.

    Raises:
        DTypeError, FormatError, ShapeError, ScaleError: an argument is outside what is allowed.
    """

    granularity: int  # type: ignore[assignment]
    power: Tensor

    INNER: ClassVar[tuple[str, ...]] = ("qdata", "scale", "power", "tensor_scale")

    @staticmethod
    def __new__(
        cls,
        x: Tensor,
        format: FormatLike = "e4m3fn",
        group: int = 128,
        *,
        dtype: torch.dtype | None = None,
        tensor_scale: float | Tensor = 1.0,
        rounding: Rounding = "nearest_even",
        generator: Randomness = None,
    ) -> Self:
        fmt = get_format(format)
        unit = checked_scale(tensor_scale, x.device, power_of_two=True)
        made = quantize_expanded(
            x.detach() / unit, fmt, group, rounding=rounding, generator=generator
        )
        return cls.of(made, fmt, group, appearance(dtype or x.dtype), unit)

    @classmethod
    def of(cls, made: Expanded, fmt: Format, group: int, dtype: torch.dtype, unit: Tensor) -> Self:
        """Around what `quantize_expanded` made, unchecked; of codes in 8 or 16 bits, no copy."""
        packed = pack(made.codes, fmt).contiguous()
        context: Any = (fmt, dtype, None, False, group)
        return cls.keep(packed, made.amax, made.power, unit, made.codes.shape, *context)

    @classmethod
    def keep(cls, qdata: Tensor, scale: Tensor, power: Tensor, *rest: Any) -> Self:
        self = super().keep(qdata, scale, power, *rest)
        self.power = power
        return self

    @property
    def rms(self) -> Tensor:
        """Measured: no rule expects anything of this tensor."""
        return measured_rms(self.value_in(torch.float32))

    @rms.setter
    def rms(self, given: Tensor) -> None:
        """The place of `power` in the constructor that all kinds of tensors share."""

    def value_in(self, dtype: torch.dtype) -> Tensor:
        held = Expanded(self.codes, self.scale, self.power)
        values = dequantize_expanded(held, self.format, self.granularity) * self.tensor_scale
        return values.to(dtype)

    def _refusal_of_writing(self, func: Any) -> str:
        return (
            f"{func} would write into a state in few bits, which an optimizer of torch.optim does "
            "not read: load plain_state_dict() of the optimizer that kept it (an optimizer of "
            "scaledtensor.optim with state_format='fp32' loads either), or step with that one"
        )

    def _spelled_scale(self) -> str:
        return f"groups of {self.granularity}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        context = (self.format.name, self.dtype, self.granularity)
        inner = tuple(as_bytes(getattr(self, name)) for name in self.INNER)
        return _rebuild, (inner, tuple(self.shape), context, self.requires_grad, is_parameter(self))


def _rebuild(
    inner: tuple[Tensor, Tensor, Tensor, Tensor],
    shape: tuple[int, ...],
    context: tuple[str, torch.dtype, int],
    requires_grad: bool,
    is_param: bool,
) -> ExpandedTensor:
    """Unpickle. A module-level function, so that `weights_only` loading can allow it by name."""
    (qdata, amax, power, unit), (name, dtype, group) = inner, context
    fmt = get_format(name)
    if fmt.bits == 8:
        qdata = qdata.view(fmt.storage_dtype)
    if tuple(qdata.shape) != packed_shape(fmt, shape):
        raise ShapeError(f"codes of {fmt.name} for {shape} do not have shape {tuple(qdata.shape)}")
    groups = -(-qdata.numel() // group)
    if fmt.bits >= 8 and not amax.shape == power.shape == (groups,):
        raise ShapeError(
            f"{qdata.numel()} codes in groups of {group} have {groups} largest magnitudes and as "
            f"many powers; got {tuple(amax.shape)} and {tuple(power.shape)}"
        )
    if unit.shape != ():
        raise ScaleError(f"the unit of a tensor is one number; got shape {tuple(unit.shape)}")
    whole: Any = (fmt, dtype, None, False, group)
    made = ExpandedTensor.keep(qdata, amax, power, unit, shape, *whole)
    return with_autograd(made, requires_grad, is_param)


torch.serialization.add_safe_globals([_rebuild, ExpandedTensor])
