"""What the tensor needs from the rules of its operators, which are loaded with the first tensor."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["Engine", "OnUse"]


class Engine(NamedTuple):
    """What this floor needs from the floor above: `scaledtensor.ops` installs it."""

    dispatch: Callable[..., Any]
    """(func, args, kwargs): an ATen operator that met a ScaledTensor."""
    functions: dict[Any, Callable[..., Any]]
    """Python-level functions that cast their operands before autograd saves them."""
    fingerprint: Callable[[], str]
    """A digest of every rule and of what they ask the machine, for caches of compiled code."""


class OnUse:
    """In the place of the engine until it is asked for: who imports the library and makes no tensor
    does not wait for the rules of hundreds of operators."""

    def __get__(self, tensor: object, kind: Any) -> Engine:
        import_module("scaledtensor.ops")  # a floor above, so named; puts an Engine in this place
        installed: Engine = kind._engine
        return installed
