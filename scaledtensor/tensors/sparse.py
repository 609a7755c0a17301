"""SparseTensor: a ScaledTensor that stores only some elements, at given places.

torch makes one when a sparse tensor is made of scaled values: the gradient of
`nn.Embedding(sparse=True)`, `torch.sparse_coo_tensor(indices, values, size)` of attention's weights
on the edges of a graph, `x.to_sparse()`. Its values are a dense tensor under one scale, and `rms`
is the RMS of the stored values: the zeros between them need no range.

The layout is torch's COO. Operators with a rule for it (`scaledtensor.ops.rules.sparse`) take it.
Every other operator raises an error that names it, because a rule for dense elements would treat
each place as stored.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.tensors.tensor import ScaledTensor
from scaledtensor.tensors.wrapper import rebuild

__all__ = ["TABLE", "SparseTensor", "as_coo", "coo", "is_sparse"]

#: The rules of operators on SparseTensors; `scaledtensor.ops.rules.sparse` fills it.
TABLE: dict[Any, Callable[..., Any]] = {}


class SparseTensor(ScaledTensor):
    """Scaled values at some places of a shape, zeros elsewhere; `layout` is `torch.sparse_coo`.

    Attributes:
        qdata: a plain sparse COO tensor: the places, and the values divided by `scale`.
        rms: the RMS that the rules expect of the stored values.
    """

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        raise UnsupportedError(
            "a SparseTensor is made by torch.sparse_coo_tensor(indices, values, size) of values "
            "that are a ScaledTensor, or by x.to_sparse()"
        )

    @classmethod
    def _wrapper(cls, qdata: Tensor, dtype: torch.dtype) -> Any:
        return _torch.make_sparse_wrapper(cls, qdata, dtype)

    @classmethod
    @_torch.uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls._engine  # noqa: B018 - loads the rules, which fill the table
        own = TABLE.get(func)
        if own is None:
            raise UnsupportedError(
                f"{func} has no rule for a sparse ScaledTensor. Compute on its values, which are "
                "dense: torch.sparse_coo_tensor(x.indices(), f(x.values()), x.shape) of "
                "x.coalesce(); or on x.to_dense()"
            )
        return own(*args, **(kwargs or {}))


def _rebuild(inner: Any, context: Any, *flags: Any) -> SparseTensor:
    """Unpickle a file of version 0.1. New files name `wrapper.rebuild`."""
    return rebuild(SparseTensor, inner, inner[0].shape, context, *flags)


torch.serialization.add_safe_globals([_rebuild, SparseTensor])


def coo(like: Tensor, values: Tensor) -> Tensor:
    """A plain COO tensor of `values` at the places of another."""
    return torch.sparse_coo_tensor(
        like._indices(),
        values,
        like.shape,
        is_coalesced=like.is_coalesced(),
        check_invariants=False,
    )


def is_sparse(x: Any) -> bool:
    """Whether `x` is a tensor in one of torch's sparse layouts, plain or scaled."""
    if type(x) is ScaledTensor:  # its layout is strided; each product asks this twice
        return False
    return isinstance(x, Tensor) and x.layout != torch.strided


def as_coo(x: Any) -> Any:
    """Return a sparse tensor in the layout of sparse ScaledTensors, and any other as it is."""
    return x.to_sparse() if is_sparse(x) and x.layout != torch.sparse_coo else x
