"""Functions that make complex numbers: they take the value, and what they return is plain.

A complex number has no scaled form here. Models pass through such numbers on their way from a real
tensor to a real one (rotary positions as a complex product, Fourier mixing, autocorrelation), and
the next product with a ScaledTensor measures what comes back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, rule
from scaledtensor.ops.results import dequantized

__all__ = ["FUNCTIONS"]


@rule(
    aten.complex.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
    aten._fft_c2c.default,
    aten.linalg_eig.default,
    aten.linalg_eigvals.default,
    aten._linalg_eigvals.default,
    aten.polar.default,
    aten.view_as_complex.default,
    pass_op=True,
)
def complex_result(op: Overload, *args: Any, **kwargs: Any) -> Any:
    """Of the value; the result is plain. Derivatives of the functions below come here."""
    return op(*map(dequantized, args), **kwargs)


def _at_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*tree_map(dequantized, args), **tree_map(dequantized, kwargs))

    return call


_COMPLEX = (
    *(torch.view_as_complex, torch.complex, torch.polar, torch.stft, Tensor.stft),
    *(torch.linalg.eig, torch.linalg.eigvals),
    *(f for name, f in vars(torch.fft).items() if "fft" in name and callable(f)),
)


#: function -> the same at the value of its arguments.
FUNCTIONS: dict[Any, Callable[..., Any]] = {f: _at_value(f) for f in _COMPLEX}


# Operators whose results have no scaled form: they say so, whatever `on_missing` allows.
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
