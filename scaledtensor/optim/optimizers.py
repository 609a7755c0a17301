"""SGD, Adam, AdamW, Muon and Lion, with learning rates by u-muP's rules and states in few bits.

Of parameters of which none is tagged they are torch.optim's classes: the learning rate and the
weight decay are those of torch.

Schedulers that multiply the learning rates of the groups work as they are. Those that set one, such
as `OneCycleLR`, overwrite the scaled ones: give them a list, one for each of `param_groups`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from scaledtensor.errors import MupError
from scaledtensor.formats import FormatLike
from scaledtensor.optim.groups import (
    GroupRule,
    LRScale,
    Tagged,
    groups_of,
    lr_scale_func_adam,
    lr_scale_func_muon,
    lr_scale_func_sgd,
)
from scaledtensor.optim.states import LowPrecision

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon"]


class _Scaled(LowPrecision):
    """Splits each parameter group that is added, at construction or later, by learning rate."""

    _rule: GroupRule

    def _prepare(
        self,
        params: ParamsT,
        lr_scale: LRScale,
        tagged: Tagged,
        weight_decay: float | None,
        usual_decay: float,
        low: dict[str, Any],
    ) -> tuple[list[dict[str, Any]], float]:
        """Before the constructor of torch's class: the groups, and the weight decay."""
        groups = groups_of(params)
        self._rule = GroupRule.of(groups, lr_scale, tagged)
        self._choose(**low)
        if weight_decay is None:
            weight_decay = 0.0 if self._rule.scales else usual_decay
        return groups, weight_decay

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for group in self._rule.split(self.defaults | param_group):
            super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_rule": self._rule}


class SGD(_Scaled, torch.optim.SGD):
    """`torch.optim.SGD`, its learning rates by `lr_scale_func_sgd`.

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged ones or plain.
        lr: the learning rate before the rule; groups may have their own.
        momentum: as of torch.
        dampening: as of torch.
        weight_decay: see `scaled_parameters`, as the next. By default 0, and torch's own where no
            parameter is tagged.
        independent_weight_decay: whether `weight_decay` is what a step decays by;
            by default where parameters are tagged.
        allow_non_unit_scaling_params: whether parameters without tags are taken, at the plain `lr`;
            by default where there are no others.
        readout_constraint: the `constraint` of the model's `LinearReadout`.
        state_format: what momenta are kept in, see `scaledtensor.optim.states`: "fp32", "bf16",
            "fp16", "e4m3fn", "e5m2" or "int8", or the `Format` or torch dtype of one. Groups may
            have their own, as of the two below.
        state_rounding: of these but "fp32", "nearest_even" or "stochastic".
        master_format: what the values of parameters are kept in: None, "fp32", "fp16", "bf16" or
            "bf16+16"; of the first three the `Format` or torch dtype too.
        compiled: whether the step in low precision is compiled; None: from 2^18 elements on.
        **options: further ones of torch.

    Raises:
        MupError: see `scaled_parameters` and `lr_scale_func_sgd`.
        FormatError: a format or rounding that there is not, or a master format that a parameter
            cannot have (at the first step).
    """

    rule = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        *,
        weight_decay: float | None = None,
        independent_weight_decay: bool | None = None,
        allow_non_unit_scaling_params: bool | None = None,
        readout_constraint: str | None = None,
        state_format: FormatLike = "fp32",
        state_rounding: str = "nearest_even",
        master_format: FormatLike | None = None,
        compiled: bool | None = None,
        **options: Any,
    ) -> None:
        groups, decay = self._prepare(
            params,
            lr_scale_func_sgd(readout_constraint),
            Tagged(independent_weight_decay, allow_non_unit_scaling_params),
            weight_decay,
            0.0,
            {
                "state_format": state_format,
                "state_rounding": state_rounding,
                "master_format": master_format,
                "compiled": compiled,
            },
        )
        super().__init__(groups, lr, momentum, dampening, weight_decay=decay, **options)


class Adam(_Scaled, torch.optim.Adam):
    """`torch.optim.Adam`, its learning rates by `lr_scale_func_adam`.

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged ones or plain.
        lr: the learning rate before the rule; groups may have their own.
        betas: as of torch.
        eps: as of torch.
        weight_decay: see `scaled_parameters`, as the next. By default 0, and torch's own where no
            parameter is tagged.
        independent_weight_decay: whether `weight_decay` is divided by the learning rate;
            by default where parameters are tagged.
        allow_non_unit_scaling_params: whether parameters without tags are taken, at the plain `lr`;
            by default where there are no others.
        state_format: what momenta are kept in, see `scaledtensor.optim.states`: "fp32", "bf16",
            "fp16", "e4m3fn", "e5m2" or "int8", or the `Format` or torch dtype of one. Groups may
            have their own, as of the two below.
        state_rounding: of these but "fp32", "nearest_even" or "stochastic".
        master_format: what the values of parameters are kept in: None, "fp32", "fp16", "bf16" or
            "bf16+16"; of the first three the `Format` or torch dtype too.
        compiled: whether the step in low precision is compiled; None: from 2^18 elements on.
        **options: further ones of torch.

    Raises:
        MupError: see `scaled_parameters`.
        FormatError: a format or rounding that there is not, or a master format that a parameter
            cannot have (at the first step).
    """

    rule = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float | None = None,
        independent_weight_decay: bool | None = None,
        allow_non_unit_scaling_params: bool | None = None,
        state_format: FormatLike = "fp32",
        state_rounding: str = "nearest_even",
        master_format: FormatLike | None = None,
        compiled: bool | None = None,
        **options: Any,
    ) -> None:
        groups, decay = self._prepare(
            params,
            lr_scale_func_adam,
            Tagged(independent_weight_decay, allow_non_unit_scaling_params),
            weight_decay,
            0.0,
            {
                "state_format": state_format,
                "state_rounding": state_rounding,
                "master_format": master_format,
                "compiled": compiled,
            },
        )
        super().__init__(groups, lr, betas, eps, weight_decay=decay, **options)


class AdamW(_Scaled, torch.optim.AdamW):
    """`torch.optim.AdamW`, its learning rates by `lr_scale_func_adam`.

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged ones or plain.
        lr: the learning rate before the rule; groups may have their own.
        betas: as of torch.
        eps: as of torch.
        weight_decay: see `scaled_parameters`, as the next. By default 0, and torch's own where no
            parameter is tagged.
        independent_weight_decay: whether `weight_decay` is what a step decays by;
            by default where parameters are tagged.
        allow_non_unit_scaling_params: whether parameters without tags are taken, at the plain `lr`;
            by default where there are no others.
        state_format: what momenta are kept in, see `scaledtensor.optim.states`: "fp32", "bf16",
            "fp16", "e4m3fn", "e5m2" or "int8", or the `Format` or torch dtype of one. Groups may
            have their own, as of the two below.
        state_rounding: of these but "fp32", "nearest_even" or "stochastic".
        master_format: what the values of parameters are kept in: None, "fp32", "fp16", "bf16" or
            "bf16+16"; of the first three the `Format` or torch dtype too.
        compiled: whether the step in low precision is compiled; None: from 2^18 elements on.
        **options: further ones of torch.

    Raises:
        MupError: see `scaled_parameters`.
        FormatError: a format or rounding that there is not, or a master format that a parameter
            cannot have (at the first step).
    """

    rule = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float | None = None,
        independent_weight_decay: bool | None = None,
        allow_non_unit_scaling_params: bool | None = None,
        state_format: FormatLike = "fp32",
        state_rounding: str = "nearest_even",
        master_format: FormatLike | None = None,
        compiled: bool | None = None,
        **options: Any,
    ) -> None:
        groups, decay = self._prepare(
            params,
            lr_scale_func_adam,
            Tagged(independent_weight_decay, allow_non_unit_scaling_params),
            weight_decay,
            1e-2,
            {
                "state_format": state_format,
                "state_rounding": state_rounding,
                "master_format": master_format,
                "compiled": compiled,
            },
        )
        super().__init__(groups, lr, betas, eps, weight_decay=decay, **options)


class Muon(_Scaled, torch.optim.Muon):
    """`torch.optim.Muon`, its learning rates by `lr_scale_func_muon`. For hidden matrices.

    Args:
        params: matrices, pairs of name and matrix, or groups of either; tagged ones or plain.
        lr: the learning rate before the rule; groups may have their own.
        weight_decay: see `scaled_parameters`, as the next. By default 0, and torch's own where no
            parameter is tagged.
        independent_weight_decay: whether `weight_decay` is what a step decays by;
            by default where parameters are tagged.
        allow_non_unit_scaling_params: whether parameters without tags are taken, at the plain `lr`;
            by default where there are no others.
        adjust_lr_fn: the factor of the shape that torch multiplies by; the rule allows for it.
        state_format: what momenta are kept in, see `scaledtensor.optim.states`: "fp32", "bf16",
            "fp16", "e4m3fn", "e5m2" or "int8", or the `Format` or torch dtype of one. Groups may
            have their own, as of the two below.
        state_rounding: of these but "fp32", "nearest_even" or "stochastic".
        compiled: as of the others; the step is torch's own, so that nothing is.
        **options: further ones of torch.

    Raises:
        MupError: see `scaled_parameters` and `lr_scale_func_muon`.
        FormatError: a format or rounding that there is not, or a master format that a parameter
            cannot have (at the first step).
    """

    rule = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float | None = None,
        independent_weight_decay: bool | None = None,
        allow_non_unit_scaling_params: bool | None = None,
        adjust_lr_fn: str | None = None,
        state_format: FormatLike = "fp32",
        state_rounding: str = "nearest_even",
        compiled: bool | None = None,
        **options: Any,
    ) -> None:
        groups, decay = self._prepare(
            params,
            lr_scale_func_muon(adjust_lr_fn),
            Tagged(independent_weight_decay, allow_non_unit_scaling_params),
            weight_decay,
            0.1,
            {
                "state_format": state_format,
                "state_rounding": state_rounding,
                "master_format": None,
                "compiled": compiled,
            },
        )
        super().__init__(groups, lr, decay, adjust_lr_fn=adjust_lr_fn, **options)


class _Lion(Optimizer):
    """What of Lion the classes of torch would be: defaults and groups."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        maximize: bool,
    ) -> None:
        if not float(lr) >= 0:
            raise MupError(f"a learning rate is not negative; got {lr}")
        if not (len(betas) == 2 and all(0 <= b < 1 for b in betas)):
            raise MupError(f"betas are two numbers from 0 to 1, without 1; got {betas}")
        if not weight_decay >= 0:
            raise MupError(f"a weight decay is not negative; got {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)


class Lion(_Scaled, _Lion):
    """Lion: steps along the signs of a momentum, one state (Chen et al., "Symbolic discovery of
    optimization algorithms", arXiv 2302.06675). Learning rates by `lr_scale_func_adam`, since its
    updates have entries of size 1 too; the paper takes 3 to 10 times smaller ones than for AdamW.

        w = (1 - lr weight_decay) w - lr sign(b1 m + (1 - b1) g),    m = b2 m + (1 - b2) g

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged ones or plain.
        lr: the learning rate before the rule; groups may have their own.
        betas: b1 and b2.
        weight_decay: see `scaled_parameters`, as the next. By default 0.
        independent_weight_decay: whether `weight_decay` is what a step decays by;
            by default where parameters are tagged.
        allow_non_unit_scaling_params: whether parameters without tags are taken, at the plain `lr`;
            by default where there are no others.
        maximize: step up instead.
        state_format: what momenta are kept in, see `scaledtensor.optim.states`: "fp32", "bf16",
            "fp16", "e4m3fn", "e5m2" or "int8", or the `Format` or torch dtype of one. Groups may
            have their own, as of the two below.
        state_rounding: of these but "fp32", "nearest_even" or "stochastic".
        master_format: what the values of parameters are kept in: None, "fp32", "fp16", "bf16" or
            "bf16+16"; of the first three the `Format` or torch dtype too.
        compiled: whether the step in low precision is compiled; None: from 2^18 elements on.

    Raises:
        MupError: see `scaled_parameters`, and for numbers that cannot be.
        FormatError: a format or rounding that there is not, or a master format that a parameter
            cannot have (at the first step).
    """

    rule = "lion"
    own_step = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        *,
        weight_decay: float | None = None,
        independent_weight_decay: bool | None = None,
        allow_non_unit_scaling_params: bool | None = None,
        maximize: bool = False,
        state_format: FormatLike = "fp32",
        state_rounding: str = "nearest_even",
        master_format: FormatLike | None = None,
        compiled: bool | None = None,
    ) -> None:
        groups, decay = self._prepare(
            params,
            lr_scale_func_adam,
            Tagged(independent_weight_decay, allow_non_unit_scaling_params),
            weight_decay,
            0.0,
            {
                "state_format": state_format,
                "state_rounding": state_rounding,
                "master_format": master_format,
                "compiled": compiled,
            },
        )
        super().__init__(groups, lr, betas, decay, maximize)
