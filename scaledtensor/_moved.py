"""Modules of version 0.1, under the names by which files and programs know them.

A pickle names the module of each function that rebuilds an object. A file that an earlier version
wrote therefore asks for modules that have since moved into other folders.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

__all__ = ["MOVED", "install"]

#: The modules that files and documents of version 0.1 name, each with its present place and
#: the functions that are safe for `torch.load(weights_only=True)`.
MOVED = {
    "coded": ("tensors.coded", ("_rebuild", "CodedTensor")),
    "expanded": ("tensors.expanded", ("_rebuild", "ExpandedTensor")),
    "histories": ("models.delayed", ()),
    "interpose": ("models.interpose", ()),
    "model": ("models.scale_model", ()),
    "sparse": ("tensors.sparse", ("_rebuild", "SparseTensor")),
    "state_dicts": ("models.state_dicts", ()),
    "tensor": ("tensors.tensor", ("_rebuild", "ScaledTensor")),
}
_PACKAGE = __name__.rpartition(".")[0]


class _Moved(ModuleType):
    """A module under its earlier name. It loads the present one when something asks for a name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and its tools ask of any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        now = MOVED[self.__name__.rpartition(".")[2]][0]
        return getattr(import_module(f"{_PACKAGE}.{now}"), name)


def install() -> None:
    """Makes the earlier names importable, and tells `torch.load` which functions are safe."""
    for earlier, (now, safe) in MOVED.items():
        sys.modules.setdefault(f"{_PACKAGE}.{earlier}", _Moved(f"{_PACKAGE}.{earlier}"))
        if safe:
            module = import_module(f"{_PACKAGE}.{now}")
            torch.serialization.add_safe_globals(
                [(getattr(module, name), f"{_PACKAGE}.{earlier}.{name}") for name in safe]
            )
