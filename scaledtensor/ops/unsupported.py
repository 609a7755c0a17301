"""Operators whose results have no scaled form: they say so, whatever `on_missing` allows."""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.registry import Overload, rule

aten = torch.ops.aten


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


@rule(
    aten._sparse_compressed_tensor_unsafe.default,
    aten.sparse_compressed_tensor.comp_plain_value_size,
    aten.sparse_compressed_tensor.comp_plain_value,
    aten.sparse_sampled_addmm.default,
    aten._to_sparse_csr.default,
    aten._to_sparse_csc.default,
    aten._to_sparse_bsr.default,
    aten._to_sparse_bsc.default,
    pass_op=True,
)
def compressed_result(op: Overload, *args: Any, **kwargs: Any) -> Tensor:
    """A sparse ScaledTensor has the layout torch.sparse_coo: UnsupportedError."""
    raise UnsupportedError(
        f"{op} has a result in a compressed sparse layout, and a sparse ScaledTensor has the layout"
        " torch.sparse_coo: make it by torch.sparse_coo_tensor(indices, values, size) or "
        "x.to_sparse(), or of x.dequantize()"
    )
