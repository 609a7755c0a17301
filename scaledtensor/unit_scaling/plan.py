"""What unit scaling does to each call of a model: made by a planner, followed by a mode."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_overridable_functions

from scaledtensor.ops.products.table import PRODUCTS

__all__ = [
    "NAMES",
    "Place",
    "Plan",
    "Split",
    "Step",
    "Undo",
    "apart",
    "given",
    "is_average",
    "is_counted",
]

#: Of every function that a mode sees, but for attributes of tensors, which compilers do not call.
#: By object: Dynamo looks that up, and reads no name of a builtin.
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

#: Where a call takes an argument: by position, by name, or by either: functions of torch that are
#: written in Python hand on by name what they were given by position, and compilers see the former.
Place = tuple[int | None, str | None]

#: A call: the name of the function, and how many of that name on float tensors came before.
Call = tuple[str, int]


def is_counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call counts: masks and positions are made of integers, and not alike in every
    mode of execution."""
    given = (*args, *kwargs.values())
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in given)


def given(place: Place, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The container in which a call has an argument, and its key there."""
    position, name = place
    return (kwargs, name) if name in kwargs else (args, position)


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
    """A call that writes into its first argument, made to write into a copy.

    Returns:
        The copy, and the arguments with it.
    """
    target: Tensor = args[0] if args else kwargs["input"]
    copy = target.clone()
    return copy, (copy, *args[1:]) if args else args, kwargs if args else kwargs | {"input": copy}


def is_average(call: Call) -> bool:
    """Whether a call is an average over positions, or may be a part of a formula that is none."""
    name, _ = call
    return name == "mean" or "avg_pool" in name


@dataclass(frozen=True)
class Split:
    """A result that a residual branch starts from: the branch's gradient is delayed to here."""

    add: int  # which residual sum the skip connection goes to
    tau: float


@dataclass(frozen=True)
class Undo:
    """Of a result whose gradient is delayed: by what that is multiplied for the call."""

    factor: float
    output: int | None  # which of several results


@dataclass(frozen=True)
class Step:
    """Of one call. What is not said stays as it is."""

    #: Whether the unit-scaled function takes the place of the call's.
    counterpart: bool = False
    #: Whether its gradients then have scales of their own: what it is made from has no other use.
    free: bool = False
    #: Whether its gradients are the true ones: a parameter of it has uses that have no scale.
    exact: bool = False
    #: Whether it looks up rows of a matrix that a product also multiplies by. That is no cut edge:
    #: both parts of its gradient have the product's scale.
    tied: bool = False
    #: Whether its mask is causal. The law then is that of causal attention, however it is spelled:
    #: models give a mask in one mode of execution, and say `is_causal` in another.
    causal: bool = False
    #: Of attention without a causal mask: between the tokens that it reads. Of an average: between
    #: what it is of. None of all else.
    correlation: float | None = None
    #: What the result is multiplied by, forwards and backwards.
    scale: float = 1.0
    #: Positions of parameters that are broadcast, whose gradients are sums over as many terms.
    parameters: tuple[int, ...] = ()
    #: (which parameter, its place) of those that other calls use as well: the gradient is a
    #: sum, of which all terms have the scale of the first, however many rows each call has.
    shared: tuple[tuple[int, Place], ...] = ()
    #: By place: what arguments are multiplied by, of which no call says that they are complete: a
    #: tensor that was written through a view of it.
    arguments: tuple[tuple[Place, float], ...] = ()
    #: By place: what gradients of arguments are multiplied by. They are delayed from here on, or
    #: have been up to here; or they leave a branch whose gradients are.
    delays: tuple[tuple[Place, float], ...] = ()
    undo: tuple[Undo, ...] = ()
    #: Whether it chooses some of the elements of a tensor that nothing else uses: the gradient of
    #: the others is zero, and that of those is multiplied to make up for it.
    choice: bool = False
    #: The residual sum that this call is, the position of its skip connection, and its weight.
    add: int | None = None
    skip: int = 0
    tau: float = 1.0
    #: Whether its skip connection waits in a split; otherwise both terms are scaled here.
    waiting: bool = True
    split: Split | None = None
    #: Whether the call writes into its first argument: what becomes of the result is written there.
    in_place: bool = False
    #: Whether a later call writes into the result.
    overwritten: bool = False


@dataclass
class Plan:
    """The calls of a model's forward that unit scaling changes."""

    steps: dict[Call, Step] = field(default_factory=dict)
    #: Calls of every name that has a step, in order: another order is another path.
    calls: tuple[str, ...] = ()
    #: Residual sums, in order: how each is called in a listing.
    residuals: list[str] = field(default_factory=list)

    @property
    def correlations(self) -> list[float]:
        """Those of its steps, in order."""
        return [s.correlation for s in self.steps.values() if s.correlation is not None]

    def __str__(self) -> str:
        lines = [f"{f'{name} {i}':34} {_words(step)}" for (name, i), step in self.steps.items()]
        return "\n".join(lines)


def _words(step: Step) -> str:
    """What becomes of a call, in an order in which it could be done."""
    said = []
    if step.shared:
        said.append("parameters of other calls")
    said += [f"argument {_named(place)} x {x:.4g}" for place, x in step.arguments]
    said += [f"gradient of argument {_named(place)} x {x:.4g}" for place, x in step.delays]
    for undo in step.undo:
        result = "result" if undo.output is None else f"result {undo.output}"
        said.append(f"gradient of {result} x {undo.factor:.4g}")
    if step.counterpart:
        said.append("unit-scaled" + (", every gradient by itself" if step.free else ""))
    if step.exact:
        said.append("true gradients")
    if step.tied:
        said.append("tied to a product")
    if step.correlation:
        said.append(f"correlated {step.correlation:.2f}")
    if step.parameters:
        said.append("parameters broadcast")
    if step.scale != 1:
        said.append(f"x {step.scale:.4g}")
    if step.choice:
        said.append("gradient makes up for what it leaves out")
    if step.add is not None:
        said.append(f"residual sum {step.add}, tau {step.tau:.4g}")
    if step.split is not None:
        said.append(f"branch {step.split.add} starts")
    return "; ".join(said)


def _named(place: Place) -> str:
    position, name = place
    return name or str(position)
