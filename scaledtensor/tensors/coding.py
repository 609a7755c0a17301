"""Coding: how the inner tensors of a CodedTensor make its value.

There are two codings.

- Blocks (`formats.quantize_blocks`) have a scale each. NVFP4's scales have two levels, an E4M3FN
  number for each block times one float32 for the tensor. Their product has up to 28 bits, and a
  value of E2M1FN codes has up to 30, where float32 has 24: `x.to(torch.float64).dequantize()` is
  exact.
- Expanded groups (`formats.quantize_expanded`) are groups of consecutive elements, each widened to
  the range of the format. Optimizer states take a byte an element, and five bytes for each group of
  128.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import register_constant

from scaledtensor.errors import FormatError, ScaleError, ShapeError
from scaledtensor.formats import (
    Expanded,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
    TwoLevelScale,
    decode,
    dequantize_blocks,
    dequantize_expanded,
    from_dtype,
)
from scaledtensor.formats.layouts import check_scale_shape, packed_shape
from scaledtensor.scales.powers import MIN_SCALE
from scaledtensor.tensors.wrapper import is_wrapper

__all__ = ["BLOCKS", "Coding", "checked_levels"]


@dataclass(frozen=True)
class Coding:
    """How the inner tensors of a `CodedTensor` make its value.

    Attributes:
        granularity: the elements that share a scale; for expanded groups, their size.
        levels: 1 if a scale is one number. 2 if it is an E4M3FN number for the block times a
            float32 for the tensor.
        expanded: whether each group is widened to the range of the format.
    """

    granularity: Granularity | int
    levels: int = 1
    expanded: bool = False

    @property
    def kind(self) -> str:
        """The name of tensors of this coding in files and messages."""
        return "ExpandedTensor" if self.expanded else "CodedTensor"

    @property
    def inner(self) -> tuple[str, ...]:
        """The names of the inner tensors."""
        return "qdata", "scale", "power" if self.expanded else "rms", "tensor_scale"

    @property
    def facts(self) -> dict[str, Any]:
        """The granularity as JSON has it. The dtype of the scales tells the levels."""
        cut = self.granularity
        if isinstance(cut, PerAxis):
            return {"granularity": {"axis": cut.dim}}
        if isinstance(cut, PerBlock):
            return {"granularity": {"block": list(cut.block)}}
        return {"granularity": {"group": cut} if isinstance(cut, int) else "tensor"}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], scale: Tensor) -> Self:
        """The coding of a tensor that has these facts and this inner tensor `scale`."""
        written = facts["granularity"]
        if written == "tensor":
            cut: Any = PerTensor()
        else:
            ((word, number),) = written.items()
            cut = {"axis": PerAxis, "block": PerBlock, "group": int}[word](number)
        expanded = isinstance(cut, int)
        two = scale.dtype == torch.float8_e4m3fn and not expanded
        return cls(cut, 2 if two else 1, expanded)

    def values(
        self, codes: Tensor, fmt: Format, scales: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor:
        """The plain tensor that codes, one an element, and the other inner tensors stand for."""
        scale, third, whole = scales
        cut: Any = self.granularity
        if self.expanded:
            return (dequantize_expanded(Expanded(codes, scale, third), fmt, cut) * whole).to(dtype)
        levels = TwoLevelScale(scale, whole) if self.levels == 2 else scale
        return dequantize_blocks(codes, levels, fmt, cut, dtype)

    def check(self, fmt: Format, shape: Sequence[int], inner: Sequence[Tensor]) -> None:
        """Raises ShapeError or ScaleError unless the inner tensors fit a tensor of `shape`."""
        qdata, scale, third, whole = inner
        if tuple(qdata.shape) != packed_shape(fmt, shape):
            raise ShapeError(
                f"codes of {fmt.name} for {tuple(shape)} do not have shape {tuple(qdata.shape)}"
            )
        if not self.expanded:
            check_scale_shape(scale, cast(Granularity, self.granularity), shape)
            check_scale_shape(whole, PerTensor(), shape)
            return
        size, group = math.prod(shape), cast(int, self.granularity)
        groups = -(-size // group)
        if not scale.shape == third.shape == (groups,):
            raise ShapeError(
                f"{size} codes in groups of {group} have {groups} largest magnitudes and as "
                f"many powers; got {tuple(scale.shape)} and {tuple(third.shape)}"
            )
        if whole.shape != ():
            raise ScaleError(f"the unit of a tensor is one number; got shape {tuple(whole.shape)}")


# torch.compile takes it as a constant, and not as a source of symbolic integers.
register_constant(Coding)

#: The coding with one scale for the tensor.
BLOCKS = Coding(PerTensor())


# --- scales that a user gives ----------------------------------------------------------------


def checked_levels(
    given: Any, fmt: Format, granularity: Granularity, codes: Tensor
) -> tuple[Tensor, Tensor]:
    """The inner tensors `scale` and `tensor_scale` for the scales that a user gave."""
    if not isinstance(given, TwoLevelScale):
        if isinstance(given, Tensor) and given.dtype == torch.float8_e8m0fnu:
            given = decode(given, from_dtype(given.dtype))
        scale = _checked_scales(given, torch.float32, granularity, codes)
        return scale, torch.ones((), device=scale.device, dtype=torch.float32)
    if fmt.bits > 8:
        raise FormatError(f"two-level scales are for elements of 8 bits or fewer, not {fmt!r}")
    block = _checked_scales(given.block, torch.float8_e4m3fn, granularity, codes)
    whole = _checked_scales(given.tensor, torch.float32, PerTensor(), codes)
    if not whole.is_meta and whole.isnan():
        raise ScaleError("the scale of the tensor is positive and finite; got nan")
    return block, whole


def _checked_scales(
    scale: Any, dtype: torch.dtype, granularity: Granularity, codes: Tensor
) -> Tensor:
    """A copy of `scale`. Its numbers are checked unless they are on the meta device."""
    if not isinstance(scale, Tensor) or is_wrapper(scale):
        raise ScaleError(
            "scales are a plain torch.Tensor or a TwoLevelScale of them; got "
            f"{type(scale).__name__}"
        )
    if scale.dtype != dtype:
        raise ScaleError(
            "scales are float32 or float8_e8m0fnu, or a TwoLevelScale of float8_e4m3fn for the "
            f"blocks and float32 for the tensor; got {scale.dtype} in place of {dtype}"
        )
    check_scale_shape(scale, granularity, codes.shape)
    if scale.device != codes.device:
        raise ScaleError(f"codes are on {codes.device}, their scales on {scale.device}")
    if not scale.is_meta:
        numbers = scale.detach().float()
        # NaN marks a block that held one, as in OCP MX; 2**-127 is the least scale of E8M0.
        usable = (numbers >= MIN_SCALE / 2) & (numbers < float("inf")) | numbers.isnan()
        if not usable.all():
            raise ScaleError(f"scales are positive and finite; got {numbers[~usable][0].item()}")
    held: Tensor = scale.detach().clone()
    return held
