"""Measurements for a plan: correlations of tokens and elements, and the size of some gradients.

All queries of attention without a causal mask see much the same mean of the values. So the results
are correlated between tokens, and a later layer's mean does not shrink with the number of tokens,
as the mean of independent values does. The scale for independent values would be too large by up to
the root of this number. The correlation is a property of the architecture, its residual weights and
embeddings, at any length. It has no closed form here, and is measured once, with Gaussian
parameters.

The same holds for an average over positions. Its operand has a mean after a relu, and a mean in
each channel after a product with such an operand. All positions of a window have one gradient, so
the gradient of a parameter above the average is a sum of terms that are as alike as the
activations. Its RMS is measured in the backward pass of the same run.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from scaledtensor import _torch
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.unit_scaling.calls import is_average
from scaledtensor.unit_scaling.mode import UnitScaling
from scaledtensor.unit_scaling.plan import Counterpart, Plan, Step
from scaledtensor.unit_scaling.record import copied, leaves_of, left_alone

__all__ = ["Measured", "measure"]


class Measured(NamedTuple):
    """Measurements of one run."""

    #: The correlation of each step that has one, in order.
    correlations: tuple[float, ...]
    #: RMS of gradients by the name of a parameter; empty if the plan has no average.
    gradients: dict[str, float]


def measure(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, plan: Plan
) -> Measured:
    """Run `plan` on these inputs with Gaussian parameters. Measure the correlation of the tokens
    that each attention without a causal mask reads, and of the elements that each average reads.
    Measure the gradients of all parameters if there is an average."""
    mode = _Measuring(plan)
    with torch.inference_mode(False):
        args, kwargs = copied(args, kwargs)
        with _torch.without_function_modes(), left_alone(module):
            named = dict(module.named_parameters())
            fresh = {name: _fresh(p, i) for i, (name, p) in enumerate(named.items())}
            given: dict[str, Tensor] = {f"module.{name}": p for name, p in fresh.items()}
            with torch.set_grad_enabled(any(is_average(name) for name, _ in plan.steps)):
                with mode:
                    result = torch.func.functional_call(_Run(module, forward), given, args, kwargs)
                gradients = _gradients(result, fresh)
    return Measured(tuple(mode.found), gradients)


def _gradients(result: Any, parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """Return the RMS of each parameter's gradient: for the losses that a model returns, or, without
    losses, for Gaussian gradients of all results."""
    found = [x for x in leaves_of(result) if isinstance(x, Tensor) and x.requires_grad]
    losses = [x for x in found if x.numel() == 1]
    rng = torch.Generator().manual_seed(0)
    seeds = [
        torch.ones_like(x)
        if losses
        else torch.randn(x.shape, generator=rng, dtype=torch.float32).to(x)
        for x in losses or found
    ]
    sources = {name: p for name, p in parameters.items() if p.requires_grad}
    if not found or not sources:
        return {}
    grads = torch.autograd.grad(losses or found, [*sources.values()], seeds, allow_unused=True)
    rms = {
        name: float(g.detach().double().square().mean().sqrt())
        for name, g in zip(sources, grads, strict=True)
        if g is not None and g.numel()
    }
    return {name: x for name, x in rms.items() if 0 < x < math.inf}


class _Run(nn.Module):
    """Runs the forward of a module without its transforms."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Measuring(UnitScaling):
    """Measures the operands of each attention and average, and scales the result accordingly, so
    that later calls read operands of the right size."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.found: list[float] = []

    def scaled(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        work = step.work
        if isinstance(work, Counterpart) and work.correlation is not None:
            if func is scaled_dot_product_attention:
                value = args[2] if len(args) > 2 else kwargs["value"]
                self.found.append(_between_rows(value))
            else:
                self.found.append(_within_windows(func, args, kwargs))
            step = replace(step, work=replace(work, correlation=self.found[-1]))
        return super().scaled(step, func, args, kwargs)


def _fresh(parameter: nn.Parameter, seed: int) -> nn.Parameter:
    """Return a parameter as it was at initialisation, so that plans of later calls agree with the
    first. Gains stay, because norms hide their scale from later layers."""
    kind = getattr(parameter, "mup_type", None)
    if kind not in ("weight", "bias"):
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    fresh = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if kind == "weight":
        fresh.normal_(generator=torch.Generator(parameter.device).manual_seed(seed))
    return nn.Parameter(fresh, requires_grad=parameter.requires_grad)


def _within_windows(function: Any, args: Any, kwargs: Any) -> float:
    """Return the correlation r for which an average has unit RMS: the mean product of two elements
    of a window."""
    with torch.no_grad():
        # Squares of the results for independent elements and for equal elements.
        independent, alike = (
            COUNTERPARTS[function](*args, **kwargs, correlation=r).double().square().mean()
            for r in (0.0, 1.0)
        )
        if not alike > 0 or not alike < independent:  # a window has one element
            return 0.0
        share = alike / independent
        return max(float((alike - share) / (1 - share)), 0.0)


def _between_rows(x: Tensor) -> float:
    """Return the mean correlation of two rows (the dimension before the last), if all rows have one
    variance."""
    with _torch.without_function_modes():
        rows = x.shape[-2]
        x = x.detach().double()
        all_of_it, common = x.square().mean(), x.mean(-2).square().mean()
        if rows < 2 or not all_of_it > 0:
            return 0.0
        return min(max(float((common / all_of_it * rows - 1) / (rows - 1)), 0.0), 1.0)
