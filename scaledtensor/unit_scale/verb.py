"""`unit_scale(model)`: another function, of unit variance everywhere, from the same code."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import nn

from scaledtensor import _torch
from scaledtensor.functional import transformer_residual_scaling_rule
from scaledtensor.interpose import UNIT_SCALED, interpose, original
from scaledtensor.unit_scale.correlation import Measured, measure
from scaledtensor.unit_scale.initialize import unit_parameters
from scaledtensor.unit_scale.mode import UnitScaling
from scaledtensor.unit_scale.plan import Plan
from scaledtensor.unit_scale.planner import ResidualRule, plan
from scaledtensor.unit_scale.record import record

__all__ = ["UnitScale", "unit_scale"]

M = TypeVar("M", bound=nn.Module)
Key = tuple[Any, ...]


class UnitScale:
    """The transform: plans by the way a model is called."""

    order: ClassVar[int] = 0  # the model's own functions, before any other transform
    mark: ClassVar[str | None] = UNIT_SCALED

    def __init__(self, residual_rule: ResidualRule | None) -> None:
        self.residual_rule = residual_rule
        self.plans: dict[Key, Plan] = {}
        #: By how many correlations there are in a plan: what was measured for the first plan of so
        #: many holds for all.
        self.measured: dict[int, Measured] = {}

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> UnitScaling:
        key = _key(module, args, kwargs)
        if key not in self.plans:
            _plan_uncompiled(self, module, args, kwargs)
        return UnitScaling(self.plans[key])

    def forward(self, module: nn.Module) -> Callable[..., Any]:
        """What a plan is made for."""
        return original(module)

    def make_plan(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        forward = self.forward(module)
        recording = record(module, forward, args, kwargs)
        rule = self.residual_rule or transformer_residual_scaling_rule()
        made = plan(recording, rule)
        n = len(made.correlations)
        if n:
            if n not in self.measured:
                self.measured[n] = measure(module, forward, args, kwargs, made)
            found = self.measured[n]
            parameters = dict(module.named_parameters())
            gradients = {id(parameters[name]): rms for name, rms in found.gradients.items()}
            made = plan(recording, rule, found.correlations, gradients)
        self.plans[_key(module, args, kwargs)] = made


@partial(
    _torch.uncompiled,
    reason="unit_scale records a model's first call of a kind: give unit_scale() the inputs, "
    "or call the model once before compiling it whole",
)
def _plan_uncompiled(transform: UnitScale, module: nn.Module, args: Any, kwargs: Any) -> None:
    transform.make_plan(module, args, kwargs)


def _key(module: nn.Module, args: Any, kwargs: Any) -> Key:
    """What the path through a model may depend on: the mode, and which arguments are given."""
    given = tuple(a is not None for a in args)
    named = tuple(sorted(name for name, a in kwargs.items() if a is not None))
    return (module.training, given, named)


def unit_scale(
    model: M,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    residual_rule: ResidualRule | None = None,
    initialize: bool = True,
) -> M:
    """Make `model` compute its unit-scaled counterpart, in place (arXiv 2303.11257, 2407.17465).

    At initialisation activations, weights and gradients then have about unit variance, so that they
    fit FP8 without scales; on a `scale_model`led model the carried scales stay near 1. The function
    changes by constants: train it from scratch. Parameters are set to unit variance (biases to
    zero) and tagged for u-muP, so `scaledtensor.optim` knows their learning rates; a learning rate
    near 1/2 is where to begin.

    Nothing is replaced by name: the model runs once, on copies and without gradients, and what it
    calls is written down (scaledtensor.unit_scale.planner says what becomes of it, and
    `scaledtensor.inspect.plans(model)` what became of it). It keeps its class and methods; it
    compiles, pickles, deep-copies and exports. Its state_dict has one more entry, the buffer
    `unit_scaled`, by which a model that is not unit-scaled refuses it. Every parameter's gradient
    is a multiple of that of the function computed, if this ends in one loss.

    Args:
        model: any module that calls torch functions; compile it afterwards.
        inputs: arguments of one call, positional or by name, to record at once. Without them each
            way of calling the model (train or eval, which arguments are given) is recorded when it
            first comes; `torch.compile(fullgraph=True)` needs that to have happened.
        residual_rule: tau of residual branch `i` of `n`; the transformer rule of u-muP by default.
        initialize: whether to set the parameters.

    Returns:
        The same model.

    Raises:
        ModelError: `model` is no module, is compiled, or is unit-scaled already. When called: it
            took another path than when it was recorded.
        UnsupportedError: when called: a part of it is checkpointed.
    """
    transform = UnitScale(residual_rule)
    interpose(model, transform)
    if initialize:
        unit_parameters(model)
    if inputs is not None:
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        transform.make_plan(model, args, kwargs)
    return model
