"""Losses as modules: torch's arguments, and where their functions have them, `mult` and
`constraint`. With `constraint="exact"` the gradient is the true one."""

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.scaling import Constraint
from scaledtensor.nn.common import described

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`functional.cross_entropy`."""

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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class NLLLoss(nn.NLLLoss):
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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """`functional.binary_cross_entropy_with_logits`."""

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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class MSELoss(nn.MSELoss):
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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")


class L1Loss(nn.L1Loss):
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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")


class SmoothL1Loss(nn.SmoothL1Loss):
    """`functional.smooth_l1_loss`."""

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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "beta", "constraint")


class KLDivLoss(nn.KLDivLoss):
    """`functional.kl_div`."""

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

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "log_target", "constraint")
