"""The same bits for a row in any batch: `batch_invariant`, and the kernels behind it.

torch chooses the order of additions by the shapes of a call, so a row has other bits in another
batch, and a query other bits beside other keys. `kernels.py` lists the operators that the setting
replaces by operators of a fixed order.
"""

from scaledtensor.ops.invariant.setting import (
    assumes_unit_scale,
    batch_invariant,
    check_cast,
    check_recipe,
    context_length,
    is_on,
)

__all__ = [
    "assumes_unit_scale",
    "batch_invariant",
    "check_cast",
    "check_recipe",
    "context_length",
    "is_on",
]
