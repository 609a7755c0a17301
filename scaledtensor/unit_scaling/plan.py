"""The plan of unit scaling: the changes to each call of a model. A planner makes it, and a mode
follows it.

A `Step` has three parts. First it multiplies arguments and their gradients. Then its `work` runs:

- `Counterpart` calls the unit-scaled function in place of the model's function;
- `Scaled` calls the model's function, and multiplies the result;
- `Residual` adds a skip connection and a branch with their weights.

Last, it multiplies gradients of the result, and splits the result where a residual branch starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

import scaledtensor.functional as U
from scaledtensor.functional.residual import residual_weights
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.unit_scaling.calls import Call, Place

__all__ = ["Counterpart", "Plan", "Residual", "Scaled", "Split", "Step", "Undo", "Work"]


@dataclass(frozen=True)
class Counterpart:
    """The unit-scaled function takes the place of the call's function."""

    #: Whether its gradients have separate scales: its operands have no other use.
    free: bool = False
    #: Whether its gradients are the true ones: one of its parameters has uses without a scale.
    exact: bool = False
    #: Whether it looks up rows of a matrix that a product also multiplies by. No edge is cut there:
    #: both parts of the matrix's gradient have the product's scale.
    tied: bool = False
    #: Whether it is attention with a causal mask. The closed form is then the one for causal
    #: attention in every spelling: models give a mask in one mode of execution, and set
    #: `is_causal` in another.
    causal: bool = False
    #: Correlation of the tokens that attention without a causal mask reads, or of the elements that
    #: an average reads. None for all other functions.
    correlation: float | None = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.free or self.exact:
            kwargs = {**kwargs, "constraint": "exact" if self.exact else None}
        if self.tied and not self.exact:
            args = tuple(map(_like_a_products, args))
            kwargs = {name: _like_a_products(a) for name, a in kwargs.items()}
        if self.causal:
            key = args[1] if len(args) > 1 else kwargs["key"]
            kwargs = {**kwargs, "context_length": key.shape[-2]}
        if self.correlation:
            kwargs = {**kwargs, "correlation": self.correlation}
        return COUNTERPARTS[func](*args, **kwargs)

    def words(self) -> Iterator[str]:
        yield "unit-scaled" + (", every gradient by itself" if self.free else "")
        if self.exact:
            yield "true gradients"
        if self.tied:
            yield "tied to a product"
        if self.correlation:
            yield f"correlated {self.correlation:.2f}"


@dataclass(frozen=True)
class Scaled:
    """The call's function runs, and its result is multiplied."""

    #: Factor of the result and of its gradient.
    scale: float = 1.0
    #: Positions of parameters that are broadcast. Their gradients are sums over the positions.
    parameters: tuple[int, ...] = ()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.parameters:
            whole = max(a.numel() for a in args if isinstance(a, Tensor))
            args = tuple(
                U.scale_bwd(a, (a.numel() / whole) ** 0.5 / self.scale)
                if i in self.parameters
                else a
                for i, a in enumerate(args)
            )
        result = func(*args, **kwargs)
        if result is None:  # `__setitem__` returns nothing
            result = args[0]
        if self.scale == 1.0:
            return result
        if isinstance(result, (tuple, list)):
            return [part * self.scale for part in result]
        return result * self.scale

    def words(self) -> Iterator[str]:
        if self.parameters:
            yield "parameters broadcast"
        if self.scale != 1:
            yield f"x {self.scale:.4g}"


@dataclass(frozen=True)
class Residual:
    """The call is the sum of a skip connection and a residual branch."""

    #: Number of the residual sum in the model.
    index: int
    #: Position of the skip connection.
    skip: int
    #: Weight of the branch relative to the skip connection.
    tau: float
    #: Whether the skip connection waits in a split; otherwise the sum scales both terms.
    waiting: bool

    def run(self, args: Any, waited: Tensor | None) -> Tensor:
        """Return the sum. `waited` is the skip connection from the split, if it waits there."""
        skip, branch = args[self.skip], args[1 - self.skip]
        if waited is not None:
            return U.residual_add(branch, waited, self.tau)
        of_branch, of_skip = residual_weights(self.tau)
        total: Tensor = branch * of_branch + skip * of_skip
        return total

    def words(self) -> Iterator[str]:
        yield f"residual sum {self.index}, tau {self.tau:.4g}"


Work = Counterpart | Scaled | Residual


@dataclass(frozen=True)
class Split:
    """The result starts a residual branch. The gradient of the branch is delayed up to here."""

    #: Number of the residual sum in which the branch ends.
    index: int
    tau: float


@dataclass(frozen=True)
class Undo:
    """The gradient of a result is delayed: here it gets its factor back."""

    factor: float
    #: The index of the result, if the call has several results.
    output: int | None


@dataclass(frozen=True)
class Step:
    """Changes to one call. Defaults leave the call unchanged."""

    work: Work = Scaled()

    #: Factors of arguments, by place. A tensor that was written through a view gets its scale here,
    #: because no call returns it.
    arguments: tuple[tuple[Place, float], ...] = ()
    #: Factors of the gradients of arguments, by place: a delay starts or ends here, or a gradient
    #: leaves a residual branch whose gradients are delayed.
    delays: tuple[tuple[Place, float], ...] = ()
    #: (which parameter, its place) of parameters that other calls use too. Their gradient is a sum,
    #: and all terms get the scale of the first term, however many rows each call has.
    shared: tuple[tuple[int, Place], ...] = ()

    undo: tuple[Undo, ...] = ()
    #: Whether the call chooses elements of a tensor that nothing else uses. The gradient of all
    #: other elements is zero, and a factor of the chosen elements' gradient compensates for it.
    choice: bool = False
    split: Split | None = None

    #: Whether the call writes into its first argument, which then gets the result.
    in_place: bool = False
    #: Whether a later call writes into the result.
    overwritten: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "counterpart" in state:
            state = _of_version_0_1(state)
        vars(self).update(state)

    def words(self) -> Iterator[str]:
        """Describe the changes, in an order in which they could be made."""
        if self.shared:
            yield "parameters of other calls"
        for place, x in self.arguments:
            yield f"argument {_named(place)} x {x:.4g}"
        for place, x in self.delays:
            yield f"gradient of argument {_named(place)} x {x:.4g}"
        for undo in self.undo:
            result = "result" if undo.output is None else f"result {undo.output}"
            yield f"gradient of {result} x {undo.factor:.4g}"
        yield from self.work.words()
        if self.choice:
            yield "gradient makes up for what it leaves out"
        if self.split is not None:
            yield f"branch {self.split.index} starts"


@dataclass
class Plan:
    """The calls of a model's forward that unit scaling changes."""

    steps: dict[Call, Step] = field(default_factory=dict)
    #: Calls of every name that has a step, in order. Another order is another path.
    calls: tuple[str, ...] = ()
    #: Residual sums, in order, as a listing calls them.
    residuals: list[str] = field(default_factory=list)

    @property
    def correlations(self) -> list[float]:
        """The correlations of all steps that have one, in order."""
        works = [step.work for step in self.steps.values()]
        return [
            work.correlation
            for work in works
            if isinstance(work, Counterpart) and work.correlation is not None
        ]

    def __str__(self) -> str:
        lines = [
            f"{f'{name} {i}':34} {'; '.join(step.words())}"
            for (name, i), step in self.steps.items()
        ]
        return "\n".join(lines)


def _of_version_0_1(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a step from a pickle of version 0.1, which had one record for all kinds
    of work."""
    kind: type[Work] = Scaled
    if state["add"] is not None:
        kind, state = Residual, state | {"index": state["add"]}
    elif state["counterpart"]:
        kind = Counterpart
    work = kind(**{f.name: state[f.name] for f in fields(kind)})
    split = state["split"]
    if split is not None:
        split = Split(vars(split)["add"], split.tau)
    rest = {f.name: state[f.name] for f in fields(Step) if f.name not in ("work", "split")}
    return {**rest, "work": work, "split": split}


def _like_a_products(x: Any) -> Any:
    """Give the gradient of a matrix (rows, columns) that is looked up the scale that the gradient
    of a product's matrix has."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return U.scale_bwd(x, (x.shape[1] / x.shape[0]) ** 0.5)


def _named(place: Place) -> str:
    position, name = place
    return name or str(position)
