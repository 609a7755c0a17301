"""Running a model by its plan."""

from typing import Any, Self

import torch
from torch import Tensor

import scaledtensor.functional as U
from scaledtensor.errors import ModelError
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.models.interpose import ENTERED, Mode
from scaledtensor.unit_scaling.calls import NAMES, apart, given, is_counted
from scaledtensor.unit_scaling.plan import Plan, Residual, Scaled, Step

__all__ = ["UnitScaling"]


#: Functions that write only the shape of a tensor.
_OF_SHAPE = {
    getattr(Tensor, f"{name}_")
    for name in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided")
}


class UnitScaling(Mode):
    """Changes the calls that the plan names. Each mode is used once. Dynamo traces it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.counts = dict.fromkeys(plan.calls, 0)
        self.done = self.entered = 0
        #: For each residual sum: the start of its branch, and the skip connection that waits.
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}
        #: For each parameter that several calls use: the number of terms of its first gradient.
        self.terms: dict[int, float] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENTERED and func not in COUNTERPARTS:
            with self:
                return ENTERED[func](*args, **kwargs)
        step = self.next_step(func, args, kwargs)
        if step is None:
            return func(*args, **kwargs)
        self.refuse_checkpoint()
        return self.applied(step, func, args, kwargs)

    def next_step(self, func: Any, args: Any, kwargs: Any) -> Step | None:
        """Return the step of this call, if it has one. The call then counts as done."""
        name = NAMES.get(func)
        if name is None or name not in self.counts or not is_counted(args, kwargs):
            return None
        if self.done == len(self.plan.calls) or self.plan.calls[self.done] != name:
            raise _other_path(f"it called {name} where it did not before")
        self.done += 1
        index = self.counts[name]
        self.counts[name] = index + 1
        return self.plan.steps.get((name, index))

    def applied(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        """Make the call with the changes of its step."""
        if not step.in_place:
            return self.finished(step, self.changed(step, func, args, kwargs), args)
        target = args[0] if args else kwargs["input"]
        if isinstance(step.work, Residual):
            return self.finished(step, self.scaled(step, func, args, kwargs), args, target)
        if func in _OF_SHAPE and isinstance(step.work, Scaled):
            return self.finished(step, func(*args, **kwargs) * step.work.scale, args, target)
        # The call writes into a copy, because autograd may save the tensors that it reads.
        _, args, kwargs = apart(args, kwargs)
        return self.finished(step, self.changed(step, func, args, kwargs), args, target)

    def changed(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self.compensated(step, func, args, kwargs)
        return self.scaled(step, func, args, kwargs)

    def compensated(self, step: Step, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Multiply arguments and gradients of arguments by their factors."""
        if not (step.delays or step.shared or step.arguments):
            return args, kwargs
        factors, args, kwargs = [*step.delays], list(args), dict(kwargs)
        for place, factor in step.arguments:
            where, key = given(place, args, kwargs)
            where[key] = where[key] * factor
        if step.shared:
            places = [given(place, args, kwargs) for _, place in step.shared]
            terms = _terms(func, args, kwargs, [key for _, key in places])
            for which, place in step.shared:
                first = self.terms.setdefault(which, terms)
                factors.append((place, (terms / first) ** 0.5))
        for place, factor in factors:
            where, key = given(place, args, kwargs)
            where[key] = U.scale_bwd(where[key], factor)
        return args, kwargs

    def scaled(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        """Do the work of a step."""
        work = step.work
        if not isinstance(work, Residual):
            return work.run(func, args, kwargs)
        waited = None
        if kwargs.get("alpha", 1) != 1:
            raise ModelError("a residual sum with alpha: write x + alpha * y")
        if work.waiting:
            start, waited = self.waiting.pop(work.index)
            # Dynamo gives a tensor another identity when a function that has modes returns it.
            if args[work.skip] is not start and not torch.compiler.is_compiling():
                raise _other_path("a residual sum is of something else than what it started at")
        return work.run(args, waited)

    def finished(self, step: Step, result: Any, args: Any, target: Tensor | None = None) -> Any:
        """Multiply gradients of a result by their factors, and split it where a branch starts. With
        `target`, the result is written into this tensor."""
        if step.choice:
            result = U.scale_bwd(result, (args[0].numel() / max(result.numel(), 1)) ** 0.5)
        for undo in step.undo:
            if undo.output is None:
                result = U.scale_bwd(result, undo.factor)
            else:
                result = list(result)
                result[undo.output] = U.scale_bwd(result[undo.output], undo.factor)
        skip = None
        if step.split is not None:
            result, skip = U.residual_split(result, step.split.tau)
        if target is not None:
            result = target.copy_(result)
        elif step.overwritten and (step.choice or step.undo or skip is not None):
            # A result with a factor for its gradient is a view that autograd forbids to write into.
            result = [x.clone() for x in result] if isinstance(result, list) else result.clone()
        if step.split is not None:
            assert skip is not None
            self.waiting[step.split.index] = result, skip
        return result

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.entered += 1  # once for the forward, and again for functions that are entered
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self.entered -= 1
        if kind is None and self.entered == 0 and self.done != len(self.plan.calls):
            raise _other_path(f"it did not call {self.plan.calls[self.done]}")


def _terms(func: Any, args: Any, kwargs: Any, parameters: list[Any]) -> float:
    """Return the number of terms of a parameter's gradient in a call, up to a factor that is equal
    for all calls on the parameter: the elements of the other operand, of the rows that are looked
    up, or of a convolution's result."""
    if NAMES[func].startswith("conv"):
        like = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
        named = {k: a.to("meta") if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        with torch.no_grad():
            return max(float(func(*like, **named).numel()), 1)
    found = [
        (place, a) for place, a in (*enumerate(args), *kwargs.items()) if isinstance(a, Tensor)
    ]
    x = next((a for place, a in found if place not in parameters), None)
    if x is None:
        return 1
    if x.is_floating_point():
        return max(x.numel(), 1)
    table = next(a for place, a in found if place in parameters)
    return max(x.numel() * table.shape[-1], 1)


def _other_path(what: str) -> ModelError:
    return ModelError(
        f"the model took another path than when unit scaling recorded it: {what}. Record that path "
        "first: scaledtensor.unit_scale(model, inputs), of a model that always takes it"
    )
