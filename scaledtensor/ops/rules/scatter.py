"""Writes to chosen places: scatter, index_put, index_add, masks, and parts put back into a whole.

The source and the base get one scale, by their mean square. Let h be the number of elements that
are written for each element of the base. If they are added, r^2 = rx^2 + h rs^2. If they replace,
r^2 = (1 - h) rx^2 + h rs^2. Zeros fit any scale. So a base that is known to be zero takes the scale
of the source, however few elements are written. A cache that fills up keeps the RMS of its filled
part.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import Operand, elements, first_scaled, operand, quadrature
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.arithmetic import chosen, under
from scaledtensor.ops.rules.reduction import extreme_rms, growth
from scaledtensor.ops.rules.views import (
    fill_under,
    masked_fill,
    moves_scale,
    plain_number,
    written,
)
from scaledtensor.scales.cast_nodes import as_stored
from scaledtensor.scales.powers import settle
from scaledtensor.scales.singles import Amount, Single, rms_of, scale_of, tensor_of
from scaledtensor.tensors.tensor import ScaledTensor

# --- places that are replaced ----------------------------------------------------------------


@rule(
    aten.scatter.src,
    aten.index_copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    pass_op=True,
)
def replace(op: Overload, x: Tensor, *args: Any, **kwargs: Any) -> Raw:
    """r = sqrt((1 - h) rx^2 + h rs^2) if a source of RMS rs replaces a share h of the elements."""
    at, source = _source(op, args, kwargs)
    return _replaced(x, source, lambda base, new: op(base, *at(new), **kwargs))


def _source(
    op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[Tensor], tuple[Any, ...]], Tensor]:
    """Return a function that puts another source into the arguments, and the source itself."""
    names = [a.name for a in op._schema.arguments][1:]
    i = next(i for i, name in enumerate(names) if name in ("src", "source"))
    for name in names[len(args) : i + 1]:
        args = (*args, kwargs.pop(name))
    return (lambda new: (*args[:i], new, *args[i + 1 :])), args[i]


def _replaced(x: Tensor, source: Tensor, write: Callable[[Tensor, Tensor], Tensor]) -> Raw:
    number = plain_number(source)
    if not isinstance(number, Tensor) and not moves_scale(number):
        a = operand(x, first_scaled(x))
        q = write(a.q, fill_under(number, tensor_of(a.scale), a.q))
        return Raw(q, a.scale, a.rms, settled=True, nonnegative=a.nonnegative and number >= 0)
    like = first_scaled(x, source)
    a, b = chosen(x, like), written(source, like)
    share = min(source.numel() / max(x.numel(), 1), 1.0)
    mixed = quadrature(a.rms * (1 - share) ** 0.5, b.rms * share**0.5)
    rms = _or_if_zero(a.rms, mixed, b.rms)
    scale, *ratios = settle(rms, a.scale, b.scale)
    q = write(*_aligned(a, b, ratios, like))
    return Raw(q, scale, rms, settled=True, nonnegative=a.nonnegative and b.nonnegative)


def _operands(x: Tensor, source: Tensor) -> tuple[Operand, Operand, ScaledTensor]:
    like = first_scaled(x, source)
    return chosen(x, like), chosen(source, like), like


def _aligned(
    a: Operand, b: Operand, ratios: Sequence[Amount], like: ScaledTensor
) -> tuple[Tensor, Tensor]:
    base, new = (under(part, ratio, like) for part, ratio in zip((a, b), ratios, strict=True))
    wide = torch.promote_types(base.dtype, new.dtype)
    return base.to(wide), new.to(wide)


def _or_if_zero(base: Amount, rms: Amount, otherwise: Amount) -> Any:
    """Return `rms`, or `otherwise` if all elements of the base are zero."""
    if type(base) is type(rms) is type(otherwise) is Single:
        return rms if base else otherwise
    return torch.where(tensor_of(base) == 0, tensor_of(otherwise), tensor_of(rms))


@rule(aten.masked_scatter.default)
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Raw:
    """r = sqrt(rx^2 + rs^2) for a source of RMS rs. The mask is data, so no rule knows its
    share."""
    a, b, like = _operands(x, source)
    rms = quadrature(a.rms, b.rms)
    scale, *ratios = settle(rms, a.scale, b.scale)
    base, new = _aligned(a, b, ratios, like)
    mask = elements(mask) != 0 if isinstance(mask, ScaledTensor) else mask
    return Raw(aten.masked_scatter.default(base, mask, new), scale, rms, settled=True)


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(g: ScaledTensor, mask: Tensor, sizes: Sequence[int]) -> Raw:
    """r_g: the gradients under the mask, then zeros. The scale stays."""
    q = aten.masked_scatter_backward.default(elements(g), mask, sizes)
    return Raw(q, scale_of(g), rms_of(g), settled=True)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.scatter.value, pass_op=True)
def fill_places(op: Overload, x: ScaledTensor, dim: int, index: Tensor, number: Any) -> Raw:
    """r = sqrt((1 - h) rx^2 + h c^2) if a number c replaces a share h of the elements. Zeros,
    infinities and the fills of masks do not move the scale."""
    nowhere = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if op is aten.scatter.value:
        mask, places = aten.scatter.value(nowhere, dim, index, True), index.numel()
    else:
        mask = aten.index_fill.int_Scalar(nowhere, dim, index, True)
        places = index.numel() * x.numel() // max(x.shape[dim] if x.dim() else 1, 1)
    if not isinstance(number, Tensor) and not moves_scale(number):
        return masked_fill(x, mask, number)
    a, b = operand(x, x), written(number, x)
    share = min(places / max(x.numel(), 1), 1.0)
    rms = quadrature(a.rms * (1 - share) ** 0.5, b.rms * share**0.5)
    scale, *ratios = settle(rms, a.scale, b.scale)
    base, fill = _aligned(a, b, ratios, x)
    positive = a.nonnegative and b.nonnegative
    return Raw(torch.where(mask, fill, base), scale, rms, settled=True, nonnegative=positive)


# --- places to which a source is added -------------------------------------------------------


@rule(aten.scatter_add.default, aten.index_add.default, pass_op=True)
def add_places(
    op: Overload, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Raw:
    """r = sqrt(rx^2 + h (alpha rs)^2) for h terms of RMS rs for each element. If the source is
    known to be nonnegative and h > 1, h becomes 2h/3 + h^2/3."""
    named = {} if alpha == 1 else {"alpha": alpha}
    return _added(x, source, lambda base, new: op(base, dim, index, new, **named), alpha)


def _added(
    x: Tensor, source: Tensor, write: Callable[[Tensor, Tensor], Tensor], alpha: float = 1
) -> Raw:
    a, b, like = _operands(x, source)
    hits = source.numel() / max(x.numel(), 1)
    # A few terms among many zeros have the scale of the terms.
    term, room = (
        b.rms * (abs(alpha) * growth(h, b.nonnegative and h > 1)) for h in (hits, max(hits, 1.0))
    )
    rms = quadrature(a.rms, term)
    scale, *ratios = settle(_or_if_zero(a.rms, rms, room), a.scale, b.scale)
    q = write(*_aligned(a, b, ratios, like))
    positive = a.nonnegative and b.nonnegative and alpha > 0
    return Raw(q, scale, rms, settled=True, nonnegative=positive)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Raw:
    """Same as `index_copy`, or as `index_add` if it accumulates. An infinity or the fill of a mask
    does not move the scale."""

    def write(base: Tensor, new: Tensor) -> Tensor:
        return aten.index_put.default(base, indices, new, accumulate)  # type: ignore[no-any-return]

    return _added(x, values, write) if accumulate else _replaced(x, values, write)


@rule(aten.put.default)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Raw:
    """Same as `index_put`. The places are indices into the flattened tensor."""

    def write(base: Tensor, new: Tensor) -> Tensor:
        return aten.put.default(base, index, new, accumulate)  # type: ignore[no-any-return]

    return _added(x, source, write) if accumulate else _replaced(x, source, write)


@rule(aten._unsafe_masked_index.default)
def unsafe_masked_index(
    x: ScaledTensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float
) -> Raw:
    """r: a choice of the elements under the same scale, and a fill in the other places."""
    q = elements(x)
    number = fill_under(fill, tensor_of(scale_of(x)), q)
    chosen = aten._unsafe_masked_index.default(q, mask, indices, 0)
    return Raw(torch.where(mask, chosen, number), scale_of(x), rms_of(x), settled=True)


@rule(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> Raw:
    """Same as `index_put` if it accumulates."""
    op = aten._unsafe_masked_index_put_accumulate.default
    return _added(x, values, lambda base, new: op(base, mask, indices, new))


# --- places that are reduced with a source ---------------------------------------------------


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Raw:
    """Same as `scatter_add` for a sum. For h terms of RMS rs and one element of RMS rx, sqrt(rx^2 +
    h rs^2) / n for a mean over n = h + 1 terms, sqrt(2 ln n (rx^2 + h rs^2) / n) for an extreme,
    and rx rs^h for a product."""
    op = aten.scatter_reduce.two

    def write(base: Tensor, new: Tensor) -> Tensor:
        return op(base, dim, index, new, reduce, include_self=include_self)  # type: ignore[no-any-return]

    return _reduced(x, src, reduce, include_self, write)


@rule(aten.index_reduce.default)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Raw:
    """Same as `scatter_reduce`."""
    op = aten.index_reduce.default

    def write(base: Tensor, new: Tensor) -> Tensor:
        return op(base, dim, index, new, reduce, include_self=include_self)  # type: ignore[no-any-return]

    return _reduced(x, source, reduce, include_self, write)


@rule(aten.scatter.reduce)
def scatter_with(x: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Raw:
    """Same as `scatter_reduce` for a sum or a product."""

    def write(base: Tensor, new: Tensor) -> Tensor:
        return aten.scatter.reduce(base, dim, index, new, reduce=reduce)  # type: ignore[no-any-return]

    return _reduced(x, src, {"add": "sum", "multiply": "prod"}[reduce], True, write)


@rule(aten.scatter.value_reduce)
def scatter_number(x: ScaledTensor, dim: int, index: Tensor, number: float, *, reduce: str) -> Raw:
    """Same as `scatter_reduce` for a source of one number."""
    return scatter_with(
        x, dim, index, torch.full(index.shape, float(number), dtype=torch.float32), reduce=reduce
    )


def _reduced(
    x: Tensor,
    source: Tensor,
    reduce: str,
    include_self: bool,
    write: Callable[[Tensor, Tensor], Tensor],
) -> Raw:
    if reduce == "sum" and include_self:
        return _added(x, source, write)
    a, b, like = _operands(x, source)
    hits = source.numel() / max(x.numel(), 1)
    n = hits + include_self
    positive = a.nonnegative and b.nonnegative
    if reduce == "prod":
        return Raw(write(a.value, b.value), None, a.rms * b.rms.pow(hits), nonnegative=positive)
    # The base stays in places without a write, which are a share exp(-h) for h writes per place.
    kept = 1.0 if include_self else math.exp(-hits)
    rms = quadrature(a.rms * kept**0.5, b.rms * max(hits, 1.0) ** 0.5)
    wide = None
    if reduce == "mean":
        rms = rms / max(n, 1.0)
    elif reduce in ("amax", "amin"):
        rms = extreme_rms(rms / max(n, 1.0) ** 0.5, max(round(n), 1))
        a, b = (part._replace(q=as_stored(part.q)) for part in (a, b))
        # The derivative looks for elements that are equal to the result.
        wide = None if isinstance(x, ScaledTensor) else FP32
    scale, *ratios = settle(rms, a.scale, b.scale)
    q = write(*_aligned(a, b, ratios, like))
    return Raw(q, scale, rms, settled=True, format=wide, nonnegative=positive)
