"""Who looks on while operators run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Observer", "observed", "observers"]

#: (overload, arguments, result)
Observer = Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], None]

observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within it, every operator that ran on a ScaledTensor is shown to `observer`.

    Composites and foreach forms come after the operators that they are made of.
    """
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)
