"""What adapters read from operands."""

from typing import Any

from torch import Tensor, nn

from scaledtensor.errors import UnsupportedError

__all__ = ["OUTPUT", "is_weight", "refuse_out"]

OUTPUT = "to_output_scale"


def is_weight(x: Any) -> bool:
    """Whether `x` is a parameter, or a view of one such as its transpose."""
    if not isinstance(x, Tensor):
        return False
    return isinstance(x, nn.Parameter) or isinstance(getattr(x, "_base", None), nn.Parameter)


def refuse_out(out: Any) -> None:
    if out is not None:
        raise UnsupportedError(
            "unit-scaled functions take no out=, as autograd takes none; assign the result instead"
        )
