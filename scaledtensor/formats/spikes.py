"""One magnitude that stands out of its group is held apart, so that the others keep their digits.

A group of `formats.expansion` has one M. A spike in one gradient would be the M of its group for as
long as an average remembers it, and the codes of all neighbours would be cut for it. So where the
largest magnitude is more than 2^6 times as large as the M that the rest would have, that M is a
power of two for the rest, and the largest magnitude is kept beside it. Nothing takes more memory:

    bit 31       set; the M of any other group is positive
    bits 30-23   the M of the rest, which are the exponent bits of that power of two
    bits 22-0    the largest magnitude without its sign: float32's 8 exponent bits and 15 digits

of the same float32. An element has that magnitude where its code is the largest of the format, with
its sign; the M of the rest leaves that code free. BF16 has the range of float32, and holds nothing
apart. Neither does a format of so few codes that none is left for the rest.
"""

import math

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats.bits import loop_of_its_own
from scaledtensor.formats.format import BF16, Format
from scaledtensor.formats.stochastic import random_words

__all__ = [
    "below_largest",
    "can_hold_apart",
    "holds_any",
    "joined",
    "parted",
    "power_of_two_from",
    "second_largest",
    "stands_out",
    "watched_from",
]

_RATIO = 2.0**6
_JUMP = 4.0  # of M, from one step to the next

_SIGN = -(1 << 31)
_EXPONENT = 0x7F800000
_DIGITS = 0x007FFFFF
_LOST = 8  # bits of a float32 that the magnitude held apart is kept without
_LARGEST = 0x7F7FFFFF >> _LOST


def can_hold_apart(fmt: Format) -> bool:
    return fmt is not BF16 and below_largest(fmt) > 2 * fmt.min_subnormal


def below_largest(fmt: Format) -> float:
    """A number that the codes below the largest one reach."""
    if fmt.is_integer:
        return fmt.max - fmt.min_subnormal
    fraction, exponent = math.frexp(fmt.max)
    step = math.ldexp(1.0, exponent - 1 - fmt.mantissa_bits)
    return fmt.max - (step if fraction > 0.5 else step / 2)


def second_largest(rows: Tensor, largest: Tensor) -> Tensor:
    """Of each row of a float32 matrix the largest magnitude below `largest`; 0 where none is."""
    size = rows.abs()
    return torch.where(size < loop_of_its_own(largest).unsqueeze(1), size, 0.0).amax(1)


def power_of_two_from(x: Tensor) -> Tensor:
    """The least power of two that is not below `x`, 2^-126 at least."""
    return ((x.view(torch.int32) + _DIGITS) & _EXPONENT).view(torch.float32)


def stands_out(largest: Tensor, second: Tensor, of_rest: Tensor) -> Tensor:
    """Where the largest magnitude is held apart. One number among zeros hurts nobody."""
    return (second > 0) & (largest > of_rest * _RATIO)


def joined(of_rest: Tensor, largest: Tensor, key: Tensor | None, start: int) -> Tensor:
    """Both numbers of a group in the bits of one float32; with `key`, rounded stochastically."""
    more: Tensor | int = 1 << (_LOST - 1)
    if key is not None:
        more = random_words(key, largest.shape, start, 32) & ((1 << _LOST) - 1)
    kept = ((largest.view(torch.int32) + more) >> _LOST).clamp(max=_LARGEST)
    return (of_rest.view(torch.int32) | kept | _SIGN).view(torch.float32)


def parted(amax: Tensor) -> tuple[Tensor, Tensor]:
    """What `joined` joined, and twice the M of any other group."""
    bits = amax.view(torch.int32)
    apart = bits < 0
    of_rest = torch.where(apart, (bits & _EXPONENT).view(torch.float32), amax)
    largest = ((bits & _DIGITS) << _LOST).view(torch.float32)
    # What a group has one of is made once, and not for each vector of it.
    return loop_of_its_own(of_rest), loop_of_its_own(torch.where(apart, largest, of_rest))


def holds_any(amax: Tensor) -> bool:
    """Whether a group may hold a magnitude apart; True where looking would take longer than that
    costs, or where there is nothing to look at yet."""
    compiling = torch.compiler.is_compiling() or _torch.is_tracing(amax)
    if compiling or _torch.is_transforming() or not amax.is_cpu:
        return True
    return bool((amax < 0).any())


def watched_from(amax: Tensor) -> Tensor:
    """The M of each group above which a magnitude may stand out after a step, told without a look
    at elements: it grew fast, or one stood out before, or all were zeros (then M = 1)."""
    return torch.where((amax < 0) | (amax == 1.0), 0.0, amax * _JUMP)
