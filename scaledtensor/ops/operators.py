"""torch's operators by name, for the tables of rules: `aten.mul.Tensor`.

Versions of torch differ in a few of some thousand operators. A name that this version lacks is an
`Absent` here, where `torch.ops` raises AttributeError: its rule waits (`registry.rule`), is listed
(`scaledtensor.ops.absent`), and is registered when torch comes to define the operator, as some of
torch's modules do when they are loaded.
"""

from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

import torch

from scaledtensor.errors import UnsupportedError

__all__ = ["Absent", "Overload", "aten", "c10d", "c10d_functional", "find", "fsdp", "prims"]

Overload = torch._ops.OpOverload


@dataclass(frozen=True)
class Absent:
    """An operator overload that this version of torch has not, or not yet, by its name."""

    name: str
    """As `str` of the overload has it: "aten.cholesky.default"."""

    def __str__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"torch {torch.__version__} has no operator {self.name}")


def find(name: str) -> Overload | Absent:
    """The overload of this name; `Absent` where torch has none."""
    try:
        found: Overload = attrgetter(name)(torch.ops)
    except AttributeError:
        return Absent(name)
    return found


# Both are modules, as `torch.ops` and its namespaces are: Dynamo reads through them.
class _Operator(ModuleType):
    """The overloads of one operator."""

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):
            raise AttributeError(overload)
        found = find(f"{self.__name__}.{overload}")
        if not isinstance(found, Absent):
            setattr(self, overload, found)
        return found


class _Namespace(ModuleType):
    """The operators of one library."""

    def __getattr__(self, operator: str) -> _Operator:
        if operator.startswith("__") and operator.endswith("__"):
            raise AttributeError(operator)
        found = _Operator(f"{self.__name__}.{operator}")
        setattr(self, operator, found)
        return found


aten: Any = _Namespace("aten")
prims: Any = _Namespace("prims")
c10d: Any = _Namespace("c10d")
c10d_functional: Any = _Namespace("_c10d_functional")
fsdp: Any = _Namespace("fsdp")
