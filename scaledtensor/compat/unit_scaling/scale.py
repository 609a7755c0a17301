"""`unit_scaling.scale`: one factor forward and another backward."""

from torch import Tensor

from scaledtensor.functional import scaling

__all__ = ["scale_bwd", "scale_fwd"]


def scale_fwd(input: Tensor, scale: float) -> Tensor:
    """Return `input * scale`; the gradient passes unchanged.

    Raises:
        ScaleError: `scale` is not a positive finite number.
    """
    return scaling.scale_fwd(input, scale)


def scale_bwd(input: Tensor, scale: float) -> Tensor:
    """Return `input` unchanged; its gradient is multiplied by `scale`.

    Raises:
        ScaleError: `scale` is not a positive finite number.
    """
    return scaling.scale_bwd(input, scale)
