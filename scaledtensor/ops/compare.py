"""Comparisons, predicates, counts and distinct values: they leave as plain tensors."""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import value
from scaledtensor.ops.registry import Overload, rule
from scaledtensor.tensor import ScaledTensor

aten = torch.ops.aten


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
