"""SGD, Adam, AdamW, Muon and Lion, with learning rates by u-muP's rules and states of few bits.

If no parameter is tagged, the learning rate and the weight decay are those that torch.optim's
classes would use.

Schedulers that multiply the learning rates of groups need no change. Schedulers that set learning
rates, such as `OneCycleLR`, overwrite the scaled ones: give them a list with one learning rate for
each of `param_groups`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from scaledtensor.errors import MupError
from scaledtensor.formats import FormatLike
from scaledtensor.optim.groups import lr_scale_func_adam, lr_scale_func_muon, lr_scale_func_sgd
from scaledtensor.optim.options import Options, with_shared_options
from scaledtensor.optim.step import LowPrecision

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon"]


@with_shared_options
class SGD(LowPrecision, torch.optim.SGD):
    """`torch.optim.SGD` with learning rates by `lr_scale_func_sgd`.

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged or plain.
        lr: the learning rate before the rule; groups may have their own.
        momentum: as in `torch.optim.SGD`.
        dampening: as in `torch.optim.SGD`.
        readout_constraint: the `constraint` of the model's `LinearReadout`.
        Options that all optimizers share: see `scaledtensor.optim.options.Options`.
        **options: further options of `torch.optim.SGD`.

    Raises:
        MupError: see `scaled_parameters` and `lr_scale_func_sgd`.
        FormatError: a format or rounding is unknown, or a parameter cannot have the master format
            (at the first step).
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
        shared = Options(
            weight_decay,
            independent_weight_decay,
            allow_non_unit_scaling_params,
            state_format,
            state_rounding,
            master_format,
            compiled,
        )
        groups, decay = self._prepare(params, lr_scale_func_sgd(readout_constraint), shared, 0.0)
        super().__init__(groups, lr, momentum, dampening, weight_decay=decay, **options)


@with_shared_options
class Adam(LowPrecision, torch.optim.Adam):
    """`torch.optim.Adam` with learning rates by `lr_scale_func_adam`.

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged or plain.
        lr: the learning rate before the rule; groups may have their own.
        betas: as in `torch.optim.Adam`.
        eps: as in `torch.optim.Adam`.
        Options that all optimizers share: see `scaledtensor.optim.options.Options`.
        **options: further options of `torch.optim.Adam`.

    Raises:
        MupError: see `scaled_parameters`.
        FormatError: a format or rounding is unknown, or a parameter cannot have the master format
            (at the first step).
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
        shared = Options(
            weight_decay,
            independent_weight_decay,
            allow_non_unit_scaling_params,
            state_format,
            state_rounding,
            master_format,
            compiled,
        )
        groups, decay = self._prepare(params, lr_scale_func_adam, shared, 0.0)
        super().__init__(groups, lr, betas, eps, weight_decay=decay, **options)


@with_shared_options
class AdamW(LowPrecision, torch.optim.AdamW):
    """`torch.optim.AdamW` with learning rates by `lr_scale_func_adam`.

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged or plain.
        lr: the learning rate before the rule; groups may have their own.
        betas: as in `torch.optim.AdamW`.
        eps: as in `torch.optim.AdamW`.
        Options that all optimizers share: see `scaledtensor.optim.options.Options`.
        **options: further options of `torch.optim.AdamW`.

    Raises:
        MupError: see `scaled_parameters`.
        FormatError: a format or rounding is unknown, or a parameter cannot have the master format
            (at the first step).
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
        shared = Options(
            weight_decay,
            independent_weight_decay,
            allow_non_unit_scaling_params,
            state_format,
            state_rounding,
            master_format,
            compiled,
        )
        groups, decay = self._prepare(params, lr_scale_func_adam, shared, 1e-2)
        super().__init__(groups, lr, betas, eps, weight_decay=decay, **options)


@with_shared_options
class Muon(LowPrecision, torch.optim.Muon):
    """`torch.optim.Muon`, for hidden matrices, with learning rates by `lr_scale_func_muon`. The
    step is torch's own and is not compiled, whatever `compiled` is.

    Args:
        params: matrices, pairs of name and matrix, or groups of either; tagged or plain.
        lr: the learning rate before the rule; groups may have their own.
        adjust_lr_fn: the factor of the shape by which torch multiplies; the rule allows for it.
        Options that all optimizers share: see `scaledtensor.optim.options.Options`.
        **options: further options of `torch.optim.Muon`.

    Raises:
        MupError: see `scaled_parameters` and `lr_scale_func_muon`.
        FormatError: a format or rounding is unknown.
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
        shared = Options(
            weight_decay,
            independent_weight_decay,
            allow_non_unit_scaling_params,
            state_format,
            state_rounding,
            None,
            compiled,
        )
        groups, decay = self._prepare(params, lr_scale_func_muon(adjust_lr_fn), shared, 0.1)
        super().__init__(groups, lr, decay, adjust_lr_fn=adjust_lr_fn, **options)


class _Lion(Optimizer):
    """The part of Lion that a class of torch would have: the defaults of groups."""

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


@with_shared_options
class Lion(LowPrecision, _Lion):
    """Lion: steps along the signs of a momentum, its only state (Chen et al., "Symbolic discovery
    of optimization algorithms", arXiv 2302.06675). The learning rates are by `lr_scale_func_adam`,
    because Lion's updates have entries of size 1 too. The paper uses 3 to 10 times smaller learning
    rates than for AdamW.

        w = (1 - lr weight_decay) w - lr sign(b1 m + (1 - b1) g),    m = b2 m + (1 - b2) g

    Args:
        params: parameters, pairs of name and parameter, or groups of either; tagged or plain.
        lr: the learning rate before the rule; groups may have their own.
        betas: b1 and b2.
        maximize: step in the opposite direction.
        Options that all optimizers share: see `scaledtensor.optim.options.Options`.

    Raises:
        MupError: see `scaled_parameters`; or a number is out of range.
        FormatError: a format or rounding is unknown, or a parameter cannot have the master format
            (at the first step).
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
        shared = Options(
            weight_decay,
            independent_weight_decay,
            allow_non_unit_scaling_params,
            state_format,
            state_rounding,
            master_format,
            compiled,
        )
        groups, decay = self._prepare(params, lr_scale_func_adam, shared, 0.0)
        super().__init__(groups, lr, betas, decay, maximize)
