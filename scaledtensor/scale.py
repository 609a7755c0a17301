"""Powers of two made and tested by exponent bits.

`exp2` and `log2` round: on some machines `exp2(127.0)` is one ulp low, and `floor(log2(x))` is
wrong just below a power of two. Everything here is integer arithmetic on the bits of a float32, so
it is exact, does not synchronise with a device, and is the same in eager and in compiled code.
"""

import math
import struct
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from scaledtensor.errors import ScaleError

__all__ = [
    "MAX_SCALE",
    "MIN_SCALE",
    "checked_scale",
    "is_one",
    "is_power_of_two",
    "nearest_power_of_two",
    "power_of_two_near",
    "quadrature",
    "settle",
    "settle_in_place",
    "settle_product",
]

MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**127

_EXPONENT = 0x7F80_0000
_ONE_BINADE = 0x0080_0000
_SQRT2_MANTISSA = 0x0035_04F3
_ROOT_HALF = (2**23 + _SQRT2_MANTISSA) / 2**24
_MIN_BITS = 0x0080_0000  # 2**-126
_MAX_BITS = 0x7F00_0000  # 2**127
_ONE_BITS = 0x3F80_0000
_LEAST = _SQRT2_MANTISSA * 2.0**-149  # what still rounds up to 2**-126
#: An RMS this far from its scale leaves elements whose squares need not be float32 numbers.
_FAR = 2.0**24
_FLOAT32_MAX = torch.finfo(torch.float32).max


def nearest_power_of_two(rms: Tensor) -> Tensor:
    """The power of two nearest to `rms` in the log domain: 2**round(log2(rms)).

    `rms`: float32 of any shape, not negative. Adding one binade minus the mantissa of sqrt(2)
    carries into the exponent exactly when the mantissa is above sqrt(2). The result is a usable
    scale for every input: at most 2**127, also for infinity; and 1 for NaN, and for zero and what
    would be under 2**-126, so that whatever is written into a zero tensor later fits.
    """
    bits = rms.view(torch.int32) + (_ONE_BINADE - _SQRT2_MANTISSA)
    bits = bits.bitwise_and_(_EXPONENT).clamp_(max=_MAX_BITS)
    return bits.masked_fill_(bits == 0, _ONE_BITS).view(torch.float32)


def settle(rms: Tensor, *scales: Tensor) -> list[Tensor]:
    """The power of two next to `rms`, and what takes elements held under each of `scales` there.

    Returns [scale, scales[0] / scale, scales[1] / scale, ...]. The ratios are kept finite, since
    0 * inf would be NaN.
    """
    if rms.is_cpu and torch.compiler.is_compiling():
        # Opaque there: Inductor's C++ would inline this scalar arithmetic into every kernel that
        # reads the result and redo it for each vector of elements (measured: 3x on a gelu).
        out: list[Tensor] = torch.ops.scaledtensor.settle(rms, scales)
        return out
    if _numbers(rms) is not None:
        return _settle_numbers(rms, scales)
    scale = nearest_power_of_two(rms)
    return [scale, *((s / scale).clamp_max_(_FLOAT32_MAX) for s in scales)]


def settle_product(
    terms: float, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """For sums of `terms` independent products of two operands, each given as (scale, rms): the
    scale, the ratio of what the products are held under to it, and the RMS."""
    known = _numbers(*a, *b)
    if known is None:
        rms = a[1] * b[1] * terms**0.5
        scale, ratio = settle(rms, a[0] * b[0])
        return scale, ratio, rms
    scale_a, rms_a, scale_b, rms_b = known
    product = _single(_single(rms_a * rms_b) * _single(terms**0.5))
    power = power_of_two_near(product)
    ratio = _tensor_of(_ratio_of(_single(scale_a * scale_b), power))
    return _tensor_of(power), ratio, _tensor_of(product)


def settle_in_place(
    kept: Tensor, was: Tensor, rms: Tensor, held: Tensor, whole: bool
) -> tuple[Tensor, Tensor]:
    """As `settle`, for elements under `held` that go into a tensor of scale `kept` and RMS `was`.

    Its scale stays, unless it is known to be zero, or all of it (`whole`) is replaced by values of
    another order (`rsqrt_` of tiny squares): then it is the power of two next to `rms`.
    """
    known = _numbers(kept, was, rms, held)
    if known is not None:
        scale, before, r, given = known
        far = whole and r > 0 and not scale / _FAR <= r <= scale * _FAR
        if before and not far:
            return kept, _tensor_of(_ratio_of(given, scale))
        scale = power_of_two_near(r)
        return _tensor_of(scale), _tensor_of(_ratio_of(given, scale))
    free = was == 0
    if whole:
        value, unit = rms.double(), kept.double()
        free = free | ((value > 0) & ((value > unit * _FAR) | (value < unit / _FAR)))
    new = torch.where(free, nearest_power_of_two(rms), kept)
    return new, (held / new).clamp_max_(_FLOAT32_MAX)


def quadrature(*rms: Tensor) -> Tensor:
    """RMS of a sum of independent terms, sqrt(sum of squares), float32.

    In float64, so that no square leaves the range.
    """
    known = _numbers(*rms)
    if known is not None:
        return _tensor_of(math.sqrt(sum(r * r for r in known)))
    total = rms[0].double().square()
    for r in rms[1:]:
        total = total + r.double().square()
    return total.sqrt().float()


# On a CPU, outside tracing, a 0-dim tensor is a number that costs nothing to read, and Python's
# arithmetic on it, bit for bit that of the tensors, a tenth of the time of as many operators.


def _numbers(*tensors: Tensor) -> list[float] | None:
    """What 0-dim tensors hold, where reading them costs nothing; elsewhere None."""
    if torch.compiler.is_compiling():
        return None
    for t in tensors:
        if type(t) is not Tensor or not t.is_cpu or t.dim():
            return None
    return [t.item() for t in tensors]


def is_one(ratio: Tensor) -> bool:
    """Whether what elements are to be multiplied by is 1, where reading it costs nothing; elsewhere
    False."""
    known = _numbers(ratio)
    return known is not None and known[0] == 1


def _single(number: float) -> float:
    """A number rounded to float32."""
    try:
        return _SINGLE.unpack(_SINGLE.pack(number))[0]  # type: ignore[no-any-return]
    except OverflowError:  # what rounds past the largest
        return math.copysign(math.inf, number)


_SINGLE = struct.Struct("f")


def _tensor_of(number: float) -> Tensor:
    """A number as a 0-dim float32 tensor, rounded."""
    if number > _FLOAT32_MAX:  # an error for a float32, where a cast rounds to max or infinity
        return torch.scalar_tensor(number, dtype=torch.float64).float()
    return torch.scalar_tensor(number, dtype=torch.float32)


def power_of_two_near(rms: float) -> float:
    """`nearest_power_of_two` of a float32 number."""
    if not MIN_SCALE < rms < MAX_SCALE:
        if rms <= MIN_SCALE:
            return MIN_SCALE if rms >= _LEAST else 1.0
        return MAX_SCALE if rms == rms else 1.0
    significand, exponent = math.frexp(rms)
    return max(math.ldexp(1.0, exponent - (significand < _ROOT_HALF)), MIN_SCALE)


def _ratio_of(held: float, scale: float) -> float:
    """What takes elements held under one float32 scale to another, as `settle` gives it."""
    return min(held / scale, _FLOAT32_MAX)


def _settle_numbers(rms: Tensor, scales: Sequence[Tensor]) -> list[Tensor]:
    scale = power_of_two_near(rms.item())
    return [_tensor_of(scale), *(_tensor_of(_ratio_of(s.item(), scale)) for s in scales)]


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("settle(Tensor rms, Tensor[] scales) -> Tensor[]")  # type: ignore[no-untyped-call]
_LIBRARY.impl("settle", _settle_numbers, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::settle", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _settle_fake(rms: Tensor, scales: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(rms) for _ in range(len(scales) + 1)]


def is_power_of_two(x: Tensor) -> Tensor:
    """Bool tensor: which float32 elements are normal powers of two (no sign or mantissa bit)."""
    bits = x.view(torch.int32)
    return (bits & ~_EXPONENT == 0) & (bits >= _MIN_BITS) & (bits <= _MAX_BITS)


def checked_scale(scale: float | Tensor, device: torch.device, *, power_of_two: bool) -> Tensor:
    """`scale` as a 0-dim float32 tensor of its own on `device`.

    Raises:
        ScaleError: it is not one real number, is not positive and finite in float32, or is not a
            power of two although `power_of_two` asks for one.
    """
    number = _real(scale)
    if not MIN_SCALE <= number <= _FLOAT32_MAX:
        raise ScaleError(
            f"a scale is positive and finite, from 2**-126 to the largest float32; got {number}"
        )
    if power_of_two and math.frexp(number)[0] != 0.5:
        raise ScaleError(
            f"this scale must be an exact power of two; got {number}. Round it first "
            "(scaledtensor.scale.nearest_power_of_two), or make it by ScaledTensor(qdata, "
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
