"""The options that all optimizers of this package share: their documentation and their checks."""

import inspect
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError, UnsupportedError
from scaledtensor.formats import FormatLike, get
from scaledtensor.native import PLAIN
from scaledtensor.optim.buckets import part
from scaledtensor.optim.masters import MASTERS
from scaledtensor.optim.states import STATE_FORMATS
from scaledtensor.optim.updates import Group
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.ruled import Ruled

__all__ = [
    "FORMATS",
    "Options",
    "check_group",
    "check_parameters",
    "check_tensor",
    "is_low",
    "with_shared_options",
]

#: The options of a parameter group that stay as the optimizer has them when it loads a file.
FORMATS = ("state_format", "state_rounding", "master_format")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROUNDINGS = ("nearest_even", "stochastic")

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Options:
    """The shared options of one optimizer.

    If all formats are float32 and there is no master, the step is torch's own. The random numbers
    of stochastic rounding are a function of the group's `seed` and of the number of its steps. The
    seed is drawn from torch's default generator at construction. Both numbers are in the
    `state_dict`, so a resumed run needs no state of a generator.

    Args:
        weight_decay: the weight decay of one step, see `scaled_parameters`. Defaults to 0, and to
            torch's default if no parameter is tagged.
        independent_weight_decay: whether a step decays by `weight_decay` itself, independently of
            the learning rate. Defaults to True if a parameter is tagged.
        allow_non_unit_scaling_params: whether parameters without tags may be given beside tagged
            ones; they train at the plain `lr`. By default only if no parameter is tagged.
        state_format: format of the optimizer's states, in groups of 128 elements: "fp32", as torch
            keeps them; "bf16" or "fp16", with one power of two for each group; "e4m3fn", "e5m2" or
            "int8", each group widened to the range of the format (COAT, arXiv 2410.19313). A
            `Format` or a torch dtype is accepted too. Groups may have their own.
        state_rounding: rounding of states that are not "fp32": "nearest_even" or "stochastic".
            Groups may have their own.
        master_format: format of the master weights. None keeps the parameter alone; "fp32" keeps
            float32 beside a narrower parameter; "fp16" keeps float16 beside it, rounded
            stochastically, with one power of two for each group of 128; "bf16" keeps the bfloat16
            parameter alone, rounded stochastically; "bf16+16" keeps the bfloat16 parameter and the
            16 bits that are missing to float32, which equals a float32 master in half of its
            memory. A `Format` or a torch dtype is accepted too. Groups may have their own.
        compiled: True makes `torch.compile` write the code of a step in low precision, and False
            does not. None does so from 2^18 elements on. On a CPU with a C++ compiler, None and
            False run a loop in C++ instead, which is faster, if all rounding is to nearest.
    """

    weight_decay: float | None
    independent_weight_decay: bool | None
    allow_non_unit_scaling_params: bool | None
    state_format: FormatLike
    state_rounding: str
    master_format: FormatLike | None
    compiled: bool | None

    def of_groups(self) -> Group:
        """Return the defaults of parameter groups."""
        chosen = (_name(self.state_format), self.state_rounding, _name(self.master_format))
        return dict(zip(FORMATS, chosen, strict=True))


_ARGUMENT = re.compile(r"^(\w+): .*(?:\n(?: {4,}.*)?)*", re.M)
_MARK = re.compile(r"^ *Options that all optimizers share.*\n", re.M)


def with_shared_options(cls: C) -> C:
    """Complete the docstring of an optimizer: the line "Options that all optimizers share" becomes
    the entries of `Options` that the class accepts."""
    shared = inspect.getdoc(Options)
    if cls.__doc__ and shared:
        accepted = inspect.signature(cls).parameters
        entries = inspect.cleandoc(shared.partition("Args:\n")[2])
        found = [m[0].rstrip() for m in _ARGUMENT.finditer(entries) if m[1] in accepted]
        lines = "\n".join(found).replace("\n", "\n" + " " * 8)
        cls.__doc__ = _MARK.sub(lambda _: " " * 8 + lines + "\n", cls.__doc__)
    return cls


def is_low(group: Group) -> bool:
    """Whether a parameter group needs another step than torch's own."""
    return group["state_format"] != "fp32" or group["master_format"] is not None


def _name(option: FormatLike | None) -> str | None:
    """Return the name of a format, which groups and files contain."""
    if isinstance(option, str):
        return option.lower()  # "bf16+16" is a master format, but no format
    return None if option is None else get(option).name


def check_group(group: Group, rule: str | None) -> Group:
    """Return the options of a parameter group that are formats, by name.

    Raises:
        FormatError: no optimizer, or not this optimizer, has such an option.
        UnsupportedError: torch's own step alone has another option of the group.
    """
    named = {name: _name(group[name]) for name in ("state_format", "master_format")}
    group = group | named
    for name, allowed in zip(FORMATS, (STATE_FORMATS, _ROUNDINGS, tuple(MASTERS)), strict=True):
        if group[name] not in allowed:
            raise FormatError(
                f"{name} is one of {', '.join(map(repr, allowed))}; got {group[name]!r}"
            )
    if rule is None and group["master_format"] is not None:
        raise FormatError(
            "Muon has no masters, since its products are bfloat16 anyway: master_format=None; got "
            f"{group['master_format']!r}"
        )
    if is_low(group):
        for name in ("fused", "capturable", "differentiable"):
            if group.get(name):
                raise UnsupportedError(
                    f"{name}=True is of torch's own step, which has float32 states and no masters; "
                    "leave it out, or take state_format='fp32' and master_format=None"
                )
    return named


def check_parameters(params: Any) -> None:
    """Raise UnsupportedError for a parameter that no step can write into."""
    for entry in [params] if isinstance(params, Tensor) else params:
        p = entry[1] if isinstance(entry, tuple) else entry
        own = part(p) if isinstance(p, Tensor) else p
        if isinstance(own, CodedTensor) and p.requires_grad:
            raise UnsupportedError(
                f"a parameter of shape {tuple(p.shape)} is a {type(own).__name__}, whose codes and "
                "scales are made together, so that no step can write into it: train x.widened(), "
                "and keep the result by scaledtensor.scaled(result, format, granularity=...); or "
                "freeze it by requires_grad_(False)"
            )


def check_tensor(name: str, x: Tensor) -> None:
    """Raise UnsupportedError or DTypeError if a step in low precision cannot use `x`."""
    if x.layout != torch.strided:
        raise UnsupportedError(
            f"steps in low precision take dense tensors; {name} of shape {tuple(x.shape)} is "
            f"{x.layout}. For an embedding, sparse=False"
        )
    if type(x) not in PLAIN and not isinstance(x, Ruled):
        raise UnsupportedError(
            f"steps in low precision take plain tensors and ScaledTensors; {name} of shape "
            f"{tuple(x.shape)} is a {type(x).__name__}"
        )
    if x.dtype not in _DTYPES:
        raise DTypeError(
            "steps in low precision compute in float32 and take float32, bfloat16 and float16; "
            f"{name} of shape {tuple(x.shape)} is {x.dtype}"
        )
