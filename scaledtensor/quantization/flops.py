"""The operations of products with a QuantizedTensor, for `torch.utils.flop_counter`.

`FlopCounterMode` sees the operators of `quantization/products.py`, and nothing inside them.
"""

import math
from typing import Any

from torch.utils.flop_counter import register_flop_formula

__all__ = ["register"]


def register(linear: Any, linear_gradient: Any, weight_gradient: Any) -> None:
    """Register the formulas of three operators, which exist when the first weight is made."""
    of_rows = linear.overloadpacket, linear_gradient.overloadpacket
    register_flop_formula(list(of_rows))(_of_rows)
    register_flop_formula(weight_gradient.overloadpacket)(_of_weight_gradient)


def _of_rows(x: Any, w: Any, *rest: Any, out_shape: Any, **kwargs: Any) -> int:
    """Rows times a matrix: a product and a sum for each element of both."""
    return int(2 * math.prod(x) * out_shape[-1])


def _of_weight_gradient(grad: Any, x: Any, w: Any, *rest: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(grad) * x[-1])
