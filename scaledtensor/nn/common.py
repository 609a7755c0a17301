"""What the modules share: tagging their parameters, and showing their settings."""

from typing import Any

from torch import Tensor, nn

from scaledtensor.errors import OptionError
from scaledtensor.mup import MupType, has_parameter_data, keep_tags, tag

__all__ = ["described", "refuse_inplace", "tag_own"]


def tag_own(
    module: nn.Module,
    weight: MupType = "weight",
    fan_in: int | None = None,
) -> None:
    """Tag `module.weight` as `weight` and `module.bias` as a bias, where there are such."""
    for name, mup_type, terms in (("weight", weight, fan_in), ("bias", "bias", None)):
        parameter = getattr(module, name, None)
        if isinstance(parameter, nn.Parameter):
            tag(parameter, mup_type, mup_fan_in=terms)
    keep_tags(module)


def described(module: nn.Module, inherited: str, *names: str) -> str:
    """torch's `extra_repr`, the settings of these names, and the weight's tags."""
    shown = [inherited] if inherited else []
    shown += [f"{name}={getattr(module, name)!r}" for name in names]
    weight: Any = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and has_parameter_data(weight):
        shown.append(f"mup_type={weight.mup_type!r}")
        if weight.mup_scaling_depth is not None:
            shown.append(f"mup_scaling_depth={weight.mup_scaling_depth}")
    return ", ".join(shown)


def refuse_inplace(module: nn.Module, inplace: bool) -> None:
    """Raises OptionError if `inplace`."""
    if inplace:
        raise OptionError(
            f"{type(module).__name__}(inplace=True): a scaled function does not have the value "
            "that its input would be overwritten with; leave inplace off"
        )
