"""`unit_scaling.optim`: see `scaledtensor.optim`, which has Muon, Lion and SOAP rules too.

As published, parameters without tags are an error unless `allow_non_unit_scaling_params`, and
weight decay is independent by default.
"""

from typing import Any

from scaledtensor import optim
from scaledtensor.optim import (
    lr_scale_for_depth,
    lr_scale_func_adam,
    lr_scale_func_sgd,
    scaled_parameters,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]


class SGD(optim.SGD):
    """`scaledtensor.optim.SGD`, of tagged parameters."""

    def __init__(
        self,
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        readout_constraint: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *args,
            weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            readout_constraint=readout_constraint,
            **options,
        )


class Adam(optim.Adam):
    """`scaledtensor.optim.Adam`, of tagged parameters."""

    def __init__(
        self,
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            *args,
            weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            **options,
        )


class AdamW(optim.AdamW):
    """`scaledtensor.optim.AdamW`, of tagged parameters."""

    def __init__(
        self,
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            *args,
            weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            **options,
        )
