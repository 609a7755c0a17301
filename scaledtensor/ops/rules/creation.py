"""New tensors like a ScaledTensor: constants, random numbers and dropout.

The RMS of random numbers follows from their distribution.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledtensor.formats import from_dtype
from scaledtensor.ops.algebra import (
    constant,
    elements,
    first_scaled,
    measured,
    operand,
    plain,
    value,
    within,
)
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.ops.rules.arithmetic import rms_beside_fills
from scaledtensor.ops.rules.views import fill_under, moves_scale, plain_number, written
from scaledtensor.scales.powers import nearest_power_of_two
from scaledtensor.scales.singles import (
    is_known,
    put,
    rms_of,
    scale_of,
    single_of,
)
from scaledtensor.tensors.tensor import ScaledTensor, is_stored

# --- constants -------------------------------------------------------------------------------


def _new(
    op: Overload, x: ScaledTensor, number: float, args: Sequence[Any], options: dict[str, Any]
) -> Tensor:
    """Make a tensor of one number. It is plain if its dtype is not float32, bfloat16 or float16."""
    dtype = options.pop("dtype", None) or x.dtype
    options.pop("layout", None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        like = torch.empty_strided(x.shape, x.stride(), device=x.device, dtype=torch.float32)
        plain: Tensor = op(like, *args, dtype=dtype, **options)
        return plain
    fmt = x.format if dtype == x.dtype else from_dtype(dtype)
    # A frozen weight in 8 bits on the meta device is filled through an empty tensor of its format.
    keeps = fmt.storage_dtype.itemsize > 1 or (op is aten.empty_like.default and is_stored(x))
    store = fmt.storage_dtype if keeps else torch.float32
    q = op(x.qdata, *(within(a, store) for a in args), dtype=store, **options)
    fmt = from_dtype(store)
    if number and not moves_scale(number):
        rms = rms_beside_fills(x)
        scale = nearest_power_of_two(rms)
        q.fill_(fill_under(number, scale, q))
        own = single_of(scale), single_of(rms)
        return ScaledTensor.make(q, *own, fmt, dtype, x.recipe, number > 0)
    place = "cpu" if is_known(q) else q.device
    rms = torch.full((), abs(number), device=place, dtype=torch.float32)
    scale = nearest_power_of_two(rms)
    q = q if number in (0, 1) else q / scale
    scale = torch.ones_like(scale) if number in (0, 1) else scale
    # Zeros are not nonnegative: views may write into them, and cannot tell their base of a sign.
    own = single_of(scale), single_of(rms)
    return ScaledTensor.make(q, *own, fmt, dtype, x.recipe, number > 0)


@rule(
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    pass_op=True,
)
def zeros(op: Overload, x: ScaledTensor, *args: Any, **options: Any) -> Tensor:
    """Zeros and empty memory have no scale yet. They take the scale of the first value that is
    written into them."""
    made = _new(op, x, 0.0, args, options)
    alike = op is aten.new_zeros.default and made.dim() == x.dim()
    if alike and x.site is not None and isinstance(made, ScaledTensor):
        made.site = x.site.copied(made)  # `fully_shard` keeps a part of a weight in such a tensor
    return made


@rule(aten.ones_like.default, aten.new_ones.default, pass_op=True)
def ones(op: Overload, x: ScaledTensor, *args: Any, **options: Any) -> Tensor:
    """r = 1."""
    return _new(op, x, 1.0, args, options)


@rule(aten.full_like.default)
def full_like(x: ScaledTensor, number: float, **options: Any) -> Tensor:
    """r = |c| for a number c. A tensor of infinities or of the fills of a mask takes the RMS of the
    operand."""
    return _new(aten.full_like.default, x, float(number), (number,), options)


@rule(aten.new_full.default)
def new_full(x: ScaledTensor, size: Sequence[int], number: float, **options: Any) -> Tensor:
    """Same as `full_like`."""
    return _new(aten.new_full.default, x, float(number), (size, number), options)


@rule(aten.zero.default)
def zero(x: ScaledTensor) -> Raw:
    """Zeros keep the scale, but take another scale with the next value that is written into
    them."""
    zero = constant(0.0, rms_of(x))
    q = elements(x)
    if 0 in x.qdata.stride():  # `zero_` writes the one element that an expanded tensor repeats
        return Raw(q.new_zeros(()).expand(q.shape), scale_of(x), zero, settled=True)
    return Raw(torch.zeros_like(q), scale_of(x), zero, settled=True)


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(x: ScaledTensor, number: Any) -> Raw:
    """Same as `full_like`."""
    number = plain_number(number)
    if not isinstance(number, Tensor) and number and not moves_scale(number):
        rms = rms_beside_fills(x)
        scale = nearest_power_of_two(rms)
        q = fill_under(number, scale, elements(x))
        return Raw(q.expand(x.shape), scale, rms, settled=True)
    c = written(number, x)
    q = c.q.to(x.device, copy=True)  # a number is on the host
    return Raw(q.expand(x.shape), c.scale, c.rms)


@rule(
    *(
        getattr(packet, overload)
        for packet in (aten.linspace, aten.logspace)
        for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
    pass_op=True,
)
def spaced(op: Overload, start: Any, end: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A plain tensor: a table of numbers between two values."""
    made: Tensor = op(plain(start), plain(end), *args, **kwargs)
    return made


# --- random numbers in place, or like a tensor -----------------------------------------------


def _float32_like(x: ScaledTensor) -> Tensor:
    """Return memory in float32 for any format: a seed then draws the same numbers as for a plain
    float32 tensor."""
    return torch.empty_like(x.qdata, dtype=torch.float32)


@rule(aten.bernoulli.p)
def bernoulli(x: ScaledTensor, p: float = 0.5, *, generator: Any = None) -> Raw:
    """r = sqrt(p). torch's decomposition of dropout draws its mask with this operator."""
    q = torch.empty(x.shape, device=x.device, dtype=elements(x).dtype)
    q.bernoulli_(p, generator=generator)
    rms = constant(math.sqrt(p), rms_of(x))
    return Raw(q, None, rms, settled=True, nonnegative=True)


@rule(aten.rand_like.default)
def rand_like(x: ScaledTensor, **options: Any) -> Tensor:
    """r = sqrt(1/3): uniform on [0, 1)."""
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
    q = torch.empty(x.shape, device=x.device, dtype=torch.float32).normal_(
        mean, std, generator=generator
    )
    return Raw(q, None, constant(math.hypot(mean, std), rms_of(x)))


@rule(aten.uniform.default)
def uniform(x: ScaledTensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Raw:
    """r = sqrt((a^2 + a b + b^2) / 3): uniform on [a, b)."""
    q = torch.empty(x.shape, device=x.device, dtype=torch.float32).uniform_(
        low, high, generator=generator
    )
    rms = math.sqrt((low * low + low * high + high * high) / 3)
    return Raw(q, None, constant(rms, rms_of(x)))


@rule(aten.exponential.default)
def exponential(x: ScaledTensor, lambd: float = 1.0, *, generator: Any = None) -> Raw:
    """r = sqrt(2) / lambda."""
    q = _float32_like(x).exponential_(lambd, generator=generator)
    return Raw(q, None, constant(2**0.5 / lambd, rms_of(x)), nonnegative=True)


@rule(aten.cauchy.default)
def cauchy(
    x: ScaledTensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> Raw:
    """r = sqrt(median^2 + sigma^2), since there is no second moment. For median = 0 this is the
    median of |x|."""
    q = _float32_like(x).cauchy_(median, sigma, generator=generator)
    return Raw(q, None, constant(math.hypot(median, sigma), rms_of(x)))


@rule(aten.geometric.default)
def geometric(x: ScaledTensor, p: float, *, generator: Any = None) -> Raw:
    """r = sqrt(2 - p) / p."""
    q = _float32_like(x).geometric_(p, generator=generator)
    return Raw(q, None, constant((2 - p) ** 0.5 / p, rms_of(x)), nonnegative=True)


@rule(aten.log_normal.default)
def log_normal(
    x: ScaledTensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> Raw:
    """r = exp(mean + std^2); std counts as 2 at most."""
    q = _float32_like(x).log_normal_(mean, std, generator=generator)
    rms = math.exp(mean + min(std * std, 4.0))
    return Raw(q, None, constant(rms, rms_of(x)), nonnegative=True)


@rule(aten.random.default, getattr(aten.random, "from"), aten.random.to, pass_op=True)
def random(op: Overload, x: ScaledTensor, *bounds: Any, generator: Any = None) -> Raw:
    """r = sqrt((a^2 + a b + b^2) / 3 + (b - a) / 6) for integers from a to b. By default b is
    2^24."""
    q = op(_float32_like(x), *bounds, generator=generator)
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, 2**24 + 1)
    return _uniform_integers(x, q, low, 2**24 + 1 if high is None else high)


@rule(
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randint_like.generator,
    aten.randint_like.low_generator_dtype,
)
def randint_like(x: ScaledTensor, *bounds: int, **options: Any) -> Any:
    """Same as `random`. The result is plain if its dtype is not a float dtype."""
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    dtype = options.pop("dtype", None) or x.dtype
    generator = options.pop("generator", None)
    integers = torch.randint(low, high, x.shape, generator=generator, device=x.device)
    if not dtype.is_floating_point:
        return integers.to(dtype)
    raw = _uniform_integers(x, integers.float(), low, high)
    return raw._replace(dtype=dtype if dtype.itemsize > 1 else torch.float32)


def _uniform_integers(x: ScaledTensor, q: Tensor, low: float, high: float) -> Raw:
    """Return integers from `low` to `high` - 1."""
    a, b = float(low), float(high - 1)
    rms = math.sqrt(max((a * a + a * b + b * b) / 3 + (b - a) / 6, 0.0))
    return Raw(q, None, constant(rms, rms_of(x)), nonnegative=low >= 0)


# --- random numbers with a tensor of parameters ----------------------------------------------


def _floats(x: Any) -> Any:
    """Return the value of a tensor in float32, also of a tensor of integers; a number as it is."""
    v = plain(x)
    return v.float() if isinstance(v, Tensor) else v


@rule(aten.bernoulli.Tensor)
def bernoulli_from(x: ScaledTensor, p: Any, *, generator: Any = None) -> Raw:
    """r = sqrt(0.93 rp) for probabilities of RMS rp. Their mean is sqrt(3)/2 rp if they are spread
    evenly, and rp if they are equal."""
    q = _float32_like(x).bernoulli_(plain(p).float(), generator=generator)
    return Raw(q, None, _of_probabilities(operand(p, x).rms), nonnegative=True)


@rule(aten.bernoulli.default)
def bernoulli_of(x: ScaledTensor, *, generator: Any = None) -> Raw:
    """Same as `bernoulli.Tensor`: the operand holds the probabilities."""
    q = torch.bernoulli(value(x).float(), generator=generator)
    return Raw(q, None, _of_probabilities(rms_of(x)), nonnegative=True)


def _of_probabilities(rms: Any) -> Any:
    return (rms.clamp_max(1.0) * 0.93).sqrt()


def _poisson_rms(rms: Any) -> Any:
    return (rms.square() + rms).sqrt()


@rule(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    pass_op=True,
)
def normal_of(op: Overload, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Raw:
    """r = sqrt(ra^2 + rb^2) for means of RMS ra and standard deviations of RMS rb."""
    like = first_scaled(mean, std)
    a, b = operand(mean, like), operand(std, like)
    q = op(_floats(mean), _floats(std), generator=generator)
    return Raw(q, None, (a.rms.square() + b.rms.square()).sqrt())


@rule(aten.poisson.default)
def poisson(x: ScaledTensor, generator: Any = None) -> Raw:
    """r = sqrt(rx^2 + rx): the mean and the variance are both x."""
    q = aten.poisson.default(value(x).float(), generator)
    return Raw(q, None, _poisson_rms(rms_of(x)), nonnegative=True)


@rule(aten.binomial.default)
def binomial(count: Any, prob: Any, generator: Any = None) -> Raw:
    """r = sqrt((n p)^2 + n p), where n is the RMS of the counts and p the RMS of the
    probabilities."""
    like = first_scaled(count, prob)
    mean = operand(count, like).rms * operand(prob, like).rms
    q = aten.binomial.default(_floats(count), _floats(prob), generator)
    return Raw(q, None, _poisson_rms(mean), nonnegative=True)


@rule(aten._standard_gamma.default)
def standard_gamma(x: ScaledTensor, generator: Any = None) -> Raw:
    """r = sqrt(rx^2 + rx): the mean and the variance are both x."""
    q = aten._standard_gamma.default(value(x).float(), generator)
    return Raw(q, None, _poisson_rms(rms_of(x)), nonnegative=True)


@rule(
    aten._sample_dirichlet.default,
    aten._standard_gamma_grad.default,
    aten._dirichlet_grad.default,
    pass_op=True,
)
def distributions(op: Overload, *args: Any) -> Raw:
    """Measured: the samples of a Dirichlet distribution, and the derivatives of gamma and Dirichlet
    samples by their parameters, have no closed second moment."""
    return measured(op(*map(_floats, args)))


# --- dropout ---------------------------------------------------------------------------------


@rule(aten.native_dropout.default)
def dropout(x: ScaledTensor, p: float, train: bool | None) -> tuple[Raw, Tensor]:
    """r / sqrt(1 - p) in training, and r in evaluation. The mask is plain."""
    q, mask = aten.native_dropout.default(elements(x), p, train)
    keep = 1 - p if train or train is None else 1.0
    rms = rms_of(x) / max(keep, 2.0**-20) ** 0.5
    return Raw(q, scale_of(x), rms, nonnegative=x.nonnegative), mask


@rule(aten.native_dropout_backward.default)
def dropout_backward(g: ScaledTensor, mask: Tensor, scale: float) -> Raw:
    """r_g / sqrt(1 - p)."""
    q = aten.native_dropout_backward.default(elements(g), mask, scale)
    return Raw(q, scale_of(g), rms_of(g) * scale**0.5)
