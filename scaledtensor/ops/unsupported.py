"""Operators whose results have no scaled form: they say so, whatever `on_missing` allows."""

from typing import Any

from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, rule


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
