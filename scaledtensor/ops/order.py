"""Order statistics and counts: sorts, quantiles, modes, histograms."""

from statistics import NormalDist
from typing import Any

from torch import Tensor

from scaledtensor.ops.algebra import count, elements, plain
from scaledtensor.ops.operators import aten
from scaledtensor.ops.reduction import extreme_rms
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.tensor import ScaledTensor


@rule(aten.topk.default, aten.sort.default, aten.sort.stable, pass_op=True)
def ordered(op: Overload, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """A choice of the elements in order: the same scale; the indices are plain."""
    q, index = op(elements(x), *args, **kwargs)
    rms = extreme_rms(x.rms, x.numel() // max(q.numel(), 1)) if q.numel() < x.numel() else x.rms
    return Raw(q, x.scale, rms), index


def rank_rms(rms: Tensor, k: int, n: int) -> Tensor:
    """RMS of the k-th smallest of n Gaussians of RMS `rms`.

    Its mean is Phi^-1(p) with p = (k - 3/8) / (n + 1/4) (Blom 1958), its variance about
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
    """The lower of the two in the middle: about r sqrt(pi / 2n)."""
    q, index = op(elements(x), dim, keepdim)
    n = max(count(x.shape, dim), 1)
    return Raw(q, x.scale, rank_rms(x.rms, (n + 1) // 2, n)), index


@rule(aten.median.default, aten.nanmedian.default, pass_op=True)
def median(op: Overload, x: ScaledTensor) -> Tensor:
    """A statistic: plain float32."""
    middle: Tensor = op(elements(x)).float() * x.scale
    return middle


@rule(aten.kthvalue.default)
def kthvalue(x: ScaledTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th of n in order: Blom's mean, and the variance of a quantile."""
    q, index = aten.kthvalue.default(elements(x), k, dim, keepdim)
    n = max(count(x.shape, dim), 1)
    return Raw(q, x.scale, rank_rms(x.rms, k, n)), index


@rule(aten.mode.default)
def mode(x: ScaledTensor, dim: int = -1, keepdim: bool = False) -> Any:
    """Of values that are all different, the least: r sqrt(2 ln n)."""
    q, index = aten.mode.default(elements(x), dim, keepdim)
    return Raw(q, x.scale, extreme_rms(x.rms, count(x.shape, dim))), index


@rule(
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    pass_op=True,
)
def unique(op: Overload, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """A choice of the elements: the same scale; the indices and counts are plain."""
    q, *counts = op(elements(x), *args, **kwargs)
    return Raw(q, x.scale, x.rms, settled=True, nonnegative=x.nonnegative), *counts


@rule(
    aten.bucketize.Scalar,
    aten.bucketize.Tensor,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
    aten.histc.default,
    aten._histogramdd_bin_edges.default,
    aten._histogramdd_from_bin_cts.default,
    aten._histogramdd_from_bin_tensors.default,
    aten.histogram.bin_ct,
    aten.histogram.bins_tensor,
    aten.isin.Scalar_Tensor,
    aten.isin.Tensor_Scalar,
    aten.isin.Tensor_Tensor,
    aten.nonzero_static.default,
    aten.searchsorted.Scalar,
    aten.searchsorted.Tensor,
    pass_op=True,
)
def counted(op: Overload, *args: Any, **kwargs: Any) -> Any:
    """Counts, places and the edges of bins: they leave as plain tensors."""

    def exact(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [exact(i) for i in x]
        x = plain(x)
        return x.float() if isinstance(x, Tensor) and x.dtype.is_floating_point else x

    return op(*map(exact, args), **{k: exact(v) for k, v in kwargs.items()})
