"""Losses as modules. They take torch's arguments, a `constraint`, and `mult` if their function
does. With `constraint="exact"` the gradient is the true one."""

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.scaling import Constraint
from scaledtensor.nn.common import Scaled

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class CrossEntropyLoss(Scaled, nn.CrossEntropyLoss):
    """`functional.cross_entropy`."""

    _settings = ("mult", "constraint")

    def __init__(
        self,
        mult: float = 1.0,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            mult=self.mult,
            constraint=self.constraint,
        )


class NLLLoss(Scaled, nn.NLLLoss):
    """`functional.nll_loss`."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        constraint: Constraint = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction)
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.nll_loss(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            constraint=self.constraint,
        )


class BCEWithLogitsLoss(Scaled, nn.BCEWithLogitsLoss):
    """`functional.binary_cross_entropy_with_logits`."""

    _settings = ("mult", "constraint")

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        mult: float = 1.0,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction, pos_weight)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.binary_cross_entropy_with_logits(
            input,
            target,
            weight=self.weight,
            reduction=self.reduction,
            pos_weight=self.pos_weight,
            mult=self.mult,
            constraint=self.constraint,
        )


class MSELoss(Scaled, nn.MSELoss):
    """`functional.mse_loss`."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        constraint: Constraint = None,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.mse_loss(input, target, reduction=self.reduction, constraint=self.constraint)


class L1Loss(Scaled, nn.L1Loss):
    """`functional.l1_loss`."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        constraint: Constraint = None,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.l1_loss(input, target, reduction=self.reduction, constraint=self.constraint)


class SmoothL1Loss(Scaled, nn.SmoothL1Loss):
    """`functional.smooth_l1_loss`."""

    _settings = ("beta", "constraint")

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        beta: float = 1.0,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(size_average, reduce, reduction, beta)
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.smooth_l1_loss(
            input,
            target,
            reduction=self.reduction,
            beta=self.beta,
            constraint=self.constraint,
        )


class KLDivLoss(Scaled, nn.KLDivLoss):
    """`functional.kl_div`."""

    _settings = ("log_target", "constraint")

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
        constraint: Constraint = None,
    ) -> None:
        super().__init__(size_average, reduce, reduction, log_target)
        self.constraint = constraint

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return U.kl_div(
            input,
            target,
            reduction=self.reduction,
            log_target=self.log_target,
            constraint=self.constraint,
        )
