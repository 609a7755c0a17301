"""Softmax, log-softmax and their derivatives.

Softmax over N logits of RMS m: from 1/N each (small m) to one winner, RMS 1/sqrt(N) (large m).
Unit scaling interpolates in the log domain: r = 1 / LI(1 / (1 + 4/m^2), N, sqrt N) (Blake et al.
2023, appendix G), that is N^(a/2 - 1) with a = m^2 / (m^2 + 4).
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import at_value, bounded_square, count, operand, quadrature, value
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.tensor import ScaledTensor

aten = torch.ops.aten


def sharpness(rms: Tensor) -> Tensor:
    """a in (0, 1): 0 where all logits count alike, 1 where one wins."""
    m2 = bounded_square(rms)
    return m2 / (m2 + 4)


def selection(m2: Tensor, n: int, causal: bool = False) -> Tensor:
    """What is left of a gradient behind a softmax, h: y (g - sum y g) has RMS r_g r_y h.

    E[y^2 (1 - 2y + sum y^2)] / E[y^2]: 1 - 1/N where all logits count alike, falling as 1/m where
    one wins, since only near ties still move. Fitted to Gaussian logits for N from 2 to 1024 and
    m^2 from 0 to 256: h^2 = (1 - 1/N) / sqrt(1 + 5 m^2 / (ln N + 0.3)). Under a causal mask the
    mean of 1 - 1/n, weighted by 1/n, is 1 - sum(1/n^2) / sum(1/n) over n = 1..N.
    """
    n = max(n, 1)
    log_n = math.log(n)
    lost = (math.pi**2 / 6 - 1 / n) / (log_n + 0.5772 + 0.5 / n) if causal else 1 / n
    share = torch.rsqrt(1 + m2 * (5 / (log_n + 0.3))) * max(1 - lost, 0.25)
    return share.sqrt()


@rule(aten._softmax.default)
def softmax(x: ScaledTensor, dim: int, half_to_float: bool = False) -> Raw:
    """r = N^(a/2 - 1), a = m^2 / (m^2 + 4)."""
    rms = _softmax_rms(x, dim)
    return at_value(lambda v: torch.softmax(v, dim), x, rms, nonnegative=True)


@rule(aten._safe_softmax.default)
def safe_softmax(x: ScaledTensor, dim: int, dtype: torch.dtype | None = None) -> Raw:
    """As softmax; a row of -inf alone, which attends to nothing, gives zeros."""
    rms = _softmax_rms(x, dim)

    def safe(v: Tensor) -> Tensor:
        return torch.softmax(v, dim).masked_fill(v.isneginf().all(dim, keepdim=True), 0.0)

    return at_value(safe, x, rms, nonnegative=True, dtype=dtype)


def _softmax_rms(x: ScaledTensor, dim: int) -> Tensor:
    n = count(x.shape, dim)
    return torch.exp((sharpness(x.rms) / 2 - 1) * math.log(max(n, 1)))


@rule(aten._softmax_backward_data.default)
def softmax_backward(g: Any, y: ScaledTensor, dim: int, input_dtype: torch.dtype) -> Raw:
    """y (g - sum y g): r = r_g r_y h, see `selection`. The result tells m: N r_y^2 = N^(a - 1)."""
    left = operand(g, y)
    n = count(y.shape, dim)
    log_n = math.log(max(n, 2))
    a = (2 + 2 * y.rms.clamp_min(2.0**-126).log() / log_n).clamp(0, 1 - 2.0**-10)
    v = value(y)
    q = aten._softmax_backward_data.default(left.q.to(v.dtype), v, dim, v.dtype)
    return Raw(q, left.scale, left.rms * y.rms * selection(4 * a / (1 - a), n))


def _logsumexp_rms(m: Tensor, n: int) -> Tensor:
    """ln N + m^2 / 2 up to m = sqrt(2 ln N), from there m sqrt(2 ln N): the free energy of N
    independent Gaussian levels (Derrida's random energy model, 1981)."""
    log_n = math.log(n)
    edge = (2 * log_n) ** 0.5
    low = m.clamp_max(edge)
    free: Tensor = low.square() / 2 + (m - low) * edge + log_n
    return free


@rule(aten._log_softmax.default)
def log_softmax(x: ScaledTensor, dim: int, half_to_float: bool = False) -> Raw:
    """x - lse: r = sqrt(lse^2 + m^2 (1 - 2/N)), since E[x lse] = m^2 E[softmax] = m^2 / N (Stein's
    lemma). In float32: a loss is a small difference of these."""
    n = max(count(x.shape, dim), 2)
    rms = quadrature(_logsumexp_rms(x.rms, n), x.rms * (1 - 2 / n) ** 0.5)
    q = aten._log_softmax.default(value(x).float(), dim, False)
    return Raw(q, None, rms, format=FP32)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(g: Any, y: ScaledTensor, dim: int, input_dtype: torch.dtype) -> Raw:
    """g - softmax * sum(g): r = r_g sqrt((N - 1) / N). With the one-hot gradient of a mean
    cross-entropy over B tokens, r_g = 1 / (B sqrt N), this is (sqrt(N - 1) / N) / B."""
    n = count(y.shape, dim)
    left = operand(g, y)
    q = aten._log_softmax_backward_data.default(left.q.float(), value(y), dim, torch.float32)
    narrow = y.recipe.activation if y.recipe is not None else None
    return Raw(q, left.scale, left.rms * max((n - 1) / n, 1 / n) ** 0.5, format=narrow)


@rule(aten.logsumexp.default)
def logsumexp(x: ScaledTensor, dim: Any, keepdim: bool = False) -> Raw:
    """A statistic, in float32: `_logsumexp_rms`, and the spread of a mean, m / sqrt(N)."""
    n = max(count(x.shape, dim), 1)
    rms = quadrature(_logsumexp_rms(x.rms, n), x.rms / n**0.5)
    return Raw(torch.logsumexp(value(x).float(), dim, keepdim), None, rms, format=FP32)
