"""Recipes that cast the operands for each of the three products of a layer.

The elements that share a scale lie along the summed dimension (rows, blocks, MX, NVFP4), or the
recipe treats the three products differently.

    forward   y  = cast(a) @ cast(b)          over the columns of a
    dgrad     da = cast(dy) @ cast(b)^T       over the columns of b
    wgrad     db = cast(a)^T @ cast(dy)       over the rows of a

If the FP8 units of a device support the blocks, they multiply the codes (`scaledtensor.backends`).
Otherwise the product of the same values is computed in bfloat16, if that is exact
(`quantize.factors`) and the device multiplies bfloat16 fast (`products.dtype`), and else in
float32. A scale that all terms of a sum share is multiplied afterwards.

The backward pass keeps activations as codes, cast for the product that reads them, and a reference
to the weight, which is cast again.
"""

import math
import string
import typing
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.backends import Codes, units_of
from scaledtensor.errors import RecipeWarning
from scaledtensor.formats import pack, unpack
from scaledtensor.formats.format import Format
from scaledtensor.ops.algebra import check_dtypes, elements
from scaledtensor.ops.products.dtype import multiplied, warn_of_emulation
from scaledtensor.ops.products.quantize import Coded, factors, mixed, quantized, sharing
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import is_wide
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.casts import HADAMARD, Cast, Gemm, parsed_cast, parsed_gemms
from scaledtensor.scales.powers import settle_product
from scaledtensor.scales.singles import tensor_of
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "Side",
    "by_units",
    "einsum",
    "is_product",
    "matmul",
    "tensordot",
    "tensordot_equation",
    "uncast",
    "under_autocast",
]


class Side(NamedTuple):
    """An operand of a product: its codes, or its elements if it was not cast."""

    held: Coded | Tensor
    cast: Cast | None
    dim: int
    """The summed dimension of the cast: -1 for a left operand, -2 for a right operand. An operand
    with the other number is transposed in this product."""


# --- as a function, above autograd -----------------------------------------------------------


def matmul(a: Tensor, b: Tensor, recipe: Recipe) -> Tensor:
    """`torch.matmul` with the operands of each product cast by the recipe."""
    check_dtypes(a, b)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b, recipe).squeeze(-2)
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1), recipe).squeeze(-1)
    if b.dim() == 2:
        rows = a if a.dim() == 2 else a.reshape(-1, a.shape[-1])
        y = _product(rows, b, recipe)
        return y if a.dim() == 2 else y.view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return _product(left, right, recipe).view(*batch, a.shape[-2], b.shape[-1])


def is_product(equation: str, operands: Sequence[Tensor]) -> bool:
    """Whether `einsum` can be one matrix product: there are two operands, no operand has a label
    twice, and no label has two sizes (which would broadcast)."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if not len(operands) == len(terms) == 2 or "." in equation:
        return False
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        if len(set(term)) < len(term) or len(term) != x.dim():
            return False
        if any(sizes.setdefault(n, size) != size for n, size in zip(term, x.shape, strict=True)):
            return False
    return True


def einsum(equation: str, a: Tensor, b: Tensor, recipe: Recipe) -> Tensor:
    """`torch.einsum` of two operands as one product.

    Labels of both operands are summed, if the result does not have them, and else are a batch.
    """
    terms, arrow, out = equation.replace(" ", "").partition("->")
    of_a, of_b = terms.split(",")
    if not arrow:  # the labels that occur once, in order
        out = "".join(sorted(set(of_a) ^ set(of_b)))
    # A label of one operand alone that the result does not have is summed beforehand.
    a, of_a = _summed(a, of_a, set(of_b) | set(out))
    b, of_b = _summed(b, of_b, set(of_a) | set(out))
    batch = [n for n in of_a if n in of_b and n in out]
    summed = [n for n in of_a if n in of_b and n not in out]
    left, right = ([n for n in t if n not in (*batch, *summed)] for t in (of_a, of_b))
    sizes = dict(zip(of_b, b.shape, strict=True)) | dict(zip(of_a, a.shape, strict=True))

    def matrices(x: Tensor, of: str, rows: list[str], columns: list[str]) -> Tensor:
        x = x.permute([of.index(n) for n in (*batch, *rows, *columns)])
        shape = [math.prod(sizes[n] for n in group) for group in (batch, rows, columns)]
        return x.reshape(shape if batch else shape[1:])

    y = matmul(matrices(a, of_a, left, summed), matrices(b, of_b, summed, right), recipe)
    order = [*batch, *left, *right]
    return y.view([sizes[n] for n in order]).permute([order.index(n) for n in out])


def _summed(x: Tensor, labels: str, kept: set[str]) -> tuple[Tensor, str]:
    gone = [i for i, n in enumerate(labels) if n not in kept]
    return (x.sum(gone) if gone else x), "".join(n for n in labels if n in kept)


def tensordot(dims: Any, a: Tensor, b: Tensor, recipe: Recipe) -> Tensor:
    """`torch.tensordot` as an einsum."""
    return einsum(tensordot_equation(a.dim(), b.dim(), dims), a, b, recipe)


def tensordot_equation(left: int, right: int, dims: Any) -> str:
    """Return the equation of `torch.tensordot` for tensors of `left` and `right` dimensions."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = [range(left - dims, left), range(dims)]
    letters = string.ascii_letters
    of_a, of_b = list(letters[:left]), list(letters[left : left + right])
    for i, j in zip(*dims, strict=True):
        of_b[j] = of_a[i]
    out = [n for n in (*of_a, *of_b) if (n in of_a) != (n in of_b)]
    return f"{''.join(of_a)},{''.join(of_b)}->{''.join(out)}"


def _product(a: Any, b: Any, recipe: Recipe) -> Tensor:
    gemms = recipe.gemms
    kept_a = _kept(a, gemms.wgrad.left, -2, gemms.wgrad.hadamard, b.requires_grad)
    weight = b.dim() == 2
    kept_b = _kept(b, gemms.dgrad.right, -1, gemms.dgrad.hadamard, a.requires_grad and not weight)
    out: Tensor = verbs.product(a, b, kept_a, kept_b, gemms.spec)
    return out


def _kept(x: Any, cast: Cast | None, dim: int, hadamard: bool, needed: bool) -> Sequence[Tensor]:
    if cast is None or not needed or not torch.is_grad_enabled():
        return []
    with torch.no_grad():
        found: Sequence[Tensor] = verbs.keep(x.detach(), cast.spec, dim, hadamard)
    return found


# --- rules -----------------------------------------------------------------------------------


@rule(verbs.keep)
def keep(x: ScaledTensor, cast: str, dim: int, hadamard: bool) -> list[Tensor]:
    """Return an operand as the backward pass will read it: packed codes, and scales."""
    coded = _coded(x, parsed_cast(cast), dim, hadamard)
    codes = coded.codes
    if dim == -2 and units_of(codes) is not None:
        codes = codes.mT.contiguous().mT  # the rows that wgrad reads, made in the kernel that casts
    packed = pack(codes, parsed_cast(cast).format)
    return [packed, coded.scale] if coded.whole is None else [packed, coded.scale, coded.whole]


@rule(verbs.product)
def product(a: ScaledTensor, b: ScaledTensor, kept_a: Any, kept_b: Any, gemms: str) -> Raw:
    """r = ra rb sqrt(K). The operands are cast for this product."""
    gemm = parsed_gemms(gemms).forward
    left = _side(a, gemm.left, -1, gemm.hadamard)
    right = _side(b, gemm.right, -2, gemm.hadamard)
    dtype = torch.promote_types(a.dtype, b.dtype)
    scales = (a.scale, a.rms), (b.scale, b.rms)
    return _raw(left, right, *scales, a.shape[-1], dtype, gemm.fast, is_wide(a, b))


@rule(verbs.product_gradient)
def product_gradient(
    grad: ScaledTensor,
    other: ScaledTensor | None,
    kept: Sequence[Tensor],
    scale: Tensor,
    rms: Tensor,
    shape: Sequence[int],
    gemm: str,
    gemms: str,
) -> Raw:
    """r_g rb sqrt(N) for dgrad and r_g ra sqrt(M) for wgrad. Operands are cast for this product."""
    how: Gemm = getattr(parsed_gemms(gemms), gemm)
    own = (grad.scale, grad.rms)
    wide = is_wide(grad, other)
    if gemm == "dgrad":
        left = _side(grad, how.left, -1, how.hadamard)
        right = _other(other, kept, shape, how.right, -1, how.hadamard)
        return _raw(left, right, own, (scale, rms), grad.shape[-1], grad.dtype, how.fast, wide)
    left = _other(other, kept, shape, how.left, -2, how.hadamard)
    right = _side(grad, how.right, -2, how.hadamard)
    return _raw(left, right, (scale, rms), own, grad.shape[-2], grad.dtype, how.fast, wide)


def _coded(x: ScaledTensor, cast: Cast, dim: int, hadamard: bool) -> Coded:
    q = elements(x)
    return quantized(mixed(q, dim) if hadamard else q, x.scale, cast, dim)


def _side(x: ScaledTensor, cast: Cast | None, dim: int, hadamard: bool) -> Side:
    if cast is None:
        return Side(elements(x), None, dim)
    return Side(_coded(x, cast, dim, hadamard), cast, dim)


def _other(
    x: ScaledTensor | None,
    kept: Sequence[Tensor],
    shape: Sequence[int],
    cast: Cast | None,
    dim: int,
    hadamard: bool,
) -> Side:
    """Return an operand of the forward product, from itself or from its kept codes."""
    if x is not None or cast is None:  # an operand without a cast was kept itself
        return _side(typing.cast(ScaledTensor, x), cast, dim, hadamard)
    packed, *scales = kept
    codes = _unpacked(packed, cast.format, shape, dim if hadamard else None)
    return Side(Coded(codes, *scales), cast, dim)


def _unpacked(packed: Tensor, fmt: Format, shape: Sequence[int], mixed_dim: int | None) -> Tensor:
    full = list(shape)
    if mixed_dim is not None:  # zeros filled the last group
        full[mixed_dim] += -full[mixed_dim] % HADAMARD
    return unpack(packed, fmt, full)


def _raw(
    left: Side,
    right: Side,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    terms: int,
    dtype: torch.dtype,
    fast: bool,
    wide: bool,
) -> Raw:
    """Return the product of two sides. `a` and `b` are their scales and RMS; `terms` is the length
    of a sum. `wide` says that the result is float32."""
    scale, ratio, rms = settle_product(terms, a, b)
    q = by_units(left, right, ratio, fast)
    if q is None:
        (x, of_x), (y, of_y) = _matrices(left, -1), _matrices(right, -2)
        x, y = multiplied(x, y, wide=wide)
        outer = ratio
        for factor in (of_x, of_y):
            if factor is not None:
                outer = outer * factor
        q = torch.matmul(x, y) * outer
    return Raw(q, scale, rms, settled=True, dtype=dtype)


def _matrices(side: Side, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return the matrix to multiply, summed over `dim`, and the factor of the product."""
    if not isinstance(side.held, Coded):
        values, outer = side.held, None
    else:
        values, outer = factors(side.held, typing.cast(Cast, side.cast), side.dim)
    if side.dim == dim:
        return values, outer
    return values.mT, outer if outer is None or outer.dim() == 0 else outer.mT


def by_units(left: Side, right: Side, ratio: Tensor, fast: bool) -> Tensor | None:
    """Return the product by the device's FP8 units, times `ratio`; None, with a warning, if they
    refuse it."""
    if not (isinstance(left.held, Coded) and isinstance(right.held, Coded)):
        return None
    units = units_of(left.held.codes)
    if units is None:
        return None
    cast_a, cast_b = typing.cast(Cast, left.cast), typing.cast(Cast, right.cast)
    if cast_a.format.bits > 8 or cast_b.format.bits > 8:
        return None
    a, b = _turned(left, cast_a, -1), _turned(right, cast_b, -2)
    reason = units.obstacle(a, b)
    if reason is not None:
        warn_of_emulation(reason)
        return None
    return units.multiply(a, b, tensor_of(ratio, a.codes.device), fast)


def _turned(side: Side, cast: Cast, dim: int) -> Codes:
    codes, scale, _ = typing.cast(Coded, side.held)
    if side.dim != dim:
        codes, scale = codes.mT, scale.mT if scale.dim() > 1 else scale
    return Codes(codes, scale, sharing(cast))


def under_autocast(y: Any) -> Any:
    """Return `y` in the dtype of autocast, which does not know the operators of this library."""
    kind = y.device.type
    stays = y.dtype == torch.float64 or not torch.is_autocast_enabled(kind)
    return y if stays else y.to(torch.get_autocast_dtype(kind))


def uncast(
    function: Any, spelled: Any, recipe: Recipe, operands: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the product of uncast operands, and warn once: the recipe casts for each of the three
    products, and this function is not a matrix product."""
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
