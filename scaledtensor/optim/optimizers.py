"""SGD, Adam, AdamW and Muon of torch.optim, with learning rates by u-muP's rules.

Schedulers that multiply the learning rates of the groups work as they are. Those that set one, such
as `OneCycleLR`, overwrite the scaled ones: give them a list, one for each of `param_groups`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from scaledtensor.optim.groups import GroupRule, groups_of
from scaledtensor.optim.rules import lr_scale_func_adam, lr_scale_func_muon, lr_scale_func_sgd
from scaledtensor.optim.states import LowPrecisionStates

__all__ = ["SGD", "Adam", "AdamW", "Muon"]


class _Scaled(LowPrecisionStates):
    """Splits each parameter group that is added, at construction or later, by learning rate."""

    _rule: GroupRule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for group in self._rule.split(self.defaults | param_group):
            super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_rule", "state_format", "state_rounding")
        return super().__getstate__() | {name: getattr(self, name) for name in own}


class SGD(_Scaled, torch.optim.SGD):
    """`torch.optim.SGD`, its learning rates by `lr_scale_func_sgd`.

    Args:
        params: tagged parameters, pairs of name and parameter, or groups of either.
        lr: the learning rate before the rule; groups may have their own.
        momentum: as of torch.
        dampening: as of torch.
        weight_decay: see `scaled_parameters`, as the two below.
        independent_weight_decay: whether `weight_decay` is what a step decays by.
        allow_non_unit_scaling_params: take parameters without tags, at the plain `lr`.
        readout_constraint: the `constraint` of the model's `LinearReadout`.
        state_format: what momenta are kept in: "fp32", as torch has them; "e4m3fn", "e5m2" or
            "int8", in groups of 128 widened to the format's range (`ExpandedTensor`).
        state_rounding: of these, "stochastic" or "nearest_even".
        **options: further ones of torch.

    Raises:
        FormatError: another `state_format` or `state_rounding`.
        MupError: see `scaled_parameters` and `lr_scale_func_sgd`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        *,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        readout_constraint: str | None = None,
        state_format: str = "fp32",
        state_rounding: str = "stochastic",
        **options: Any,
    ) -> None:
        self._rule = GroupRule(
            lr_scale_func_sgd(readout_constraint),
            independent_weight_decay,
            allow_non_unit_scaling_params,
        )
        self._keep_states(state_format, state_rounding)
        super().__init__(
            groups_of(params), lr, momentum, dampening, weight_decay=weight_decay, **options
        )


class Adam(_Scaled, torch.optim.Adam):
    """`torch.optim.Adam`, its learning rates by `lr_scale_func_adam`.

    Args:
        params: tagged parameters, pairs of name and parameter, or groups of either.
        lr: the learning rate before the rule; groups may have their own.
        betas: as of torch.
        eps: as of torch.
        weight_decay: see `scaled_parameters`, as the two below.
        independent_weight_decay: whether `weight_decay` is divided by the learning rate.
        allow_non_unit_scaling_params: take parameters without tags, at the plain `lr`.
        state_format: what momenta are kept in: "fp32", as torch has them; "e4m3fn", "e5m2" or
            "int8", in groups of 128 widened to the format's range (`ExpandedTensor`).
        state_rounding: of these, "stochastic" or "nearest_even".
        **options: further ones of torch.

    Raises:
        FormatError: another `state_format` or `state_rounding`.
        MupError: see `scaled_parameters`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        state_format: str = "fp32",
        state_rounding: str = "stochastic",
        **options: Any,
    ) -> None:
        self._rule = GroupRule(
            lr_scale_func_adam, independent_weight_decay, allow_non_unit_scaling_params
        )
        self._keep_states(state_format, state_rounding)
        super().__init__(groups_of(params), lr, betas, eps, weight_decay=weight_decay, **options)


class AdamW(_Scaled, torch.optim.AdamW):
    """`torch.optim.AdamW`, its learning rates by `lr_scale_func_adam`.

    Args:
        params: tagged parameters, pairs of name and parameter, or groups of either.
        lr: the learning rate before the rule; groups may have their own.
        betas: as of torch.
        eps: as of torch.
        weight_decay: see `scaled_parameters`, as the two below. The default is 0, unlike torch's.
        independent_weight_decay: whether `weight_decay` is what a step decays by.
        allow_non_unit_scaling_params: take parameters without tags, at the plain `lr`.
        state_format: what momenta are kept in: "fp32", as torch has them; "e4m3fn", "e5m2" or
            "int8", in groups of 128 widened to the format's range (`ExpandedTensor`).
        state_rounding: of these, "stochastic" or "nearest_even".
        **options: further ones of torch.

    Raises:
        FormatError: another `state_format` or `state_rounding`.
        MupError: see `scaled_parameters`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        state_format: str = "fp32",
        state_rounding: str = "stochastic",
        **options: Any,
    ) -> None:
        self._rule = GroupRule(
            lr_scale_func_adam, independent_weight_decay, allow_non_unit_scaling_params
        )
        self._keep_states(state_format, state_rounding)
        super().__init__(groups_of(params), lr, betas, eps, weight_decay=weight_decay, **options)


class Muon(_Scaled, torch.optim.Muon):
    """`torch.optim.Muon`, its learning rates by `lr_scale_func_muon`. For hidden matrices.

    Args:
        params: tagged matrices, pairs of name and matrix, or groups of either.
        lr: the learning rate before the rule; groups may have their own.
        weight_decay: see `scaled_parameters`, as the two below. The default is 0, unlike torch's.
        independent_weight_decay: whether `weight_decay` is what a step decays by.
        allow_non_unit_scaling_params: take matrices without tags, at the plain `lr`.
        adjust_lr_fn: the factor of the shape that torch multiplies by; the rule allows for it.
        state_format: what momenta are kept in: "fp32", as torch has them; "e4m3fn", "e5m2" or
            "int8", in groups of 128 widened to the format's range (`ExpandedTensor`).
        state_rounding: of these, "stochastic" or "nearest_even".
        **options: further ones of torch.

    Raises:
        FormatError: another `state_format` or `state_rounding`.
        MupError: see `scaled_parameters` and `lr_scale_func_muon`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        adjust_lr_fn: str | None = None,
        state_format: str = "fp32",
        state_rounding: str = "stochastic",
        **options: Any,
    ) -> None:
        self._rule = GroupRule(
            lr_scale_func_muon(adjust_lr_fn),
            independent_weight_decay,
            allow_non_unit_scaling_params,
        )
        self._keep_states(state_format, state_rounding)
        super().__init__(groups_of(params), lr, weight_decay, adjust_lr_fn=adjust_lr_fn, **options)
