"""u-muP tags of parameters, which choose the learning rate of each parameter.

A tagged parameter is an ordinary `nn.Parameter` with four plain attributes: `mup_type`,
`mup_scaling_depth`, `mup_fan_in` and `mup_lr_mult`. Attributes belong to the object, and many
functions of PyTorch replace the object: `copy.deepcopy` of a module,
`load_state_dict(assign=True)`, `to_empty()` from the meta device, and `fully_shard`, which puts a
DTensor in its place. All of these put the new parameter under the old one's name in the module that
owns it. So `keep_tags(model)` gives each module of a model a dictionary of parameters that keeps
the tags by name and gives them to new parameters. The modules of `scaledtensor.nn` do this
themselves.

A parameter without a module does not keep its tags: `copy.deepcopy` of a single parameter drops all
attributes. `copy_tags` restores the tags.

The types and the rules come from u-muP (Blake et al., arXiv 2407.17465).
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
    """Number of layers of the residual stack around the parameter; None outside of a stack."""
    mup_fan_in: int | None = None
    """Number of inputs that one output sums over; None if the shape tells it."""
    mup_lr_mult: float = 1.0
    """Factor of the learning rate that an optimizer's rule gives: a hyperparameter."""

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
    """A tagged parameter, for type checkers; it is an `nn.Parameter` too."""

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
    """Return a tagged `nn.Parameter`.

    Args:
        data: any tensor that `nn.Parameter` takes, a ScaledTensor too.
        mup_type: "weight", "bias", "norm" or "output".
        mup_scaling_depth: number of layers of the residual stack around the parameter. The
            containers `scaledtensor.nn.DepthSequential` and `DepthModuleList` set it.
        mup_fan_in: see `fan_in`.
        mup_lr_mult: factor of the learning rate in `scaledtensor.optim`.

    Raises:
        MupError: a tag has another value.
    """
    return tag(nn.Parameter(data), mup_type, mup_scaling_depth, mup_fan_in, mup_lr_mult)


def tag(
    parameter: P,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    mup_fan_in: int | None = None,
    mup_lr_mult: float = 1.0,
) -> P:
    """Tag a parameter and return it. Tags that it had are replaced.

    Raises:
        MupError: a tag has a value that `Parameter` does not accept.
    """
    its = Tags(mup_type, mup_scaling_depth, mup_fan_in, mup_lr_mult)
    for name, value in vars(its).items():
        setattr(parameter, name, value)
    return parameter


def has_parameter_data(parameter: Any) -> TypeGuard[ParameterData]:
    """Whether `parameter` is tagged."""
    return getattr(parameter, "mup_type", None) in _TYPES


def tags(parameter: Any) -> Tags:
    """Return the tags of a parameter.

    Raises:
        MupError: the parameter has no tags, or a tag was set to an invalid value.
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
    """Return the number of inputs that one output of a weight sums over.

    This is `mup_fan_in`, if set: transposed convolutions, weights that are stored `[in, out]` and
    stacks of weights need it. Otherwise it is the product of all dimensions of `[out, in, *kernel]`
    except the first, and the length of a vector. For an embedding, `[vocabulary, width]`, this is
    the width, as in u-muP (arXiv 2407.17465).
    """
    explicit = getattr(parameter, "mup_fan_in", None)
    if explicit is not None:
        return int(explicit)
    shape = parameter.shape
    return math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)


def keep_tags(model: M) -> M:
    """Make the parameters of `model` keep their tags when they are replaced.

    Call it when all tagged parameters are in place. Parameters without tags stay so. A parameter
    that replaces a tagged one inherits the tags, unless it has tags already, as a tied parameter
    does.

    Returns:
        The same model.
    """
    for module in model.modules():
        table = module._parameters
        if not isinstance(table, _Table) and any(map(has_parameter_data, table.values())):
            module._parameters = _Table(table)
    return model


class _Table(dict[str, nn.Parameter | None]):
    """`nn.Module._parameters` with the tags of its entries.

    Torch has no hook for the replacement of a parameter. `Module._apply` and `fully_shard` write
    into this dictionary directly, and a copy of a module copies it. So the dictionary is the one
    object through which a new parameter always comes, and it keeps the tags by name.

    A new parameter gets its tags when it is put here. One case needs a check on reading too:
    `torch.utils.swap_tensors`, which `Module.to` uses for tensor subclasses, exchanges all
    attributes of a parameter that is here already, and writes nothing here.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], known: Mapping[str, Tags] | None = None
    ) -> None:
        super().__init__(parameters)
        self._known = dict(known or {})
        self._agree()

    def _agree(self) -> None:
        """Note the tags of each tagged parameter under its name, and tag all others by name."""
        for name, parameter in super().items():
            if has_parameter_data(parameter):
                self._known[name] = tags(parameter)
            elif parameter is not None and name in self._known:
                tag(parameter, **vars(self._known[name]))

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        self._agree()  # the old parameter's tags may have changed
        super().__setitem__(name, parameter)
        self._agree()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if name in self._known and not hasattr(parameter, "mup_type"):
            self._agree()
        return parameter

    def items(self) -> Any:
        self._agree()
        return super().items()

    def values(self) -> Any:
        self._agree()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the tags beside the parameters, because copies of parameters lose
        them."""
        self._agree()
        return _Table, (dict(self), self._known)
