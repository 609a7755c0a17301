"""Running a model by its plan."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

import scaledtensor.functional as U
from scaledtensor.errors import ModelError
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.interpose import ENTERED
from scaledtensor.unit_scale.plan import NAMES, Plan, Step, is_counted

__all__ = ["UnitScaling"]


class UnitScaling(TorchFunctionMode):
    """Changes the calls that the plan names; one use each. Dynamo traces it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.counts = dict.fromkeys(plan.counts, 0)
        self.waiting: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENTERED:
            with self:
                return ENTERED[func](*args, **kwargs)
        name = NAMES.get(func)
        if name is None or name not in self.counts or not is_counted(args):
            return func(*args, **kwargs)
        index = self.counts[name]
        self.counts[name] = index + 1
        step = self.plan.steps.get((name, index))
        if step is None:
            return func(*args, **kwargs)
        result = self.applied(step, func, args, kwargs)
        if step.split is not None:
            result, skip = U.residual_split(result, step.split.tau)
            self.waiting[step.split.add] = skip
        return result

    def applied(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if step.add is not None:
            return self.residual(step, args, kwargs)
        if step.counterpart:
            if step.free:
                kwargs = {**kwargs, "constraint": None}
            if step.tied:
                rows, weight, *rest = args
                of_rows, of_columns = weight.shape
                args = (rows, U.scale_bwd(weight, (of_columns / of_rows) ** 0.5), *rest)
            if step.causal:
                key = args[1] if len(args) > 1 else kwargs["key"]
                kwargs = {**kwargs, "context_length": key.shape[-2]}
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
        if step.scale == 1.0:
            return result
        return result.mul_(step.scale) if step.in_place else result * step.scale

    def residual(self, step: Step, args: Any, kwargs: Any) -> Tensor:
        if kwargs.get("alpha", 1) != 1:
            raise ModelError("a residual sum with alpha: write x + alpha * y")
        skip, branch = args[step.skip], args[1 - step.skip]
        if step.waiting:
            result = U.residual_add(branch, self.waiting.pop(step.add), step.tau)  # type: ignore[arg-type]
        else:
            whole = (1 + step.tau**2) ** 0.5
            result = branch * (step.tau / whole) + skip * (1 / whole)
        # `x += y` and `x.add_(y)` arrive alike, and whoever wrote the second looks at x.
        return args[0].copy_(result) if step.in_place else result

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self.counts != self.plan.counts:
            off = ", ".join(
                f"{name} {n} times instead of {self.plan.counts[name]}"
                for name, n in self.counts.items()
                if n != self.plan.counts[name]
            )
            raise ModelError(
                f"the model took another path than when unit scaling recorded it: it called {off}. "
                "Record that path first: scaledtensor.unit_scale(model, *inputs, **kwargs)"
            )
