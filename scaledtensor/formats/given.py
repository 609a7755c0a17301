"""The check that the casts share: their tensors are torch's."""

from typing import Any

from torch import Tensor

from scaledtensor.errors import DTypeError

__all__ = ["check_tensor"]


def check_tensor(given: Any, function: str, argument: str = "x") -> None:
    """Raises DTypeError unless `given`, that argument of `scaledtensor.formats.<function>`, is a
    torch.Tensor."""
    if not isinstance(given, Tensor):
        what = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
        raise DTypeError(
            f"{argument} of scaledtensor.formats.{function} is a torch.Tensor; got {what}. For"
            " arrays and lists use scaledtensor.formats.numpy, or make a tensor by torch.as_tensor"
        )
