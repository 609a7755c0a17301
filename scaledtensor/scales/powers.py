"""Scales as powers of two: how a scale follows from an RMS, and the checks of a given scale.

`exp2` and `log2` round: on some machines `exp2(127.0)` is one ulp low, and `floor(log2(x))` is
wrong just below a power of two. So powers of two are made and tested by integer arithmetic on the
bits of a float32. It is exact, does not wait for a device, and is the same in eager and compiled
code.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import ScaleError
from scaledtensor.scales import formed as formed  # defines the operators of forms
from scaledtensor.scales.forms import Form
from scaledtensor.scales.singles import (
    ONE,
    Amount,
    Single,
    rounded,
    scaled_by,
    single_of,
    tensor_of,
)

__all__ = [
    "MAX_SCALE",
    "MIN_SCALE",
    "NEAREST",
    "checked_scale",
    "commutes",
    "is_one",
    "is_power_of_two",
    "larger",
    "nearest_power_of_two",
    "power_of_two_near",
    "product_of",
    "quadrature",
    "quotient_of",
    "settle",
    "settle_in_place",
    "settle_product",
    "times",
]

A = TypeVar("A", Tensor, Single)
"""An Amount. The Amounts of one call are all tensors, or all numbers."""

MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**127

_EXPONENT = 0x7F80_0000
_ONE_BINADE = 0x0080_0000
_SQRT2_MANTISSA = 0x0035_04F3
_ROOT_HALF = (2**23 + _SQRT2_MANTISSA) / 2**24
_MIN_BITS = 0x0080_0000  # 2**-126
_MAX_BITS = 0x7F00_0000  # 2**127
_ONE_BITS = 0x3F80_0000
_LEAST = _SQRT2_MANTISSA * 2.0**-149  # the least number that rounds up to 2**-126
#: If an RMS is this far from its scale, the squares of elements may leave the range of float32.
_FAR = 2.0**24
_FLOAT32_MAX = torch.finfo(torch.float32).max
#: The four numbers of `nearest_power_of_two`: the addend, the mask, the largest bits, the bits of
#: 1.
NEAREST = (_ONE_BINADE - _SQRT2_MANTISSA, _EXPONENT, _MAX_BITS, _ONE_BITS)


# --- powers of two ------------------------------------------------------------------------------


def nearest_power_of_two(rms: Tensor) -> Tensor:
    """The power of two nearest to `rms` in the log domain: 2**round(log2(rms)).

    `rms` is float32 of any shape, not negative. Adding one binade minus the mantissa of sqrt(2)
    carries into the exponent exactly if the mantissa is above sqrt(2). The result is a usable scale
    for every input: at most 2**127, also for infinity. It is 1 for NaN, for zero, and for results
    below 2**-126, so that values that are later written into a tensor of zeros fit.
    """
    carry, exponent, most, one = NEAREST
    bits = rms.view(torch.int32) + carry
    bits = bits.bitwise_and_(exponent).clamp_(max=most)
    return bits.masked_fill_(bits == 0, one).view(torch.float32)


def power_of_two_near(rms: float) -> float:
    """`nearest_power_of_two` of a float32 number."""
    return float(_power_near(rms))


#: The usable scales, in order. Eager code finds thousands of scales and ratios in a step. New
#: objects would take more time, and the garbage collector would visit each.
_POWERS = tuple(Single(2.0**exponent) for exponent in range(-126, 128))
_POWER_OF = {float(power): power for power in _POWERS}


def _power_near(rms: float) -> Single:
    if not MIN_SCALE < rms < MAX_SCALE:
        if rms <= MIN_SCALE:
            return _POWERS[0] if rms >= _LEAST else ONE
        return _POWERS[-1] if rms == rms else ONE
    significand, exponent = math.frexp(rms)
    return _POWERS[exponent + (126 if significand >= _ROOT_HALF or exponent == -126 else 125)]


def is_power_of_two(x: Tensor) -> Tensor:
    """A bool tensor: True for float32 elements that are normal powers of two (no sign or mantissa
    bit)."""
    bits = x.view(torch.int32)
    return (bits & ~_EXPONENT == 0) & (bits >= _MIN_BITS) & (bits <= _MAX_BITS)


# --- the scale of a result ----------------------------------------------------------------------


def settle(rms: A, *scales: A) -> Sequence[A]:
    """The power of two nearest to `rms`, and the ratio of each of `scales` to it.

    Elements under `scales[i]`, times its ratio, are the same values under the new scale. Returns
    [scale, scales[0] / scale, scales[1] / scale, ...]. The ratios stay finite, since 0 * inf would
    be NaN. `product_of` and `quotient_of` make the products and quotients of scales to pass here.
    """
    if type(rms) is Single:
        power: Any = _power_near(rms)
        found: list[Any] = [power]
        for held in scales:
            if type(held) is not Single:
                break
            found.append(_ratio_of(held, power))
        else:
            return found
        if not torch.compiler.is_compiling() and not _is_traced(*scales):
            return [power, *(_ratio_of_any(held, power) for held in scales)]
    if torch.compiler.is_compiling() or _is_traced(rms, *scales):
        return _settle_forms(rms, scales)
    return _settle_tensors(tensor_of(rms), tuple(map(_held, scales)))  # type: ignore[return-value]


def _settle_forms(rms: Any, scales: Sequence[Any]) -> list[Any]:
    known = isinstance(rms, Single)
    power: Any = _power_near(rms) if known else Form("power", rms)

    def ratio(held: Any) -> Any:
        # A form needs a tensor of the graph as a leaf, and two numbers have none.
        numbers = known and isinstance(held, Single)
        return _ratio_of(held, power) if numbers else Form("ratio", held, power)

    return [power, *map(ratio, scales)]


def _are_numbers(*amounts: Any) -> bool:
    for x in amounts:  # noqa: SIM110 - a generator takes three times as long
        if type(x) is not Single:
            return False
    return True


def _settle_tensors(tensor: Tensor, held: tuple[Tensor, ...]) -> list[Tensor]:
    if type(tensor) is Tensor and backend_of(tensor).host and not tensor.dim():
        numbers = settle(Single(tensor.item()), *(Single(s.item()) for s in held))
        return [number.tensor() for number in numbers]
    power = nearest_power_of_two(tensor)
    return [power, *(_ratio_of_tensor(s, power) for s in held)]


def _is_traced(*amounts: Any) -> bool:
    """Whether one of them is a closed form, as in a graph that is being traced."""
    return any(isinstance(x, Form) for x in amounts)


def product_of(a: Any, b: Any) -> Any:
    """The scale of products of elements under two scales. Only `settle` takes it.

    The product is exact, in float64. The product of two scales near 2^127 overflows float32,
    although the values of the elements may be ordinary numbers.
    """
    if type(a) is Single and type(b) is Single:
        product = float.__mul__(a, b)
        return _POWER_OF.get(product) or Single(product)
    if _is_traced(a, b):
        return Form("product", a, b)
    return tensor_of(a).double() * tensor_of(b)


def quotient_of(a: Any, b: Any) -> Any:
    """The scale of quotients of elements under two scales; see `product_of`."""
    if type(a) is Single and type(b) is Single:
        return Single(float.__truediv__(a, b))
    if _is_traced(a, b):
        return Form("quotient", a, b)
    return tensor_of(a).double() / tensor_of(b)


def _held(scale: Any) -> Tensor:
    if isinstance(scale, (Tensor, Form)):
        return tensor_of(scale)
    return torch.scalar_tensor(float(scale), dtype=torch.float64)


def settle_product(terms: float, a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    """The scale and RMS of sums of `terms` independent products of two operands, each given as
    (scale, rms). Returns (scale, ratio of the products' scale to it, RMS)."""
    rms = a[1] * b[1] * terms**0.5
    held = product_of(a[0], b[0])
    if type(rms) is type(held) is Single:  # `settle` without its lists, for eager products
        power = _power_near(rms)
        return power, _ratio_of(held, power), rms
    scale, ratio = settle(rms, held)
    return scale, ratio, rms


def settle_sum(a: tuple[Any, Any], b: tuple[Any, Any], alpha: float) -> tuple[Any, Any, Any, Any]:
    """The scale and RMS of `a + alpha * b` for independent terms, each given as (scale, rms).
    Returns (scale, ratio of a's scale to it, ratio of b's scale to it, RMS)."""
    rms = quadrature(a[1], b[1] if abs(alpha) == 1 else b[1] * abs(alpha))
    scale, first, second = settle(rms, a[0], b[0])
    return scale, first, second, rms


def settle_in_place(
    kept: Any, was: Any, rms: Any, held: Any, whole: bool, far: float = _FAR
) -> tuple[Any, Any]:
    """`settle` for elements under `held` that are written into a tensor of scale `kept` and RMS
    `was`.

    The tensor keeps its scale, except in two cases: it is known to be zero, or all of it (`whole`)
    is replaced by values of another order of magnitude (`rsqrt_` of tiny squares), by more than the
    factor `far`. Then its scale becomes the power of two nearest to `rms`. Returns (scale, held /
    scale); a scale that stays is the object `kept`.
    """
    kept, was, rms, held = single_of(kept), single_of(was), single_of(rms), single_of(held)
    if _are_numbers(kept, was, rms, held):
        moves = whole and rms > 0 and not float(kept) / far <= rms <= float(kept) * far
        scale = _power_near(rms) if not was or moves else kept
        return scale, _ratio_of(held, scale)
    if type(kept) is Single and not torch.compiler.is_compiling() and not _is_traced(was, rms):
        return kept, _ratio_of_any(held, kept)  # the others cannot be read now
    held = _held(held)
    kept, was, rms = map(tensor_of, (kept, was, rms))
    free = was == 0
    if whole:
        value, unit = rms.double(), kept.double()
        free = free | ((value > 0) & ((value > unit * far) | (value < unit / far)))
    new = torch.where(free, nearest_power_of_two(rms), kept)
    return new, _ratio_of_tensor(held, new)


def _ratio_of(held: float, scale: float) -> Single:
    """The float32 factor that takes elements from one scale to another. It is finite."""
    ratio = float.__truediv__(held, scale)
    return _POWER_OF.get(ratio) or Single(rounded(min(ratio, _FLOAT32_MAX)))


def _ratio_of_tensor(held: Tensor, scale: Any) -> Tensor:
    """`_ratio_of` a scale that is a tensor, which is not read."""
    ratio: Tensor = (held / scale).clamp_max_(_FLOAT32_MAX).float()
    return ratio


def _ratio_of_any(held: Any, scale: Single) -> Any:
    """`_ratio_of` a scale that is a number, or a tensor. A tensor of a device is not read."""
    if isinstance(held, Tensor) and backend_of(held).host:
        held = single_of(held)
    return (_ratio_of_tensor if isinstance(held, Tensor) else _ratio_of)(held, scale)


# --- numbers of rules: ratios and RMS -----------------------------------------------------------


def is_one(ratio: Amount) -> bool:
    """Whether a ratio of scales is 1. False if reading the ratio would cost time."""
    if type(ratio) is Single:
        return float.__eq__(ratio, 1.0)
    if isinstance(ratio, Tensor) and not backend_of(ratio).host:
        return False
    known = single_of(ratio)
    return isinstance(known, Single) and float(known) == 1


#: Products of 8-bit elements and their sums stay float32 and bfloat16 numbers under every power of
#: two from here to the inverse.
_TINY = 2.0**-60


def commutes(ratio: Any) -> bool:
    """Whether the bits of a product of 8-bit elements do not depend on the place where a ratio is
    applied: to an operand, to the sums, or to the rounded result."""
    return type(ratio) is Single and _TINY < ratio < 1 / _TINY and math.frexp(ratio)[0] == 0.5


def times(q: Tensor, ratio: Amount) -> Tensor:
    """Elements times a ratio of scales: `q` itself if `is_one(ratio)`."""
    return q if is_one(ratio) else scaled_by(q, ratio)


def quadrature(*rms: Any) -> Any:
    """RMS of a sum of independent terms, sqrt(sum of squares), float32.

    The squares are float64, so that none leaves the range.
    """
    squares = 0.0
    for r in rms:
        if type(r) is not Single:
            break
        squares += float.__mul__(r, r)
    else:
        return Single(rounded(math.sqrt(squares)))
    if _is_traced(*rms):
        return Form("quadrature", *rms)
    total = tensor_of(rms[0]).double().square()
    for r in rms[1:]:
        total = total + tensor_of(r).double().square()
    return total.sqrt().float()


def larger(a: Amount, b: Amount) -> Any:
    """The larger of two RMS; NaN if one of them is NaN."""
    a, b = single_of(a), single_of(b)
    if isinstance(a, Single) and isinstance(b, Single):
        return b if b > a or b != b else a
    if _is_traced(a, b):
        return Form("most", a, b)
    return torch.maximum(tensor_of(a), tensor_of(b))


# --- checks -------------------------------------------------------------------------------------


def checked_scale(scale: float | Tensor, device: torch.device, *, power_of_two: bool) -> Tensor:
    """`scale` as a new 0-dim float32 tensor on `device`.

    Raises:
        ScaleError: `scale` is not one real number, is not positive and finite in float32, or is not
            a power of two although `power_of_two` requires one.
    """
    number = _real(scale)
    if not MIN_SCALE <= number <= _FLOAT32_MAX:
        raise ScaleError(
            f"a scale is positive and finite, from 2**-126 to the largest float32; got {number}"
        )
    if power_of_two and math.frexp(number)[0] != 0.5:
        raise ScaleError(
            f"this scale must be an exact power of two; got {number}. Round it first "
            "(scaledtensor.scales.powers.nearest_power_of_two), or make it by ScaledTensor(qdata, "
            "scale, format, power_of_two=False)"
        )
    return torch.full((), number, dtype=torch.float32, device=device)


def _real(scale: object) -> float:
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool or scale.is_meta:
            raise ScaleError(
                "a per-tensor scale is one real number; got a tensor of shape "
                f"{tuple(scale.shape)}, {scale.dtype}, on {scale.device}"
            )
        return float(scale.detach())
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise ScaleError(f"a per-tensor scale is one real number; got {scale!r}")
    return float(scale)
