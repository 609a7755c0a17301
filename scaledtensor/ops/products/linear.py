"""A linear layer as one node of autograd, in eager code on a CPU.

torch makes `linear` of six operators on ScaledTensors in the forward pass and ten in the backward
pass. Most of them are views, and each costs as much time as the elements of a small layer. This
module calculates the same three products on the elements, to the same bits. An operand is decoded
in the pass that casts it. The gradient is decoded once for both of its products. A product is
rounded and added to the bias in one pass.

A mode that observes the call (`_torch.is_watched`) sees torch's operators. A derivative that is
differentiated again runs torch's operators too.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch, native
from scaledtensor.backends import units_of
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import BF16, FP32, Format, from_dtype
from scaledtensor.formats.bits import Mode
from scaledtensor.formats.native import ValueLoop, value_loop
from scaledtensor.native.elements import converted, rounded_rows
from scaledtensor.ops.algebra import Operand, elements
from scaledtensor.ops.operators import aten
from scaledtensor.ops.plausible import believed
from scaledtensor.ops.products.dtype import multiplied, product_dtype
from scaledtensor.ops.registry import dispatch, observers
from scaledtensor.ops.results import HUGE, OVERFLOW, narrowest, store
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.casts import Carried, Cast
from scaledtensor.scales.powers import commutes, is_one, quadrature, settle, settle_product
from scaledtensor.scales.singles import (
    ONE,
    Single,
    amounts_of,
    calculates,
    rms_of,
    scale_of,
    scaled_by,
    scaled_in_place,
)
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter

__all__ = ["adds", "is_alone", "linear", "operand_cast", "serves", "wide_gradient"]


def is_alone() -> bool:
    """Whether no mode and no observer sees the operators of this thread."""
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
        and units_of(x.qdata) is None
    )


def operand_cast(x: Any, cast: Cast, fits: bool = False) -> tuple[Any, ...]:
    """Return the operator that casts an operand, and its arguments. `fits` is true for an operand
    that `sites.fit` returned."""
    if isinstance(cast.scale, Carried):
        unless_wild = ("nearest_even", True) if fits and cast.format.bits == 8 else ()
        return verbs.to_format, verbs.shifted(x, cast.scale.shift), cast.format.name, *unless_wild
    return verbs.quantize, x, cast.spec


def adds(bias: Any, weight: Any) -> bool:
    """Whether `linear` takes this bias beside a weight that it serves."""
    return (
        type(bias) is ScaledTensor
        and bias.dtype == weight.dtype
        and bias.qdata.dtype is torch.float32
        and bias.shape == weight.shape[:1]
        and calculates(bias)
    )


def linear(x: Any, weight: Any, casts: tuple[Cast, Cast, Cast], bias: Any = None) -> Any:
    """`torch.nn.functional.linear` with input, weight and gradient cast.

    An operand that already has the format of its cast stays as it is. The gradient of the bias sums
    uncast terms.
    """
    if weight.format == casts[1].format:
        weight = wide_gradient(weight)
    return _Linear.apply(x, weight, casts, bias)[0]  # type: ignore[no-untyped-call]


def wide_gradient(x: Any) -> Any:
    """Return an operand that is not cast. The gradient of a weight has the format of its dtype,
    also if `fully_shard` gathered the weight in codes."""
    fmt = from_dtype(x.dtype)
    if x.format == fmt or not (is_parameter(x) and x.requires_grad and torch.is_grad_enabled()):
        return x
    if torch.compiler.is_compiling():
        return verbs.gradient_to_format(x, fmt.name, "nearest_even")
    # autograd sees a write into the weight before the backward pass, because a view shares the
    # version of its base. The result of an operator has a version of its own.
    view = x.view_as(x)
    view.register_hook(lambda grad: grad.to_format(fmt) if isinstance(grad, ScaledTensor) else grad)
    return view


class _Linear(torch.autograd.Function):
    """(input, weight, casts, bias) -> (output, the cast input, the cast weight).

    The cast operands are outputs too, because autograd saves them, and then they have derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, casts: tuple[Cast, Cast, Cast], bias: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.formats, ctx.gradient = (x.format, weight.format), casts[2]
        (made_x, rows), (made_weight, matrix) = _cast(x, casts[0]), _cast(weight, casts[1])
        x = x if made_x is None else made_x
        weight = weight if made_weight is None else made_weight
        of_x, of_weight, _, of_bias = ctx.needs_input_grad
        alone = of_bias and not of_x and not of_weight
        ctx.save_for_backward(
            x if of_weight else None, weight if of_x else None, bias if alone else None
        )
        fmt = narrowest((x, weight))
        product = _multiplied(rows, _turned(matrix), fmt, bias is None)
        y = None if bias is None else _plus(product, fmt, bias)
        if y is None:
            y = _stored(product, fmt, fmt)
        made = _tensor(y, (*x.shape[:-1], weight.shape[0]), fmt, x, weight)
        if bias is not None and y.rms is product.rms:  # the bias is not added yet
            made = _run(aten.add.Tensor, made, bias)
        return made, made_x, made_weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, Any, None, Any]:
        grad, *found = grads
        of_bias = None
        if grad is not None:
            x, weight, bias = ctx.saved_tensors
            for saved in (x, weight, bias):
                _check_saved(saved)
            if not isinstance(grad, ScaledTensor):
                known = next(t for t in (weight, x, bias) if t is not None)
                grad = verbs.promote(grad, known.detach())
            with _torch.disable_torch_function():
                direct = is_alone() and not torch.is_grad_enabled() and not _is_batched(grad)
                if direct and calculates(grad):
                    made = _by_elements(grad, x, weight, ctx.gradient, ctx.formats)
                else:
                    made = _by_operators(grad, x, weight, ctx.gradient)
                if ctx.needs_input_grad[3]:
                    of_bias = _run(aten.sum.dim_IntList, grad, list(range(grad.dim() - 1)))
            found = [_sum(a, b) for a, b in zip(found, made, strict=True)]
        with _torch.disable_torch_function():
            dx, dw = map(_in_format, found, ctx.formats)
        return dx, dw, None, of_bias


def _check_saved(x: Any) -> None:
    if x is not None and not isinstance(x, ScaledTensor):
        raise UnsupportedError(
            "a hook of torch.autograd.graph.saved_tensors_hooks gave a plain tensor for a "
            "ScaledTensor that it had packed: pack the ScaledTensor itself (x.cpu(), x.clone(), "
            "torch.save), or wrap what the hook gives back in scaledtensor.scaled"
        )


def _sum(a: Any, b: Any) -> Any:
    """Return the sum of two gradients. None stands for a gradient that nobody asked for."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _run(op: Any, *args: Any) -> Any:
    """Run an operator, directly by its rule if neither autograd nor an observer has to see it."""
    direct = is_alone() and not torch.is_grad_enabled() and not _is_batched(args[0])
    return dispatch(op, args, {}) if direct else op(*args)


def _is_batched(x: Any) -> bool:
    """Whether `x` stands for a batch of tensors (`is_grads_batched`). Its attributes are hidden."""
    return "qdata" not in vars(x)


# --- casts -----------------------------------------------------------------------------------


def _factor(x: Any) -> Operand:
    """Return the elements of `x` as a matrix whose rows are its last dimension."""
    return Operand(_rows(elements(x)), *amounts_of(x))


def _rows(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    *rows, columns = x.shape
    return x.reshape(math.prod(rows), columns)


def _turned(a: Operand) -> Operand:
    return Operand(a.q.t(), a.scale, a.rms)


def _cast(x: Any, cast: Cast) -> tuple[Any, Operand]:
    """Return the cast operand, or None if it stays as it is, and the factor of the product."""
    if x.format == cast.format:
        return None, _factor(x)
    both = _in_one_pass(x, cast)
    if both is None:
        cast_x = _run(*operand_cast(x, cast))
        return cast_x, _factor(cast_x)
    held, loop = both
    codes, values = loop.codes_and_values(held.qdata)
    amounts = amounts_of(held)
    made = ScaledTensor.make(codes, *amounts, cast.format, x.dtype, x.recipe, x.nonnegative)
    return made, Operand(_rows(values), *amounts)


def _cast_gradient(grad: Any, cast: Cast) -> Any:
    if isinstance(cast.scale, Carried):
        how = () if cast.rounding == "nearest_even" else (cast.rounding,)
        held = verbs.shifted(grad, cast.scale.shift)
        return _run(verbs.to_format, held, cast.format.name, *how)
    if grad.qdata.dtype.itemsize == 1:  # cast already, by a history
        return grad
    return _run(verbs.quantize, grad, cast.spec)


def _gradient_factor(grad: Any, cast: Cast) -> Operand:
    """Return the values of the cast gradient. Its codes have no other reader."""
    both = _in_one_pass(grad, cast) if cast.rounding == "nearest_even" else None
    if both is None:
        return _factor(_cast_gradient(grad, cast))
    held, loop = both
    return Operand(_rows(loop.values(held.qdata)), *amounts_of(held))


_TO_NEAREST = Mode("nearest_even", OVERFLOW)


def _in_one_pass(x: Any, cast: Cast) -> tuple[Any, ValueLoop] | None:
    """Return the tensor to cast, and the loop that makes the values that products multiply, beside
    the codes or instead of them. None if there is no loop, or if autograd or an observer has to see
    the cast."""
    q, scale = x.qdata, cast.scale
    if not isinstance(scale, Carried) or torch.is_grad_enabled() or not is_alone():
        return None
    floats = q.dtype is torch.float32 or q.dtype is torch.bfloat16
    if not floats or not q.is_contiguous() or not native.takes(q):
        return None
    loop = value_loop(cast.format, _TO_NEAREST, product_dtype(q.device))
    return None if loop is None else (verbs.shifted(x, scale.shift), loop)


def _in_format(grad: Any, source: Format) -> Any:
    """Return a gradient in the format of its operand, if that was wider than 8 bits before its
    cast."""
    wide = source.storage_dtype.itemsize > 1
    if wide and isinstance(grad, ScaledTensor) and grad.format != source:
        return _run(verbs.to_format, grad, source.name)
    return grad


# --- products --------------------------------------------------------------------------------


def _by_elements(
    grad: Any, x: Any, weight: Any, cast: Cast, formats: tuple[Format, Format]
) -> tuple[Any, Any]:
    """Return the gradients of input and weight, calculated on elements. A constant operand has
    None, and the other operand was not kept for it."""
    dy = _gradient_factor(grad, cast)
    cast_grad = _Source(cast.format, grad.recipe, grad.dtype)
    dx = dw = None
    if weight is not None:
        fmt = narrowest((cast_grad, weight))
        product = _stored(_multiplied(dy, _factor(weight), fmt), fmt, formats[0])
        dx = _tensor(product, (*grad.shape[:-1], weight.shape[1]), fmt, cast_grad, weight)
    if x is not None:
        fmt = narrowest((cast_grad, x))
        product = _stored(_multiplied(_turned(dy), _factor(x), fmt), fmt, formats[1])
        dw = _tensor(product, product.q.shape, fmt, cast_grad, x)
    return dx, dw


def _by_operators(grad: Any, x: Any, weight: Any, cast: Cast) -> tuple[Any, Any]:
    """Return the same by operators of torch, which are differentiable."""
    dy = _cast_gradient(grad, cast)
    rows = dy.reshape(-1, dy.shape[-1])
    dx = dw = None
    if weight is not None:
        dx = (rows @ weight).view(*dy.shape[:-1], weight.shape[1])
    if x is not None:
        dw = rows.t() @ x.reshape(-1, x.shape[-1])
    return dx, dw


class _Source(NamedTuple):
    """The attributes of an operand that a result inherits."""

    format: Format
    recipe: Recipe | None
    dtype: torch.dtype


class _Product(NamedTuple):
    """A product whose elements have yet to be multiplied by `ratio`."""

    q: Tensor
    scale: Single
    rms: Single
    ratio: Single = ONE


def _multiplied(a: Operand, b: Operand, fmt: Format, final: bool = True) -> _Product:
    """Return the product of two matrices, whose result is in `fmt`. `final` says that no bias
    follows: then the kernel of a bfloat16 product, which rounds its sums, multiplies them by the
    ratio first."""
    scale, ratio, rms = settle_product(a.q.shape[1], (a.scale, a.rms), (b.scale, b.rms))
    x, y = multiplied(a.q, b.q, wide=fmt is FP32)
    if final and x.dtype is torch.bfloat16 and commutes(ratio) and not is_one(ratio):
        q = torch.addmm(_zero(x.device), x, y, beta=0, alpha=ratio)
        return _Product(q, scale, rms)
    return _Product(torch.mm(x, y), scale, rms, ratio)


@cache
def _zero(device: torch.device) -> Tensor:
    """The sum that `torch.addmm` asks for, and that it does not read for a `beta` of 0."""
    return torch.zeros((), dtype=torch.bfloat16, device=device)


def _stored(product: _Product, fmt: Format, target: Format) -> _Product:
    """Return a product rounded to `fmt`, and stored in float32 if `target` is FP32."""
    q, ratio = product.q, product.ratio
    if fmt is BF16 and (target is FP32 or not is_one(ratio)):  # otherwise torch takes one pass too
        made = rounded_rows(q, ratio, in_place=target is FP32)
        if made is not None:
            return product._replace(q=made, ratio=ONE)
    if not is_one(ratio):
        q = scaled_in_place(q, ratio)
    q = store(q, fmt)
    return product._replace(q=converted(q, torch.float32) if target is FP32 else q, ratio=ONE)


def _plus(product: _Product, fmt: Format, bias: Any) -> _Product | None:
    """Add a bias to a product, in the pass that rounds the product."""
    rms = quadrature(product.rms, rms_of(bias))
    scale, kept, share = settle(rms, product.scale, scale_of(bias))
    if fmt is not BF16 or share >= HUGE:
        return None
    q = rounded_rows(product.q, product.ratio, bias.qdata, kept, share)
    return None if q is None else _Product(q, scale, rms)


def _tensor(product: _Product, shape: Sequence[int], fmt: Format, a: Any, b: Any) -> ScaledTensor:
    q, scale = product.q, product.scale
    rms = believed(product.rms, q, scale)
    if rms is not product.rms:
        scale, ratio = settle(rms, scale)
        q = scaled_by(q, ratio)
    held = FP32 if q.dtype is torch.float32 else fmt
    recipe = a.recipe or b.recipe
    dtype = a.dtype if a.dtype == b.dtype else torch.promote_types(a.dtype, b.dtype)
    kept = held, dtype, None if recipe is None else recipe.uncorrected
    return ScaledTensor.make(q.view(shape), scale, rms, *kept)
