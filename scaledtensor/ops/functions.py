"""Python-level functions whose operands are cast before autograd saves them.

Autograd saves what an operator was given. A cast below it, in the ATen rule, would save 16-bit
operands; so the matrix products are caught one level above, in every spelling that torch has, and
called on cast operands. What the recipe does not govern (a tensor without a recipe, a plain
`nn.Parameter` that a filter left out) passes as it is.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch, verbs
from scaledtensor.errors import RecipeWarning, UnsupportedError
from scaledtensor.formats import from_dtype
from scaledtensor.ops import by_gemm
from scaledtensor.ops.algebra import check_dtypes, first_scaled
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.casts import Cast
from scaledtensor.recipes.scales import Carried, Fixed
from scaledtensor.sparse import is_sparse
from scaledtensor.tensor import ScaledTensor, is_parameter

__all__ = ["FUNCTIONS", "cast_input", "cast_once", "linear", "plus"]


def _governing(*operands: Any) -> Recipe | None:
    """The recipe of a product: that of a parameter among its operands, else of the last that is
    scaled, where a weight stands; none where one is kept out."""
    found: Recipe | None = None
    of_parameter = False
    for x in operands:
        if isinstance(x, ScaledTensor):
            if x.recipe is None:
                return None
            if not of_parameter:
                found, of_parameter = x.recipe, is_parameter(x)
        elif isinstance(x, torch.nn.Parameter):
            return None
    return found


def _promoted(operands: Sequence[Any]) -> Sequence[Any]:
    count = sum(isinstance(x, ScaledTensor) for x in operands)
    if count in (0, len(operands)):  # none but the bias, perhaps
        return operands
    # Detached: a product needs no gradient for the sake of what it is promoted by.
    like = first_scaled(*operands).detach()
    return [x if isinstance(x, ScaledTensor) else verbs.promote(x, like) for x in operands]


def _cast(x: ScaledTensor, cast: Cast) -> Any:
    if x.format == cast.format:
        return _wide_gradient(x) if is_parameter(x) and x.requires_grad else x
    if isinstance(cast.scale, Carried):
        return verbs.to_format(x, cast.format.name)
    return verbs.quantize(x, cast.spec)


def _wide_gradient(weight: ScaledTensor) -> Any:
    """A weight that came as codes (`fully_shard` gathers them): its gradient is that of the master,
    which a cast would have seen to."""
    return verbs.gradient_to_format(weight, from_dtype(weight.dtype).name, "nearest_even")


def _gradient_cast(y: Any, cast: Cast) -> Any:
    if not isinstance(y, ScaledTensor):
        return y
    if isinstance(cast.scale, Carried):
        return verbs.gradient_to_format(y, cast.format.name, cast.rounding)
    return verbs.gradient_quantize(y, cast.spec)


def _product(
    function: Callable[..., Any],
    *operands: Any,
    spelled: Any = None,
    lowered: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """`function(*operands)` with every operand cast, and its gradient cast once on the way back;
    or, where the recipe casts for each product, `lowered` or that of `BY_GEMM`. `spelled` is the
    function to name where there is neither."""
    recipe = _governing(*operands)
    if any(map(is_sparse, operands)):
        return function(*_beside_sparse(operands, recipe), **kwargs)
    if recipe is None:
        # Promoted here as the rule would: so the gradient of a plain parameter is plain as well.
        return function(*_promoted(operands), **kwargs)
    scaled, once = _promoted(operands), recipe.gemms.once
    if once is None:
        matmul = lowered or BY_GEMM.get(function)
        if matmul is None or kwargs:
            return _uncast(function, spelled or function, recipe, scaled, kwargs)
        return _under_autocast(matmul(*scaled, recipe=recipe))
    first, weight, gradient = once
    cast = [_cast(x, weight if i == 1 else first) for i, x in enumerate(scaled)]
    return _gradient_cast(function(*cast, **kwargs), gradient)


def _under_autocast(y: Any) -> Any:
    """What torch's own product would have been cast to, which an operator of ours is not."""
    kind = y.device.type
    if not torch.is_autocast_enabled(kind) or y.dtype == torch.float64:
        return y
    return y.to(torch.get_autocast_dtype(kind))


def _beside_sparse(operands: Sequence[Any], recipe: Recipe | None) -> Sequence[Any]:
    """Operands of a product with a sparse one, which no recipe casts to 8 bits: the dense one is in
    the activation format. A plain sparse one without a gradient stays as it is."""
    constant = [
        is_sparse(x) and not (isinstance(x, ScaledTensor) or x.requires_grad) for x in operands
    ]
    with_gradients = [x for x, stays in zip(operands, constant, strict=True) if not stays]
    promoted = iter(_promoted([_as_coo(x) for x in with_gradients]))
    held = [x if stays else next(promoted) for x, stays in zip(operands, constant, strict=True)]
    if recipe is None:
        return held
    return [x if is_sparse(x) else _cast(x, Cast(recipe.activation)) for x in held]


def _as_coo(x: Any) -> Any:
    """The layout of a sparse ScaledTensor, where a sparse tensor is to become one."""
    return x.to_sparse() if is_sparse(x) and x.layout != torch.sparse_coo else x


def _uncast(
    function: Any, spelled: Any, recipe: Recipe, operands: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What a recipe with a cast for each product does not reach: as it is, and said once."""
    name = getattr(spelled.func if isinstance(spelled, partial) else spelled, "__name__", "it")
    if not torch.compiler.is_compiling() and (recipe, name) not in _told:
        _told.add((recipe, name))
        warnings.warn(
            f"{type(recipe).__name__} casts the operands of matrix products along what they sum "
            f"over; {name} stays in {recipe.activation.name}",
            RecipeWarning,
            stacklevel=2,
        )
    return function(*operands, **kwargs)


_told: set[tuple[Recipe, str]] = set()


def cast_once(weight: Any, *others: Any) -> Any:
    """A weight for many products with what `others` stand for: cast here, it is not again."""
    recipe = _governing(weight, *others)
    if recipe is None or recipe.gemms.once is None:
        return weight
    return _cast(_promoted([weight, *others])[0], recipe.gemms.once[1])


def cast_input(x: ScaledTensor, recipe: Recipe | None) -> Any:
    """The input of products with weights of a recipe, where its cast is the same for any part of
    it and for the whole; else as it is."""
    once = None if recipe is None else recipe.gemms.once
    if once is None or not isinstance(once[0].scale, (Carried, Fixed)):
        return x
    return _cast(x, once[0])


def _reflected(function: Callable[..., Any], a: Any, b: Any) -> Any:
    return _product(function, b, a)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """The bias is added outside, so that its gradient sums uncast terms."""
    y = _product(torch.nn.functional.linear, input, weight)
    return y if bias is None else plus(y, bias)


def plus(y: Any, bias: Any) -> Any:
    """The sum of a product and what is added to it, which autocast converts too."""
    if bias.dtype != y.dtype:
        check_dtypes(y, bias)
        bias = bias.to(y.dtype)
    return y + bias


def added(
    function: Callable[..., Any], whole: Callable[..., Any], input: Any, *args: Any, **kwargs: Any
) -> Any:
    """beta input + alpha function(a, b), as addmm and its kin. What is added stays uncast. Where it
    is a factor too, nothing is: that is a polynomial of one matrix, whose terms cancel."""
    _refuse_out(function, kwargs)
    if any(x is input for x in args):
        return whole(input, *args, **kwargs)
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    y = _product(function, *args, *kwargs.values())  # mat1, mat2; batch1, batch2; mat, vec
    y = y if alpha == 1 else y * alpha
    return plus(y, input if beta == 1 else input * beta)


def _summed_bmm(a: Any, b: Any) -> Any:
    return torch.bmm(a, b).sum(0)


def einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return torch.einsum(equation, *operands)
    lowered = None
    if by_gemm.is_product(equation, operands):
        lowered = partial(by_gemm.einsum, equation)
    return _product(partial(torch.einsum, equation), *operands, lowered=lowered)


def binary(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _refuse_out(function, kwargs)
    return _product(function, *args, *kwargs.values())  # torch.matmul(input=a, other=b)


def grouped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The products of experts: one matrix to a group of rows."""
    a, b, *rest = (*args, *(kwargs.pop(name) for name in ("mat_a", "mat_b") if name in kwargs))
    return _product(lambda x, y: function(x, y, *rest, **kwargs), a, b, spelled=function)


def tensordot(a: Any, b: Any, dims: Any = 2, **kwargs: Any) -> Any:
    _refuse_out(torch.tensordot, kwargs)
    lowered = partial(by_gemm.tensordot, dims)
    return _product(partial(torch.tensordot, dims=dims), a, b, lowered=lowered)


def chain(*matrices: Any, **kwargs: Any) -> Any:
    """multi_dot takes a list, chain_matmul its elements."""
    _refuse_out(torch.linalg.multi_dot, kwargs)
    if len(matrices) == 1:
        (matrices,) = matrices
    return _product(lambda *cast: torch.linalg.multi_dot(cast), *matrices, spelled=chain)


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """As an einsum: torch's own operator has no rule, and no product with a scale in it."""
    y = _product(partial(torch.einsum, "...i,...j,oij->...o"), input1, input2, weight)
    return y if bias is None else plus(y, bias)


def convolution(
    function: Callable[..., Any], input: Any, weight: Any, *args: Any, **kw: Any
) -> Any:
    """As for linear, the bias is added outside: (input, weight, bias, stride, padding, ...)."""
    bias, *rest = args or (kw.pop("bias", None),)
    y = _product(lambda x, w: function(x, w, None, *rest, **kw), input, weight, spelled=function)
    return y if bias is None else plus(y, bias.view(-1, *[1] * (weight.dim() - 2)))


def conv_tbc(input: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """As the convolution that it is: of (time, batch, channel), by (tap, in, out)."""
    y = _product(
        partial(torch.conv1d, padding=pad), input.permute(1, 2, 0), weight.permute(2, 1, 0)
    )
    return plus(y.permute(2, 0, 1), bias)


def sparse_mm(a: Any, b: Any, reduce: str | None = None) -> Any:
    """`torch.sparse.mm`, of which the gradient of a sparse operand is sparse too."""
    if reduce is None:
        return _product(torch.sparse.mm, a, b)
    return _product(partial(torch.sparse.mm, reduce=reduce), a, b)


def _refuse_out(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    if kwargs.pop("out", None) is not None:
        raise UnsupportedError(
            f"{function.__name__}(..., out=) on ScaledTensors: autograd has no out= either; "
            "assign the result instead"
        )


def _linear(x: Any, weight: Any, recipe: Recipe) -> Any:
    return by_gemm.matmul(x, weight.t(), recipe)


def _inner(a: Any, b: Any, recipe: Recipe) -> Any:
    return by_gemm.matmul(a, b.mT if b.dim() > 1 else b, recipe)


#: (operands, recipe) of what is called on cast operands -> the same by `by_gemm.matmul`.
BY_GEMM: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.inner: _inner,
    _summed_bmm: lambda a, b, recipe: by_gemm.matmul(a, b, recipe).sum(0),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv), by_gemm.matmul),
}

#: function that a user may call -> the same on cast operands.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: linear,
    torch.nn.functional.bilinear: bilinear,
    **{
        spelling: partial(added, function, spelling)
        for name, function in (
            ("addmm", torch.mm),
            ("baddbmm", torch.bmm),
            ("addbmm", _summed_bmm),
            ("addmv", torch.mv),
        )
        for spelling in (getattr(torch, name), getattr(Tensor, name))
    },
    **{
        spelling: partial(convolution, spelling)
        for spelling in (
            *(torch.conv1d, torch.conv2d, torch.conv3d, torch.convolution),
            *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        )
    },
    torch.conv_tbc: conv_tbc,
    torch.einsum: einsum,
    torch.functional.einsum: einsum,
    Tensor.__matmul__: partial(binary, torch.matmul),
    Tensor.__rmatmul__: partial(_reflected, torch.matmul),
    **{
        spelling: partial(binary, getattr(torch, name))
        for name in ("matmul", "mm", "bmm", "mv", "inner")
        for spelling in (getattr(torch, name), getattr(Tensor, name))
    },
    **{
        spelling: partial(grouped, spelling)
        for spelling in (torch.nn.functional.grouped_mm, _torch.grouped_mm)
    },
    torch.linalg.matmul: partial(binary, torch.matmul),
    torch.sparse.mm: sparse_mm,
    torch.spmm: partial(binary, torch.mm),
    torch.dsmm: partial(binary, torch.mm),
    torch.sparse.addmm: partial(added, torch.sparse.mm, torch.sparse.addmm),
    torch.linalg.multi_dot: chain,
    torch.chain_matmul: chain,
    torch.functional.chain_matmul: chain,
    torch.tensordot: tensordot,
    torch.functional.tensordot: tensordot,
}
