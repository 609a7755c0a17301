"""How large the batch is that gradients are summed over.

The scale of a weight's gradient is one over the square root of the number of its terms. A process
sees the terms of one micro-batch; data parallelism and accumulation add up more of them elsewhere.
"""

from scaledtensor.errors import ScaleError
from scaledtensor.setting import Setting

__all__ = ["batch_factor", "global_batch"]


def batch_factor() -> float:
    """Global over local batch size, as set by `global_batch`; 1 at first."""
    return global_batch._now


class global_batch(Setting):  # noqa: N801 - called like a function
    """From now on, or inside a `with` block, multiply every batch size in the closed forms.

    >>> U.global_batch(world_size * accumulation_steps)

    Gradients that are then summed over processes and micro-batches arrive at unit scale. Read when
    a function runs forward; a compiled function is compiled anew for another factor.

    Args:
        factor: global over local batch size, positive.

    Raises:
        ScaleError: `factor` is not a positive finite number.
    """

    _now: float = 1.0

    def __init__(self, factor: float) -> None:
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not (number and 0 < factor < float("inf")):
            raise ScaleError(
                f"global_batch takes world size times accumulation steps, a positive finite "
                f"number; got {factor!r}"
            )
        super().__init__(float(factor))
