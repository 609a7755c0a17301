"""Writes to chosen places: scatter, index_put, index_add, masks, and parts put back into a whole.

What is written joins the base under one scale. The RMS is that of the energy: with h elements
written per element of the base, r^2 = rx^2 + h rs^2 where they add up, and (1 - h) rx^2 + h rs^2
where they replace. Zeros fit any scale: a base known to be zero leaves the scale to what is written
into it, however little that is, and a cache that fills up keeps the RMS of what it holds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import Operand, elements, first_scaled, operand, quadrature
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.reduction import extreme_rms, growth
from scaledtensor.ops.rules.views import fill_under, masked_fill, moves_scale
from scaledtensor.scales.powers import settle
from scaledtensor.tensors.tensor import ScaledTensor

# --- replaced --------------------------------------------------------------------------------


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
    """r = sqrt((1 - h) rx^2 + h rs^2) for a share h that is replaced."""
    at, source = _source(op, args, kwargs)
    return _replaced(x, source, lambda base, new: op(base, *at(new), **kwargs))


def _source(
    op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[Tensor], tuple[Any, ...]], Tensor]:
    """The tensor that is written, and the arguments with another in its place."""
    names = [a.name for a in op._schema.arguments][1:]
    i = next(i for i, name in enumerate(names) if name in ("src", "source"))
    for name in names[len(args) : i + 1]:
        args = (*args, kwargs.pop(name))
    return (lambda new: (*args[:i], new, *args[i + 1 :])), args[i]


def _replaced(x: Tensor, source: Tensor, write: Callable[[Tensor, Tensor], Tensor]) -> Raw:
    a, b = _operands(x, source)
    share = min(source.numel() / max(x.numel(), 1), 1.0)
    mixed = quadrature(a.rms * (1 - share) ** 0.5, b.rms * share**0.5)
    rms = torch.where(a.rms == 0, b.rms, mixed)
    scale, *ratios = settle(rms, a.scale, b.scale)
    q = write(*_aligned(a, b, *ratios))
    return Raw(q, scale, rms, settled=True, nonnegative=a.nonnegative and b.nonnegative)


def _operands(x: Tensor, source: Tensor) -> tuple[Operand, Operand]:
    like = first_scaled(x, source)
    return operand(x, like), operand(source, like)


def _aligned(a: Operand, b: Operand, ratio_a: Tensor, ratio_b: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(a.q.dtype, b.q.dtype)
    return (a.q * ratio_a).to(wide), (b.q * ratio_b).to(wide)


@rule(aten.masked_scatter.default)
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Raw:
    """As a sum of what is kept and what is written: how much the mask lets through is data."""
    a, b = _operands(x, source)
    rms = quadrature(a.rms, b.rms)
    scale, *ratios = settle(rms, a.scale, b.scale)
    base, new = _aligned(a, b, *ratios)
    return Raw(aten.masked_scatter.default(base, _plain_mask(mask), new), scale, rms, settled=True)


def _plain_mask(mask: Tensor) -> Tensor:
    return elements(mask) != 0 if isinstance(mask, ScaledTensor) else mask


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(g: ScaledTensor, mask: Tensor, sizes: Sequence[int]) -> Raw:
    """The gradients that the mask lets through, then zeros: the same scale."""
    q = aten.masked_scatter_backward.default(elements(g), mask, sizes)
    return Raw(q, g.scale, g.rms, settled=True)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.scatter.value, pass_op=True)
def fill_places(op: Overload, x: ScaledTensor, dim: int, index: Tensor, number: Any) -> Raw:
    """As a part that is replaced; zeros, infinities and mask fills do not move the scale."""
    nowhere = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if op is aten.scatter.value:
        mask, places = aten.scatter.value(nowhere, dim, index, True), index.numel()
    else:
        mask = aten.index_fill.int_Scalar(nowhere, dim, index, True)
        places = index.numel() * x.numel() // max(x.shape[dim] if x.dim() else 1, 1)
    if not isinstance(number, Tensor) and not moves_scale(number):
        return masked_fill(x, mask, number)
    a, b = operand(x, x), operand(number, x)
    share = min(places / max(x.numel(), 1), 1.0)
    rms = quadrature(a.rms * (1 - share) ** 0.5, b.rms * share**0.5)
    scale, *ratios = settle(rms, a.scale, b.scale)
    base, fill = _aligned(a, b, *ratios)
    positive = a.nonnegative and b.nonnegative
    return Raw(torch.where(mask, fill, base), scale, rms, settled=True, nonnegative=positive)


# --- added -----------------------------------------------------------------------------------


@rule(aten.scatter_add.default, aten.index_add.default, pass_op=True)
def add_places(
    op: Overload, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Raw:
    """r = sqrt(rx^2 + h (alpha rs)^2) for h terms per element; of non-negative terms they add up
    with their mean."""
    named = {} if alpha == 1 else {"alpha": alpha}
    return _added(x, source, lambda base, new: op(base, dim, index, new, **named), alpha)


def _added(
    x: Tensor, source: Tensor, write: Callable[[Tensor, Tensor], Tensor], alpha: float = 1
) -> Raw:
    a, b = _operands(x, source)
    hits = source.numel() / max(x.numel(), 1)
    # Few among many zeros: the scale fits those that are there.
    term, room = (b.rms * (abs(alpha) * _terms(h, b)) for h in (hits, max(hits, 1.0)))
    rms = quadrature(a.rms, term)
    scale, *ratios = settle(torch.where(a.rms == 0, room, rms), a.scale, b.scale)
    q = write(*_aligned(a, b, *ratios))
    positive = a.nonnegative and b.nonnegative and alpha > 0
    return Raw(q, scale, rms, settled=True, nonnegative=positive)


def _terms(n: float, source: Operand) -> float:
    return growth(n, source.nonnegative and n > 1)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Raw:
    """As index_copy, or as index_add where it accumulates."""

    def write(base: Tensor, new: Tensor) -> Tensor:
        return aten.index_put.default(base, indices, new, accumulate)  # type: ignore[no-any-return]

    return _added(x, values, write) if accumulate else _replaced(x, values, write)


@rule(aten.put.default)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Raw:
    """As index_put, of places counted along the flattened tensor."""

    def write(base: Tensor, new: Tensor) -> Tensor:
        return aten.put.default(base, index, new, accumulate)  # type: ignore[no-any-return]

    return _added(x, source, write) if accumulate else _replaced(x, source, write)


@rule(aten._unsafe_masked_index.default)
def unsafe_masked_index(
    x: ScaledTensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float
) -> Raw:
    """A choice of the elements, and a fill elsewhere: the same scale."""
    q = elements(x)
    number = fill_under(fill, x.scale, q)
    chosen = aten._unsafe_masked_index.default(q, mask, indices, 0)
    return Raw(torch.where(mask, chosen, number), x.scale, x.rms, settled=True)


@rule(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put(
    x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> Raw:
    """As index_put, accumulated."""
    op = aten._unsafe_masked_index_put_accumulate.default
    return _added(x, values, lambda base, new: op(base, mask, indices, new))


# --- reduced ---------------------------------------------------------------------------------


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Raw:
    """A sum as scatter_add; a mean over n = h + 1 terms r / sqrt(n); the largest of n Gaussians
    r sqrt(2 ln n); a product of h terms rx rs^h."""
    op = aten.scatter_reduce.two

    def write(base: Tensor, new: Tensor) -> Tensor:
        return op(base, dim, index, new, reduce, include_self=include_self)  # type: ignore[no-any-return]

    return _reduced(x, src, reduce, include_self, write)


@rule(aten.index_reduce.default)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Raw:
    """As scatter_reduce."""
    op = aten.index_reduce.default

    def write(base: Tensor, new: Tensor) -> Tensor:
        return op(base, dim, index, new, reduce, include_self=include_self)  # type: ignore[no-any-return]

    return _reduced(x, source, reduce, include_self, write)


@rule(aten.scatter.reduce)
def scatter_with(x: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Raw:
    """As scatter_reduce, by "add" or "multiply"."""

    def write(base: Tensor, new: Tensor) -> Tensor:
        return aten.scatter.reduce(base, dim, index, new, reduce=reduce)  # type: ignore[no-any-return]

    return _reduced(x, src, {"add": "sum", "multiply": "prod"}[reduce], True, write)


@rule(aten.scatter.value_reduce)
def scatter_number(x: ScaledTensor, dim: int, index: Tensor, number: float, *, reduce: str) -> Raw:
    """As scatter_reduce of a constant."""
    return scatter_with(x, dim, index, torch.full(index.shape, float(number)), reduce=reduce)


def _reduced(
    x: Tensor,
    source: Tensor,
    reduce: str,
    include_self: bool,
    write: Callable[[Tensor, Tensor], Tensor],
) -> Raw:
    if reduce == "sum" and include_self:
        return _added(x, source, write)
    a, b = _operands(x, source)
    hits = source.numel() / max(x.numel(), 1)
    n = hits + include_self
    if reduce == "prod":
        return _multiplied(x, source, a, b, hits, write)
    # Where nothing is written the base stays, whatever becomes of it elsewhere: exp(-h) of the
    # places, of as many chances as there are.
    kept = 1.0 if include_self else math.exp(-hits)
    rms = quadrature(a.rms * kept**0.5, b.rms * max(hits, 1.0) ** 0.5)
    if reduce == "mean":
        rms = rms / max(n, 1.0)
    elif reduce in ("amax", "amin"):
        rms = extreme_rms(rms / max(n, 1.0) ** 0.5, max(round(n), 1))
    scale, *ratios = settle(rms, a.scale, b.scale)
    q = write(*_aligned(a, b, *ratios))
    return Raw(q, scale, rms, settled=True, nonnegative=a.nonnegative and b.nonnegative)


def _multiplied(
    x: Tensor,
    source: Tensor,
    a: Operand,
    b: Operand,
    hits: float,
    write: Callable[[Tensor, Tensor], Tensor],
) -> Raw:
    base, new = (t.q.float() * t.scale for t in (a, b))
    rms = a.rms * b.rms.pow(hits)
    return Raw(write(base, new), None, rms, nonnegative=a.nonnegative and b.nonnegative)
