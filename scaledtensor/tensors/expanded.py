"""ExpandedTensor: the name that version 0.1 had for a CodedTensor of expanded groups."""

from typing import Any

import torch

from scaledtensor.tensors.coded import CodedTensor, is_expanded
from scaledtensor.tensors.wrapper import rebuild

__all__ = ["ExpandedTensor"]


class _Expanded(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return is_expanded(x)


class ExpandedTensor(metaclass=_Expanded):
    """A CodedTensor of expanded groups. `ExpandedTensor(...)` is `CodedTensor.expanded(...)`, and
    `isinstance(x, ExpandedTensor)` is true of each tensor that it makes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return CodedTensor.expanded(*args, **kwargs)


def _rebuild(inner: Any, shape: Any, context: tuple[Any, ...], *flags: Any) -> CodedTensor:
    """Unpickle a file of version 0.1. New files name `wrapper.rebuild`."""
    name, dtype, group = context
    return rebuild(CodedTensor, inner, shape, (name, dtype, None, False, group, 1, True), *flags)


torch.serialization.add_safe_globals([_rebuild, ExpandedTensor])
