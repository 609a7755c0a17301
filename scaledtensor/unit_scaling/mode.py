"""Running a model by its plan."""

from typing import Any, Self

import torch
from torch import Tensor

import scaledtensor.functional as U
from scaledtensor.errors import ModelError
from scaledtensor.functional.residual import residual_weights
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.models.interpose import ENTERED, Mode
from scaledtensor.unit_scaling.plan import NAMES, Plan, Step, apart, given, is_counted

__all__ = ["UnitScaling"]


#: What writes into a tensor its shape alone.
_OF_SHAPE = {
    getattr(Tensor, f"{name}_")
    for name in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided")
}


class UnitScaling(Mode):
    """Changes the calls that the plan names; one use each. Dynamo traces it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.counts = dict.fromkeys(plan.calls, 0)
        self.done = self.entered = 0
        #: By residual sum: what its branch starts from, and the skip connection that waits for it.
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}
        #: Of parameters that several calls use: over how many terms the first one sums.
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
        """What the plan has for this call; the call then counts as done."""
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
        """The call as its step has it."""
        if not step.in_place:
            return self.finished(step, self.changed(step, func, args, kwargs), args)
        target = args[0] if args else kwargs["input"]
        if step.add is not None:
            return self.finished(step, self.residual(step, args, kwargs), args, target)
        if func in _OF_SHAPE:
            return self.finished(step, func(*args, **kwargs) * step.scale, args, target)
        # Into a copy: what the call then is made of and leaves may be saved for its derivative.
        _, args, kwargs = apart(args, kwargs)
        return self.finished(step, self.changed(step, func, args, kwargs), args, target)

    def changed(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self.compensated(step, func, args, kwargs)
        return self.scaled(step, func, args, kwargs)

    def finished(self, step: Step, result: Any, args: Any, target: Tensor | None = None) -> Any:
        """A call's result with factors for its gradient, and where a residual branch starts what
        the branch goes on with; written into `target`, which then is that."""
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
            # What has a factor for its gradient is a view that autograd lets nobody write into.
            result = [x.clone() for x in result] if isinstance(result, list) else result.clone()
        if step.split is not None:
            assert skip is not None
            self.waiting[step.split.add] = result, skip
        return result

    def compensated(self, step: Step, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments that have factors, or whose gradients do."""
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
        if step.add is not None:
            return self.residual(step, args, kwargs)
        if step.counterpart:
            if step.free or step.exact:
                kwargs = {**kwargs, "constraint": "exact" if step.exact else None}
            if step.tied and not step.exact:
                args = tuple(map(_of_product, args))
                kwargs = {name: _of_product(a) for name, a in kwargs.items()}
            if step.causal:
                key = args[1] if len(args) > 1 else kwargs["key"]
                kwargs = {**kwargs, "context_length": key.shape[-2]}
            if step.correlation:
                kwargs = {**kwargs, "correlation": step.correlation}
            return COUNTERPARTS[func](*args, **kwargs)
        if step.parameters:
            whole = max(a.numel() for a in args if isinstance(a, Tensor))
            args = tuple(
                U.scale_bwd(a, (a.numel() / whole) ** 0.5 / step.scale)
                if i in step.parameters
                else a
                for i, a in enumerate(args)
            )
        result = func(*args, **kwargs)
        if result is None:  # of `__setitem__`
            result = args[0]
        if step.scale == 1.0:
            return result
        if isinstance(result, (tuple, list)):
            return [part * step.scale for part in result]
        return result * step.scale

    def residual(self, step: Step, args: Any, kwargs: Any) -> Tensor:
        if kwargs.get("alpha", 1) != 1:
            raise ModelError("a residual sum with alpha: write x + alpha * y")
        skip, branch = args[step.skip], args[1 - step.skip]
        if step.waiting:
            start, waited = self.waiting.pop(step.add)  # type: ignore[arg-type]
            # Dynamo gives a tensor another identity when a function that has modes returns it.
            if skip is not start and not torch.compiler.is_compiling():
                raise _other_path("a residual sum is of something else than what it started at")
            return U.residual_add(branch, waited, step.tau)
        of_branch, of_skip = residual_weights(step.tau)
        total: Tensor = branch * of_branch + skip * of_skip
        return total

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
    """Of how many terms the gradients of a call's parameters are sums, up to a factor that all
    calls on one parameter have: elements of what it is multiplied by, of what is looked up, or of
    what a convolution makes."""
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


def _of_product(x: Any) -> Any:
    """A matrix (rows, columns) that is looked up: its gradient has the scale of a product's."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return U.scale_bwd(x, (x.shape[1] / x.shape[0]) ** 0.5)


def _other_path(what: str) -> ModelError:
    return ModelError(
        f"the model took another path than when unit scaling recorded it: {what}. Record that path "
        "first: scaledtensor.unit_scale(model, inputs), of a model that always takes it"
    )
