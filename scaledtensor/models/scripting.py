"""`torch.jit.script` is an error for a module whose parameters are not plain.

TorchScript runs the operators of a module from C++, below the functions that the products of such
parameters replace. A scripted product would read the plain values and cast no input. `script` asks
each module for the method `__prepare_scriptable__` before it compiles the module.
"""

from typing import Any, NoReturn

from torch import nn

from scaledtensor.errors import UnsupportedError
from scaledtensor.tensors.wrapper import is_wrapper

__all__ = ["attach"]

_ASKED = "__prepare_scriptable__"


def attach(module: nn.Module) -> None:
    """Let `torch.jit.script` raise an error for `module` if it has parameters that are not plain,
    and take it otherwise."""
    attributes: dict[str, Any] = module.__dict__
    if any(is_wrapper(p) for p in module._parameters.values()):
        attributes[_ASKED] = _refuse
    elif attributes.get(_ASKED) is _refuse:
        del attributes[_ASKED]


def _refuse() -> NoReturn:
    raise UnsupportedError(
        "torch.jit.script reads plain values of scaled and quantised weights, and casts no inputs: "
        "use torch.export.export, or script the plain model that unscale_model(model) makes"
    )
