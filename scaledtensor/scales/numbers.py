"""float32 numbers of the host, which calculate like 0-dim float32 tensors."""

import math
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

__all__ = ["ONE", "Single", "exponential", "quotient", "rounded"]


def rounded(number: float) -> float:
    """A number rounded to float32; infinity if it is beyond the range of float32."""
    return c_float(number).value


class Single(float):
    """A float32 number that calculates like a 0-dim float32 tensor on a CPU.

    The other operand is a Single, or a Python number, which is rounded to float32 first. A tensor
    takes a Single as a Python number. Sums, products, quotients and roots are calculated in float64
    and rounded to float32; for float32 operands, rounding twice gives the same as rounding once. A
    root is the nearest float32 number, as in compiled code. Eager tensors get the root of MKL,
    which may be a neighbour of that number.
    """

    __slots__ = ()

    def __mul__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(float.__mul__(self, number)).value)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(float.__add__(self, number)).value)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(float.__sub__(self, number)).value)

    def __rsub__(self, other: Any) -> Any:
        return -(self - other)

    def __truediv__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(quotient(self, number)).value)

    def __rtruediv__(self, other: Any) -> Any:
        return self.reciprocal() * other  # torch divides a number by a tensor like this

    def __pow__(self, exponent: Any, modulus: None = None) -> Any:
        if exponent == 0.5:
            return self.sqrt()
        return self.square() if exponent == 2 else self.pow(exponent)

    def __neg__(self) -> "Single":
        return Single(float.__neg__(self))

    def __abs__(self) -> "Single":
        return Single(float.__abs__(self))

    abs = __abs__

    def sqrt(self) -> "Single":
        return Single(rounded(math.sqrt(self)) if self >= 0 else math.nan)

    def square(self) -> "Single":
        return Single(rounded(float.__mul__(self, self)))

    def exp(self) -> "Single":
        return Single(rounded(exponential(self)))

    def expm1(self) -> "Single":
        return Single(rounded(math.expm1(self) if self < 709 else exponential(self)))

    def log1p(self) -> "Single":
        return Single(rounded(math.log1p(self)) if self > -1 else math.nan)

    def asin(self) -> "Single":
        return Single(rounded(math.asin(self)) if -1 <= self <= 1 else math.nan)

    def log(self) -> "Single":
        if self > 0:
            return Single(rounded(math.log(self)))
        return Single(math.nan if self != self or self < 0 else -math.inf)

    def reciprocal(self) -> "Single":
        return Single(rounded(quotient(1.0, self)))

    def rsqrt(self) -> "Single":
        return Single(rounded(quotient(1.0, math.sqrt(self))) if self >= 0 else math.nan)

    def clamp_max(self, most: float) -> "Single":
        return Single(rounded(most)) if self > most else self

    def clamp_min(self, least: float) -> "Single":
        return Single(rounded(least)) if self < least else self

    def pow(self, exponent: float) -> "Single":
        return Single(self.tensor().pow(exponent).item())

    def tensor(self) -> Tensor:
        """This number as a 0-dim float32 tensor."""
        return torch.scalar_tensor(self, dtype=torch.float32)


ONE = Single(1.0)


def _number(x: Any) -> float | None:
    if type(x) is Single:
        return x
    return c_float(x).value if isinstance(x, (float, int)) else None


def exponential(x: float) -> float:
    """e^x in float64; infinity beyond its range."""
    return math.exp(x) if x < 709 else math.inf if x == x else x


def quotient(a: float, b: float) -> float:
    """a / b in float64; a divisor of 0 gives the result of IEEE 754."""
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return float.__truediv__(a, b)
