"""u-muP tags: what a parameter is to the rules for learning rates.

A tagged parameter is an ordinary `nn.Parameter` with four plain attributes: `mup_type`,
`mup_scaling_depth`, `mup_fan_in` and `mup_lr_mult`. Attributes belong to the object, and much of
PyTorch replaces the object: `copy.deepcopy` of a module, `load_state_dict(assign=True)`,
`to_empty()` from the meta device, and `fully_shard`, which puts a DTensor in its place. All of
these put the new parameter under the old one's name in the module that owns it. So
`keep_tags(model)` gives each module of a model a parameter table that knows the tags by name, hands
them to what takes the name, and is copied and pickled with them. The modules of `scaledtensor.nn`
do this themselves.

What has no module keeps no tags: `copy.deepcopy` of a single parameter drops every attribute of it.
`copy_tags` restores them.

Types and rules are those of u-muP (Blake et al., arXiv 2407.17465).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, get_args

import torch
from torch import Tensor, nn

from scaledtensor.errors import MupError

__all__ = [
    "MupType",
    "Parameter",
    "ParameterData",
    "Tags",
    "copy_tags",
    "fan_in",
    "has_parameter_data",
    "keep_tags",
    "tag",
    "tags",
]

MupType = Literal["weight", "bias", "norm", "output"]
"""Hidden and embedding weights; biases; gains of norms; the weight of the final readout."""

P = TypeVar("P", bound=Tensor)
M = TypeVar("M", bound=nn.Module)

_TYPES: tuple[str, ...] = get_args(MupType)


@dataclass(frozen=True)
class Tags:
    """The tags of one parameter."""

    mup_type: MupType
    mup_scaling_depth: int | None = None
    """Number of layers of the residual stack that it is in; None outside of one."""
    mup_fan_in: int | None = None
    """Inputs that one output sums over, where the shape does not tell; None where it does."""
    mup_lr_mult: float = 1.0
    """By what an optimizer's rule for the learning rate is multiplied: a hyperparameter."""

    def __post_init__(self) -> None:
        if self.mup_type not in _TYPES:
            raise MupError(f"mup_type is one of {', '.join(_TYPES)}; got {self.mup_type!r}")
        for name in ("mup_scaling_depth", "mup_fan_in"):
            n = getattr(self, name)
            if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
                raise MupError(f"{name} is a positive int or None; got {n!r}")
        mult = self.mup_lr_mult
        if isinstance(mult, bool) or not isinstance(mult, (int, float)) or not 0 < mult < math.inf:
            raise MupError(f"mup_lr_mult is a positive, finite number; got {mult!r}")


class ParameterData(Protocol):
    """A tagged parameter, as type checkers see it; it is an `nn.Parameter` as well."""

    mup_type: MupType
    mup_scaling_depth: int | None
    mup_fan_in: int | None
    mup_lr_mult: float
    shape: torch.Size


def Parameter(  # noqa: N802 - takes the place of the class of this name
    data: Tensor,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    mup_fan_in: int | None = None,
    mup_lr_mult: float = 1.0,
) -> nn.Parameter:
    """An `nn.Parameter` of `data`, tagged.

    Args:
        data: any tensor that `nn.Parameter` takes, a ScaledTensor too.
        mup_type: "weight", "bias", "norm" or "output".
        mup_scaling_depth: layers of the residual stack that the parameter is in. The containers
            `scaledtensor.nn.DepthSequential` and `DepthModuleList` set it.
        mup_fan_in: see `fan_in`.
        mup_lr_mult: by what the learning rate of `scaledtensor.optim` is multiplied.

    Raises:
        MupError: a tag that is none of these.
    """
    return tag(nn.Parameter(data), mup_type, mup_scaling_depth, mup_fan_in, mup_lr_mult)


def tag(
    parameter: P,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    mup_fan_in: int | None = None,
    mup_lr_mult: float = 1.0,
) -> P:
    """Tag a parameter, in place of any tags it had, and return it.

    Raises:
        MupError: a tag that is none of those that `Parameter` lists.
    """
    its = Tags(mup_type, mup_scaling_depth, mup_fan_in, mup_lr_mult)
    for name, value in vars(its).items():
        setattr(parameter, name, value)
    return parameter


def has_parameter_data(parameter: Any) -> TypeGuard[ParameterData]:
    """Whether `parameter` is tagged."""
    return getattr(parameter, "mup_type", None) in _TYPES


def tags(parameter: Any) -> Tags:
    """The tags of a parameter.

    Raises:
        MupError: it has none, or one that was set to what no tag can be.
    """
    if not has_parameter_data(parameter):
        raise MupError(
            f"a parameter of shape {tuple(parameter.shape)} has no u-muP tags; make it with "
            "Parameter(data, mup_type) or tag(parameter, mup_type)"
        )
    return Tags(
        parameter.mup_type,
        getattr(parameter, "mup_scaling_depth", None),
        getattr(parameter, "mup_fan_in", None),
        getattr(parameter, "mup_lr_mult", 1.0),
    )


def copy_tags(source: Tensor, target: P) -> P:
    """Give `target` the tags of `source`, if it has any, and return it."""
    return tag(target, **vars(tags(source))) if has_parameter_data(source) else target


def fan_in(parameter: Any) -> int:
    """How many inputs one output of a weight sums over.

    `mup_fan_in` where it is set: transposed convolutions, weights that are stored `[in, out]` and
    stacks of weights need it. Otherwise of a shape `[out, in, *kernel]` all but the first, and of
    a vector its length. Of an embedding, `[vocabulary, width]`, that is the width, as u-muP has it
    (arXiv 2407.17465).
    """
    explicit = getattr(parameter, "mup_fan_in", None)
    if explicit is not None:
        return int(explicit)
    shape = parameter.shape
    return math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)


def keep_tags(model: M) -> M:
    """See to it that parameters of `model` keep their tags when something replaces them.

    Call it on a module that has tagged parameters of its own, when they are in place. Parameters
    that are not tagged stay so. A parameter that takes a tagged one's name inherits its tags,
    unless it brings tags of its own, as a tied one does.

    Returns:
        The same model.
    """
    for module in model.modules():
        table = module._parameters
        if not isinstance(table, _Table) and any(map(has_parameter_data, table.values())):
            module._parameters = _Table(table)
    return model


class _Table(dict[str, nn.Parameter | None]):
    """`nn.Module._parameters` that knows the tags of its entries.

    A parameter that comes without tags gets those known of its name: when it is put here, and when
    it is read, since `torch.utils.swap_tensors` (the way of `Module.to` with tensor subclasses)
    exchanges all attributes of an object that is here already.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], known: Mapping[str, Tags] | None = None
    ) -> None:
        self._known = dict(known or {})
        super().__init__(parameters)
        self._note()

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        self._note()
        super().__setitem__(name, parameter)
        self._note()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = dict.__getitem__(self, name)
        if parameter is not None and not hasattr(parameter, "mup_type"):
            self._restore(name, parameter)
        return parameter

    # Torch reads these before it changes parameters, and `model.parameters()` does.
    def items(self) -> Any:
        self._note()
        return super().items()

    def values(self) -> Any:
        self._note()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        """Tags apart from the parameters: the copy of a parameter loses its attributes."""
        self._note()
        return _Table, (dict(self), self._known)

    def _note(self) -> None:
        for name, parameter in super().items():
            if has_parameter_data(parameter):
                self._known[name] = tags(parameter)
            elif parameter is not None:
                self._restore(name, parameter)

    def _restore(self, name: str, parameter: nn.Parameter) -> None:
        if name in self._known:
            tag(parameter, **vars(self._known[name]))
