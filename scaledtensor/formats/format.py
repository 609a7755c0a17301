"""What a number format is: a frozen record of facts, from which every other number follows.

A code is read as sign | exponent field | mantissa field, most significant bit first. With field
value e, mantissa m, M mantissa bits and bias b its value is

    (-1)^sign * 2^(e - b) * (1 + m / 2^M)     for e > 0
    (-1)^sign * 2^(1 - b) * (m / 2^M)         for e = 0 (subnormals and zero)

except for the codes that `Specials` sets apart. An unsigned format (E8M0) is a bare exponent: it
has neither zero nor subnormals, so its field 0 is 2^-b.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf, ldexp, nan
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils._pytree import register_constant

from scaledtensor.errors import FormatError


class Specials(enum.Enum):
    """Which codes are not finite numbers."""

    IEEE = "ieee"
    """The top exponent field holds infinity (mantissa 0) and NaNs (any other mantissa)."""
    NAN_ONLY = "nan_only"
    """No infinity; NaN is the code with every exponent and mantissa bit set ("fn")."""
    FNUZ = "fnuz"
    """No infinity and no -0; the code that would be -0 is the only NaN."""
    NONE = "none"
    """Every code is a finite number."""


@dataclass(frozen=True, repr=False)
class Format:
    """A binary floating-point format of at most 32 bits.

    `storage_dtype` is the torch dtype of its codes: the dtype that torch has for the format, or
    uint8 with the code in the low bits. `ml_dtype` is the scalar type of its reference.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    storage_dtype: torch.dtype
    ml_dtype: type
    signed: bool = True

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.lower():
            raise FormatError(f"a format's name is non-empty and lower case, got {self.name!r}")
        if not 1 <= self.exponent_bits <= 8:
            raise FormatError(f"{self.name}: exponent_bits is 1 to 8, got {self.exponent_bits}")
        if not 0 <= self.mantissa_bits <= 23:
            raise FormatError(f"{self.name}: mantissa_bits is 0 to 23, got {self.mantissa_bits}")
        if not self.signed and (
            self.exponent_bits,
            self.mantissa_bits,
            self.bias,
            self.specials,
            self.storage_dtype,
        ) != (8, 0, 127, Specials.NAN_ONLY, torch.float8_e8m0fnu):
            raise FormatError(f"{self.name}: the only unsigned format is E8M0, the scale of MX")
        if self.signed and self.mantissa_bits == 0 and self.specials is Specials.IEEE:
            raise FormatError(f"{self.name}: IEEE specials need a mantissa bit, for NaN")
        # Every value must be a float32, the type that all arithmetic on codes runs in.
        if self.bias > 127 or self.max_code >> self.mantissa_bits > 127 + self.bias:
            raise FormatError(f"{self.name}: bias {self.bias} puts values outside float32")
        width = 8 * self.storage_dtype.itemsize
        if width != self.bits and not (self.storage_dtype is torch.uint8 and self.bits < width):
            raise FormatError(
                f"{self.name}: codes of {self.bits} bits do not fit storage {self.storage_dtype}"
            )
        # The first use of a cached property takes a lock, which torch.compile cannot trace.
        _ = self.max, self.min_normal, self.min_subnormal

    def __repr__(self) -> str:
        return self.name.upper()

    def __reduce__(self) -> tuple[Any, ...]:
        if FORMATS.get(self.name) is self:
            return get, (self.name,)  # so that identity survives pickle and deepcopy
        return Format, tuple(getattr(self, f.name) for f in fields(self))

    @cached_property
    def bits(self) -> int:
        """Bits in a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def num_codes(self) -> int:
        return 1 << self.bits

    @property
    def has_inf(self) -> bool:
        return self.specials is Specials.IEEE

    @property
    def has_nan(self) -> bool:
        return self.specials is not Specials.NONE

    @property
    def has_zero(self) -> bool:
        return self.signed

    @property
    def has_signed_zero(self) -> bool:
        return self.signed and self.specials is not Specials.FNUZ

    @property
    def max_code(self) -> int:
        """The code of `max`."""
        top = 1 << (self.exponent_bits + self.mantissa_bits)
        if self.specials is Specials.IEEE:
            return top - (1 << self.mantissa_bits) - 1
        return top - 2 if self.specials is Specials.NAN_ONLY else top - 1

    @property
    def nan_codes(self) -> tuple[range, ...]:
        """Every NaN code, as ranges because FP32 has 2^24 - 2 of them."""
        sign = 1 << (self.bits - 1)
        if self.specials is Specials.NONE:
            return ()
        if self.specials is Specials.FNUZ:
            return (range(sign, sign + 1),)
        if not self.signed:
            return (range(self.max_code + 1, self.num_codes),)
        first = self.max_code + (2 if self.has_inf else 1)
        return range(first, sign), range(sign + first, 2 * sign)

    def value(self, code: int) -> float:
        """The value of one code; bits above `bits` are ignored."""
        code %= self.num_codes
        if any(code in codes for codes in self.nan_codes):
            return nan
        sign_bit = self.num_codes >> int(self.signed)
        size = self._magnitude(code % sign_bit)
        return -size if code >= sign_bit else size

    def _magnitude(self, code: int) -> float:
        if code == self.max_code + 1 and self.has_inf:
            return inf
        field, mantissa = divmod(code, 1 << self.mantissa_bits)
        if field == 0 and self.signed:
            return mantissa * self.min_subnormal
        significand = (1 << self.mantissa_bits) + mantissa
        return ldexp(significand, field - self.bias - self.mantissa_bits)

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self._magnitude(self.max_code)

    @cached_property
    def min_normal(self) -> float:
        return ldexp(1.0, int(self.signed) - self.bias)

    @cached_property
    def min_subnormal(self) -> float:
        """The smallest positive value (`min_normal` where there are no subnormals)."""
        return ldexp(self.min_normal, -self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The step from 1 to the next value."""
        return ldexp(1.0, -self.mantissa_bits)


# To torch.compile a format is a constant, not a source of symbolic integers.
register_constant(Format)

# OCP 8-bit Floating Point Specification (OFP8) 1.0, table 1.
E4M3FN = Format("e4m3fn", 4, 3, 7, Specials.NAN_ONLY, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, 15, Specials.IEEE, torch.float8_e5m2, ml_dtypes.float8_e5m2)

# Noune et al., "8-bit numerical formats for deep neural networks" (arXiv 2206.02915).
E4M3FNUZ = Format(
    "e4m3fnuz", 4, 3, 8, Specials.FNUZ, torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz
)
E5M2FNUZ = Format(
    "e5m2fnuz", 5, 2, 16, Specials.FNUZ, torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz
)

# IEEE 754 conventions carried to 8 bits, as in LLVM's APFloat and ml_dtypes.
E4M3 = Format("e4m3", 4, 3, 7, Specials.IEEE, torch.uint8, ml_dtypes.float8_e4m3)
E3M4 = Format("e3m4", 3, 4, 3, Specials.IEEE, torch.uint8, ml_dtypes.float8_e3m4)

# Sun et al., "Hybrid 8-bit floating point training and inference" (NeurIPS 2019): bias 11.
E4M3B11FNUZ = Format(
    "e4m3b11fnuz", 4, 3, 11, Specials.FNUZ, torch.uint8, ml_dtypes.float8_e4m3b11fnuz
)

# OCP Microscaling Formats (MX) 1.0: the scale type (section 5.4.1), FP6 and FP4 (section 5.3).
E8M0FNU = Format(
    "e8m0fnu",
    8,
    0,
    127,
    Specials.NAN_ONLY,
    torch.float8_e8m0fnu,
    ml_dtypes.float8_e8m0fnu,
    signed=False,
)
E3M2FN = Format("e3m2fn", 3, 2, 3, Specials.NONE, torch.uint8, ml_dtypes.float6_e3m2fn)
E2M3FN = Format("e2m3fn", 2, 3, 1, Specials.NONE, torch.uint8, ml_dtypes.float6_e2m3fn)
E2M1FN = Format("e2m1fn", 2, 1, 1, Specials.NONE, torch.uint8, ml_dtypes.float4_e2m1fn)

# The upper half of binary32 (Kalamkar et al., arXiv 1905.12322).
BF16 = Format("bf16", 8, 7, 127, Specials.IEEE, torch.bfloat16, ml_dtypes.bfloat16)

# IEEE 754-2019, binary16 and binary32 (table 3.5).
FP16 = Format("fp16", 5, 10, 15, Specials.IEEE, torch.float16, np.float16)
FP32 = Format("fp32", 8, 23, 127, Specials.IEEE, torch.float32, np.float32)

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            E4M3FN,
            E5M2,
            E4M3FNUZ,
            E5M2FNUZ,
            E4M3,
            E3M4,
            E4M3B11FNUZ,
            E8M0FNU,
            E3M2FN,
            E2M3FN,
            E2M1FN,
            BF16,
            FP16,
            FP32,
        )
    }
)
_BY_DTYPE = {f.storage_dtype: f for f in FORMATS.values() if f.storage_dtype is not torch.uint8}


def get(name: "str | Format") -> Format:
    """The format of that name, in any case; a `Format` is returned as it is."""
    if isinstance(name, Format):
        return name
    fmt = FORMATS.get(name.lower()) if isinstance(name, str) else None
    if fmt is None:
        raise FormatError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    return fmt


def from_dtype(dtype: torch.dtype) -> Format:
    """The format whose codes torch stores in `dtype`."""
    fmt = _BY_DTYPE.get(dtype)
    if fmt is None:
        raise FormatError(
            f"no format is stored as {dtype}; those with a torch dtype of their own are"
            f" {', '.join(map(str, _BY_DTYPE))}"
        )
    return fmt
