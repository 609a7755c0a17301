"""Operators whose results have no scaled form: they say so, whatever `on_missing` allows."""

from typing import Any

from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, rule


@rule(aten._to_sparse.default, aten._to_sparse.sparse_dim, pass_op=True)
def sparse_result(op: Overload, *args: Any, **kwargs: Any) -> Tensor:
    """Sparse layouts have no scaled form here: UnsupportedError."""
    raise UnsupportedError("a ScaledTensor is dense; call to_sparse() on x.dequantize()")
