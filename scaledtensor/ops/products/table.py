"""The table of all functions of torch that multiply tensors, and products on cast operands.

Recipes, the histories of `Delayed`, `simulate_format` and `unit_scale` all read `PRODUCTS`. A
spelling in the table is known to all of them, and a spelling that is missing to none.

Autograd saves the operands that an operator gets. A cast below autograd, in the ATen rule, would
save 16-bit operands. So the products are caught above autograd, in every spelling of torch, and
called on cast operands. A product without a recipe is called as it is: one of its operands is a
tensor without a recipe, a plain `nn.Parameter` that a filter left out, or the plain filter of a
convolution. Such a filter is no weight but a blur, as in SSIM, which subtracts nearly equal sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import check_dtypes
from scaledtensor.ops.products import by_gemm, counted, delayed, sites
from scaledtensor.ops.products import linear as as_one
from scaledtensor.ops.registry import promoted
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.casts import Carried, Cast, Fixed
from scaledtensor.tensors import steps, verbs
from scaledtensor.tensors.sparse import as_coo, is_sparse
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter
from scaledtensor.tensors.wrapper import refuse_capture, refuse_jit

__all__ = [
    "FUNCTIONS",
    "PRODUCTS",
    "Product",
    "cast_input",
    "cast_once",
    "linear",
    "linear_in_time",
    "plus",
]

#: `multiply(function, *operands, spelled=, lowered=, **kwargs)` returns `function(*operands,
#: **kwargs)` of operands that it cast. `spelled` is the function to name in a message. `lowered` is
#: the same product by `by_gemm`.
Multiply = Callable[..., Any]


@dataclass(frozen=True)
class Product:
    """One function of torch that multiplies tensors."""

    #: The name of its unit-scaled counterpart (`scaledtensor.functional.spellings`). Spellings of
    #: one name take the same arguments.
    name: str

    #: Position and name of each operand. Or position and name of the first operand, if the operands
    #: are given one by one or as one list. Empty for a product of sparse operands, which nothing
    #: rounds.
    places: tuple[tuple[int, str], ...] | tuple[int, str]

    #: `on(multiply, *args, **kwargs)` returns the result, and makes the product by `multiply`. None
    #: for a product that recipes leave in the activation format.
    on: Callable[..., Any] | None = None

    #: Whether the function writes into its first argument.
    in_place: bool = False

    def operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the operands of a call, in order."""
        found: list[Any] = []
        self.mapped(found.append, args, kwargs)
        return found

    def mapped(
        self, f: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with `f(operand)` in place of each operand."""
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
    """Return the recipe of a product, and the weight that has it: the first parameter, or else the
    first view or conversion of one, as `w.t()` and `w.bfloat16()` are. A product without a weight
    has the recipe of the last scaled operand. If a filter left out an operand, there is none."""
    refuse_jit(ScaledTensor)
    refuse_capture(operands[0])
    found, weight, settled = None, None, False
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
    if found is not None and invariant.is_on():
        invariant.check_recipe(found, all(isinstance(x, ScaledTensor) for x in operands))
    return found, weight


def _cast(
    x: ScaledTensor,
    cast: Cast,
    traced: counted.Traced | None = None,
    at: int = 0,
    fits: bool = False,
) -> Any:
    """Return an operand cast. `traced` is given for inputs, with their places among operands.
    `fits` is true for an operand that `sites.fit` returned."""
    if x.format == cast.format:
        return as_one.wide_gradient(x)
    if traced and cast.format.bits <= 8:
        return traced.cast(x, cast, at)
    operator, *arguments = as_one.operand_cast(x, cast, fits)
    return operator(*arguments)


def _gradient_cast(y: Any, cast: Cast, traced: counted.Traced | None, fits: bool) -> Any:
    if not isinstance(y, ScaledTensor):
        return y
    if isinstance(cast.scale, Carried):
        more = traced.gradient(cast) if traced else (cast.scale.shift,)
        if fits and torch.compiler.is_compiling():
            more = (*more, None, False, fits)
        return verbs.gradient_to_format(y, cast.format.name, cast.rounding, *more)
    return verbs.gradient_quantize(y, cast.spec)


def _product(
    function: Callable[..., Any],
    *operands: Any,
    spelled: Any = None,
    lowered: Callable[..., Any] | None = None,
    in_time: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `function(*operands)` with every operand cast, and the gradient cast once. If the
    recipe casts for each of the three products, `lowered` or the entry of `BY_GEMM` makes the
    product. A warning names `spelled` if there is neither. `in_time` is for `linear_in_time`."""
    recipe, weight = _governing(*operands)
    if recipe is None and not kwargs and [*map(type, operands)] == [ScaledTensor, ScaledTensor]:
        return function(*operands)  # the steps below would do nothing
    if any(map(is_sparse, operands)):
        return function(*_beside_sparse(operands, recipe), **kwargs)
    if recipe is None or (spelled in _FILTERED and not isinstance(operands[1], ScaledTensor)):
        # Promoted here, as the rule would: the gradient of a plain parameter is then plain too.
        return function(*promoted(operands), **kwargs)
    if weight is None and steps.is_update():  # Muon's terms cancel, and no weight has shifts
        y = function(*promoted(operands), **kwargs)
        return verbs.promote(verbs.dequantize(y), y) if isinstance(y, ScaledTensor) else y
    scaled, once = promoted(operands), recipe.gemms.once
    if once is None:
        matmul = lowered or BY_GEMM.get(function)
        if matmul is None or kwargs:
            return by_gemm.uncast(function, spelled or function, recipe, scaled, kwargs)
        return by_gemm.under_autocast(matmul(*scaled, recipe=recipe))
    kept, history = delayed.remembered(scaled, once)
    if history is not None:
        return delayed.product(function, scaled, kept, history, once)
    if in_time and isinstance(once[2].scale, Carried):
        once = (*once[:2], Cast(recipe.activation))
    looks = weight is not None and sites.looks(weight)
    casts = sites.look_at_inputs(weight, scaled) if looks else once
    alone = function is torch.nn.functional.linear and as_one.serves(*scaled)
    traced = None if alone else counted.traced(scaled, recipe)
    fits = traced is None and sites.fits(recipe, weight)
    if fits:
        scaled = sites.fit(scaled, recipe)

    def product(casts: tuple[Cast, Cast, Cast]) -> Any:
        if alone:
            return as_one.linear(scaled[0], scaled[1], casts)
        w = sites.place(scaled, traced.weight if traced else weight)
        held = [
            _cast(x, casts[1], fits=fits) if i == w else _cast(x, casts[0], traced, i, fits)
            for i, x in enumerate(scaled)
        ]
        return _gradient_cast(function(*held, **kwargs), casts[2], traced, fits)

    if fits:
        return sites.product_of_fitted(product, casts, recipe)
    y = product(casts)
    return sites.look_back(weight, y) if looks else y


def _beside_sparse(operands: Sequence[Any], recipe: Recipe | None) -> Sequence[Any]:
    """Return the operands of a product with a sparse operand, which no recipe casts to 8 bits. The
    dense one is in the activation format. A plain sparse one without a gradient stays as it is."""
    constant = [
        is_sparse(x) and not (isinstance(x, ScaledTensor) or x.requires_grad) for x in operands
    ]
    with_gradients = [x for x, stays in zip(operands, constant, strict=True) if not stays]
    entering = iter(promoted([as_coo(x) for x in with_gradients]))
    held = [x if stays else next(entering) for x, stays in zip(operands, constant, strict=True)]
    if recipe is None:
        return held
    return [x if is_sparse(x) else _cast(x, Cast(recipe.activation)) for x in held]


def cast_once(weight: Any, *others: Any) -> Any:
    """Cast a weight once for many products with operands such as `others`."""
    recipe, _ = _governing(weight, *others)
    if recipe is None or recipe.gemms.once is None:
        return weight
    return _cast(promoted([weight, *others])[0], recipe.gemms.once[1])


def cast_input(x: ScaledTensor, recipe: Recipe | None) -> Any:
    """Cast the input of products with weights of a recipe, if the cast of a part equals the part of
    the cast. Otherwise return the input."""
    once = None if recipe is None else recipe.gemms.once
    if once is None or not isinstance(once[0].scale, (Carried, Fixed)):
        return x
    return _cast(x, once[0])


# --- each function, with `multiply` in place of its product ----------------------------------


def _reflected(function: Callable[..., Any], multiply: Multiply, a: Any, b: Any) -> Any:
    return multiply(function, b, a)


def _linear(multiply: Multiply, input: Any, weight: Any, bias: Any = None) -> Any:
    """Add the bias outside of the product, so that its gradient sums uncast terms."""
    together = multiply is _product and bias is not None
    if together and as_one.serves(input, weight) and as_one.adds(bias, weight):
        recipe, parameter = _governing(input, weight)
        once = None if recipe is None or sites.fits(recipe, parameter) else recipe.gemms.once
        if once is not None and delayed.remembered((input, weight), once)[1] is None:
            looks = parameter is not None and sites.looks(parameter)
            casts = sites.look_at_inputs(parameter, (input, weight)) if looks else once
            y = as_one.linear(input, weight, casts, bias)
            casts_gradient = input.requires_grad or weight.requires_grad  # a bias alone does not
            return sites.look_back(parameter, y) if looks and casts_gradient else y
    y = multiply(torch.nn.functional.linear, input, weight)
    return y if bias is None else plus(y, bias)


#: `torch.nn.functional.linear` on operands that the recipe casts.
linear = partial(_linear, _product)

#: The same for a state, whose gradient is not cast: it would be cast again at each step.
linear_in_time = partial(_linear, partial(_product, in_time=True))


def plus(y: Any, bias: Any) -> Any:
    """Return the sum of a product and a bias, in the dtype of the product under autocast."""
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
    """Return beta input + alpha function(a, b), for addmm and its like. `input` stays uncast. If it
    is a factor too, nothing is cast: the terms of a polynomial of one matrix cancel."""
    out = kwargs.pop("out", None)
    if any(x is input for x in args):
        return _into(out, whole(input, *args, **kwargs))
    beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
    y = multiply(function, *args, *kwargs.values())  # mat1, mat2; batch1, batch2; mat, vec
    y = y if alpha == 1 else y * alpha
    if beta == 0:  # torch does not read the input, which may be memory that nobody wrote
        input.expand(y.shape)
        return _into(out, y)
    return _into(out, plus(y, input if beta == 1 else input * beta))


def _added_in_place(
    function: Callable[..., Any],
    whole: Callable[..., Any],
    multiply: Multiply,
    input: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Write the same into `input`, which keeps its identity, format and scale."""
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
    lowered = partial(by_gemm.einsum, equation) if by_gemm.is_product(equation, operands) else None
    return multiply(partial(torch.einsum, equation), *operands, lowered=lowered)


def _binary(function: Callable[..., Any], multiply: Multiply, *args: Any, **kwargs: Any) -> Any:
    if not kwargs:
        return multiply(function, *args)
    out = kwargs.pop("out", None)
    return _into(out, multiply(function, *args, *kwargs.values()))  # matmul(input=a, other=b)


def _grouped(function: Callable[..., Any], multiply: Multiply, *args: Any, **kwargs: Any) -> Any:
    """The products of experts: each group of rows has a matrix."""
    a, b, *rest = (*args, *(kwargs.pop(name) for name in ("mat_a", "mat_b") if name in kwargs))
    return multiply(lambda x, y: function(x, y, *rest, **kwargs), a, b, spelled=function)


def _tensordot(multiply: Multiply, a: Any, b: Any, dims: Any = 2, **kwargs: Any) -> Any:
    lowered = partial(by_gemm.tensordot, dims)
    y = multiply(partial(torch.tensordot, dims=dims), a, b, lowered=lowered)
    return _into(kwargs.get("out"), y)


def _multi_dot(multiply: Multiply, tensors: Any, **kwargs: Any) -> Any:
    function = torch.linalg.multi_dot
    y = multiply(lambda *matrices: function(matrices), *tensors, spelled=function)
    return _into(kwargs.get("out"), y)


def _chain(multiply: Multiply, *matrices: Any, **kwargs: Any) -> Any:
    """torch takes the matrices of chain_matmul one by one or as one list."""
    listed = len(matrices) == 1 and isinstance(matrices[0], (list, tuple))
    return _multi_dot(multiply, matrices[0] if listed else matrices, **kwargs)


def _bilinear(multiply: Multiply, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """Make an einsum: torch's own operator has no rule, and no product with a scale in it."""
    y = multiply(partial(torch.einsum, "...i,...j,oij->...o"), input1, input2, weight)
    return y if bias is None else plus(y, bias)


def _convolution(
    function: Callable[..., Any], multiply: Multiply, input: Any, weight: Any, *args: Any, **kw: Any
) -> Any:
    """Add the bias outside, as in `_linear`. `args` are (bias, stride, padding, ...)."""
    bias, *rest = args or (kw.pop("bias", None),)
    y = multiply(lambda x, w: function(x, w, None, *rest, **kw), input, weight, spelled=function)
    return y if bias is None else plus(y, bias.view(-1, *[1] * (weight.dim() - 2)))


def _conv_tbc(multiply: Multiply, input: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """Make a convolution of (time, batch, channel) by (tap, in, out)."""

    def conv_tbc(x: Any, w: Any) -> Any:
        y = torch.conv1d(x.permute(1, 2, 0), w.permute(2, 1, 0), padding=pad)
        return y.permute(2, 0, 1)

    return plus(multiply(conv_tbc, input, weight, spelled=torch.conv_tbc), bias)


def _sparse_mm(multiply: Multiply, a: Any, b: Any, reduce: str | None = None) -> Any:
    """`torch.sparse.mm`; the gradient of its sparse operand is sparse too."""
    function = torch.sparse.mm if reduce is None else partial(torch.sparse.mm, reduce=reduce)
    return multiply(function, a, b)


def _into(out: Any, y: Any) -> Any:
    """Return `y`, written into the argument `out=` of a product if there is one."""
    if out is None:
        return y
    if torch.is_grad_enabled() and (y.requires_grad or out.requires_grad):
        raise UnsupportedError("autograd has no out=: assign the result of this product instead")
    return (out if out.shape == y.shape else out.resize_(y.shape)).copy_(y)


def _inner(a: Any, b: Any, recipe: Recipe) -> Any:
    return by_gemm.matmul(a, b.mT if b.dim() > 1 else b, recipe)


#: function on cast operands -> the same of (operands, recipe) by `by_gemm.matmul`.
BY_GEMM: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: lambda x, weight, recipe: by_gemm.matmul(x, weight.t(), recipe),
    torch.inner: _inner,
    _summed_bmm: lambda a, b, recipe: by_gemm.matmul(a, b, recipe).sum(0),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv), by_gemm.matmul),
}


# --- the table -------------------------------------------------------------------------------

_WEIGHED = ((0, "input"), (1, "weight"))

_TURNED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d, torch.convolution, *_TURNED)
_FILTERED = (*_CONVOLUTIONS, torch.conv_tbc)


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
    others = {"matmul": "other", "mm": "mat2", "bmm": "mat2", "mv": "vec", "inner": "other"}
    for name, second in others.items():
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
    for spelling in _CONVOLUTIONS:
        table[spelling] = Product(spelling.__name__, _WEIGHED, partial(_convolution, spelling))
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
        # Optimizers (LBFGS) multiply such vectors, so no recipe casts them.
        Product("dot", ((0, "input"), (1, "tensor"))): (torch.dot, Tensor.dot),
        Product("outer", ((0, "input"), (1, "vec2"))): (torch.outer, Tensor.outer),
    }
    for found, spellings in several.items():
        table |= dict.fromkeys(spellings, found)
    return table


#: Function of torch -> its row. This is the one table of products.
PRODUCTS: dict[Any, Product] = _products()

#: Function of torch -> the same on cast operands.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    spelling: partial(found.on, _product)
    for spelling, found in PRODUCTS.items()
    if found.on is not None
}
