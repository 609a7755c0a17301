"""The steps of the optimizers, as functions of float32 matrices of groups and of columns.

    value, states = rule(value, gradient, states, columns)

A row has its own hyperparameters, that of its parameter, so that parameters of different groups are
stepped at once. Everything is in units that make scales cancel: the value in that of the parameter
(its `scale`), the gradient and first moments in a unit u of the parameter's gradients, second
moments in u^2. `columns` are the numbers that follow from these, computed in float64.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RULES", "Columns", "Rule", "Units"]

Columns = Mapping[str, Tensor]
States = tuple[Tensor, ...]
Flags = frozenset[str]

#: Of its square, a float32 number.
_LARGEST = 2.0**64 - 2.0**40


class Units(NamedTuple):
    """Of one parameter: powers of two, 1 where tensors are plain."""

    value: float
    gradient: float
    """The scale of the gradient at hand."""
    moment: float
    """u, chosen at the first step."""


@dataclass(frozen=True)
class Rule:
    """One optimizer."""

    states: Callable[[dict[str, Any]], tuple[str, ...]]
    """Names of the states that a parameter group has, as torch.optim calls them."""
    squared: tuple[str, ...]
    """Those in units of u^2."""
    flags: Callable[[dict[str, Any]], Flags]
    """What of a group's options chooses other code."""
    columns: tuple[str, ...]
    numbers: Callable[[dict[str, Any], float, bool, Units], dict[str, float]]
    """(group, number of this step, whether it is the first, units): the columns; and "unit", the
    parameter's, that every rule has."""
    update: Callable[[Tensor, Tensor, States, Columns, Flags], tuple[Tensor, States]]
    counts: bool = True
    """Whether it keeps the number of steps."""


def _gradient(group: dict[str, Any], units: Units) -> float:
    sign = -1.0 if group.get("maximize") else 1.0
    return sign * units.gradient / units.moment


# --- Adam and AdamW --------------------------------------------------------------------------


def _adam_numbers(
    group: dict[str, Any], step: float, first: bool, units: Units
) -> dict[str, float]:
    beta1, beta2 = (float(b) for b in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    coupled = not group["decoupled_weight_decay"]
    return {
        "gradient": _gradient(group, units),
        "decay": decay * units.value / units.moment if coupled else 1 - lr * decay,
        "rate": lr / (1 - beta1**step) / units.value,
        "first": 1 - beta1,
        "keep": beta2,
        "second": 1 - beta2,
        "root": (1 - beta2**step) ** -0.5,
        "eps": float(group["eps"]) / units.moment,
    }


def _adam(
    value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
) -> tuple[Tensor, States]:
    """m, v as running means of g and g^2; w - lr m / (sqrt(v) + eps), both corrected for their
    start (Kingma and Ba, arXiv 1412.6980; decoupled decay: Loshchilov and Hutter, arXiv
    1711.05101; amsgrad, the largest v so far: Reddi et al., arXiv 1904.09237)."""
    if "decoupled" in flags:
        value = value * c["decay"]
    elif "decay" in flags:
        g = g + value * c["decay"]
    m, v, *largest = states
    # A gradient of which the square is no float32 counts as the largest of which it is: states in
    # groups keep finite numbers. One that is infinite itself makes the parameter a NaN.
    g = torch.where(g.abs() < torch.inf, g.clamp(-_LARGEST, _LARGEST), g)
    m = m + (g - m) * c["first"]
    v = v * c["keep"] + g * g * c["second"]
    if "amsgrad" in flags:
        largest = [torch.maximum(largest[0], v)]
    root = (largest[0] if largest else v).sqrt() * c["root"]
    value = value - c["rate"] * (m / (root + c["eps"]))
    return value, (m, v, *largest)


def _adam_states(group: dict[str, Any]) -> tuple[str, ...]:
    names = ("exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def _adam_flags(group: dict[str, Any]) -> Flags:
    decay = "decoupled" if group["decoupled_weight_decay"] else group["weight_decay"] and "decay"
    return frozenset(filter(None, (decay, group["amsgrad"] and "amsgrad")))


# --- SGD -------------------------------------------------------------------------------------


def _sgd_numbers(group: dict[str, Any], step: float, first: bool, units: Units) -> dict[str, float]:
    return {
        "gradient": _gradient(group, units),
        "decay": float(group["weight_decay"]) * units.value / units.moment,
        "rate": float(group["lr"]) * units.moment / units.value,
        "momentum": float(group["momentum"]),
        "keep": 0.0 if first else float(group["momentum"]),
        "add": 1.0 if first else 1 - float(group["dampening"]),
    }


def _sgd(
    value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
) -> tuple[Tensor, States]:
    """b = mu b + (1 - d) g, at first g; w - lr b, or with Nesterov's g + mu b."""
    if "decay" in flags:
        g = g + value * c["decay"]
    if not states:
        return value - c["rate"] * g, ()
    buffer = states[0] * c["keep"] + g * c["add"]
    direction = g + buffer * c["momentum"] if "nesterov" in flags else buffer
    return value - c["rate"] * direction, (buffer,)


def _sgd_states(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd_flags(group: dict[str, Any]) -> Flags:
    nesterov, decay = group["nesterov"] and "nesterov", group["weight_decay"] and "decay"
    return frozenset(filter(None, (nesterov, decay)))


# --- Lion ------------------------------------------------------------------------------------


def _lion_numbers(
    group: dict[str, Any], step: float, first: bool, units: Units
) -> dict[str, float]:
    beta1, beta2 = (float(b) for b in group["betas"])
    lr = float(group["lr"])
    return {
        "gradient": _gradient(group, units),
        "decay": 1 - lr * float(group["weight_decay"]),
        "rate": lr / units.value,
        "look": 1 - beta1,
        "add": 1 - beta2,
    }


def _lion(
    value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
) -> tuple[Tensor, States]:
    """w - lr sign(b1 m + (1 - b1) g), after the decay; then m = b2 m + (1 - b2) g (Chen et al.,
    arXiv 2302.06675, algorithm 2)."""
    (m,) = states
    direction = (m + (g - m) * c["look"]).sign()
    return value * c["decay"] - c["rate"] * direction, (m + (g - m) * c["add"],)


def _lion_states(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg",)


def _no_flags(group: dict[str, Any]) -> Flags:
    return frozenset()


RULES: Mapping[str, Rule] = {
    "adam": Rule(
        _adam_states,
        ("exp_avg_sq", "max_exp_avg_sq"),
        _adam_flags,
        ("gradient", "decay", "rate", "first", "keep", "second", "root", "eps", "unit"),
        _adam_numbers,
        _adam,
    ),
    "sgd": Rule(
        _sgd_states,
        (),
        _sgd_flags,
        ("gradient", "decay", "rate", "momentum", "keep", "add", "unit"),
        _sgd_numbers,
        _sgd,
        counts=False,
    ),
    "lion": Rule(
        _lion_states,
        (),
        _no_flags,
        ("gradient", "decay", "rate", "look", "add", "unit"),
        _lion_numbers,
        _lion,
    ),
}
