"""Operators without a scaled result: complex numbers, compressed sparse layouts, nested tensors.

Complex numbers have no scaled form. Functions that make them take the value and return a plain
tensor. Models use such numbers between two real tensors (rotary positions as a complex product,
Fourier mixing, autocorrelation). The next product with a ScaledTensor measures the plain real
tensor again. Operators with a result in a compressed sparse layout, or with a nested tensor as
their result, raise an error, under any `on_missing`.
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


# --- complex numbers -------------------------------------------------------------------------


# Autograd calls these operators for the derivatives of the functions below.
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
    """A plain result, computed from the value."""
    return op(*map(dequantized, args), **kwargs)


def _at_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for the values of its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*tree_map(dequantized, args), **tree_map(dequantized, kwargs))

    return call


_COMPLEX = (
    *(torch.view_as_complex, torch.complex, torch.polar, torch.stft, Tensor.stft),
    *(torch.linalg.eig, torch.linalg.eigvals),
    *(f for name, f in vars(torch.fft).items() if "fft" in name and callable(f)),
)


#: Function of torch -> the same function for the values of its arguments.
FUNCTIONS: dict[Any, Callable[..., Any]] = {f: _at_value(f) for f in _COMPLEX}


# --- compressed sparse layouts ---------------------------------------------------------------


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
    """Raises UnsupportedError: a sparse ScaledTensor has the layout `torch.sparse_coo`."""
    raise UnsupportedError(
        f"{op} has a result in a compressed sparse layout, and a sparse ScaledTensor has the layout"
        " torch.sparse_coo: make it by torch.sparse_coo_tensor(indices, values, size) or "
        "x.to_sparse(), or of x.dequantize()"
    )


# --- nested tensors --------------------------------------------------------------------------


@rule(
    aten._nested_tensor_from_tensor_list.default,
    aten._nested_view_from_buffer.default,
    aten._nested_view_from_jagged.default,
    pass_op=True,
)
def nested_result(op: Overload, *args: Any, **kwargs: Any) -> Tensor:
    """Raises UnsupportedError: a nested tensor has no scaled form."""
    raise UnsupportedError(
        f"{op} has a nested tensor as its result, which has no scaled form: make it of "
        "x.dequantize(), whose gradient reaches x, or pad the sequences and pass a mask"
    )
