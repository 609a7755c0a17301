"""New tensors in the likeness of a ScaledTensor, random ones, and dropout."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import from_dtype
from scaledtensor.ops.algebra import elements, first_scaled, measured, operand, plain, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.views import fill_under, moves_scale
from scaledtensor.scales.powers import nearest_power_of_two
from scaledtensor.scales.singles import (
    Single,
    calculates,
    put,
    rms_of,
    scale_of,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.tensor import ScaledTensor, is_stored

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _new(
    op: Overload, x: ScaledTensor, number: float, args: Sequence[Any], options: dict[str, Any]
) -> Tensor:
    """A tensor of one number. Of another than a float dtype it has no scale and is plain."""
    dtype = options.pop("dtype", None) or x.dtype
    options.pop("layout", None)
    if dtype not in _FLOATS:
        like = torch.empty_strided(x.shape, x.stride(), device=x.device)
        plain: Tensor = op(like, *args, dtype=dtype, **options)
        return plain
    fmt = x.format if dtype == x.dtype else from_dtype(dtype)
    # A stored frozen weight on the meta device is filled through an empty one.
    keeps = fmt.storage_dtype.itemsize > 1 or (op is aten.empty_like.default and is_stored(x))
    store = fmt.storage_dtype if keeps else torch.float32
    q = op(x.qdata, *args, dtype=store, **options)
    fmt = from_dtype(store)
    if number and not moves_scale(number):
        rms = _rms_beside_fills(x)
        scale = nearest_power_of_two(rms)
        q.fill_(fill_under(number, scale, q))
        return ScaledTensor.make(q, scale, rms, fmt, dtype, x.recipe, number > 0)
    rms = torch.full((), abs(number), device=q.device)
    scale = nearest_power_of_two(rms)
    q = q if number in (0, 1) else q / scale
    scale = torch.ones_like(scale) if number in (0, 1) else scale
    # Zeros are made to be written into, by views too, which cannot tell their base of a sign.
    own = single_of(scale), single_of(rms)
    return ScaledTensor.make(q, *own, fmt, dtype, x.recipe, number > 0)


def _rms_beside_fills(x: ScaledTensor) -> Tensor:
    """That of `x`, which a mask will be joined with: an infinity fits any scale. 1 beside zeros."""
    rms = tensor_of(rms_of(x))
    return torch.where(rms > 0, rms, 1.0)


@rule(
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    pass_op=True,
)
def zeros(op: Overload, x: ScaledTensor, *args: Any, **options: Any) -> Tensor:
    """Zero (or not yet written) has no scale: it takes that of what is first written into it."""
    made = _new(op, x, 0.0, args, options)
    alike = op is aten.new_zeros.default and made.dim() == x.dim()
    if alike and x.site is not None and isinstance(made, ScaledTensor):
        made.site = x.site.copied(made)  # `fully_shard` keeps its part of a weight in such a tensor
    return made


@rule(aten.ones_like.default, aten.new_ones.default, pass_op=True)
def ones(op: Overload, x: ScaledTensor, *args: Any, **options: Any) -> Tensor:
    """r = 1."""
    return _new(op, x, 1.0, args, options)


@rule(aten.full_like.default)
def full_like(x: ScaledTensor, number: float, **options: Any) -> Tensor:
    """r = |c|; the fill of a mask takes the RMS of x."""
    return _new(aten.full_like.default, x, float(number), (number,), options)


@rule(aten.new_full.default)
def new_full(x: ScaledTensor, size: Sequence[int], number: float, **options: Any) -> Tensor:
    """As full_like."""
    return _new(aten.new_full.default, x, float(number), (size, number), options)


@rule(aten.zero.default)
def zero(x: ScaledTensor) -> Raw:
    """All zeros: the scale is free."""
    zero = Single(0.0) if calculates(x) else torch.zeros_like(x.rms)
    q = elements(x)
    if 0 in x.qdata.stride():  # `zero_` writes the one element that an expanded tensor repeats
        return Raw(q.new_zeros(()).expand(q.shape), scale_of(x), zero, settled=True)
    return Raw(torch.zeros_like(q), scale_of(x), zero, settled=True)


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(x: ScaledTensor, number: Any) -> Raw:
    """As full_like."""
    if not isinstance(number, Tensor) and number and not moves_scale(number):
        rms = _rms_beside_fills(x)
        scale = nearest_power_of_two(rms)
        q = fill_under(number, scale, elements(x))
        return Raw(q.expand(x.shape), scale, rms, settled=True)
    c = operand(number, x)
    return Raw((c.q * 1.0).expand(x.shape), c.scale, c.rms)


# --- random ----------------------------------------------------------------------------------


@rule(aten.bernoulli.p)
def bernoulli(x: ScaledTensor, p: float = 0.5, *, generator: Any = None) -> Raw:
    """r = sqrt(p). The mask of a dropout that torch spells out."""
    q = torch.empty(x.shape, device=x.device, dtype=elements(x).dtype)
    q.bernoulli_(p, generator=generator)
    rms = torch.full_like(x.rms, math.sqrt(p))
    return Raw(q, None, rms, settled=True, nonnegative=True)


@rule(aten.rand_like.default)
def rand_like(x: ScaledTensor, **options: Any) -> Tensor:
    """Uniform on [0, 1): r = sqrt(1/3)."""
    out = _new(aten.rand_like.default, x, 1.0, (), options)
    if isinstance(out, ScaledTensor):
        put(out, rms=rms_of(out) * 3**-0.5)
    return out


@rule(aten.randn_like.default)
def randn_like(x: ScaledTensor, **options: Any) -> Tensor:
    """r = 1."""
    out = _new(aten.randn_like.default, x, 1.0, (), options)
    if isinstance(out, ScaledTensor):
        out.nonnegative = False
    return out


@rule(aten.normal_functional.default)
def normal(x: ScaledTensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Raw:
    """r = sqrt(mean^2 + std^2)."""
    q = torch.empty(x.shape, device=x.device).normal_(mean, std, generator=generator)
    return Raw(q, None, torch.full_like(x.rms, math.hypot(mean, std)))


@rule(aten.uniform.default)
def uniform(x: ScaledTensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Raw:
    """r = sqrt((a^2 + a b + b^2) / 3)."""
    q = torch.empty(x.shape, device=x.device).uniform_(low, high, generator=generator)
    rms = math.sqrt((low * low + low * high + high * high) / 3)
    return Raw(q, None, torch.full_like(x.rms, rms))


# --- between scaled ends ---------------------------------------------------------------------


@rule(
    *(
        getattr(packet, overload)
        for packet in (aten.linspace, aten.logspace)
        for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
    pass_op=True,
)
def spaced(op: Overload, start: Any, end: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A table of numbers: plain."""
    made: Tensor = op(plain(start), plain(end), *args, **kwargs)
    return made


# --- dropout ---------------------------------------------------------------------------------


@rule(aten.native_dropout.default)
def dropout(x: ScaledTensor, p: float, train: bool | None) -> tuple[Raw, Tensor]:
    """r / sqrt(1 - p); the mask is plain."""
    q, mask = aten.native_dropout.default(elements(x), p, train)
    keep = 1 - p if train or train is None else 1.0
    return Raw(q, x.scale, x.rms / max(keep, 2.0**-20) ** 0.5, nonnegative=x.nonnegative), mask


@rule(aten.native_dropout_backward.default)
def dropout_backward(g: ScaledTensor, mask: Tensor, scale: float) -> Raw:
    """r / sqrt(1 - p), with scale = 1 / (1 - p)."""
    q = aten.native_dropout_backward.default(elements(g), mask, scale)
    return Raw(q, g.scale, g.rms * scale**0.5)


# Random numbers in the place or the likeness of a ScaledTensor: their distribution says the RMS.
# Drawn in float32 whatever the tensor is stored in, so that a seed draws what it draws for a
# plain float32 tensor.
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
def bernoulli_by_element(x: ScaledTensor, *, generator: Any = None) -> Raw:
    """r = sqrt(E p)."""
    q = torch.bernoulli(value(x).float(), generator=generator)
    return Raw(q, None, _mean_of_share(x.rms).sqrt(), nonnegative=True)


@rule(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    pass_op=True,
)
def normal_by_element(op: Overload, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Raw:
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
