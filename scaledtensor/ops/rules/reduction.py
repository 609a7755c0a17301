"""Sums and statistics.

A sum of n independent terms with mean zero grows by sqrt(n). A sum of terms that are known to be
nonnegative grows by n. Results stay in float32: they are few, and the next operator (a
normalisation, the gradient of a parameter) needs the precision. A reduction over all elements is a
statistic, and leaves as a plain float32 scalar.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor._torch import log
from scaledtensor.formats import FP32
from scaledtensor.native.elements import column_sums
from scaledtensor.ops.algebra import (
    count,
    elements,
    first_scaled,
    of_floats,
    operand,
    plain,
    statistic,
    value,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.scales.cast_nodes import as_stored
from scaledtensor.scales.powers import product_of
from scaledtensor.scales.singles import Amount, rms_of, scale_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["extreme_rms", "growth"]

Dims = int | Sequence[int] | None


def _is_full(x: ScaledTensor, dims: Dims, keepdim: bool) -> bool:
    if keepdim:
        return False
    return dims is None or (not isinstance(dims, int) and len(dims) in (0, x.dim())) or x.dim() == 0


def growth(n: float, nonnegative: bool) -> float:
    """RMS of a sum of n terms of RMS 1.

    Nonnegative terms have a mean. It is 1/sqrt(3) for squares of Gaussians, and from 0.56 (relu) to
    1 (equal terms) for others.
    """
    root: float = (n * 2 / 3 + n * n / 3 if nonnegative else n) ** 0.5
    return root


def _sum(x: ScaledTensor, dims: Dims, keepdim: bool, divide: bool, dtype: Any) -> Any:
    n, dtype = count(x.shape, dims), of_floats(dtype)
    q = _summed(elements(x), dims, keepdim)
    factor = growth(n, x.nonnegative)
    if divide:
        q, factor = q / n, factor / max(n, 1)
    if _is_full(x, dims, keepdim):
        return statistic(q * scale_of(x), dtype)
    rms, positive = rms_of(x) * factor, x.nonnegative
    return Raw(q, scale_of(x), rms, format=FP32, nonnegative=positive, dtype=dtype or x.dtype)


def _summed(q: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    """Return float32 sums of elements."""
    over = dims if dims is None or isinstance(dims, int) else tuple(dims)
    if not keepdim and q.dim() > 1 and over == tuple(range(q.dim() - 1)):  # of a bias, often
        made = column_sums(q)
        if made is not None:
            return made
    return q.sum(over, keepdim=keepdim, dtype=torch.float32)


@rule(aten.sum.dim_IntList)
def sum_dims(x: ScaledTensor, dim: Dims, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """r sqrt(n). For terms that are known to be nonnegative, r sqrt(2n/3 + n^2/3). Over all
    elements, a plain float32 statistic."""
    return _sum(x, dim, keepdim, False, dtype)


@rule(aten.sum.default)
def sum_all(x: ScaledTensor, *, dtype: Any = None) -> Any:
    """A plain float32 statistic."""
    return _sum(x, None, False, False, dtype)


@rule(aten.mean.dim)
def mean_dims(x: ScaledTensor, dim: Dims, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The RMS of `sum` divided by n."""
    return _sum(x, dim, keepdim, True, dtype)


@rule(aten.mean.default)
def mean_all(x: ScaledTensor, *, dtype: Any = None) -> Any:
    """A plain float32 statistic."""
    return _sum(x, None, False, True, dtype)


@rule(aten.nansum.default)
def nansum(x: ScaledTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Same as `sum`. NaNs count as zeros."""
    dtype = of_floats(dtype)
    q = aten.nansum.default(elements(x).float(), dim, keepdim)
    if _is_full(x, dim, keepdim):
        return statistic(q * scale_of(x), dtype)
    rms = rms_of(x) * growth(count(x.shape, dim), x.nonnegative)
    positive = x.nonnegative
    return Raw(q, scale_of(x), rms, format=FP32, nonnegative=positive, dtype=dtype or x.dtype)


@rule(aten.trace.default)
def trace(x: ScaledTensor) -> Tensor:
    """A plain float32 statistic."""
    total: Tensor = elements(x).float().trace() * scale_of(x)
    return total


@rule(aten.segment_reduce.default)
def segment_reduce(x: ScaledTensor, reduce: str, **kwargs: Any) -> Raw:
    """For segments of n elements r sqrt(n) for sums, r / sqrt(n) for means, r sqrt(2 ln n) for
    extremes and r^n for products."""
    q = aten.segment_reduce.default(value(x).float(), reduce, **kwargs)
    n = max(x.numel() / max(q.numel(), 1), 1.0)
    factor = growth(n, x.nonnegative)
    r = rms_of(x)
    rms = {
        "sum": r * factor,
        "mean": r * (factor / n),
        "prod": r.pow(n),
    }.get(reduce, extreme_rms(r, round(n)))
    return Raw(q, None, rms, format=FP32, nonnegative=x.nonnegative)


@rule(aten._segment_reduce_backward.default)
def segment_reduce_backward(g: Any, y: Any, x: Any, reduce: str, **kwargs: Any) -> Raw:
    """r_g for sums, since each of the n elements of a segment gets the gradient; r_g / n for means,
    r_g / sqrt(n) for extremes, and r_g ry / rx for products with the result y."""
    like = first_scaled(g, y, x)
    left = operand(g, like)
    grad = left.q.float()
    result, data = (plain(t).float() for t in (y, x))
    q = aten._segment_reduce_backward.default(grad, result, data, reduce, **kwargs)
    n = max(data.numel() / max(result.numel(), 1), 1.0)
    rms = left.rms * {"sum": 1.0, "prod": 1.0, "mean": 1 / n}.get(reduce, n**-0.5)
    if reduce == "prod":
        rms = rms * operand(y, like).rms / operand(x, like).rms
    return Raw(q, left.scale, rms)


# --- extremes --------------------------------------------------------------------------------


def extreme_rms(rms: Amount, n: int) -> Any:
    """RMS of the largest of n Gaussians of RMS r: r sqrt(2 ln n), and at least r."""
    root: float = max(2 * log(max(n, 1)), 1.0) ** 0.5
    return rms * root


@rule(aten.amax.default, aten.amin.default, pass_op=True)
def amax(op: Overload, x: ScaledTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    """r sqrt(2 ln n). Over all elements, a plain float32 statistic."""
    q = op(as_stored(elements(x)), dim, keepdim)
    if _is_full(x, dim, keepdim):
        return q.float() * scale_of(x)
    return Raw(q, scale_of(x), extreme_rms(rms_of(x), count(x.shape, dim)))


@rule(aten.max.dim, aten.min.dim, pass_op=True)
def max_dim(op: Overload, x: ScaledTensor, dim: int, keepdim: bool = False) -> Any:
    """r sqrt(2 ln n). The indices are plain."""
    q, index = op(as_stored(elements(x)), dim, keepdim)
    return Raw(q, scale_of(x), extreme_rms(rms_of(x), count(x.shape, dim))), index


@rule(aten.max.default, aten.min.default, pass_op=True)
def max_all(op: Overload, x: ScaledTensor) -> Tensor:
    """A plain float32 statistic."""
    largest: Tensor = op(as_stored(elements(x))).float() * scale_of(x)
    return largest


@rule(aten.aminmax.default)
def aminmax(x: ScaledTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Same as `amin` and `amax`."""
    dims = () if dim is None else dim
    return amax(aten.amin.default, x, dims, keepdim), amax(aten.amax.default, x, dims, keepdim)


# --- moments ---------------------------------------------------------------------------------


def _variance(x: ScaledTensor, q: Tensor, dim: Dims, correction: float | None = None) -> Any:
    if q.dim() == 0:
        return q * scale_of(x) * scale_of(x)
    n, degrees = _degrees(x, dim, correction)
    scale = scale_of(x)
    rms = rms_of(x).square() * (((n - 1) * (n + 1)) ** 0.5 / degrees)
    return Raw(q, product_of(scale, scale), rms, format=FP32, nonnegative=True)


def _degrees(x: ScaledTensor, dim: Dims, correction: float | None) -> tuple[int, float]:
    n = max(count(x.shape, dim), 1)
    return n, max(n - (1 if correction is None else correction), 1)


@rule(aten.var.correction)
def var(
    x: ScaledTensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """r^2 sqrt((n - 1)(n + 1)) / (n - correction), by the second moment of a chi-square
    variable."""
    q = aten.var.correction(elements(x).float(), dim, correction=correction, keepdim=keepdim)
    return _variance(x, q, dim, correction)


@rule(aten.std.correction)
def std(
    x: ScaledTensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """r sqrt((n - 1) / (n - correction))."""
    q = aten.std.correction(elements(x).float(), dim, correction=correction, keepdim=keepdim)
    if q.dim() == 0:
        return q * scale_of(x)
    n, degrees = _degrees(x, dim, correction)
    rms = rms_of(x) * ((n - 1) / degrees) ** 0.5
    return Raw(q, scale_of(x), rms, format=FP32, nonnegative=True)


@rule(aten.var_mean.correction)
def var_mean(
    x: ScaledTensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Same as `var` for the variance, and r / sqrt(n) for the mean."""
    variance, mean = aten.var_mean.correction(
        elements(x).float(), dim, correction=correction, keepdim=keepdim
    )
    if mean.dim() == 0:
        scale = scale_of(x)
        return variance * scale * scale, mean * scale
    n = count(x.shape, dim)
    rms = rms_of(x) * (growth(n, x.nonnegative) / max(n, 1))
    return _variance(x, variance, dim, correction), Raw(mean, scale_of(x), rms, format=FP32)


@rule(aten.std_mean.correction)
def std_mean(
    x: ScaledTensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Same as `std` for the deviation, and r / sqrt(n) for the mean."""
    mean = mean_all(x) if dim is None and not keepdim else mean_dims(x, dim, keepdim)
    return std(x, dim, correction=correction, keepdim=keepdim), mean


@rule(aten.linalg_vector_norm.default)
def vector_norm(
    x: ScaledTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """r n^(1/p) for the p-norm. Over all elements, a plain float32 statistic. For p = 0 it counts
    elements, and is plain."""
    held, dtype = elements(x), of_floats(dtype)
    if math.isinf(ord) and torch.compiler.is_compiling():
        held = as_stored(held.abs())  # torch's derivative compares the magnitudes with the norm
    q = torch.linalg.vector_norm(held, ord, dim, keepdim, dtype=torch.float32)
    if ord == 0:
        return statistic(q, dtype)
    if _is_full(x, dim, keepdim):
        return statistic(q * scale_of(x), dtype)
    n = count(x.shape, dim)
    r = rms_of(x)
    rms = extreme_rms(r, n) if math.isinf(ord) else r * n ** (1 / ord)
    return Raw(q, scale_of(x), rms, format=FP32, dtype=dtype, nonnegative=True)


@rule(
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
)
def norm(
    x: ScaledTensor,
    p: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """Same as `linalg_vector_norm`."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@rule(aten.renorm.default)
def renorm(x: ScaledTensor, p: float, dim: int, maxnorm: float) -> Raw:
    """r, or c n^(-1/p) if that is smaller, for slices of n elements with p-norm at most c."""
    n = max(x.numel() // max(x.shape[dim], 1), 1)
    bound = float(maxnorm) / (n ** (1 / p) if p > 0 else 1)
    q = aten.renorm.default(value(x), p, dim, maxnorm)
    return Raw(q, None, rms_of(x).clamp_max(bound), nonnegative=x.nonnegative)


@rule(aten.dist.default)
def dist(x: Any, y: Any, p: float = 2) -> Tensor:
    """A plain float32 statistic: the norm of a difference."""
    return aten.dist.default(plain(x).float(), plain(y).float(), p)  # type: ignore[no-any-return]


@rule(aten.prod.default, aten.prod.dim_int, pass_op=True)
def prod(op: Overload, x: ScaledTensor, *args: Any, dtype: Any = None) -> Any:
    """r^n for n independent terms. Over all elements, a plain float32 statistic."""
    dtype = of_floats(dtype)
    q = op(value(x).float(), *args)
    if q.dim() == 0:
        return statistic(q, dtype)
    n = x.numel() // max(q.numel(), 1)
    return Raw(q, None, rms_of(x) ** n, format=FP32, dtype=dtype, nonnegative=x.nonnegative)
