"""Linear algebra: decompositions, inverses and solutions.

Where the factors are orthonormal their RMS is a matter of counting, whatever the matrix: the
columns have norm 1, and the other factor has the norm of the matrix. A determinant of Gaussians has
E det^2 = n! r^(2n). Of an inverse or a solution no moment is finite: 1 / det of a Gaussian matrix
has none. Those are computed on the value, in float32, and their RMS is read from the result.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    elements,
    first_scaled,
    gaussian_moment,
    measured,
    operand,
    plain,
    quadrature,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.tensors.tensor import ScaledTensor


@rule(
    aten.cholesky.default,
    aten.cholesky_inverse.default,
    aten.cholesky_solve.default,
    aten.geqrf.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_householder_product.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_ldl_solve.default,
    aten.linalg_lstsq.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_matrix_sqrth.default,
    aten.linalg_pinv.atol_rtol_tensor,
    aten._linalg_solve_ex.default,
    aten.linalg_solve_triangular.default,
    aten.lu_unpack.default,
    aten.ormqr.default,
    aten.triangular_solve.default,
    pass_op=True,
)
def solved(op: Overload, *args: Any, **kwargs: Any) -> Any:
    """No closed form: the entries of an inverse, of a solution or of a triangular factor depend on
    the conditioning, which is data, and have no finite variance for Gaussians. Measured."""
    result = op(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})
    return tuple(map(_read, result)) if isinstance(result, (tuple, list)) else _read(result)


def _wide(x: Any) -> Any:
    x = plain(x)
    return x.float() if isinstance(x, Tensor) and x.dtype.is_floating_point else x


def _read(x: Tensor) -> Any:
    return measured(x, format=FP32) if x.dtype.is_floating_point and x.dim() > 0 else x


# --- orthonormal factors ---------------------------------------------------------------------


def _orthonormal(q: Tensor, length: int, like: ScaledTensor) -> Raw:
    """Of columns, or rows, of norm 1."""
    return Raw(q, None, torch.full_like(like.rms, max(length, 1) ** -0.5), format=FP32)


def _shares_norm(q: Tensor, x: ScaledTensor, **kwargs: Any) -> Raw:
    """Of the same Frobenius norm as x, spread over fewer or more elements."""
    spread = (x.numel() / max(q.numel(), 1)) ** 0.5
    return Raw(q, x.scale, x.rms * spread, format=FP32, **kwargs)


@rule(aten.linalg_qr.default)
def qr(x: ScaledTensor, mode: str = "reduced") -> Any:
    """Q: 1 / sqrt(rows). R has the norm of the matrix: r sqrt(elements of it per element of R)."""
    q, r = aten.linalg_qr.default(elements(x).float(), mode)
    return _orthonormal(q, x.shape[-2], x), _shares_norm(r, x)


@rule(aten.linalg_polar.default)
def polar(x: ScaledTensor) -> Any:
    """U: 1 / sqrt(rows). H has the norm of the matrix: r sqrt(elements of it per element of H)."""
    u, h = aten.linalg_polar.default(elements(x).float())
    return _orthonormal(u, x.shape[-2], x), _shares_norm(h, x)


@rule(aten._linalg_svd.default)
def svd(
    x: ScaledTensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> Any:
    """U, V: 1 / sqrt(rows), 1 / sqrt(columns). The singular values have the norm of the matrix."""
    u, s, v = aten._linalg_svd.default(
        elements(x).float(), full_matrices, compute_uv, driver=driver
    )
    rows, columns = x.shape[-2:]
    values = _shares_norm(s, x, nonnegative=True)
    return _orthonormal(u, rows, x), values, _orthonormal(v, columns, x)


@rule(aten._linalg_eigh.default)
def eigh(x: ScaledTensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    """Vectors: 1 / sqrt(n). The eigenvalues have the norm of the matrix, r sqrt(n)."""
    values, vectors = aten._linalg_eigh.default(elements(x).float(), UPLO, compute_v)
    return _shares_norm(values, x), _orthonormal(vectors, x.shape[-1], x)


# --- determinants ----------------------------------------------------------------------------


@rule(aten._linalg_det.default)
def det(x: ScaledTensor) -> Any:
    """sqrt(n!) r^n: of the n! products only squares have a mean. One matrix's is a statistic."""
    q, lu, pivots = aten._linalg_det.default(elements(x).float())
    n = x.shape[-1]
    factor = x.scale.pow(n).clamp(MIN_SCALE, MAX_SCALE)
    result = q * factor
    if q.dim() > 0:
        rms = x.rms.pow(n) * math.exp(0.5 * math.lgamma(n + 1))
        result = Raw(q, factor, rms, format=FP32)
    return result, *_factors(lu, pivots, x)


@rule(aten._linalg_slogdet.default)
def slogdet(x: ScaledTensor) -> Any:
    """ln|det| = n ln r plus a sum of ln chi_i, i = 1..n: its mean is 1/2 sum (ln 2 + psi(i/2)) and
    its variance 1/4 sum psi'(i/2) (Goodman 1963). The sign is 1."""
    sign, q, lu, pivots = aten._linalg_slogdet.default(elements(x).float())
    n = x.shape[-1]
    result = q + n * x.scale.log()
    if q.dim() > 0:
        halves = torch.arange(1, n + 1, dtype=torch.float64) / 2
        mean = 0.5 * float((math.log(2) + torch.digamma(halves)).sum())
        spread = 0.5 * float(torch.polygamma(1, halves).sum()) ** 0.5
        rms = quadrature(
            n * x.rms.clamp_min(MIN_SCALE).log() + mean, torch.full_like(x.rms, spread)
        )
        result = Raw(result, None, rms, format=FP32)
        sign = Raw(sign, None, torch.ones_like(x.rms), settled=True, format=FP32)
    return sign, result, *_factors(lu, pivots, x)


def _factors(lu: Tensor, pivots: Tensor, x: ScaledTensor) -> tuple[Raw, Tensor]:
    """What autograd saves: L and U in one, of the value."""
    n = x.shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool, device=x.device).triu()
    return measured(torch.where(upper, lu * x.scale, lu), format=FP32), pivots


# --- the matrix exponential ------------------------------------------------------------------
# Autograd reads its derivative off a larger exponential, in which the gradient is one block: where
# the gradient is small or large, that is of another precision. Here it has elements near 1.


_matrix_exp = define_operator(
    "matrix_exp(Tensor x) -> Tensor", lambda grad, x: _matrix_exp_backward(grad, x)
)
_matrix_exp_backward = define_operator("matrix_exp_backward(Tensor grad, Tensor x) -> Tensor")


@rule(_matrix_exp)
def matrix_exp_rule(x: ScaledTensor) -> Any:
    """No closed form for a matrix of any spectrum. Measured."""
    return _read(torch.linalg.matrix_exp(_wide(x)))


@rule(_matrix_exp_backward)
def matrix_exp_backward(g: Any, x: ScaledTensor) -> Raw:
    """The Frechet derivative at the transpose, the upper right block of exp([[A, G], [0, A]])
    (Najfeld and Havel 1995). Linear in g, on whose elements it works. Measured."""
    left, a = operand(g, x), _wide(x).mT
    zero = torch.zeros_like(a)
    n = a.shape[-1]
    above, below = torch.cat((a, left.q.float()), -1), torch.cat((zero, a), -1)
    whole = torch.linalg.matrix_exp(torch.cat((above, below), -2))
    return measured(whole[..., :n, n:], left.scale, format=FP32)


def matrix_exp(input: Tensor) -> Tensor:
    result: Tensor = _matrix_exp(input)
    return result


#: function that a user may call -> the same with a derivative that has rules.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(
    (torch.linalg.matrix_exp, torch.matrix_exp, Tensor.matrix_exp), matrix_exp
)


# Distances between vectors, and their derivatives.  E|z|^p of a Gaussian gives the p-norm of n
# differences of RMS r: r (n E|z|^p)^(1/p).
def _length(n: int, p: float) -> float:
    """p-norm of n numbers from N(0, 1)."""
    n = max(n, 1)
    if math.isinf(p):
        return math.sqrt(max(2 * math.log(n), 1.0))
    return float((n * gaussian_moment(p / 2) ** 2) ** (1 / p))


def _slope_of_distance(n: int, p: float) -> float:
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
    rms = left.rms * (math.sqrt(max(y.shape[-2], 1)) * _slope_of_distance(x.shape[-1], p))
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
    return Raw(
        q, left.scale, left.rms * (rows**0.5 * _slope_of_distance(x.shape[-1], p)), format=FP32
    )
