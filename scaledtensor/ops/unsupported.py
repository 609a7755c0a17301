"""Operators whose results have no scaled form: they say so, whatever `on_missing` allows."""

from typing import Any

from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, rule


@rule(
    aten.complex.default,
    aten._fft_r2c.default,
    aten.linalg_eig.default,
    aten.linalg_eigvals.default,
    aten._linalg_eigvals.default,
    aten.polar.default,
    aten.view_as_complex.default,
    pass_op=True,
)
def complex_result(op: Overload, *args: Any, **kwargs: Any) -> Tensor:
    """Complex numbers have no scaled form here: UnsupportedError."""
    raise UnsupportedError(
        f"{op} has a complex result, and a ScaledTensor is real; call it on x.dequantize()"
    )


@rule(aten._to_sparse.default, aten._to_sparse.sparse_dim, pass_op=True)
def sparse_result(op: Overload, *args: Any, **kwargs: Any) -> Tensor:
    """Sparse layouts have no scaled form here: UnsupportedError."""
    raise UnsupportedError("a ScaledTensor is dense; call to_sparse() on x.dequantize()")
