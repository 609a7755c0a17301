"""What the modules share: tagging their parameters, and showing their settings."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from scaledtensor.errors import MupError, OptionError
from scaledtensor.mup import MupType, has_parameter_data, keep_tags, tag, tags

__all__ = [
    "DepthModuleList",
    "DepthSequential",
    "Sliceable",
    "described",
    "refuse_inplace",
    "tag_own",
]


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


# Containers that tell parameters how deep the residual stack is that they are in.
class DepthModuleList(nn.ModuleList):
    """A `torch.nn.ModuleList` that tags every parameter in it with its length at construction.

    A slice is a plain `torch.nn.ModuleList` of the same modules, whose depth stays that of the
    whole.

    Raises:
        MupError: a parameter has no u-muP tags, or has a depth already.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        _set_depth(self, len(self))

    def __getitem__(self, index: int | slice) -> Any:
        return (
            nn.ModuleList(list(self)[index])
            if isinstance(index, slice)
            else super().__getitem__(index)
        )


class Sliceable(nn.Sequential):
    """A `torch.nn.Sequential` whose slices are plain ones.

    torch makes a slice by the constructor of the class, which here takes other arguments.
    """

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return super().__getitem__(index)


class DepthSequential(Sliceable):
    """A `torch.nn.Sequential` that tags every parameter in it with its length at construction.

    A slice is a plain `torch.nn.Sequential` of the same modules, whose depth stays that of the
    whole.

    Raises:
        MupError: a parameter has no u-muP tags, or has a depth already.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        _set_depth(self, len(self))


def _set_depth(container: nn.Module, depth: int) -> None:
    """All are checked first: an error leaves every parameter as it was."""
    found = dict(container.named_parameters())
    for name, parameter in found.items():
        if not has_parameter_data(parameter):
            raise MupError(
                f"{name} has no u-muP tags; is it of a plain torch module? Use the modules of "
                "scaledtensor.nn, or tag it (scaledtensor.mup.tag)"
            )
        before = tags(parameter).mup_scaling_depth
        if before is not None:
            raise MupError(
                f"{name} is in a container of depth {before} already; a parameter has the "
                "depth of one residual stack"
            )
    for parameter in found.values():
        tag(parameter, **vars(replace(tags(parameter), mup_scaling_depth=depth)))
    keep_tags(container)
