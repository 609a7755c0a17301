"""How alike the tokens are that attention without a causal mask reads.

All of its queries see much the same mean of the values, so that what it returns is correlated
between tokens, and a later layer's mean does not get smaller with their number as it does for
independent ones: the scale of independent values comes out too large by up to the root of that
number. The correlation is a property of the architecture, of its residual weights and embeddings,
at any length. It has no closed form here; it is measured, once, with Gaussian parameters.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor import _torch
from scaledtensor.unit_scale.mode import UnitScaling
from scaledtensor.unit_scale.plan import Plan, Step
from scaledtensor.unit_scale.record import copied, left_alone

__all__ = ["correlations"]


def correlations(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, plan: Plan
) -> tuple[float, ...]:
    """Of the values of each such attention in order, in a run by `plan` on these inputs."""
    mode = _Measuring(plan)
    args, kwargs = copied(args, kwargs)
    with _torch.without_function_modes(), left_alone(module):
        named = enumerate(module.named_parameters())
        parameters = {f"module.{name}": _fresh(p, i) for i, (name, p) in named}
        with mode:
            torch.func.functional_call(_Run(module, forward), parameters, args, kwargs)
    return tuple(mode.found)


class _Run(nn.Module):
    """A module's forward without its transforms."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Measuring(UnitScaling):
    """Each attention is scaled by what it is seen to read, as later ones will find it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.found: list[float] = []

    def scaled(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if step.correlation is not None:
            value = args[2] if len(args) > 2 else kwargs["value"]
            self.found.append(_between_rows(value))
            step = replace(step, correlation=self.found[-1])
        return super().scaled(step, func, args, kwargs)


def _fresh(parameter: nn.Parameter, seed: int) -> Tensor:
    """As at initialisation, whatever was learned since: plans of later calls agree with the first.
    Gains stay: norms hide their scale from what comes after."""
    kind = getattr(parameter, "mup_type", None)
    if kind not in ("weight", "bias"):
        return parameter.detach()
    fresh = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if kind == "weight":
        fresh.normal_(generator=torch.Generator(parameter.device).manual_seed(seed))
    return fresh


def _between_rows(x: Tensor) -> float:
    """Mean correlation of two rows (the dimension before the last), for rows of one variance."""
    with _torch.without_function_modes():
        rows = x.shape[-2]
        x = x.detach().double()
        all_of_it, common = x.square().mean(), x.mean(-2).square().mean()
        if rows < 2 or not all_of_it > 0:
            return 0.0
        return min(max(float((common / all_of_it * rows - 1) / (rows - 1)), 0.0), 1.0)
