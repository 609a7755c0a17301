"""How alike the tokens are that attention without a causal mask reads.

All of its queries see much the same mean of the values, so that what it returns is correlated
between tokens, and a later layer's mean does not get smaller with their number as it does for
independent ones: the scale of independent values comes out too large by up to the root of that
number. The correlation is a property of the architecture, of its residual weights and embeddings,
at any length. It has no closed form here; it is measured, once, with Gaussian parameters.

An average over positions is like that: what it is of has a mean, after a relu, and has one in each
channel, after a product with what has. And all positions of a window have one gradient, so that
the gradient of a parameter above is a sum of terms that are alike, as far as activations are. Its
RMS is measured in the backward pass of that run.
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
from scaledtensor.unit_scaling.mode import UnitScaling
from scaledtensor.unit_scaling.plan import Plan, Step, is_average
from scaledtensor.unit_scaling.record import copied, leaves_of, left_alone

__all__ = ["Measured", "measure"]


class Measured(NamedTuple):
    """What a run by a plan had."""

    #: Of each step with a correlation, in order.
    correlations: tuple[float, ...]
    #: RMS by the name of a parameter; empty where the plan has no average.
    gradients: dict[str, float]


def measure(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, plan: Plan
) -> Measured:
    """Of a run by `plan` on these inputs, with Gaussian parameters: what each attention without a
    causal mask reads, what each average is of, and what gradients parameters above one have."""
    mode = _Measuring(plan)
    with torch.inference_mode(False):
        args, kwargs = copied(args, kwargs)
        with _torch.without_function_modes(), left_alone(module):
            named = dict(module.named_parameters())
            fresh = {name: _fresh(p, i) for i, (name, p) in enumerate(named.items())}
            given: dict[str, Tensor] = {f"module.{name}": p for name, p in fresh.items()}
            with torch.set_grad_enabled(any(map(is_average, plan.steps))):
                with mode:
                    result = torch.func.functional_call(_Run(module, forward), given, args, kwargs)
                gradients = _gradients(result, fresh)
    return Measured(tuple(mode.found), gradients)


def _gradients(result: Any, parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """RMS of each parameter's gradient: of the losses that a model returns, or else for Gaussian
    gradients of all that it returns."""
    found = [x for x in leaves_of(result) if isinstance(x, Tensor) and x.requires_grad]
    losses = [x for x in found if x.numel() == 1]
    rng = torch.Generator().manual_seed(0)
    seeds = [
        torch.ones_like(x) if losses else torch.randn(x.shape, generator=rng).to(x)
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
    """A module's forward without its transforms."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Measuring(UnitScaling):
    """Each attention and average is scaled by what it reads, as later ones will find it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.found: list[float] = []

    def scaled(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if step.correlation is not None:
            if func is scaled_dot_product_attention:
                value = args[2] if len(args) > 2 else kwargs["value"]
                self.found.append(_between_rows(value))
            else:
                self.found.append(_within_windows(func, args, kwargs))
            step = replace(step, correlation=self.found[-1])
        return super().scaled(step, func, args, kwargs)


def _fresh(parameter: nn.Parameter, seed: int) -> nn.Parameter:
    """As at initialisation, whatever was learned since: plans of later calls agree with the first.
    Gains stay: norms hide their scale from what comes after."""
    kind = getattr(parameter, "mup_type", None)
    if kind not in ("weight", "bias"):
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    fresh = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if kind == "weight":
        fresh.normal_(generator=torch.Generator(parameter.device).manual_seed(seed))
    return nn.Parameter(fresh, requires_grad=parameter.requires_grad)


def _within_windows(function: Any, args: Any, kwargs: Any) -> float:
    """The r at which an average is of unit RMS: the mean product of two elements of a window."""
    with torch.no_grad():
        # Those of independent elements, k^-1/2 of which is the average itself.
        independent, alike = (
            COUNTERPARTS[function](*args, **kwargs, correlation=r).double().square().mean()
            for r in (0.0, 1.0)
        )
        if not alike > 0 or not alike < independent:  # a window of one element
            return 0.0
        share = alike / independent
        return max(float((alike - share) / (1 - share)), 0.0)


def _between_rows(x: Tensor) -> float:
    """Mean correlation of two rows (the dimension before the last), for rows of one variance."""
    with _torch.without_function_modes():
        rows = x.shape[-2]
        x = x.detach().double()
        all_of_it, common = x.square().mean(), x.mean(-2).square().mean()
        if rows < 2 or not all_of_it > 0:
            return 0.0
        return min(max(float((common / all_of_it * rows - 1) / (rows - 1)), 0.0), 1.0)
