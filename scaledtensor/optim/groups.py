"""Parameter groups with the learning rates that a rule gives each parameter."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scaledtensor.errors import MupError
from scaledtensor.mup import has_parameter_data, tags
from scaledtensor.optim.rules import LRScale

__all__ = ["GroupRule", "Tagged", "groups_of", "scaled_parameters"]

Group = dict[str, Any]


@dataclass(frozen=True)
class Tagged:
    """What an optimizer was told of parameters without tags."""

    independent_weight_decay: bool | None = None
    """None: where parameters are tagged."""
    allow_non_unit_scaling_params: bool | None = None
    """None: where there are no others. True: beside others too. False: an error."""


@dataclass(frozen=True)
class GroupRule:
    """How one parameter group becomes several, one for each learning rate in it."""

    lr_scale: LRScale
    independent_weight_decay: bool = True
    allow_non_unit_scaling_params: bool = False
    scales: bool = True
    """Whether there is a tagged parameter; without any, groups stay as they are."""

    @classmethod
    def of(cls, groups: list[Group], lr_scale: LRScale, told: Tagged) -> "GroupRule":
        """The rule for what an optimizer is constructed with. Groups that are added later are to be
        of the same kind."""
        for group in groups:
            group["params"] = _entries(group["params"])  # an iterator is read once
        given = [_parameter(entry) for group in groups for entry in group["params"]]
        allowed, independent = told.allow_non_unit_scaling_params, told.independent_weight_decay
        scales = allowed is not None or any(map(has_parameter_data, given))
        if independent is None:
            independent = scales
        return cls(lr_scale, independent, not scales if allowed is None else allowed, scales)

    def split(self, group: Group) -> Iterator[Group]:
        """Groups that hold the parameters of `group`, which has an `lr` and a `weight_decay`.

        Parameters whose learning rates are equal stay together, so that fused and foreach forms
        work on as many at once as they can. All other options are passed on.
        """
        _check_numbers(group)
        if not self.scales:
            self._refuse_tagged(group)
        by_scale: dict[float, list[Any]] = {}
        for entry in _entries(group["params"]):
            by_scale.setdefault(self._scale(entry), []).append(entry)
        for scale, members in by_scale.items():
            lr = group["lr"] * scale  # a tensor of its own for every group
            decay = group["weight_decay"]
            yield group | {"params": members, "lr": lr, "weight_decay": self._decay(decay, lr)}

    def _scale(self, entry: Any) -> float:
        parameter = _parameter(entry)
        if has_parameter_data(parameter):
            return float(self.lr_scale(parameter)) * tags(parameter).mup_lr_mult
        if self.allow_non_unit_scaling_params:
            return 1.0
        name = f"{entry[0]}, " if isinstance(entry, tuple) else "a parameter "
        shape = tuple(getattr(parameter, "shape", ()))
        raise MupError(
            f"{name}of shape {shape} has no u-muP tags; see scaledtensor.mup, or pass "
            "allow_non_unit_scaling_params=True to train it at the plain learning rate"
        )

    def _refuse_tagged(self, group: Group) -> None:
        group["params"] = _entries(group["params"])
        if any(has_parameter_data(_parameter(entry)) for entry in group["params"]):
            raise MupError(
                "this optimizer was made for parameters without u-muP tags and takes them as "
                "torch.optim does; a group with a tagged one needs an optimizer of its own, or "
                "allow_non_unit_scaling_params=True"
            )

    def _decay(self, decay: float, lr: float | Tensor) -> float:
        """torch decays by lr * weight_decay: independent of the learning rate, divided by it."""
        if not self.independent_weight_decay or decay == 0:
            return decay
        if float(lr) == 0:
            raise MupError(
                "no weight decay is independent of a learning rate of 0; pass the peak learning "
                "rate and warm up by a scheduler, or independent_weight_decay=False"
            )
        return decay / float(lr)


#: Options of torch's optimizers that are numbers, or pairs of them.
_NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")


def _check_numbers(group: Group) -> None:
    """Raises MupError for what torch lets pass: its comparisons hold of infinity, and some of
    NaN."""
    for name in _NUMBERS:
        given = group.get(name)
        for x in given if isinstance(given, (tuple, list)) else (given,):
            if x is not None and not math.isfinite(float(x)):
                raise MupError(f"{name} is a finite number; got {given}")


def _parameter(entry: Any) -> Any:
    return entry[1] if isinstance(entry, tuple) else entry


def scaled_parameters(
    params: Iterable[Any],
    lr_scale_func: LRScale,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
) -> list[Group]:
    """Parameter groups with scaled learning rates, for any optimizer of the form of torch.optim's.

        torch.optim.RAdam(scaled_parameters(model.parameters(), lr_scale_func_adam, lr=1.0))

    Args:
        params: what torch's optimizers take: parameters, pairs of name and parameter, or groups.
        lr_scale_func: takes a tagged parameter, returns a factor of its learning rate.
        lr: of parameters in groups that have none of their own.
        weight_decay: likewise.
        independent_weight_decay: divide the weight decay by the learning rate, so that a step at
            the given learning rate decays by `weight_decay` itself. A scheduler of the learning
            rate changes both.
        allow_non_unit_scaling_params: leave parameters without tags at the plain learning rate.

    Returns:
        One group for each learning rate in each given group, in the order of first parameters.

    Raises:
        MupError: no learning rate, a parameter without tags, or an independent weight decay at
            learning rate 0.
    """
    rule = GroupRule(lr_scale_func, independent_weight_decay, allow_non_unit_scaling_params)
    found: list[Group] = []
    for group in groups_of(params):
        full = {"lr": lr, "weight_decay": weight_decay} | group
        if full["lr"] is None:
            raise MupError("no learning rate: pass lr, or groups that each have an lr")
        found.extend(rule.split(full))
    return found


def groups_of(params: Iterable[Any]) -> list[Group]:
    """Groups in their order; parameters outside of any go together, where the first one was.

    torch takes either groups or parameters. The published library takes a mixture, as this does.

    Raises:
        MupError: `params` is one tensor.
    """
    if isinstance(params, Tensor):
        raise MupError("params is an iterable of parameters; got one tensor. Put it in a list")
    found: list[Group] = []
    loose: list[Any] = []
    for entry in _entries(params):
        if isinstance(entry, dict):
            found.append(entry)
        else:
            if not loose:
                found.append({"params": loose})
            loose.append(entry)
    return found


def _entries(params: Any) -> list[Any]:
    if isinstance(params, set):
        raise MupError("params has an order; got a set. Put the parameters in a list")
    return [params] if isinstance(params, Tensor) else list(params)
