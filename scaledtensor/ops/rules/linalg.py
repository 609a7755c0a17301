"""Linear algebra: decompositions, inverses, solutions, determinants and distances.

The columns of an orthonormal factor have norm 1, and the other factor has the norm of the matrix.
So their RMS follow from the sizes, for any matrix. A determinant of Gaussians has E det^2 = n!
r^(2n). Inverses and solutions have no finite moment, because 1 / det of a Gaussian matrix has none.
They are computed on the value in float32, and their RMS is measured. The p-norm of n differences of
RMS r is r (n E |z|^p)^(1/p), by the moments of a Gaussian z.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    constant,
    difference,
    elements,
    first_scaled,
    gaussian_moment,
    measured,
    operand,
    quadrature,
    wide,
)
from scaledtensor.ops.operators import aten, define_operator
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.scales.singles import rms_of, scale_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


# --- inverses, solutions and triangular factors ----------------------------------------------


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
    """Measured: the entries of inverses, solutions and triangular factors depend on the condition
    of the matrix. For Gaussians they have no finite variance."""
    result = op(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
    return tuple(map(_measured, result)) if isinstance(result, tuple | list) else _measured(result)


def _measured(x: Tensor) -> Any:
    return measured(x, format=FP32) if x.dtype.is_floating_point and x.dim() > 0 else x


# --- orthonormal factors ---------------------------------------------------------------------


def _orthonormal(q: Tensor, length: int, like: ScaledTensor) -> Raw:
    """Return columns or rows of norm 1, with `length` elements each."""
    return Raw(q, None, constant(max(length, 1) ** -0.5, rms_of(like)), format=FP32)


def _shares_norm(q: Tensor, x: ScaledTensor, **kwargs: Any) -> Raw:
    """Return a factor with the Frobenius norm of `x`, spread over fewer or more elements."""
    spread = (x.numel() / max(q.numel(), 1)) ** 0.5
    return Raw(q, scale_of(x), rms_of(x) * spread, format=FP32, **kwargs)


@rule(aten.linalg_qr.default)
def qr(x: ScaledTensor, mode: str = "reduced") -> Any:
    """1 / sqrt(rows) for Q, and r sqrt(elements / elements of R) for R, which has the norm of the
    matrix."""
    q, r = aten.linalg_qr.default(elements(x).float(), mode)
    return _orthonormal(q, x.shape[-2], x), _shares_norm(r, x)


@rule(aten.linalg_polar.default)
def polar(x: ScaledTensor) -> Any:
    """1 / sqrt(rows) for U, and r sqrt(elements / elements of H) for H, which has the norm of the
    matrix."""
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
    """1 / sqrt(rows) for U, 1 / sqrt(columns) for V, and r sqrt(elements / singular values) for the
    singular values, which have the norm of the matrix."""
    u, s, v = aten._linalg_svd.default(
        elements(x).float(), full_matrices, compute_uv, driver=driver
    )
    rows, columns = x.shape[-2:]
    values = _shares_norm(s, x, nonnegative=True)
    return _orthonormal(u, rows, x), values, _orthonormal(v, columns, x)


@rule(aten._linalg_eigh.default)
def eigh(x: ScaledTensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    """1 / sqrt(n) for the eigenvectors, and r sqrt(n) for the eigenvalues, which have the norm of
    the matrix."""
    values, vectors = aten._linalg_eigh.default(elements(x).float(), UPLO, compute_v)
    return _shares_norm(values, x), _orthonormal(vectors, x.shape[-1], x)


# --- determinants ----------------------------------------------------------------------------


@rule(aten._linalg_det.default)
def det(x: ScaledTensor) -> Any:
    """sqrt(n!) r^n: the square has n! products with a mean, which are squares themselves. The
    determinant of a single matrix is a plain float32 statistic."""
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
    """ln |det| is n ln r plus the sum of ln chi_i over i = 1..n. The mean of this sum is 1/2 sum
    (ln 2 + psi(i/2)), and its variance 1/4 sum psi'(i/2) (Goodman 1963). The sign has r = 1."""
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
    """Return L and U of the value in one matrix, which autograd saves, and the pivots."""
    n = x.shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool, device=x.device).triu()
    return measured(torch.where(upper, lu * x.scale, lu), format=FP32), pivots


# --- the matrix exponential ------------------------------------------------------------------

# Autograd takes the derivative from a larger exponential, in which the gradient is one block. There
# a small or large gradient loses precision. The operator of this library uses the elements of the
# gradient, which are near 1.
_matrix_exp = define_operator(
    "matrix_exp(Tensor x) -> Tensor", lambda grad, x: _matrix_exp_backward(grad, x)
)
_matrix_exp_backward: Any = define_operator("matrix_exp_backward(Tensor grad, Tensor x) -> Tensor")


@rule(_matrix_exp)
def matrix_exp_rule(x: ScaledTensor) -> Any:
    """Measured: it has no closed form for a matrix of any spectrum."""
    return _measured(torch.linalg.matrix_exp(wide(x)))


@rule(_matrix_exp_backward)
def matrix_exp_backward(g: Any, x: ScaledTensor) -> Raw:
    """Measured. It is the Frechet derivative at the transpose, the upper right block of exp([[A,
    G], [0, A]]) (Najfeld and Havel 1995)."""
    left, a = operand(g, x), wide(x).mT
    zero = torch.zeros_like(a)
    n = a.shape[-1]
    above, below = torch.cat((a, left.q.float()), -1), torch.cat((zero, a), -1)
    whole = torch.linalg.matrix_exp(torch.cat((above, below), -2))
    return measured(whole[..., :n, n:], left.scale, format=FP32)


def matrix_exp(input: Tensor) -> Tensor:
    result: Tensor = _matrix_exp(input)
    return result


#: Function of torch -> the same function with a derivative that has rules.
FUNCTIONS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(
    (torch.linalg.matrix_exp, torch.matrix_exp, Tensor.matrix_exp), matrix_exp
)


# --- distances between vectors ---------------------------------------------------------------


def _length(n: int, p: float) -> float:
    """Return the p-norm of n numbers from N(0, 1)."""
    n = max(n, 1)
    if math.isinf(p):
        return math.sqrt(max(2 * math.log(n), 1.0))
    return float((n * gaussian_moment(p / 2) ** 2) ** (1 / p))


def _slope(n: int, p: float) -> float:
    """Return the RMS of (|z| / |z|_p)^(p - 1), one component of the gradient of a p-norm."""
    n = max(n, 1)
    if math.isinf(p) or p == 0:
        return float(n**-0.5)
    return float(gaussian_moment(max(p - 1, 0.0)) / _length(n, p) ** (p - 1))


def _distance(q: Tensor, rms: Tensor, n: int, p: float) -> Any:
    if p == 0:
        return q  # the number of components that differ has no scale
    return Raw(q, None, rms * _length(n, p), format=FP32, nonnegative=True)


@rule(aten._cdist_forward.default)
def cdist(x: Any, y: Any, p: float, mode: int | None) -> Any:
    """sqrt(rx^2 + ry^2) (n E |z|^p)^(1/p) for vectors of n components. For p = 0 it counts
    components, and is plain."""
    left, right, rms = difference(x, y)
    q = aten._cdist_forward.default(left.contiguous(), right.contiguous(), p, mode)
    return _distance(q, rms, x.shape[-1], p)


@rule(aten._euclidean_dist.default)
def euclidean_dist(x: Any, y: Any) -> Any:
    """sqrt(rx^2 + ry^2) sqrt(n)."""
    left, right, rms = difference(x, y)
    q = aten._cdist_forward.default(left.contiguous(), right.contiguous(), 2.0, 1)
    return _distance(q, rms, x.shape[-1], 2.0)


@rule(aten._cdist_backward.default)
def cdist_backward(g: Any, x: Any, y: Any, p: float, distances: Any) -> Raw:
    """r_g sqrt(rows of y) s, where s is the RMS of (|z| / |z|_p)^(p - 1): a sum over the rows of y
    of g times one component of the norm's gradient."""
    like = first_scaled(g, x, y, distances)
    left = operand(g, like)
    a, b, c = (operand(t, like).value for t in (x, y, distances))
    q = aten._cdist_backward.default(
        left.q.float().contiguous(), a.contiguous(), b.contiguous(), p, c.contiguous()
    )
    rms = left.rms * (math.sqrt(max(y.shape[-2], 1)) * _slope(x.shape[-1], p))
    return Raw(q, left.scale, rms, format=FP32)


@rule(aten._pdist_forward.default)
def pdist(x: ScaledTensor, p: float = 2.0) -> Any:
    """Same as `_cdist_forward` of x with itself, with each pair once."""
    left = operand(x, x).value
    q = aten._pdist_forward.default(left.contiguous(), p)
    return _distance(q, rms_of(x) * 2**0.5, x.shape[-1], p)


@rule(aten._pdist_backward.default)
def pdist_backward(g: Any, x: Any, p: float, distances: Any) -> Raw:
    """r_g sqrt(rows - 1) s, with s as in `_cdist_backward`."""
    like = first_scaled(g, x, distances)
    left = operand(g, like)
    a, c = operand(x, like).value, operand(distances, like).value
    q = aten._pdist_backward.default(left.q.float().contiguous(), a.contiguous(), p, c)
    rows = max(x.shape[0] - 1, 1)
    return Raw(q, left.scale, left.rms * (rows**0.5 * _slope(x.shape[-1], p)), format=FP32)
