"""Comparisons, predicates, counts and distinct values: they leave as plain tensors."""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError
from scaledtensor.ops.algebra import value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, rule
from scaledtensor.tensor import ScaledTensor


@rule(
    *(
        getattr(getattr(aten, name), overload)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Tensor", "Scalar")
    ),
    *(
        getattr(getattr(aten, name), overload)
        for name in ("all", "any")
        for overload in ("default", "dim", "dims")
    ),
    aten.allclose.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.argsort.default,
    aten.argsort.stable,
    aten.bincount.default,
    aten.equal.default,
    aten.hash_tensor.default,
    aten.isclose.default,
    aten.isfinite.default,
    aten.isinf.default,
    aten.isnan.default,
    aten.isneginf.default,
    aten.isposinf.default,
    aten.is_nonzero.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.multinomial.default,
    aten.nonzero.default,
    aten.signbit.default,
    pass_op=True,
)
def plain(op: Overload, *args: Any, **kwargs: Any) -> Any:
    """A question about the value: the answer is plain."""

    def exact(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(exact, x))
        if isinstance(x, ScaledTensor):
            return value(x).float()
        return x.float() if isinstance(x, Tensor) and x.dtype.is_floating_point else x

    return op(*map(exact, args), **{k: exact(v) for k, v in kwargs.items()})


@rule(aten.is_same_size.default)
def is_same_size(x: Tensor, y: Tensor) -> bool:
    """A question about shapes."""
    return x.shape == y.shape


@rule(aten._has_same_storage_numel.default)
def has_same_storage_numel(x: Tensor, y: Tensor) -> bool:
    """A question about memory, of forward-mode derivatives: the elements' answers."""
    found = [t.qdata if isinstance(t, ScaledTensor) else t for t in (x, y)]
    first, second = (t.untyped_storage().nbytes() // t.itemsize for t in found)
    return first == second


@rule(aten._assert_tensor_metadata.default)
def assert_metadata(
    x: ScaledTensor,
    size: Any = None,
    stride: Any = None,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | None = None,
    layout: torch.layout | None = None,
) -> None:
    """What torch.export asserts at run time: it is that of the appearance. Nothing is computed."""
    for name, wanted, found in (
        ("size", size, list(x.shape)),
        ("stride", stride, list(x.stride())),
        ("dtype", dtype, x.dtype),
        ("device", device, x.device),
        ("layout", layout, x.layout),
    ):
        if wanted is not None and wanted != found:
            raise DTypeError(f"the program was exported for {name} {wanted}; got {found}")
