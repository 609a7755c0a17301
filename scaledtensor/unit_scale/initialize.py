"""Parameters as unit scaling starts them: weights of unit variance, biases of zero."""

import torch
from torch import Tensor, nn

from scaledtensor import mup

__all__ = ["VECTOR_LR_MULT", "unit_parameters"]

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
