"""Blocks, scales and packed bits in exact rational arithmetic, one element at a time.

This module shares only the names of the policies and the facts of a format with the library.
"""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import product

import numpy as np

from scaledtensor.formats import E4M3FN, PerAxis, PerTensor
from scaledtensor.testing.reference import ladder

TINY, HUGE = Fraction(2) ** -126, Fraction(float(np.finfo(np.float32).max))


def grid(granularity, shape):
    """Return the sizes of a block and the number of blocks, for each dimension."""
    if isinstance(granularity, PerTensor):
        sizes = [max(n, 1) for n in shape]
        return sizes, [1] * len(shape)
    if isinstance(granularity, PerAxis):
        dim = granularity.dim % len(shape)
        sizes = [1 if i == dim else max(n, 1) for i, n in enumerate(shape)]
        return sizes, [n if i == dim else 1 for i, n in enumerate(shape)]
    block = list(granularity.block)
    asked = list(zip(shape, ([1] * len(shape) + block)[len(block) :], strict=True))
    sizes = [max(n, 1) if size == -1 else size for n, size in asked]
    return sizes, [1 if size == -1 else math.ceil(n / size) for n, size in asked]


def members(granularity, shape):
    """Return the indices of the elements of each block, in the order of the scales."""
    sizes, counts = grid(granularity, shape)
    found = {at: [] for at in product(*map(range, counts))}
    for index in product(*map(range, shape)):
        found[tuple(i // size for i, size in zip(index, sizes, strict=True))].append(index)
    return found


def floor_log2(q: Fraction) -> int:
    k = q.numerator.bit_length() - q.denominator.bit_length()
    return k if Fraction(2) ** k <= q else k - 1


def ceil_log2(q: Fraction) -> int:
    k = floor_log2(q)
    return k if Fraction(2) ** k == q else k + 1


def exponent(amax: Fraction, fmt, mode: str, least: int) -> int:
    """OCP MX 1.0, section 6.3, and its three variants."""
    if amax == 0:
        return 0
    emax = floor_log2(Fraction(fmt.max))
    if mode == "even":
        fixed_point = fmt.max_code < 1 << fmt.mantissa_bits
        at_max = ladder(fmt)[1] if fixed_point else Fraction(2) ** (emax - fmt.mantissa_bits)
        step = at_max * Fraction(2) ** (floor_log2(amax) - emax)
        amax = round(amax / step) * step  # Python rounds a tie to even
    k = {
        "floor": lambda: floor_log2(amax) - emax,
        "even": lambda: floor_log2(amax) - emax,
        "ceil": lambda: ceil_log2(amax) - emax,
        "rceil": lambda: ceil_log2(amax / Fraction(fmt.max)),
    }[mode]()
    return min(max(k, least), 127)


def least_float32(q: Fraction) -> Fraction:
    """Return the least normal float32 that is not below q, or 1 for zero."""
    if q == 0:
        return Fraction(1)
    if not TINY < q < HUGE:
        return TINY if q <= TINY else HUGE
    step = Fraction(2) ** (floor_log2(q) - 23)
    return math.ceil(q / step) * step


def nearest(size: Fraction, steps) -> int:
    """Return the index of the number in `steps` that is nearest to `size`. Ties go to even; sizes
    saturate."""
    above = min(bisect_left(steps, size), len(steps) - 1)
    if above == 0 or steps[above] < size:
        return above
    low, high = size - steps[above - 1], steps[above] - size
    return above if high < low or (high == low and above % 2 == 0) else above - 1


def code(value: float, scale: Fraction, fmt) -> int:
    """Return the saturating code of a number that is not NaN."""
    negative, steps = math.copysign(1, value) < 0, ladder(fmt)
    if fmt.is_integer and negative:
        steps = (*steps, steps[-1] + steps[1])
    found = len(steps) - 1
    if math.isfinite(value):
        found = nearest(abs(Fraction(value)) / scale, steps)
    if fmt.is_integer:
        return -found % fmt.num_codes if negative else found
    return found | int(negative and (fmt.has_signed_zero or found > 0)) << (fmt.bits - 1)


def scales(blocks, fmt, scale_format, mode):
    """Return the scale of each list of numbers and the tensor's scale. The policy for NaN is left
    out."""
    amax = [
        max((abs(Fraction(v)) for v in values if math.isfinite(v)), default=Fraction(0))
        for values in blocks
    ]
    if scale_format == "fp32":
        return [least_float32(a / Fraction(fmt.max)) for a in amax], None
    if scale_format == "nvfp4":
        top = max(amax, default=Fraction(0))
        tensor = least_float32(top / Fraction(fmt.max * E4M3FN.max))
        steps = ladder(E4M3FN)
        ratio = [a / (tensor * Fraction(fmt.max)) if a else Fraction(1) for a in amax]
        return [steps[max(nearest(r, steps), 1)] for r in ratio], tensor
    least = -127 if scale_format == "e8m0" else -126
    return [Fraction(2) ** exponent(a, fmt, mode, least) for a in amax], None


def rounded(q: Fraction, precision: int, least: int, largest: Fraction) -> float:
    """Round q once to a binary type of this precision, least exponent of a step, and maximum."""
    if q == 0:
        return 0.0
    step = Fraction(2) ** max(floor_log2(abs(q)) - precision + 1, least)
    near = round(q / step) * step
    return float(near) if abs(near) <= largest else math.copysign(math.inf, q)


def packed(codes, bits: int) -> list[int]:
    """Return a row of codes as a little-endian stream of bits, in whole bytes."""
    stream = sum((c & ((1 << bits) - 1)) << bits * i for i, c in enumerate(codes))
    return list(stream.to_bytes(math.ceil(bits * len(codes) / 8), "little"))
