"""`unit_scale(model)`: another function, of unit variance everywhere, from the same code."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from scaledtensor import _torch, mup
from scaledtensor.functional import transformer_residual_scaling_rule
from scaledtensor.models.interpose import UNIT_SCALED, interpose, original
from scaledtensor.unit_scaling.correlation import Measured, measure
from scaledtensor.unit_scaling.mode import UnitScaling
from scaledtensor.unit_scaling.plan import Plan
from scaledtensor.unit_scaling.planner import ResidualRule, plan
from scaledtensor.unit_scaling.record import record

__all__ = ["VECTOR_LR_MULT", "UnitScale", "unit_parameters", "unit_scale"]


# Parameters as unit scaling starts them: weights of unit variance, biases of zero.
#: By what the learning rate of gains and biases is multiplied. By the published rule a gain moves
#: by the learning rate itself, and a weight by the learning rate over sqrt(fan_in): at the rates
#: that are best for weights of unit variance, about 1/2, gains would change by half in one step.
#: Of 1/16, 1/32 and 1/64 this served GPT-2 and Llama best (benchmarks/unit_scale_training.py).
VECTOR_LR_MULT = 2.0**-5


def unit_parameters(module: nn.Module) -> None:
    """Scale every weight to unit RMS and set every bias to zero, in place; tag all for u-muP.

    The depth that a tag tells is the length of the outermost `ModuleList` around a parameter.

    A weight has two or more dimensions; what is constant in it (zeros, a padding row) stays. Of one
    dimension, biases become zero and gains stay what they are.
    """
    depths = _depths(module)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            kind = _kind(name, parameter)
            with torch.no_grad():
                if kind == "bias":
                    parameter.zero_()
                elif kind == "weight":
                    _to_unit(parameter)
            if not mup.has_parameter_data(parameter):
                mult = 1.0 if kind == "weight" else VECTOR_LR_MULT
                mup.tag(parameter, kind, depths.get(parameter), _fan_in(owner, parameter), mult)
    mup.keep_tags(module)


def _depths(module: nn.Module) -> dict[nn.Parameter, int]:
    """Of the parameters of a stack, a `ModuleList` of several: how many layers it has."""
    found: dict[nn.Parameter, int] = {}
    for stack in module.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) > 1:
            for parameter in stack.parameters():
                found.setdefault(parameter, len(stack))
    return found


def _fan_in(owner: nn.Module, weight: Tensor) -> int | None:
    """The inputs of a matrix that is kept as (in, out): its bias is as long as its rows."""
    bias = getattr(owner, "bias", None)
    if weight.dim() != 2 or not isinstance(bias, Tensor) or len(bias) == weight.shape[0]:
        return None
    return weight.shape[0] if len(bias) == weight.shape[1] else None


def _kind(name: str, parameter: Tensor) -> mup.MupType:
    if "bias" in name and parameter.dim() <= 1:
        return "bias"
    return "weight" if parameter.dim() > 1 else "norm"


def _to_unit(weight: Tensor) -> None:
    rms = weight.float().square().mean().sqrt()
    if torch.isfinite(rms) and rms > 0:
        weight.div_(rms)


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
    calls is written down (scaledtensor.unit_scaling.planner says what becomes of it, and
    `scaledtensor.inspect.listing(model)` what became of it). It keeps its class and methods; it
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
