"""Facts about a call that follow from its function and its arguments, before any plan."""

import enum
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_overridable_functions

from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.ops.products.table import PRODUCTS

__all__ = [
    "NAMES",
    "Call",
    "Family",
    "Place",
    "apart",
    "family_of",
    "given",
    "is_average",
    "is_counted",
]

#: Name of every function that a mode sees, except attributes of tensors, which compilers do not
#: call. The key is the function itself, because Dynamo cannot read the name of a builtin.
NAMES: dict[Any, str] = {
    function: function.__name__  # type: ignore[attr-defined]
    for functions in (
        *get_overridable_functions().values(),
        *([getattr(space, name) for name in dir(space)] for space in (torch, functional, Tensor)),
        PRODUCTS,
    )
    for function in functions
    if isinstance(function, Hashable)
    and not isinstance(function, type)
    and getattr(function, "__name__", "__get__") != "__get__"
}

Call = tuple[str, int]
"""A call: the name of the function, and the number of earlier calls of this name on float
tensors."""

Place = tuple[int | None, str | None]
"""The place of an argument: its position, its name, or both. Functions of torch that are written in
Python pass a positional argument on by name, and compilers see the former."""


class Family(enum.Enum):
    """How unit scaling treats a function that has a unit-scaled counterpart."""

    BORDER = "border"
    """Products, norms, attention, embeddings and losses: the counterpart always takes its place."""
    ACTIVATION = "activation"
    """Functions by element: the counterpart takes its place unless it is part of a formula."""
    AVERAGE = "average"
    """Averages over positions: the counterpart takes its place if it averages all of a model."""
    SUM = "sum"
    """Sums and products by element: parts of formulas."""


_ACTIVATIONS = ("gelu", "silu", "relu", "leaky_relu", "tanh", "sigmoid")
_SUMS = ("add", "radd", "sub", "rsub", "mul")


def is_average(name: str) -> bool:
    """Whether a function of this name is an average over positions."""
    return name == "mean" or "avg_pool" in name


def _family(counterpart: str) -> Family:
    if counterpart in _SUMS:
        return Family.SUM
    if counterpart in _ACTIVATIONS:
        return Family.ACTIVATION
    return Family.AVERAGE if is_average(counterpart) else Family.BORDER


_FAMILIES = {f: _family(counterpart.__name__) for f, counterpart in COUNTERPARTS.items()}


def family_of(function: Any) -> Family | None:
    """Return the family of a function; None if it has no unit-scaled counterpart."""
    return _FAMILIES.get(function)


def is_counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call counts. Calls on masks and positions, which are integers, do not: they differ
    between modes of execution."""
    given = (*args, *kwargs.values())
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in given)


def given(place: Place, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the container in which a call has an argument, and the key there."""
    position, name = place
    return (kwargs, name) if name in kwargs else (args, position)


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
    """Replace the first argument, into which a call writes, by a copy.

    Returns:
        The copy, and the arguments with the copy.
    """
    target: Tensor = args[0] if args else kwargs["input"]
    copy = target.clone()
    return copy, (copy, *args[1:]) if args else args, kwargs if args else kwargs | {"input": copy}
