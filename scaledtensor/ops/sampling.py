"""Random numbers in the place or the likeness of a ScaledTensor: their distribution says the RMS.

Drawn in float32 whatever the tensor is stored in, so that a seed draws what it draws for a plain
float32 tensor.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import first_scaled, measured, operand, plain, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.tensor import ScaledTensor


def _like(x: ScaledTensor) -> Tensor:
    return torch.empty_like(x.qdata, dtype=torch.float32)


def _uniform_integers(x: ScaledTensor, q: Tensor, low: float, high: float) -> Raw:
    """Integers from `low` to `high` - 1."""
    a, b = float(low), float(high - 1)
    rms = math.sqrt(max((a * a + a * b + b * b) / 3 + (b - a) / 6, 0.0))
    return Raw(q, None, torch.full_like(x.rms, rms), nonnegative=low >= 0)


# --- in place --------------------------------------------------------------------------------


@rule(aten.exponential.default)
def exponential(x: ScaledTensor, lambd: float = 1.0, *, generator: Any = None) -> Raw:
    """r = sqrt(2) / lambda."""
    q = _like(x).exponential_(lambd, generator=generator)
    return Raw(q, None, torch.full_like(x.rms, 2**0.5 / lambd), nonnegative=True)


@rule(aten.cauchy.default)
def cauchy(
    x: ScaledTensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> Raw:
    """No second moment: r = sqrt(median^2 + sigma^2), the median of |x| where median = 0."""
    q = _like(x).cauchy_(median, sigma, generator=generator)
    return Raw(q, None, torch.full_like(x.rms, math.hypot(median, sigma)))


@rule(aten.geometric.default)
def geometric(x: ScaledTensor, p: float, *, generator: Any = None) -> Raw:
    """r = sqrt(2 - p) / p."""
    q = _like(x).geometric_(p, generator=generator)
    return Raw(q, None, torch.full_like(x.rms, (2 - p) ** 0.5 / p), nonnegative=True)


@rule(aten.log_normal.default)
def log_normal(
    x: ScaledTensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> Raw:
    """r = exp(mean + std^2), std bounded at 2 as for exp."""
    q = _like(x).log_normal_(mean, std, generator=generator)
    rms = math.exp(mean + min(std * std, 4.0))
    return Raw(q, None, torch.full_like(x.rms, rms), nonnegative=True)


@rule(aten.random.default, getattr(aten.random, "from"), aten.random.to, pass_op=True)
def random(op: Overload, x: ScaledTensor, *bounds: Any, generator: Any = None) -> Raw:
    """Integers of [a, b): r = sqrt((a^2 + ab + b^2) / 3) or so; by default up to 2^24."""
    q = op(_like(x), *bounds, generator=generator)
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, 2**24 + 1)
    return _uniform_integers(x, q, low, 2**24 + 1 if high is None else high)


@rule(aten.bernoulli.Tensor)
def bernoulli_of(x: ScaledTensor, p: Any, *, generator: Any = None) -> Raw:
    """r = sqrt(E p)."""
    q = _like(x).bernoulli_(plain(p).float(), generator=generator)
    return Raw(q, None, _mean_of_share(operand(p, x).rms).sqrt(), nonnegative=True)


# --- of parameters that are tensors ----------------------------------------------------------


def _mean_of_share(rms: Tensor) -> Tensor:
    """E p of probabilities by their RMS: between sqrt(3)/2 of it, where they are spread evenly, and
    all of it, where they are equal."""
    return rms.clamp_max(1.0) * 0.93


@rule(aten.bernoulli.default)
def bernoulli(x: ScaledTensor, *, generator: Any = None) -> Raw:
    """r = sqrt(E p)."""
    q = torch.bernoulli(value(x).float(), generator=generator)
    return Raw(q, None, _mean_of_share(x.rms).sqrt(), nonnegative=True)


@rule(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    pass_op=True,
)
def normal(op: Overload, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Raw:
    """r = sqrt(r_mean^2 + r_std^2)."""
    like = first_scaled(mean, std)
    a, b = operand(mean, like), operand(std, like)
    q = op(_wide(mean), _wide(std), generator=generator)
    return Raw(q, None, (a.rms.square() + b.rms.square()).sqrt())


def _wide(x: Any) -> Any:
    v = plain(x)
    return v.float() if isinstance(v, Tensor) else v


@rule(aten.poisson.default)
def poisson(x: ScaledTensor, generator: Any = None) -> Raw:
    """r = sqrt(rx^2 + rx): the variance is the mean."""
    q = aten.poisson.default(value(x).float(), generator)
    return Raw(q, None, (x.rms.square() + x.rms).sqrt(), nonnegative=True)


@rule(aten.binomial.default)
def binomial(count: Any, prob: Any, generator: Any = None) -> Raw:
    """r = sqrt((n p)^2 + n p)."""
    like = first_scaled(count, prob)
    mean = operand(count, like).rms * operand(prob, like).rms
    q = aten.binomial.default(_wide(count), _wide(prob), generator)
    return Raw(q, None, (mean.square() + mean).sqrt(), nonnegative=True)


@rule(aten._standard_gamma.default)
def standard_gamma(x: ScaledTensor, generator: Any = None) -> Raw:
    """r = sqrt(a^2 + a): mean and variance are both a."""
    q = aten._standard_gamma.default(value(x).float(), generator)
    return Raw(q, None, (x.rms.square() + x.rms).sqrt(), nonnegative=True)


@rule(aten._sample_dirichlet.default, aten._standard_gamma_grad.default, aten._dirichlet_grad.default, pass_op=True)  # fmt: skip # noqa: E501
def distributions(op: Overload, *args: Any) -> Raw:
    """Measured: Dirichlet samples and the implicit derivatives of gamma and Dirichlet samples have
    no closed second moment."""
    return measured(op(*(_wide(a) for a in args)))


@rule(
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randint_like.generator,
    aten.randint_like.low_generator_dtype,
)
def randint_like(x: ScaledTensor, *bounds: int, **options: Any) -> Any:
    """Integers of [a, b): r = sqrt((a^2 + ab + b^2) / 3) or so; plain where they are not floats."""
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    dtype = options.pop("dtype", None) or x.dtype
    generator = options.pop("generator", None)
    integers = torch.randint(low, high, x.shape, generator=generator, device=x.device)
    if not dtype.is_floating_point:
        return integers.to(dtype)
    raw = _uniform_integers(x, integers.float(), low, high)
    return raw._replace(dtype=dtype if dtype.itemsize > 1 else torch.float32)
