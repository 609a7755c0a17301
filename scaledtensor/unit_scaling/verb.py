"""`unit_scale(model)`: the model computes a function with unit variance everywhere."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from scaledtensor import _torch, mup
from scaledtensor.errors import ModelError
from scaledtensor.functional import transformer_residual_scaling_rule
from scaledtensor.models.interpose import UNIT_SCALED, Transform, interpose, original
from scaledtensor.unit_scaling.correlation import Measured, measure
from scaledtensor.unit_scaling.mode import UnitScaling
from scaledtensor.unit_scaling.plan import Plan
from scaledtensor.unit_scaling.planner import ResidualRule, plan
from scaledtensor.unit_scaling.record import record

__all__ = ["VECTOR_LR_MULT", "UnitScale", "unit_parameters", "unit_scale"]


#: Factor of the learning rate of gains and biases. By the published rule a gain moves by the
#: learning rate itself, and a weight by the learning rate over sqrt(fan_in). At the best learning
#: rates for weights of unit variance, about 1/2, gains would change by half in one step. Of 1/16,
#: 1/32 and 1/64, the factor 1/32 was best for GPT-2 and Llama (benchmarks/unit_scale_training.py).
VECTOR_LR_MULT = 2.0**-5


def unit_parameters(module: nn.Module) -> None:
    """Scale every weight to unit RMS and set every bias to zero, in place. Tag all for u-muP.

    The depth in a tag is the length of the outermost `ModuleList` around a parameter.

    A weight has two or more dimensions; zeros in it, such as a padding row, stay zero. Of the
    parameters with one dimension, biases become zero and gains stay unchanged.
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
    """Return the number of layers of the stack around a parameter. A stack is a `ModuleList` with
    more than one layer."""
    found: dict[nn.Parameter, int] = {}
    for stack in module.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) > 1:
            for parameter in stack.parameters():
                found.setdefault(parameter, len(stack))
    return found


def _fan_in(owner: nn.Module, weight: Tensor) -> int | None:
    """Return the number of inputs of a matrix (in, out), whose bias is as long as its rows. None
    for any other weight."""
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


class UnitScale(Transform):
    """The transform of a model, with one plan for each way of calling it."""

    order: ClassVar[int] = 0  # the model's own functions, before any other transform
    mark: ClassVar[str | None] = UNIT_SCALED

    def __init__(self, residual_rule: ResidualRule | None) -> None:
        self.residual_rule = residual_rule
        self.plans: dict[Key, Plan] = {}
        #: Measurements by the number of correlations in a plan. The measurements for the first plan
        #: with this number hold for all plans with it.
        self.measured: dict[int, Measured] = {}

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> UnitScaling:
        key = _key(module, args, kwargs)
        if key not in self.plans:
            _plan_uncompiled(self, module, args, kwargs)
        return UnitScaling(self.plans[key])

    def forward(self, module: nn.Module) -> Callable[..., Any]:
        """Return the function that a plan is made for."""
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
    """Return the facts on which the path through a model may depend: whether it trains, and which
    arguments are given."""
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

    At initialisation, activations, weights and gradients then have about unit variance, so they fit
    FP8 without scales. If `scale_model` was called too, the carried scales stay near 1. The
    function changes by constants: train it from scratch. Parameters are set to unit variance
    (biases to zero) and tagged for u-muP, so `scaledtensor.optim` knows their learning rates. Start
    with a learning rate near 1/2.

    No layer is replaced by name. The model runs once, on copies and without gradients, and its
    calls are recorded. `scaledtensor.unit_scaling.planner` describes the rules, and
    `print(*scaledtensor.inspect.plans(model))` lists the changed calls.

    The model keeps its class and methods.
    It compiles, pickles, deep-copies and exports. Its state_dict has one more entry, the buffer
    `unit_scaled`, so that a model without unit scaling refuses to load it. Every parameter's
    gradient is a multiple of the computed function's gradient, if the model returns one loss.

    Args:
        model: any module that calls torch functions; compile it afterwards.
        inputs: arguments of one call, positional or by name, to record at once. Otherwise each way
            of calling the model (train or eval, which arguments are given) is recorded at its first
            call, which must precede `torch.compile(fullgraph=True)`.
        residual_rule: tau of residual branch `i` of `n`; the transformer rule of u-muP by default.
        initialize: whether to set the parameters.

    Returns:
        The same model.

    Raises:
        ModelError: `model` is no module, is compiled, or is unit-scaled already; `inputs` is a
            tensor instead of a tuple. A call raises it
            if the model takes another path than when it was recorded.
        UnsupportedError: a call raises it if a part of the model is checkpointed.
    """
    if isinstance(inputs, Tensor):
        raise ModelError(
            "the inputs of unit_scale are a tuple of arguments or a mapping of keyword arguments, "
            "as in unit_scale(model, (x,)); got a tensor"
        )
    transform = UnitScale(residual_rule)
    interpose(model, transform)
    if initialize:
        unit_parameters(model)
    if inputs is not None:
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        transform.make_plan(model, args, kwargs)
    return model
