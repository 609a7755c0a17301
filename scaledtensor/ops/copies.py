"""8-bit copies of activations for the backward pass. `saved.py` lists the operators that keep them.

A copy has codes in the format of `Recipe.saved`, in the shape of the tensor, and one byte for the
power of two of each group of 16 along the last dimension. Read again, it is a ScaledTensor like the
first one, under the same scale. An infinity saturates and a NaN stays; both affect only their
group.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import Format, dequantize_blocks, encode, quantize_blocks
from scaledtensor.ops.algebra import saved_format
from scaledtensor.tensors.memo import note
from scaledtensor.tensors.tensor import Context, ScaledTensor, is_parameter

__all__ = ["GROUP", "is_worth_it", "keep", "keep_sign", "kept"]

Function = Callable[..., Any]

#: Number of elements of the last dimension that share a scale.
GROUP = 16


def keep(ctx: Any, tensors: Iterable[Tensor | None], in_codes: Iterable[bool]) -> None:
    """Save tensors for the backward pass, those marked `in_codes` in 8 bits if that is smaller."""
    parts: list[Tensor | None] = []
    ctx.readers = []
    for x, coded in zip(tensors, in_codes, strict=True):
        own, reader = _copied(x) if coded and is_worth_it(x) else ([x], _as_it_is)
        parts += own
        ctx.readers.append((len(own), reader))
    ctx.save_for_backward(*parts)


def kept(ctx: Any) -> list[Any]:
    """Return the tensors that `keep` or `keep_sign` saved.

    Raises:
        UnsupportedError: The caller wants a graph of the backward pass.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a second derivative (create_graph=True) of what is saved in 8 bits: the first is "
            "computed from rounded copies that have no gradient. Leave Recipe.saved None for it"
        )
    saved = iter(ctx.saved_tensors)
    return [reader(*islice(saved, count)) for count, reader in ctx.readers]


def is_worth_it(x: Tensor | None) -> TypeGuard[ScaledTensor]:
    if not isinstance(x, ScaledTensor) or saved_format(x) is None:
        return False
    size = x.format.storage_dtype.itemsize
    return x.dim() > 0 and x.numel() > 0 and size > 1 and (size > 2 or x.shape[-1] > 1)


def _as_it_is(x: Tensor | None) -> Tensor | None:
    return x


def _copied(x: ScaledTensor) -> tuple[list[Tensor | None], Function]:
    fmt = cast(Format, saved_format(x))  # `is_worth_it` saw one
    reader = partial(_read, fmt, x.shape, x.__tensor_flatten__()[1])
    made = _made_before(x, fmt)
    if made is None:
        q = x.qdata
        for dim, stride in enumerate(q.stride()):
            if stride == 0:  # an expanded dimension holds one element
                q = q.narrow(dim, 0, 1)
        made = cast(tuple[Tensor, Tensor], quantize_blocks(q, fmt, GROUP))
        if not (_torch.is_tracing(q) or is_parameter(x)):  # attributes of a parameter are tags
            note(x, copies=(fmt, x._version, *map(TensorWeakRef, made)))
    return [*made, x.scale, x.rms], reader


def _made_before(x: ScaledTensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
    """Return the copy that another operator keeps of the present `x`."""
    copies = x.memo.copies
    if copies is None or copies[:2] != (fmt, x._version):
        return None
    codes, scale = (part() for part in copies[2:])
    return None if codes is None or scale is None else (codes, scale)


def _read(
    fmt: Format,
    shape: torch.Size,
    context: Context,
    codes: Tensor,
    group_scale: Tensor,
    scale: Tensor,
    rms: Tensor,
) -> ScaledTensor:
    dtype = context[0].storage_dtype
    if dtype == torch.float16:  # the largest numbers, rounded up, would leave its range
        q = encode(dequantize_blocks(codes, group_scale, fmt, GROUP), context[0])
    else:
        q = dequantize_blocks(codes, group_scale, fmt, GROUP, dtype)
    return ScaledTensor.make(q.expand(shape), scale, rms, *context)


def keep_sign(ctx: Any, x: Any) -> None:
    """Save whether each element of a ScaledTensor is positive, a byte an element."""
    ctx.readers = [(3, partial(_read_sign, x.__tensor_flatten__()[1]))]
    ctx.save_for_backward(x.qdata > 0, x.scale, x.rms)


def _read_sign(context: Context, positive: Tensor, scale: Tensor, rms: Tensor) -> ScaledTensor:
    return ScaledTensor.make(positive.to(context[0].storage_dtype), scale, rms, *context)
