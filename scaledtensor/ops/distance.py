"""Distances between vectors, and their derivatives.

E|z|^p of a Gaussian gives the p-norm of n differences of RMS r: r (n E|z|^p)^(1/p).
"""

import math
from typing import Any

from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import first_scaled, gaussian_moment, operand, quadrature
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.tensor import ScaledTensor


def _length(n: int, p: float) -> float:
    """p-norm of n numbers from N(0, 1)."""
    n = max(n, 1)
    if math.isinf(p):
        return math.sqrt(max(2 * math.log(n), 1.0))
    return float((n * gaussian_moment(p / 2) ** 2) ** (1 / p))


def _slope(n: int, p: float) -> float:
    """RMS of one component of the gradient of the p-norm of n: (|z| / |z|_p)^(p - 1)."""
    n = max(n, 1)
    if math.isinf(p) or p == 0:
        return float(n**-0.5)
    return float(gaussian_moment(max(p - 1, 0.0)) / _length(n, p) ** (p - 1))


def _distances(x: Any, y: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Both values in float32, and the RMS of their difference."""
    like = first_scaled(x, y)
    a, b = operand(x, like), operand(y, like)
    return a.q.float() * a.scale, b.q.float() * b.scale, quadrature(a.rms, b.rms)


def _as_distance(q: Tensor, rms: Tensor, n: int, p: float) -> Any:
    if p == 0:
        return q  # how many components differ: a number without a scale
    return Raw(q, None, rms * _length(n, p), format=FP32, nonnegative=True)


@rule(aten._cdist_forward.default)
def cdist(x: Any, y: Any, p: float, mode: int | None) -> Any:
    """sqrt(rx^2 + ry^2) (n E|z|^p)^(1/p) over n components; p = 0 counts and is plain."""
    left, right, rms = _distances(x, y)
    q = aten._cdist_forward.default(left.contiguous(), right.contiguous(), p, mode)
    return _as_distance(q, rms, x.shape[-1], p)


@rule(aten._euclidean_dist.default)
def euclidean_dist(x: Any, y: Any) -> Any:
    """sqrt(rx^2 + ry^2) sqrt(n)."""
    left, right, rms = _distances(x, y)
    q = aten._cdist_forward.default(left.contiguous(), right.contiguous(), 2.0, 1)
    return _as_distance(q, rms, x.shape[-1], 2.0)


@rule(aten._cdist_backward.default)
def cdist_backward(g: Any, x: Any, y: Any, p: float, distances: Any) -> Raw:
    """A sum over the rows of y of g times a unit vector's component: r_g sqrt(rows) s, s the RMS of
    (|z| / |z|_p)^(p - 1)."""
    like = first_scaled(g, x, y, distances)
    left = operand(g, like)
    a, b, c = (_value(t, like) for t in (x, y, distances))
    q = aten._cdist_backward.default(
        left.q.float().contiguous(), a.contiguous(), b.contiguous(), p, c.contiguous()
    )
    rms = left.rms * (math.sqrt(max(y.shape[-2], 1)) * _slope(x.shape[-1], p))
    return Raw(q, left.scale, rms, format=FP32)


def _value(x: Any, like: ScaledTensor) -> Tensor:
    a = operand(x, like)
    return a.q.float() * a.scale


@rule(aten._pdist_forward.default)
def pdist(x: ScaledTensor, p: float = 2.0) -> Any:
    """As cdist of x with itself, each pair once."""
    left = _value(x, x)
    q = aten._pdist_forward.default(left.contiguous(), p)
    return _as_distance(q, x.rms * 2**0.5, x.shape[-1], p)


@rule(aten._pdist_backward.default)
def pdist_backward(g: Any, x: Any, p: float, distances: Any) -> Raw:
    """r_g sqrt(rows - 1) s, as cdist."""
    like = first_scaled(g, x, distances)
    left = operand(g, like)
    a, c = _value(x, like), _value(distances, like)
    q = aten._pdist_backward.default(left.q.float().contiguous(), a.contiguous(), p, c)
    rows = max(x.shape[0] - 1, 1)
    return Raw(q, left.scale, left.rms * (rows**0.5 * _slope(x.shape[-1], p)), format=FP32)
