"""`unit_scaling.optim`: see `scaledtensor.optim`, which also has rules for Muon, Lion and SOAP.

Three things are as published. Parameters without tags are an error unless
`allow_non_unit_scaling_params`. Weight decay is independent by default. Each parameter has its own
group, in the given order, so either library loads a `state_dict` of the other's optimizers.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from scaledtensor import optim
from scaledtensor.errors import MupError
from scaledtensor.optim import lr_scale_for_depth, lr_scale_func_adam, lr_scale_func_sgd
from scaledtensor.optim.groups import LRScale

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]


def scaled_parameters(
    params: Iterable[Any],
    lr_scale_func: LRScale,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
) -> list[dict[str, Any]]:
    """`scaledtensor.optim.scaled_parameters`, with a group for each parameter.

    Raises:
        MupError: there is no learning rate, a parameter has no tags, or the weight decay is
            independent and the learning rate is 0.
    """
    return optim.scaled_parameters(
        _one_each(params),
        lr_scale_func,
        lr,
        weight_decay,
        independent_weight_decay,
        allow_non_unit_scaling_params,
    )


def _one_each(params: Iterable[Any]) -> Iterator[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise MupError("params is an iterable of parameters; got one tensor. Put it in a list")
    for entry in params:
        if not isinstance(entry, dict):
            yield {"params": [entry]}
            continue
        given = entry["params"]
        for one in [given] if isinstance(given, Tensor) else given:
            yield entry | {"params": [one]}


class SGD(optim.SGD):
    """`scaledtensor.optim.SGD` for tagged parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        readout_constraint: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            list(_one_each(params)),
            *args,
            weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            readout_constraint=readout_constraint,
            **options,
        )


class Adam(optim.Adam):
    """`scaledtensor.optim.Adam` for tagged parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            list(_one_each(params)),
            *args,
            weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            **options,
        )


class AdamW(optim.AdamW):
    """`scaledtensor.optim.AdamW` for tagged parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            list(_one_each(params)),
            *args,
            weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            **options,
        )
