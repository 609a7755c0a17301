"""A linear layer as one node of autograd, in eager code on a CPU.

What torch makes of `linear` is ten operators on ScaledTensors in the backward pass and six in the
forward pass, of which most are views, and each costs as much as the elements of a small layer. Here
the same three products are calculated on the elements themselves, to the same bits. The gradient
is decoded once for both of its products.

Whoever looks on (`_torch.is_watched`) sees torch's operators, and so does a derivative that is
differentiated again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch, verbs
from scaledtensor.formats import Format
from scaledtensor.ops import matmul
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.observe import observers
from scaledtensor.ops.registry import dispatch
from scaledtensor.ops.results import wrap
from scaledtensor.recipes.casts import Cast
from scaledtensor.recipes.scales import Carried
from scaledtensor.singles import calculates
from scaledtensor.tensor import ScaledTensor

__all__ = ["is_alone", "linear", "operand_cast", "serves"]


def is_alone() -> bool:
    """Whether nobody looks on while operators of this thread run."""
    return not (torch.compiler.is_compiling() or observers or _torch.is_watched())


def serves(x: Any, weight: Any) -> bool:
    """Whether `linear` takes these operands."""
    return (
        is_alone()
        and type(x) is ScaledTensor
        and type(weight) is ScaledTensor
        and x.dtype == weight.dtype
        and calculates(x)
        and calculates(weight)
        and x.dim() > 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[-1]
        and x.qdata.is_contiguous()
        and weight.qdata.is_contiguous()
    )


def operand_cast(x: Any, cast: Cast) -> tuple[Any, ...]:
    """The operator that casts an operand, and its arguments."""
    if isinstance(cast.scale, Carried):
        return verbs.to_format, verbs.shifted(x, cast.scale.shift), cast.format.name
    return verbs.quantize, x, cast.spec


def linear(x: Any, weight: Any, casts: tuple[Cast, Cast, Cast]) -> Any:
    """`torch.nn.functional.linear` with input, weight and gradient cast. An operand that has the
    format of its cast already stays as it is."""
    return _Linear.apply(x, weight, casts)[0]  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """(input, weight, casts) -> (output, the operands as they were cast).

    What was cast is an output too, so that what autograd keeps of it has a derivative of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, casts: tuple[Cast, Cast, Cast]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.formats, ctx.gradient = (x.format, weight.format), casts[2]
        made = [_cast(x, casts[0]), _cast(weight, casts[1])]
        x, weight = (t if m is None else m for t, m in zip((x, weight), made, strict=True))
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        shape = (*x.shape[:-1], weight.shape[0])
        with torch.enable_grad():  # as forward products run, also where a checkpoint asks again
            return _product(_rows(x), _transposed(weight), shape), *made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, Any, None]:
        grad, *found = grads
        if grad is not None:
            x, weight = ctx.saved_tensors
            if not isinstance(grad, ScaledTensor):
                grad = verbs.promote(grad, (weight if x is None else x).detach())
            with _torch.disable_torch_function():
                differentiable = torch.is_grad_enabled() or not is_alone() or not calculates(grad)
                products = _by_operators if differentiable else _by_elements
                made = products(grad, x, weight, ctx.gradient)
            found = [b if a is None else a + b for a, b in zip(found, made, strict=True)]
        with _torch.disable_torch_function():
            dx, dw = map(_in_format, found, ctx.formats)
        return dx, dw, None


def _run(op: Any, *args: Any) -> Any:
    """An operator, straight by its rule where neither autograd nor anybody else is to see it."""
    direct = is_alone() and not torch.is_grad_enabled()
    return dispatch(op, args, {}) if direct else op(*args)


def _cast(x: Any, cast: Cast) -> Any:
    """An operand as it was cast; None where it stays as it is."""
    return None if x.format == cast.format else _run(*operand_cast(x, cast))


def _cast_gradient(grad: Any, cast: Cast) -> Any:
    if isinstance(cast.scale, Carried):
        how = () if cast.rounding == "nearest_even" else (cast.rounding,)
        held = verbs.shifted(grad, cast.scale.shift)
        return _run(verbs.to_format, held, cast.format.name, *how)
    if grad.qdata.dtype.itemsize == 1:  # cast already, by a history
        return grad
    return _run(verbs.quantize, grad, cast.spec)


def _in_format(grad: Any, source: Format) -> Any:
    """A gradient in the format of what was cast, if that was wider than 8 bits."""
    wide = source.storage_dtype.itemsize > 1
    if wide and isinstance(grad, ScaledTensor) and grad.format != source:
        return _run(verbs.to_format, grad, source.name)
    return grad


def _by_elements(grad: Any, x: Any, weight: Any, cast: Cast) -> tuple[Any, Any]:
    """The gradients of input and weight, calculated on elements. None for what is a constant, for
    whose sake nothing was kept of the other."""
    dy = _rows(_cast_gradient(grad, cast))
    dy.decoded = elements(dy)
    dx = dw = None
    if weight is not None:
        dx = _product(dy, weight, (*grad.shape[:-1], weight.shape[1]))
    if x is not None:
        dw = _product(_transposed(dy), _rows(x), (dy.shape[1], x.shape[-1]))
    return dx, dw


def _by_operators(grad: Any, x: Any, weight: Any, cast: Cast) -> tuple[Any, Any]:
    """The same by operators of torch, which are differentiable."""
    dy = _cast_gradient(grad, cast)
    rows = dy.reshape(-1, dy.shape[-1])
    dx = dw = None
    if weight is not None:
        dx = (rows @ weight).view(*dy.shape[:-1], weight.shape[1])
    if x is not None:
        dw = rows.t() @ x.reshape(-1, x.shape[-1])
    return dx, dw


def _product(a: Any, b: Any, shape: Sequence[int]) -> Any:
    raw = matmul._product(torch.mm, a, b)
    return wrap(raw._replace(q=raw.q.view(shape)), [a, b])


def _rows(x: Any) -> Any:
    """All of `x` as a matrix of its last dimension."""
    return x if x.dim() == 2 else x.viewed(x.qdata.reshape(-1, x.shape[-1]))


def _transposed(x: Any) -> Any:
    made = x.viewed(x.qdata.t())
    made.decoded = None if x.decoded is None else x.decoded.t()
    return made
