"""Base classes of the modules, and containers that know how deep a residual stack is."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from scaledtensor.errors import MupError, OptionError
from scaledtensor.functional.scaling import Constraint
from scaledtensor.mup import MupType, has_parameter_data, keep_tags, tag, tags

__all__ = [
    "DepthModuleList",
    "DepthSequential",
    "Scaled",
    "Sliceable",
    "Weighted",
    "refuse_inplace",
    "tag_own",
]


class Scaled(nn.Module):
    """Base of a module that calls a unit-scaled function. Its representation shows torch's
    settings, the attributes named in `_settings`, and the tags of its weight."""

    _settings: ClassVar[tuple[str, ...]] = ("constraint",)

    constraint: Constraint

    def extra_repr(self) -> str:
        inherited = super().extra_repr()
        shown = [inherited] if inherited else []
        shown += [f"{name}={getattr(self, name)!r}" for name in self._settings]
        weight: Any = getattr(self, "weight", None)
        if isinstance(weight, Tensor) and has_parameter_data(weight):
            shown.append(f"mup_type={weight.mup_type!r}")
            if weight.mup_scaling_depth is not None:
                shown.append(f"mup_scaling_depth={weight.mup_scaling_depth}")
        return ", ".join(shown)


class Weighted(Scaled):
    """Base of a module with a weight of unit variance, and a bias that starts at zero."""

    weight: Tensor
    bias: Any

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def tag_own(
    module: nn.Module,
    weight: MupType = "weight",
    fan_in: int | None = None,
) -> None:
    """Tag `module.weight` as `weight`, and `module.bias` as a bias, if the module has them."""
    for name, mup_type, terms in (("weight", weight, fan_in), ("bias", "bias", None)):
        parameter = getattr(module, name, None)
        if isinstance(parameter, nn.Parameter):
            tag(parameter, mup_type, mup_fan_in=terms)
    keep_tags(module)


def refuse_inplace(module: nn.Module, inplace: bool) -> None:
    """Raise OptionError if `inplace` is True."""
    if inplace:
        raise OptionError(
            f"{type(module).__name__}(inplace=True): a scaled function does not have the value "
            "that its input would be overwritten with; leave inplace off"
        )


# --- containers ------------------------------------------------------------------------------


class DepthModuleList(nn.ModuleList):
    """A `torch.nn.ModuleList` that tags its parameters with the depth of the residual stack: the
    length of the list at construction.

    A slice is a plain `torch.nn.ModuleList` of the same modules. They keep the depth of the whole
    list.

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
    """A `torch.nn.Sequential` whose slices are plain `torch.nn.Sequential`s.

    torch makes a slice with the constructor of the class, which takes other arguments here.
    """

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return super().__getitem__(index)


class DepthSequential(Sliceable):
    """A `torch.nn.Sequential` that tags its parameters with the depth of the residual stack: its
    length at construction.

    A slice is a plain `torch.nn.Sequential` of the same modules. They keep the depth of the whole
    container.

    Raises:
        MupError: a parameter has no u-muP tags, or has a depth already.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        _set_depth(self, len(self))


def _set_depth(container: nn.Module, depth: int) -> None:
    """Tag all parameters with `depth`. An error leaves all of them unchanged: the check is
    first."""
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
