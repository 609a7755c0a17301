"""The engine: the rules of a tensor's operators, which are loaded with the first tensor."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["Engine", "OnUse"]


class Engine(NamedTuple):
    """The three things that a tensor needs from the rules. `scaledtensor.ops` installs them."""

    dispatch: Callable[..., Any]
    """Runs an ATen operator that met a ScaledTensor, given (func, args, kwargs)."""
    functions: dict[Any, Callable[..., Any]]
    """Python-level functions that cast their operands before autograd saves them."""
    fingerprint: Callable[[], str]
    """Returns a digest of every rule and of the facts about the machine that rules ask for. Caches
    of compiled code use it."""


class OnUse:
    """Stands for the engine until something asks for it. An import of the library that makes no
    tensor does not load the rules of hundreds of operators."""

    def __get__(self, tensor: object, kind: Any) -> Engine:
        import_module("scaledtensor.ops")  # a higher floor, so it is named; puts an Engine here
        installed: Engine = kind._engine
        return installed
