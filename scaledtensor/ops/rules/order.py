"""Questions about values, order statistics, and scans.

Comparisons, tests, counts and indices are answers about the value, and leave as plain tensors.
Sorts and quantiles choose elements, and keep the scale. Scans (cumsum, cummax, logcumsumexp) have
the RMS of a mean over the lengths of their prefixes.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError
from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    count,
    elements,
    of_floats,
    operand,
    plain,
    quadrature,
    rms_seen,
    value,
    wide,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.plausible import wild
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.results import HUGE
from scaledtensor.ops.rules.reduction import extreme_rms, growth
from scaledtensor.ops.rules.softmax import logsumexp_rms
from scaledtensor.ops.rules.views import fill_under, plain_number
from scaledtensor.scales.cast_nodes import as_stored
from scaledtensor.scales.singles import Amount, amount, rms_of, scale_of, scaled_by, tensor_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


# --- questions -------------------------------------------------------------------------------


_COMPARING = [getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")]
#: Comparisons of two tensors, which may be elements and their maximum.
_COMPARISONS = {compare.Tensor for compare in _COMPARING}
_AND_NUMBERS = _COMPARISONS | {compare.Scalar for compare in _COMPARING}


@rule(
    *(getattr(compare, kind) for compare in _COMPARING for kind in ("Tensor", "Scalar")),
    *(
        getattr(getattr(aten, name), overload)
        for name in ("all", "any")
        for overload in ("default", "dim", "dims")
    ),
    aten.allclose.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.argsort.default,
    aten.argsort.stable,
    aten.bincount.default,
    aten.bucketize.Scalar,
    aten.bucketize.Tensor,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
    aten.equal.default,
    aten.hash_tensor.default,
    aten.histc.default,
    aten._histogramdd_bin_edges.default,
    aten._histogramdd_from_bin_cts.default,
    aten._histogramdd_from_bin_tensors.default,
    aten.histogram.bin_ct,
    aten.histogram.bins_tensor,
    aten.isclose.default,
    aten.isfinite.default,
    aten.isin.Scalar_Tensor,
    aten.isin.Tensor_Scalar,
    aten.isin.Tensor_Tensor,
    aten.isinf.default,
    aten.isnan.default,
    aten.isneginf.default,
    aten.isposinf.default,
    aten.is_nonzero.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.multinomial.default,
    aten.nonzero.default,
    aten.nonzero_static.default,
    aten.searchsorted.Scalar,
    aten.searchsorted.Tensor,
    aten.signbit.default,
    pass_op=True,
)
def question(op: Overload, *args: Any, **kwargs: Any) -> Any:
    """The answer is a plain tensor, a number or a bool, about the value in float32. A comparison
    with a number that fills masks is about the elements: a fill with `torch.finfo(...).max` is
    equal to that number, although it saturates."""
    if op in _AND_NUMBERS and isinstance(args[0], ScaledTensor):
        x, number = args[0], plain_number(args[1])
        if type(number) in (int, float) and HUGE <= abs(number) < math.inf:
            q = elements(x)
            return op.overloadpacket.Tensor(q, fill_under(number, tensor_of(scale_of(x)), q))
    exact = _compared if op in _COMPARISONS else _exact
    return op(*map(exact, args), **{k: exact(v) for k, v in kwargs.items()})


def _compared(x: Any) -> Any:
    if isinstance(x, ScaledTensor) and torch.compiler.is_compiling():
        return scaled_by(as_stored(elements(x)).float(), scale_of(x))
    return wide(x)


def _exact(x: Any) -> Any:
    return type(x)(map(_exact, x)) if isinstance(x, list | tuple) else wide(x)


@rule(aten.is_same_size.default)
def is_same_size(x: Tensor, y: Tensor) -> bool:
    """The answer depends on the shapes only."""
    return x.shape == y.shape


@rule(aten._has_same_storage_numel.default)
def has_same_storage_numel(x: Tensor, y: Tensor) -> bool:
    """The answer for the elements. Forward-mode derivatives ask about the memory of two tensors."""
    found = [t.qdata if isinstance(t, ScaledTensor) else t for t in (x, y)]
    first, second = (t.untyped_storage().nbytes() // t.itemsize for t in found)
    return first == second


@rule(aten._assert_tensor_metadata.default)
def assert_metadata(
    x: ScaledTensor,
    size: Any = None,
    stride: Any = None,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | None = None,
    layout: torch.layout | None = None,
) -> None:
    """Compares the shape, the strides, the dtype, the device and the layout of the tensor with the
    ones that `torch.export` recorded."""
    for name, wanted, found in (
        ("size", size, list(x.shape)),
        ("stride", stride, list(x.stride())),
        ("dtype", dtype, x.dtype),
        ("device", device, x.device),
        ("layout", layout, x.layout),
    ):
        if wanted is not None and wanted != found:
            raise DTypeError(f"the program was exported for {name} {wanted}; got {found}")


# --- order statistics ------------------------------------------------------------------------


@rule(aten.topk.default, aten.sort.default, aten.sort.stable, pass_op=True)
def ordered(op: Overload, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """r: the elements in order, under the same scale. For the k largest or smallest of n, r sqrt(2
    ln(n / k)). The indices are plain."""
    q, index = op(as_stored(elements(x)), *args, **kwargs)
    rms = rms_of(x)
    if q.numel() < x.numel():
        rms = extreme_rms(rms, x.numel() // max(q.numel(), 1))
    return Raw(q, scale_of(x), rms), index


def _rank_rms(rms: Amount, k: int, n: int) -> Any:
    """RMS of the k-th smallest of n Gaussians of RMS `rms`.

    Its mean is Phi^-1(p) with p = (k - 3/8) / (n + 1/4) (Blom 1958). Its variance is about
    p (1 - p) / (n + 1) / phi^2 at that point.
    """
    unit = NormalDist()
    p = (k - 0.375) / (n + 0.25)
    mean = unit.inv_cdf(p)
    variance = p * (1 - p) / (n + 1) / unit.pdf(mean) ** 2
    factor: float = (mean * mean + variance) ** 0.5
    return rms * factor


@rule(aten.median.dim, aten.nanmedian.dim, pass_op=True)
def median_dim(op: Overload, x: ScaledTensor, dim: int, keepdim: bool = False) -> Any:
    """About r sqrt(pi / (2 n)). For an even n it is the lower of the two elements in the middle."""
    q, index = op(as_stored(elements(x)), dim, keepdim)
    n = max(count(x.shape, dim), 1)
    return Raw(q, scale_of(x), _rank_rms(rms_of(x), (n + 1) // 2, n)), index


@rule(aten.median.default, aten.nanmedian.default, pass_op=True)
def median(op: Overload, x: ScaledTensor) -> Tensor:
    """A plain float32 statistic."""
    middle: Tensor = op(as_stored(elements(x))).float() * scale_of(x)
    return middle


@rule(aten.kthvalue.default)
def kthvalue(x: ScaledTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """r sqrt(mean^2 + variance) of the k-th of n Gaussians. With p = (k - 3/8) / (n + 1/4) the mean
    is Phi^-1(p) (Blom 1958), and the variance p (1 - p) / (n + 1) / phi^2."""
    q, index = aten.kthvalue.default(as_stored(elements(x)), k, dim, keepdim)
    n = max(count(x.shape, dim), 1)
    return Raw(q, scale_of(x), _rank_rms(rms_of(x), k, n)), index


@rule(aten.mode.default)
def mode(x: ScaledTensor, dim: int = -1, keepdim: bool = False) -> Any:
    """r sqrt(2 ln n): if all values are different, the mode is the least one."""
    q, index = aten.mode.default(as_stored(elements(x)), dim, keepdim)
    return Raw(q, scale_of(x), extreme_rms(rms_of(x), count(x.shape, dim))), index


@rule(
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    pass_op=True,
)
def unique(op: Overload, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """r: some of the elements, under the same scale. The indices and counts are plain."""
    q, *counts = op(elements(x), *args, **kwargs)
    return Raw(q, scale_of(x), rms_of(x), settled=True, nonnegative=x.nonnegative), *counts


# --- scans -----------------------------------------------------------------------------------


@rule(aten.cumsum.default)
def cumsum(x: ScaledTensor, dim: int, *, dtype: Any = None) -> Raw:
    """r sqrt(n / 2): the mean square of a sum of i terms is i r^2, here in the mean over i = 1..n.
    For terms that are known to be nonnegative, the RMS of the sum of n divided by sqrt(3)."""
    n = count(x.shape, dim)
    factor = growth(n, x.nonnegative) / (3**0.5 if x.nonnegative else 2**0.5)
    q = elements(x).cumsum(dim, dtype=torch.float32)
    rms = rms_of(x) * max(factor, 1.0)
    return Raw(q, scale_of(x), rms, format=FP32, dtype=of_floats(dtype), nonnegative=x.nonnegative)


@rule(aten.cumprod.default)
def cumprod(x: ScaledTensor, dim: int, *, dtype: Any = None) -> Raw:
    """Measured: the mean of r^(2 i) over i = 1..n grows or falls exponentially with n, and factors
    near 1 (transmittances, survival probabilities) give products near 1. If some element overflows,
    or all are 0, that mean is taken."""
    n = max(count(x.shape, dim), 1)
    powers = x.rms.double() ** torch.arange(1, n + 1, device=x.rms.device)
    expected = powers.clamp_max(2.0**126).square().mean().sqrt().float()
    q = value(x).cumprod(dim, dtype=torch.float32)
    rms = wild(rms_seen(q, expected))
    return Raw(q, None, rms, format=FP32, dtype=of_floats(dtype), nonnegative=x.nonnegative)


@rule(aten.cummax.default, aten.cummin.default, pass_op=True)
def cummax(op: Overload, x: ScaledTensor, dim: int) -> tuple[Raw, Tensor]:
    """r sqrt(2 ln(n!) / n): the mean square of the largest of i Gaussians, 2 ln i, over i = 1..n.
    The indices are plain."""
    q, index = op(elements(x), dim)
    n = max(count(x.shape, dim), 1)
    rms = rms_of(x) * max(2 * math.lgamma(n + 1) / n, 1.0) ** 0.5
    return Raw(q, scale_of(x), rms), index


# Autograd writes the derivative of logcumsumexp with the logarithm of the gradient, for which no
# rule has a moment. So it runs as an operator of this library.
_logcumsumexp = define_operator(
    "logcumsumexp(Tensor x, int dim) -> Tensor",
    lambda grad, x, result, dim: _logcumsumexp_backward(grad, x, result, dim),
)
_logcumsumexp_backward: Any = define_operator(
    "logcumsumexp_backward(Tensor grad, Tensor x, Tensor result, int dim) -> Tensor"
)


@rule(aten.logcumsumexp.default, _logcumsumexp)
def logcumsumexp_rule(x: ScaledTensor, dim: int) -> Raw:
    """The mean over i = 1..n of `logsumexp` of i terms. It has two parts in quadrature: the free
    energy of N terms, with (ln N)^2 the mean of (ln i)^2, and the spread r sqrt(sum(1 / i) / n)."""
    n = max(count(x.shape, dim), 1)
    logs = math.sqrt(sum(math.log(i) ** 2 for i in range(1, n + 1)) / n)
    spread = math.sqrt(sum(1 / i for i in range(1, n + 1)) / n)
    r = rms_of(x)
    rms = quadrature(logsumexp_rms(r, round(math.exp(logs))), r * spread)
    return Raw(torch.logcumsumexp(value(x).float(), dim), None, rms, format=FP32)


@rule(_logcumsumexp_backward)
def logcumsumexp_backward(g: Any, x: ScaledTensor, result: Any, dim: int) -> Raw:
    """r_g sqrt(sum_j min(1, exp(m^2) / j) / n). Element i gets from each gradient j >= i its share
    of the softmax of j terms. The squares of these shares sum to exp(m^2) / j, and at most to 1."""
    left = operand(g, x)
    n = max(count(x.shape, dim), 1)
    square = tensor_of(rms_of(x).square().clamp_max(64.0).exp())
    terms = torch.arange(1, n + 1, device=square.device)
    rms = left.rms * amount((square / terms).clamp_max(1.0).mean().sqrt())
    grad, v, total = left.q.float(), value(x).float(), plain(result).float()
    # sum_j g_j exp(x_i - total_j) in logarithms, so that no exponential leaves its range.
    positive, negative = (_upstream(part.clamp_min(0), total, v, dim) for part in (grad, -grad))
    return Raw(positive - negative, left.scale, rms, format=FP32)


def _upstream(grad: Tensor, total: Tensor, v: Tensor, dim: int) -> Tensor:
    logs = (grad.log() - total).flip(dim).logcumsumexp(dim).flip(dim)
    return (logs + v).exp()


def logcumsumexp(input: Tensor, dim: int, **kwargs: Any) -> Tensor:
    if kwargs:
        return torch.logcumsumexp(input, dim, **kwargs)
    result: Tensor = _logcumsumexp(input, dim)
    return result


#: Function of torch -> the same function with a derivative that has rules.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(
    (torch.logcumsumexp, Tensor.logcumsumexp), logcumsumexp
)
