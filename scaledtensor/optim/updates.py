"""The updates of Adam, SGD and Lion, each as a function of float32 matrices.

    value, states = rule.update(value, gradient, states, columns, flags)

The rows of a matrix are groups of 128 elements. Hyperparameters are columns, with one number for
each row, so that one call steps parameters of different groups. All values have units in which
scales cancel. The value is in units of the parameter's scale. Gradients and first moments are in
units of u, a power of two that each parameter chooses at its first step. Second moments are in
units of u^2. `numbers` computes the columns in float64.

To add an optimizer, add a class and its entry in `RULES`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RULES", "Columns", "Flags", "Group", "Rule", "States", "Units"]

Group = dict[str, Any]
"""A parameter group of an optimizer."""

Columns = Mapping[str, Tensor]
States = tuple[Tensor, ...]
Flags = frozenset[str]

#: The square of this number is a float32 number.
_LARGEST = 2.0**64 - 2.0**40


class Units(NamedTuple):
    """The units of one parameter: powers of two, all 1 for a plain parameter."""

    value: float
    """The scale of the parameter."""
    gradient: float
    """The scale of the present gradient."""
    moment: float
    """u, chosen at the first step."""


class Rule:
    """The update of one optimizer."""

    #: Names of all columns. Each rule has the column "unit", the parameter's scale.
    columns: tuple[str, ...]
    #: Names of the states in units of u^2.
    squared: tuple[str, ...] = ()
    #: Whether the optimizer counts its steps.
    counts = True

    def states(self, group: Group) -> tuple[str, ...]:
        """Return the names of the states of a parameter group, as torch.optim calls them."""
        raise NotImplementedError

    def flags(self, group: Group) -> Flags:
        """Return the options of a group that choose other code."""
        raise NotImplementedError

    def numbers(self, group: Group, step: float, first: bool, units: Units) -> dict[str, float]:
        """Return the columns of a parameter, except "unit".

        Args:
            group: the parameter group.
            step: the number of this step.
            first: whether the parameter has no states yet.
            units: the units of the parameter.
        """
        raise NotImplementedError

    def update(
        self, value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
    ) -> tuple[Tensor, States]:
        """Return the new value and the new states."""
        raise NotImplementedError


def _gradient(group: Group, units: Units) -> float:
    sign = -1.0 if group.get("maximize") else 1.0
    return sign * units.gradient / units.moment


class Adam(Rule):
    """Adam and AdamW: m and v are running means of g and g^2, both corrected for their start; the
    step is lr m / (sqrt(v) + eps) (Kingma and Ba, arXiv 1412.6980; decoupled decay: Loshchilov and
    Hutter, arXiv 1711.05101; amsgrad uses the largest v so far: Reddi et al., arXiv 1904.09237)."""

    columns = ("gradient", "decay", "rate", "first", "keep", "second", "root", "eps", "unit")
    squared = ("exp_avg_sq", "max_exp_avg_sq")

    def states(self, group: Group) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def flags(self, group: Group) -> Flags:
        coupled = group["weight_decay"] and "decay"
        decay = "decoupled" if group["decoupled_weight_decay"] else coupled
        return frozenset(filter(None, (decay, group["amsgrad"] and "amsgrad")))

    def numbers(self, group: Group, step: float, first: bool, units: Units) -> dict[str, float]:
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

    def update(
        self, value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
    ) -> tuple[Tensor, States]:
        if "decoupled" in flags:
            value = value * c["decay"]
        elif "decay" in flags:
            g = g + value * c["decay"]
        m, v, *largest = states
        # A finite gradient is clamped, because its square must be a float32 number: states in
        # groups keep finite numbers. An infinite gradient makes the parameter NaN.
        g = torch.where(g.abs() < torch.inf, g.clamp(-_LARGEST, _LARGEST), g)
        m = m + (g - m) * c["first"]
        v = v * c["keep"] + g * g * c["second"]
        if "amsgrad" in flags:
            largest = [torch.maximum(largest[0], v)]
        root = (largest[0] if largest else v).sqrt() * c["root"]
        value = value - c["rate"] * (m / (root + c["eps"]))
        return value, (m, v, *largest)


class SGD(Rule):
    """SGD: the buffer is b = mu b + (1 - d) g, and g at the first step; the step is lr b, or
    lr (g + mu b) with Nesterov's momentum."""

    columns = ("gradient", "decay", "rate", "momentum", "keep", "add", "unit")
    counts = False

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def flags(self, group: Group) -> Flags:
        nesterov, decay = group["nesterov"] and "nesterov", group["weight_decay"] and "decay"
        return frozenset(filter(None, (nesterov, decay)))

    def numbers(self, group: Group, step: float, first: bool, units: Units) -> dict[str, float]:
        return {
            "gradient": _gradient(group, units),
            "decay": float(group["weight_decay"]) * units.value / units.moment,
            "rate": float(group["lr"]) * units.moment / units.value,
            "momentum": float(group["momentum"]),
            "keep": 0.0 if first else float(group["momentum"]),
            "add": 1.0 if first else 1 - float(group["dampening"]),
        }

    def update(
        self, value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
    ) -> tuple[Tensor, States]:
        if "decay" in flags:
            g = g + value * c["decay"]
        if not states:
            return value - c["rate"] * g, ()
        buffer = states[0] * c["keep"] + g * c["add"]
        direction = g + buffer * c["momentum"] if "nesterov" in flags else buffer
        return value - c["rate"] * direction, (buffer,)


class Lion(Rule):
    """Lion: the step is lr sign(b1 m + (1 - b1) g), after the decay; then m = b2 m + (1 - b2) g
    (Chen et al., arXiv 2302.06675, algorithm 2)."""

    columns = ("gradient", "decay", "rate", "look", "add", "unit")

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def flags(self, group: Group) -> Flags:
        return frozenset()

    def numbers(self, group: Group, step: float, first: bool, units: Units) -> dict[str, float]:
        beta1, beta2 = (float(b) for b in group["betas"])
        lr = float(group["lr"])
        return {
            "gradient": _gradient(group, units),
            "decay": 1 - lr * float(group["weight_decay"]),
            "rate": lr / units.value,
            "look": 1 - beta1,
            "add": 1 - beta2,
        }

    def update(
        self, value: Tensor, g: Tensor, states: States, c: Columns, flags: Flags
    ) -> tuple[Tensor, States]:
        (m,) = states
        direction = (m + (g - m) * c["look"]).sign()
        return value * c["decay"] - c["rate"] * direction, (m + (g - m) * c["add"],)


RULES: Mapping[str, Rule] = {"adam": Adam(), "sgd": SGD(), "lion": Lion()}
