"""Convolutions and transposed convolutions. Unlike torch's, they have no bias by default."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.convolutions import Sizes
from scaledtensor.functional.scaling import Constraint, product
from scaledtensor.mup import MupType
from scaledtensor.nn.common import Weighted, tag_own

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
]


class _AnyConv(Weighted):
    """torch's attributes of a convolution and of a transposed convolution."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any


class _Conv(_AnyConv):
    function: ClassVar[Callable[..., Tensor]]

    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self.constraint = constraint
        tag_own(self, weight_mup_type)

    def forward(self, input: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = 0
        return type(self).function(
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            self.constraint,
        )


class Conv1d(_Conv, nn.Conv1d):
    """`functional.conv1d`. Takes the arguments of `torch.nn.Conv1d`, a constraint and a tag."""

    function = staticmethod(U.conv1d)


class Conv2d(_Conv, nn.Conv2d):
    """`functional.conv2d`. Takes the arguments of `torch.nn.Conv2d`, a constraint and a tag."""

    function = staticmethod(U.conv2d)


class Conv3d(_Conv, nn.Conv3d):
    """`functional.conv3d`. Takes the arguments of `torch.nn.Conv3d`, a constraint and a tag."""

    function = staticmethod(U.conv3d)


class _ConvTranspose(_AnyConv):
    function: ClassVar[Callable[..., Tensor]]

    _output_padding: Callable[..., list[int]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self.constraint = constraint
        # One tap in `stride` meets an input. The shape [in, out, *taps] does not contain the
        # stride.
        terms = in_channels // groups * product(self.kernel_size) // product(self.stride)
        tag_own(self, weight_mup_type, fan_in=max(terms, 1))

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,
            self.padding,
            self.kernel_size,
            len(self.kernel_size),
            self.dilation,
        )
        return type(self).function(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
            self.constraint,
        )


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`functional.conv_transpose1d`. Takes the arguments of `torch.nn.ConvTranspose1d`, a
    constraint and a tag."""

    function = staticmethod(U.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`functional.conv_transpose2d`. Takes the arguments of `torch.nn.ConvTranspose2d`, a
    constraint and a tag."""

    function = staticmethod(U.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`functional.conv_transpose3d`. Takes the arguments of `torch.nn.ConvTranspose3d`, a
    constraint and a tag."""

    function = staticmethod(U.conv_transpose3d)
