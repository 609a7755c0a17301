"""Every function of torch that multiplies tensors, in one table, and products on cast operands.

`PRODUCTS` is what recipes, the histories of `Delayed`, `simulate_format` and `unit_scale` read: a
spelling that stands there is known to all of them, and one that does not stand there to none.

Autograd saves what an operator was given. A cast below it, in the ATen rule, would save 16-bit
operands; so the matrix products are caught one level above, in every spelling that torch has, and
called on cast operands. What the recipe does not govern (a tensor without a recipe, a plain
`nn.Parameter` that a filter left out) passes as it is.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import RecipeWarning, UnsupportedError
from scaledtensor.ops.algebra import check_dtypes
from scaledtensor.ops.products import by_gemm, counted, delayed, sites
from scaledtensor.ops.products import linear as as_one
from scaledtensor.ops.registry import promoted
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.casts import Carried, Cast, Fixed
from scaledtensor.tensors import verbs
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter

__all__ = ["FUNCTIONS", "PRODUCTS", "Product", "cast_input", "cast_once", "linear", "plus"]

#: (function, operands, spelled=, lowered=, keyword arguments of the function) -> the function of
#: these operands, cast by whoever passed it. `spelled` is what a message names; `lowered` is the
#: same product by `by_gemm`.
Multiply = Callable[..., Any]


@dataclass(frozen=True)
class Product:
    """What everything that changes products knows of one function that multiplies tensors."""

    #: What the unit-scaled counterpart is listed by (`scaledtensor.functional.spellings`). Two
    #: spellings of one name take the same arguments.
    name: str

    #: Position and name of each operand; or where the first of them stands, one by one or as one
    #: list. Empty for a product of sparse operands, which nothing rounds.
    places: tuple[tuple[int, str], ...] | tuple[int, str]

    #: (multiply, *args, **kwargs) -> the result, in which `multiply` makes the product. None for
    #: what recipes leave in the activation format.
    on: Callable[..., Any] | None = None

    #: Whether it writes into its first argument.
    in_place: bool = False

    def operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """What a call multiplies, in order."""
        found: list[Any] = []
        self.mapped(found.append, args, kwargs)
        return found

    def mapped(
        self, f: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call, with `f` of each operand in its place."""
        given = list(args)
        if self.places and isinstance(self.places[0], int):
            start, name = self.places
            if name in kwargs:
                return given, {**kwargs, name: [f(x) for x in kwargs[name]]}
            listed = len(given) > start and isinstance(given[start], (list, tuple))
            if listed:
                given[start] = [f(x) for x in given[start]]
            else:
                given[start:] = [f(x) for x in given[start:]]
            return given, kwargs
        for position, name in self.places:
            if position < len(given):
                given[position] = f(given[position])
            elif name in kwargs:
                kwargs = {**kwargs, name: f(kwargs[name])}
        return given, kwargs


def _governing(*operands: Any) -> tuple[Recipe | None, ScaledTensor | None]:
    """The recipe of a product, and the weight that has it: the first parameter among the operands,
    else the first that is a view of one, or converted, as `w.t()` and `w.bfloat16()` are. Without a
    weight it is the recipe of the last operand that is scaled, where a weight stands. An operand
    that a filter left out gives the product no recipe."""
    found: Recipe | None = None
    weight: ScaledTensor | None = None
    settled = False
    for x in operands:
        if isinstance(x, ScaledTensor):
            if x.recipe is None:
                return None, None
            if settled:
                continue
            if is_parameter(x):
                found, weight, settled = x.recipe, x, True
            elif weight is None:
                if x.site is not None:
                    weight = x
                    x.site.correct(x)
                found = x.recipe
        elif isinstance(x, torch.nn.Parameter):
            return None, None
    return found, weight


def _cast(x: ScaledTensor, cast: Cast) -> Any:
    if x.format == cast.format:
        return as_one.wide_gradient(x)
    operator, *arguments = as_one.operand_cast(x, cast)
    return operator(*arguments)


def _gradient_cast(y: Any, cast: Cast, traced: counted.Traced | None = None) -> Any:
    if not isinstance(y, ScaledTensor):
        return y
    if isinstance(cast.scale, Carried):
        more = traced.gradient(y, cast) if traced else (cast.scale.shift,)
        return verbs.gradient_to_format(y, cast.format.name, cast.rounding, *more)
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
    recipe, weight = _governing(*operands)
    if any(map(is_sparse, operands)):
        return function(*_beside_sparse(operands, recipe), **kwargs)
    if recipe is None:
        # Promoted here as the rule would: so the gradient of a plain parameter is plain as well.
        return function(*promoted(operands), **kwargs)
    scaled, once = promoted(operands), recipe.gemms.once
    if once is None:
        matmul = lowered or BY_GEMM.get(function)
        if matmul is None or kwargs:
            return _uncast(function, spelled or function, recipe, scaled, kwargs)
        return _under_autocast(matmul(*scaled, recipe=recipe))
    kept, history = delayed.remembered(scaled, once)
    if history is not None:
        return delayed.product(function, scaled, kept, history, once)
    looks = sites.looks(weight) if weight is not None else sites.tells(scaled, recipe)
    casts = sites.look_at_inputs(weight, scaled) if looks else once
    if function is torch.nn.functional.linear and as_one.serves(*scaled):
        y = as_one.linear(scaled[0], scaled[1], casts)
    else:
        traced = counted.traced(scaled, recipe)
        held = traced.held(scaled, casts[0]) if traced else scaled
        at = sites.place(scaled, traced.weight if traced else weight)
        cast = [_cast(x, casts[1] if i == at else casts[0]) for i, x in enumerate(held)]
        y = function(*(traced.watched(cast) if traced else cast), **kwargs)
        y = _gradient_cast(y, casts[2], traced)
    return sites.look_back(weight, y) if looks else y


def _under_autocast(y: Any) -> Any:
    """What torch would have cast its own product to, which an operator of ours is not."""
    kind = y.device.type
    stays = y.dtype == torch.float64 or not torch.is_autocast_enabled(kind)
    return y if stays else y.to(torch.get_autocast_dtype(kind))


def _beside_sparse(operands: Sequence[Any], recipe: Recipe | None) -> Sequence[Any]:
    """Operands of a product with a sparse one, which no recipe casts to 8 bits: the dense one is in
    the activation format. A plain sparse one without a gradient stays as it is."""
    constant = [
        is_sparse(x) and not (isinstance(x, ScaledTensor) or x.requires_grad) for x in operands
    ]
    with_gradients = [x for x, stays in zip(operands, constant, strict=True) if not stays]
    entering = iter(promoted([_as_coo(x) for x in with_gradients]))
    held = [x if stays else next(entering) for x, stays in zip(operands, constant, strict=True)]
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
    recipe, _ = _governing(weight, *others)
    if recipe is None or recipe.gemms.once is None:
        return weight
    return _cast(promoted([weight, *others])[0], recipe.gemms.once[1])


def cast_input(x: ScaledTensor, recipe: Recipe | None) -> Any:
    """The input of products with weights of a recipe, where its cast is the same for any part of
    it and for the whole; else as it is."""
    once = None if recipe is None else recipe.gemms.once
    if once is None or not isinstance(once[0].scale, (Carried, Fixed)):
        return x
    return _cast(x, once[0])


# --- products, by what multiplies their operands ---------------------------------------------


def _reflected(function: Callable[..., Any], multiply: Multiply, a: Any, b: Any) -> Any:
    return multiply(function, b, a)


def _linear(multiply: Multiply, input: Any, weight: Any, bias: Any = None) -> Any:
    """The bias is added outside, so that its gradient sums uncast terms."""
    together = multiply is _product and bias is not None
    if together and as_one.serves(input, weight) and as_one.adds(bias, weight):
        recipe, parameter = _governing(input, weight)
        once = None if recipe is None else recipe.gemms.once
        if once is not None and delayed.remembered((input, weight), once)[1] is None:
            if parameter is None or not sites.looks(parameter):
                return as_one.linear(input, weight, once, bias)
            once = sites.look_at_inputs(parameter, (input, weight))
            y = as_one.linear(input, weight, once)
            return plus(sites.look_back(parameter, y), bias)
    y = multiply(torch.nn.functional.linear, input, weight)
    return y if bias is None else plus(y, bias)


#: `torch.nn.functional.linear` of operands that a recipe casts.
linear = partial(_linear, _product)


def plus(y: Any, bias: Any) -> Any:
    """The sum of a product and what is added to it, which autocast converts too."""
    if bias.dtype != y.dtype:
        check_dtypes(y, bias)
        bias = bias.to(y.dtype)
    return y + bias


def _added(
    function: Callable[..., Any],
    whole: Callable[..., Any],
    multiply: Multiply,
    input: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """beta input + alpha function(a, b), as addmm and its kin. What is added stays uncast. Where it
    is a factor too, nothing is: that is a polynomial of one matrix, whose terms cancel."""
    _refuse_out(function, kwargs)
    if any(x is input for x in args):
        return whole(input, *args, **kwargs)
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    y = multiply(function, *args, *kwargs.values())  # mat1, mat2; batch1, batch2; mat, vec
    y = y if alpha == 1 else y * alpha
    return plus(y, input if beta == 1 else input * beta)


def _added_in_place(
    function: Callable[..., Any],
    whole: Callable[..., Any],
    multiply: Multiply,
    input: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The same, written into `input`, which keeps its identity, format and scale."""
    if any(x is input for x in (*args, *kwargs.values())):
        return whole(input, *args, **kwargs)
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    y = multiply(function, *args, *kwargs.values())
    if beta != 1:
        input = input.mul_(beta) if beta else input.zero_()
    check_dtypes(y, input)
    return input.add_(y.to(input.dtype), alpha=alpha)


def _summed_bmm(a: Any, b: Any) -> Any:
    return torch.bmm(a, b).sum(0)


def _einsum(multiply: Multiply, equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    lowered = None
    if by_gemm.is_product(equation, operands):
        lowered = partial(by_gemm.einsum, equation)
    return multiply(partial(torch.einsum, equation), *operands, lowered=lowered)


def _binary(function: Callable[..., Any], multiply: Multiply, *args: Any, **kwargs: Any) -> Any:
    _refuse_out(function, kwargs)
    return multiply(function, *args, *kwargs.values())  # torch.matmul(input=a, other=b)


def _grouped(function: Callable[..., Any], multiply: Multiply, *args: Any, **kwargs: Any) -> Any:
    """The products of experts: one matrix to a group of rows."""
    a, b, *rest = (*args, *(kwargs.pop(name) for name in ("mat_a", "mat_b") if name in kwargs))
    return multiply(lambda x, y: function(x, y, *rest, **kwargs), a, b, spelled=function)


def _tensordot(multiply: Multiply, a: Any, b: Any, dims: Any = 2, **kwargs: Any) -> Any:
    _refuse_out(torch.tensordot, kwargs)
    lowered = partial(by_gemm.tensordot, dims)
    return multiply(partial(torch.tensordot, dims=dims), a, b, lowered=lowered)


def _multi_dot(multiply: Multiply, tensors: Any, **kwargs: Any) -> Any:
    _refuse_out(torch.linalg.multi_dot, kwargs)
    return multiply(_dotted, *tensors, spelled=torch.linalg.multi_dot)


def _chain(multiply: Multiply, *matrices: Any, **kwargs: Any) -> Any:
    """torch takes the matrices of chain_matmul one by one, and as one list."""
    listed = len(matrices) == 1 and isinstance(matrices[0], (list, tuple))
    return _multi_dot(multiply, matrices[0] if listed else matrices, **kwargs)


def _dotted(*matrices: Any) -> Any:
    return torch.linalg.multi_dot(matrices)


def _bilinear(multiply: Multiply, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """As an einsum: torch's own operator has no rule, and no product with a scale in it."""
    y = multiply(partial(torch.einsum, "...i,...j,oij->...o"), input1, input2, weight)
    return y if bias is None else plus(y, bias)


def _convolution(
    function: Callable[..., Any],
    multiply: Multiply,
    input: Any,
    weight: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """As for linear, the bias is added outside: (input, weight, bias, stride, padding, ...)."""
    bias, *rest = args or (kw.pop("bias", None),)
    y = multiply(lambda x, w: function(x, w, None, *rest, **kw), input, weight, spelled=function)
    return y if bias is None else plus(y, bias.view(-1, *[1] * (weight.dim() - 2)))


def _conv_tbc(multiply: Multiply, input: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """As the convolution that it is: of (time, batch, channel), by (tap, in, out)."""
    y = multiply(_conv_of_tbc(pad), input, weight)
    return plus(y, bias)


def _conv_of_tbc(pad: int) -> Callable[..., Any]:
    def conv_tbc(x: Any, w: Any) -> Any:
        y = torch.conv1d(x.permute(1, 2, 0), w.permute(2, 1, 0), padding=pad)
        return y.permute(2, 0, 1)

    return conv_tbc


def _sparse_mm(multiply: Multiply, a: Any, b: Any, reduce: str | None = None) -> Any:
    """`torch.sparse.mm`, of which the gradient of a sparse operand is sparse too."""
    if reduce is None:
        return multiply(torch.sparse.mm, a, b)
    return multiply(partial(torch.sparse.mm, reduce=reduce), a, b)


def _refuse_out(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    if kwargs.pop("out", None) is not None:
        raise UnsupportedError(
            f"{function.__name__}(..., out=) on ScaledTensors: autograd has no out= either; "
            "assign the result instead"
        )


def _by_rows(x: Any, weight: Any, recipe: Recipe) -> Any:
    return by_gemm.matmul(x, weight.t(), recipe)


def _inner(a: Any, b: Any, recipe: Recipe) -> Any:
    return by_gemm.matmul(a, b.mT if b.dim() > 1 else b, recipe)


#: (operands, recipe) of what is called on cast operands -> the same by `by_gemm.matmul`.
BY_GEMM: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _by_rows,
    torch.inner: _inner,
    _summed_bmm: lambda a, b, recipe: by_gemm.matmul(a, b, recipe).sum(0),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv), by_gemm.matmul),
}


# --- the table -------------------------------------------------------------------------------

_WEIGHED = ((0, "input"), (1, "weight"))


def _products() -> dict[Any, Product]:
    table: dict[Any, Product] = {
        torch.nn.functional.linear: Product("linear", _WEIGHED, _linear),
        torch.nn.functional.bilinear: Product(
            "bilinear", ((0, "input1"), (1, "input2"), (2, "weight")), _bilinear
        ),
        Tensor.__matmul__: Product(
            "matmul", ((0, "input"), (1, "other")), partial(_binary, torch.matmul)
        ),
        Tensor.__rmatmul__: Product(
            "reflected_matmul", ((0, "input"), (1, "other")), partial(_reflected, torch.matmul)
        ),
        torch.linalg.multi_dot: Product("multi_dot", (0, "tensors"), _multi_dot),
        torch.conv_tbc: Product("conv_tbc", _WEIGHED, _conv_tbc),
        torch.sparse.mm: Product("sparse_mm", (), _sparse_mm),
        torch.sparse.addmm: Product(
            "sparse_addmm", (), partial(_added, torch.sparse.mm, torch.sparse.addmm)
        ),
        torch.nn.functional.scaled_dot_product_attention: Product(
            "scaled_dot_product_attention", ((0, "query"), (1, "key"), (2, "value"))
        ),
    }
    for name, second in (
        *(("matmul", "other"), ("mm", "mat2"), ("bmm", "mat2"), ("mv", "vec"), ("inner", "other")),
    ):
        function = getattr(torch, name)
        found = Product(name, ((0, "input"), (1, second)), partial(_binary, function))
        table |= dict.fromkeys((function, getattr(Tensor, name)), found)
    table[torch.linalg.matmul] = table[torch.matmul]
    for name, factors, function in (
        ("addmm", ("mat1", "mat2"), torch.mm),
        ("addmv", ("mat", "vec"), torch.mv),
        ("baddbmm", ("batch1", "batch2"), torch.bmm),
        ("addbmm", ("batch1", "batch2"), _summed_bmm),
    ):
        places = tuple(enumerate(factors, 1))
        for spelling in (getattr(torch, name), getattr(Tensor, name)):
            table[spelling] = Product(name, places, partial(_added, function, spelling))
        spelling = getattr(Tensor, f"{name}_")
        table[spelling] = Product(
            name, places, partial(_added_in_place, function, spelling), in_place=True
        )
    for name in (
        *("conv1d", "conv2d", "conv3d", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    ):
        spelling = getattr(torch, name)
        table[spelling] = Product(name, _WEIGHED, partial(_convolution, spelling))
    for spelling in (torch.nn.functional.grouped_mm, _torch.grouped_mm):
        places = ((0, "mat_a"), (1, "mat_b"))
        table[spelling] = Product("grouped_mm", places, partial(_grouped, spelling))
    several = {
        Product("einsum", (1, "operands"), _einsum): (torch.einsum, torch.functional.einsum),
        Product("chain_matmul", (0, "matrices"), _chain): (
            *(torch.chain_matmul, torch.functional.chain_matmul),
        ),
        Product("tensordot", ((0, "a"), (1, "b")), _tensordot): (
            *(torch.tensordot, torch.functional.tensordot),
        ),
        # Of vectors: what optimizers (LBFGS) multiply, so that no recipe casts them.
        Product("dot", ((0, "input"), (1, "tensor"))): (torch.dot, Tensor.dot),
        Product("outer", ((0, "input"), (1, "vec2"))): (torch.outer, Tensor.outer),
    }
    for found, spellings in several.items():
        table |= dict.fromkeys(spellings, found)
    return table


#: Function that a user may call -> what is known of it. The one table of products.
PRODUCTS: dict[Any, Product] = _products()

#: Function that a user may call -> the same on cast operands.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    spelling: partial(found.on, _product)
    for spelling, found in PRODUCTS.items()
    if found.on is not None
}
