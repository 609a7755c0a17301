"""Normalisations. Unlike torch's, they have no gains and shifts by default."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.scaling import Constraint
from scaledtensor.nn.common import Scaled, tag_own

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(Scaled, nn.LayerNorm):
    """`functional.layer_norm`. Takes the arguments of `torch.nn.LayerNorm`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
    ) -> None:
        shape = _shape(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.constraint = constraint
        tag_own(self, "norm")

    def forward(self, input: Tensor) -> Tensor:
        return U.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, self.constraint
        )


class RMSNorm(Scaled, nn.RMSNorm):
    """`functional.rms_norm`: x / sqrt(mean(x^2) + eps), over the trailing dimensions.

    Args:
        normalized_shape: shape of the trailing dimensions.
        eps: added under the root; None is torch's default, the dtype's epsilon.
        elementwise_affine: whether to multiply by gains, which start at one.
        device: device of the gains.
        dtype: dtype of the gains.
        constraint: "exact" gives the true gradient of the gains.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine, device, dtype)
        self.constraint = constraint
        tag_own(self, "norm")

    def forward(self, input: Tensor) -> Tensor:
        return U.rms_norm(input, self.normalized_shape, self.weight, self.eps, self.constraint)


class GroupNorm(Scaled, nn.GroupNorm):
    """`functional.group_norm` of (batch, channels, ...). Takes the arguments of
    `torch.nn.GroupNorm`."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.constraint = constraint
        tag_own(self, "norm")

    def forward(self, input: Tensor) -> Tensor:
        return U.group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, self.constraint
        )


class _BatchNorm(Scaled):
    weight: Any
    bias: Any
    eps: float
    momentum: float | None
    track_running_stats: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    constraint: Constraint
    _check_input_dim: Callable[[Tensor], None]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.constraint = constraint
        tag_own(self, "norm")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        tracking = self.training and self.track_running_stats
        return U.batch_norm(
            input,
            self.running_mean if tracking or not self.training else None,
            self.running_var if tracking or not self.training else None,
            self.weight,
            self.bias,
            training=self.training or self.running_mean is None,
            momentum=self._next_momentum() if tracking else 0.0,
            eps=self.eps,
            constraint=self.constraint,
        )

    def _next_momentum(self) -> float:
        """Count the batch. Without a momentum, the statistics are means over all batches."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 1 / float(self.num_batches_tracked or 1)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`functional.batch_norm` of (batch, channels) or (batch, channels, length). Takes the
    arguments of `torch.nn.BatchNorm1d`."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`functional.batch_norm` of (batch, channels, height, width). Takes the arguments of
    `torch.nn.BatchNorm2d`."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`functional.batch_norm` of (batch, channels, depth, height, width). Takes the arguments of
    `torch.nn.BatchNorm3d`."""


def _shape(normalized_shape: int | Sequence[int]) -> list[int]:
    single = isinstance(normalized_shape, int)
    return [normalized_shape] if single else list(normalized_shape)  # type: ignore[list-item, arg-type]
