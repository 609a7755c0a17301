"""What unit scaling does to each call of a model: made by a planner, followed by a mode."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_overridable_functions

__all__ = ["NAMES", "Plan", "Split", "Step", "is_counted"]

#: Of every function that a mode sees, but for attributes of tensors, which compilers do not call.
#: By object: Dynamo looks that up, and reads no name of a builtin.
NAMES: dict[Any, str] = {
    function: function.__name__  # type: ignore[attr-defined]
    for functions in (
        *get_overridable_functions().values(),
        *([getattr(space, name) for name in dir(space)] for space in (torch, functional, Tensor)),
    )
    for function in functions
    if isinstance(function, Hashable)
    and not isinstance(function, type)
    and getattr(function, "__name__", "__get__") != "__get__"
}

#: A call: the name of the function, and how many of that name on float tensors came before.
Call = tuple[str, int]


def is_counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call counts: masks and positions are made of integers, and not alike in every
    mode of execution."""
    given = (*args, *kwargs.values())
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in given)


@dataclass(frozen=True)
class Split:
    """A result that a residual branch starts from: the branch's gradient is delayed to here."""

    add: int  # which residual sum the skip connection goes to
    tau: float


@dataclass(frozen=True)
class Step:
    """Of one call. What is not said stays as it is."""

    #: Whether the unit-scaled function takes the place of the call's.
    counterpart: bool = False
    #: Whether its gradient then has a scale of its own: no residual sum comes after it.
    free: bool = False
    #: Whether it looks up rows of a matrix that a product also multiplies by. That is no cut edge:
    #: both parts of its gradient have the product's scale.
    tied: bool = False
    #: Whether its mask is causal. The law then is that of causal attention, however it is spelled:
    #: models give a mask in one mode of execution, and say `is_causal` in another.
    causal: bool = False
    #: What the result is multiplied by, forwards and backwards.
    scale: float = 1.0
    #: Positions of parameters that are broadcast, whose gradients are sums over as many terms.
    parameters: tuple[int, ...] = ()
    #: The residual sum that this call is, the position of its skip connection, and its weight.
    add: int | None = None
    skip: int = 0
    tau: float = 1.0
    #: Whether its skip connection waits in a split; otherwise both terms are scaled here.
    waiting: bool = True
    split: Split | None = None
    #: Whether the call writes into its first argument.
    in_place: bool = False


@dataclass
class Plan:
    """The calls of a model's forward that unit scaling changes."""

    steps: dict[Call, Step] = field(default_factory=dict)
    #: Calls of every name that has a step, in order: another order is another path.
    calls: tuple[str, ...] = ()
    #: Residual sums, in order: how each is called in a listing.
    residuals: list[str] = field(default_factory=list)
