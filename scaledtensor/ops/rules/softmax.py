"""Softmax, log-softmax and their derivatives.

For N logits of RMS m, the results of a softmax are 1/N each if m is small. If m is large, one logit
wins, and the RMS is 1/sqrt(N). Unit scaling interpolates in the log domain: r = 1 / LI(1 / (1 +
4/m^2), N, sqrt N) (Blake et al. 2023, appendix G). This is N^(a/2 - 1) with a = m^2 / (m^2 + 4).
Let E be the sum of the squares of a row. Then E = N^(a - 1) and r = sqrt(E / N). With a mask, 1/N
becomes the mean of 1/n over rows that see n logits (`Visible`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor._torch import log
from scaledtensor.backends import backend_of
from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import (
    bounded_square,
    count,
    operand,
    quadrature,
    read_value,
    value,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.plausible import compounding
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import FILL
from scaledtensor.scales.powers import A
from scaledtensor.scales.singles import Single, is_known, rms_of, rounded
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "MASKED",
    "Visible",
    "all_visible",
    "causally_visible",
    "concentration",
    "logsumexp_rms",
    "selection",
    "visible",
]

#: A smaller logit is masked, because a fill was added to it.
MASKED = FILL / 2


class Visible(NamedTuple):
    """Moments of 1/n over the rows of a softmax, which see n logits each."""

    log_share: Any
    """ln of the mean of 1/n, which is -ln N without a mask; a float, or a 0-dim tensor that cannot
    be read now."""
    lost: Any
    """Mean of 1/n^2 over mean of 1/n: the part of a gradient that the sum of its row removes."""


def all_visible(n: int) -> Visible:
    """Each row sees all `n` logits."""
    n = max(n, 1)
    return Visible(-log(n), 1 / n)


def causally_visible(rows: int, n: int) -> Visible:
    """Row i of `rows` sees the first min(i, n) logits. The sums over 1/i and 1/i^2 are
    asymptotic."""
    rows, n = max(rows, 1), max(n, 1)
    steps = min(rows, n)
    first = log(steps) + 0.5772 + 0.5 / steps - 1 / (12 * steps**2)
    second = math.pi**2 / 6 - 1 / steps + 0.5 / steps**2 - 1 / (6 * steps**3)
    mean = (first + (rows - steps) / n) / rows
    square = (second + (rows - steps) / n**2) / rows
    return Visible(log(mean), square / mean)


def visible(seen: Tensor, dim: int) -> Visible:
    """Count the logits that a mask shows, because no closed form knows the structure of a mask.

    Softmax and its derivative read all logits anyway. Outside of a trace the host reads the two
    moments at once, and rules calculate with numbers.
    """
    rows = seen.sum(dim, dtype=torch.float32)
    share = (rows if rows.numel() else rows.new_ones(1)).clamp_min(1.0).reciprocal()
    moments = torch.stack((share.mean(), share.square().mean()))
    if is_known(moments):
        mean, square = map(Single, moments.tolist())
        return Visible(Single(rounded(math.log(mean))), square / mean)
    return Visible(moments[0].log(), moments[1] / moments[0])


def _visible_above(v: Tensor, limit: float, dim: int) -> Visible:
    """Count the logits above a limit. Without a mask the least one tells it, in a sixth of the
    time."""
    if is_known(v) and backend_of(v).host and v.numel() and v.amin().item() > limit:
        n = count(v.shape, dim)
        return Visible(Single(rounded(-math.log(n))), Single(rounded(1 / n)))
    return visible(v > limit, dim)


def sharpness(rms: A) -> A:
    """Return a = m^2 / (m^2 + 4): 0 if all logits count alike, and 1 if one wins."""
    m2 = bounded_square(rms)
    sharp: A = m2 / (m2 + 4)
    return sharp


def concentration(rms: A, seen: Visible) -> A:
    """Return E, the mean over rows of the sum of squares: (mean of 1/n)^(1 - a)."""
    energy: A = ((1 - sharpness(rms)) * seen.log_share).exp()
    return energy


def selection(m2: A, seen: Visible) -> A:
    """Return h, the part of a gradient that passes a softmax: y (g - sum y g) has the RMS r_g r_y
    h.

    h^2 is the mean of y^2 (1 - 2y + sum y^2) over the mean of y^2. It is 1 - 1/N if all logits
    count alike. If one logit wins it falls as 1/m, since only rows with nearly equal logits still
    change. The formula is a fit to Gaussian logits for N from 2 to 1024 and m^2 from 0 to 256: h^2
    = (1 - 1/N) / sqrt(1 + 5 m^2 / (ln N + 0.3)).
    """
    lost, log_n = seen.lost, -seen.log_share
    kept = (1 - lost).clamp_min(0.25) if isinstance(lost, Tensor) else max(1 - lost, 0.25)
    share: A = (m2 * (5 / (log_n + 0.3)) + 1).rsqrt() * kept
    return share.sqrt()


@rule(aten._softmax.default)
def softmax(x: ScaledTensor, dim: int, half_to_float: bool = False) -> Raw:
    """r = sqrt(E / N) for N logits of RMS m, where E is the sum of the squares of a row. E is N^(a
    - 1) with a = m^2 / (m^2 + 4); with a mask, 1/N is the mean of 1/n over rows that see n
    logits."""
    return _shares(torch.softmax, x, dim)


@rule(aten._safe_softmax.default)
def safe_softmax(x: ScaledTensor, dim: int, dtype: torch.dtype | None = None) -> Raw:
    """Same as `_softmax`. A row with -inf only gives zeros."""

    def safe(v: Tensor, dim: int) -> Tensor:
        return torch.softmax(v, dim).masked_fill_(v.isneginf().all(dim, keepdim=True), 0.0)

    return _shares(safe, x, dim)._replace(dtype=dtype)


def _shares(function: Callable[[Tensor, int], Tensor], x: ScaledTensor, dim: int) -> Raw:
    """Return a softmax, which `function` makes of the value."""
    v = read_value(x)
    seen = _visible_above(v, MASKED, dim)
    energy = concentration(_beside(seen, x), seen)
    rms = (energy / max(count(x.shape, dim), 1)).sqrt()
    compounding(rms, False)
    return Raw(function(v, dim), None, rms, fresh=True, nonnegative=True)


def _beside(seen: Visible, x: ScaledTensor) -> Any:
    """Return the RMS of `x` as a number or a tensor, as `seen` has them."""
    return x.rms if isinstance(seen.log_share, Tensor) else rms_of(x)


@rule(aten._softmax_backward_data.default)
def softmax_backward(g: Any, y: ScaledTensor, dim: int, input_dtype: torch.dtype) -> Raw:
    """r_g ry h for the gradient y (g - sum y g), where y is the saved result and h^2 = (1 - 1/N) /
    sqrt(1 + 5 m^2 / (ln N + 0.3)). The RMS m of the logits follows from ry."""
    v = read_value(y)
    seen = _visible_above(v, 0.0, dim)
    rms = _beside(seen, y)
    left = operand(g, y)
    energy = rms.clamp_min(2.0**-60).square() * max(count(y.shape, dim), 1)
    sharp = 1 - energy.log() / seen.log_share.clamp_max(-(2.0**-10))
    a = sharp.clamp_min(0.0).clamp_max(1 - 2.0**-10)
    q = aten._softmax_backward_data.default(left.q.to(v.dtype), v, dim, v.dtype)
    return Raw(q, left.scale, left.rms * rms * selection(4 * a / (1 - a), seen))


def logsumexp_rms(m: A, n: int) -> A:
    """RMS of logsumexp of N logits of RMS m: ln N + m^2 / 2 up to m = sqrt(2 ln N), and m sqrt(2 ln
    N) beyond. It is the free energy of N independent Gaussian levels (Derrida's random energy
    model, 1981)."""
    log_n = log(n)
    edge = (2 * log_n) ** 0.5
    low = m.clamp_max(edge)
    free: A = low.square() / 2 + (m - low) * edge + log_n
    return free


@rule(aten._log_softmax.default)
def log_softmax(x: ScaledTensor, dim: int, half_to_float: bool = False) -> Raw:
    """r = sqrt(l^2 + m^2 (1 - 2/N)) for N logits of RMS m and x - logsumexp(x), where l is the RMS
    of `logsumexp`: the mean of x logsumexp(x) is m^2 / N (Stein's lemma). The result is float32,
    because a loss is a small difference of its elements."""
    n = max(count(x.shape, dim), 2)
    m = rms_of(x)
    rms = quadrature(logsumexp_rms(m, n), m * (1 - 2 / n) ** 0.5)
    q = aten._log_softmax.default(value(x).float(), dim, False)
    return Raw(q, None, rms, format=FP32)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(g: Any, y: ScaledTensor, dim: int, input_dtype: torch.dtype) -> Raw:
    """r_g sqrt((N - 1) / N) for the gradient g - softmax(x) sum(g) over N classes. For a mean
    cross-entropy over B tokens, g is one-hot with r_g = 1 / (B sqrt(N)), and the result is
    (sqrt(N - 1) / N) / B."""
    n = count(y.shape, dim)
    left = operand(g, y)
    q = aten._log_softmax_backward_data.default(left.q.float(), value(y), dim, torch.float32)
    narrow = y.recipe.activation if y.recipe is not None else None
    return Raw(q, left.scale, left.rms * max((n - 1) / n, 1 / n) ** 0.5, format=narrow)
