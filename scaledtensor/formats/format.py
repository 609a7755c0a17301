"""`Format`, the frozen record of a number format, and the records of all built-in formats.

A code is read as sign | exponent field | mantissa field, most significant bit first. With exponent
field e, mantissa m, M mantissa bits and bias b, its value is

    (-1)^sign * 2^(e - b) * (1 + m / 2^M)     for e > 0
    (-1)^sign * 2^(1 - b) * (m / 2^M)         for e = 0 (subnormals and zero)

except for the codes that `Specials` lists. Two kinds of format read their codes differently. The
unsigned format (E8M0) is a bare exponent: it has neither zero nor subnormals, so its field 0 is
2^-b. A format without exponent bits is fixed point: an integer in two's complement that counts
steps of 2^(1 - b - M).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import frexp, inf, ldexp, nan
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_constant

from scaledtensor.errors import FormatError, UnsupportedError

__all__ = [
    "BF16",
    "E2M1FN",
    "E2M3FN",
    "E3M2FN",
    "E3M4",
    "E4M3",
    "E4M3B11FNUZ",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0FNU",
    "FORMATS",
    "FP16",
    "FP32",
    "INT4",
    "INT8",
    "MXINT8",
    "Format",
    "FormatLike",
    "Specials",
    "from_dtype",
    "get",
]


class _Integer:
    """An integer field of `Format` that is held as a string, so that torch.compile takes it as a
    constant.

    `register_constant` makes Dynamo guard on the equality of records. From torch 2.15 on, Dynamo
    nevertheless makes symbols of a record's integers if the record is an argument of the compiled
    function and two records were seen, or under `dynamic=True`. If the width of a mantissa is a
    symbol, Inductor writes code that does not compile. Every version of torch takes a string, and
    the integer that is parsed from it, as a constant.
    """

    def __init__(self, name: str) -> None:
        self.name, self.held = name, f"_{name}"

    def __get__(self, record: Any, owner: type) -> Any:
        return self if record is None else int(getattr(record, self.held))

    def __set__(self, record: Any, given: Any) -> None:
        if type(given) is not int:
            raise FormatError(f"{self.name} of a format is an int, got {given!r}")
        object.__setattr__(record, self.held, str(given))


class Specials(enum.Enum):
    """The codes that are not finite numbers, and how a sign is written."""

    IEEE = "ieee"
    """The top exponent field holds infinity (mantissa 0) and NaNs (any other mantissa)."""
    NAN_ONLY = "nan_only"
    """No infinity; NaN is the code with every exponent and mantissa bit set ("fn")."""
    FNUZ = "fnuz"
    """No infinity and no -0; the code that would be -0 is the only NaN."""
    P3109 = "p3109"
    """No -0; the code that would be -0 is the only NaN; infinity is the code with every exponent
    and mantissa bit set (IEEE P3109 working group, extended domain)."""
    NONE = "none"
    """Every code is a finite number."""
    INTEGER = "integer"
    """Every code is a finite number, in two's complement; no exponent field."""


_NO_MINUS_ZERO = (Specials.FNUZ, Specials.P3109)
_RAW_STORAGE = (torch.uint8, torch.int16)

_NAN_SENTENCES = {
    Specials.IEEE: "NaN: the top exponent field with a non-zero mantissa.",
    Specials.NAN_ONLY: "NaN: every exponent and mantissa bit set, nothing else.",
    Specials.FNUZ: "NaN: the code that would be -0, the only one.",
    Specials.P3109: "NaN: the code that would be -0, the only one.",
    Specials.NONE: "No NaN: a NaN becomes the zero of the opposite sign.",
    Specials.INTEGER: "No NaN: a NaN becomes 0.",
}


@dataclass(frozen=True, repr=False)
class Format:
    """A binary number format of at most 16 bits, or FP32.

    `storage_dtype` is the torch dtype of its codes: the dtype that torch has for the format, else
    uint8 (up to 8 bits) or int16 (up to 16 bits) with the code in the low bits. `ml_dtype` is the
    scalar type of the same format in ml_dtypes or NumPy, or None. Raises FormatError for facts that
    contradict each other. `custom` is the short way to a format of your own.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    storage_dtype: torch.dtype
    ml_dtype: type | None = None
    signed: bool = True

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.lower():
            raise FormatError(f"a format's name is non-empty and lower case, got {self.name!r}")
        integer = self.specials is Specials.INTEGER
        if integer and self.exponent_bits != 0:
            raise FormatError(
                f"{self.name}: an integer has no exponent_bits, got {self.exponent_bits}"
            )
        if not integer and not 1 <= self.exponent_bits <= 8:
            raise FormatError(f"{self.name}: exponent_bits is 1 to 8, got {self.exponent_bits}")
        if not int(integer) <= self.mantissa_bits <= 23:
            raise FormatError(
                f"{self.name}: mantissa_bits is {int(integer)} to 23, got {self.mantissa_bits}"
            )
        if not self.signed and (
            self.exponent_bits,
            self.mantissa_bits,
            self.bias,
            self.specials,
            self.storage_dtype,
        ) != (8, 0, 127, Specials.NAN_ONLY, torch.float8_e8m0fnu):
            raise FormatError(f"{self.name}: the only unsigned format is E8M0, the scale of MX")
        self._check_range()
        self._check_storage()

    def _check_range(self) -> None:
        if self.signed and self.mantissa_bits == 0 and self.specials is Specials.IEEE:
            raise FormatError(f"{self.name}: IEEE specials need a mantissa bit, for NaN")
        if self.max_code < 1:
            raise FormatError(
                f"{self.name}: no code is left for a positive number; take more bits, or fewer"
                f" special values than {self.specials.value}"
            )
        # Every value must be a float32, the type that arithmetic on codes runs in, and so must
        # 2^24 steps of the smallest, which round to whole steps.
        top = self.max_code >> self.mantissa_bits
        low, high = max(-102 - self.mantissa_bits, top - 127), 127
        if low > high:
            raise FormatError(
                f"{self.name}: {self.exponent_bits} exponent bits without a field for infinity"
                " reach beyond float32; take at most 7, or IEEE specials"
            )
        if not low <= self.bias <= high:
            raise FormatError(
                f"{self.name}: bias {self.bias} puts values outside float32; here it is"
                f" {low} to {high}"
            )

    def _check_storage(self) -> None:
        width = 8 * self.storage_dtype.itemsize
        spare = self.storage_dtype in _RAW_STORAGE and self.bits < width
        if width != self.bits and not spare:
            raise FormatError(
                f"{self.name}: codes of {self.bits} bits do not fit storage {self.storage_dtype}"
            )
        if self.bits > 16 and self.storage_dtype is not torch.float32:
            raise FormatError(f"{self.name}: codes are at most 16 bits, got {self.bits}")

    def __eq__(self, other: object) -> bool:
        if self is other:  # nearly always; each cast compares formats
            return True
        if type(other) is not Format:
            return NotImplemented
        return self.name == other.name and self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def __hash__(self) -> int:
        # The name is enough: two formats of one name are rarely in one process. Every cast looks
        # the format up in caches, so the hash has to be fast.
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name.upper()

    def __reduce__(self) -> tuple[Any, ...]:
        if FORMATS.get(self.name) is self:
            return get, (self.name,)  # so that identity survives pickle and deepcopy
        return Format, self._key()

    # These are plain properties, calculated from whole numbers. torch.compile folds them into
    # constants. It would make inputs of the graph out of stored floats, and cannot trace the lock
    # of a cached property.

    @property
    def bits(self) -> int:
        """Bits in a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def num_codes(self) -> int:
        return 1 << self.bits

    @property
    def is_integer(self) -> bool:
        return self.specials is Specials.INTEGER

    @property
    def has_inf(self) -> bool:
        return self.specials in (Specials.IEEE, Specials.P3109)

    @property
    def has_nan(self) -> bool:
        return self.specials not in (Specials.NONE, Specials.INTEGER)

    @property
    def has_zero(self) -> bool:
        return self.signed

    @property
    def has_signed_zero(self) -> bool:
        """Whether -0 has a code of its own."""
        return self.signed and not self.is_integer and self.specials not in _NO_MINUS_ZERO

    @property
    def has_subnormals(self) -> bool:
        return self.signed and not self.is_integer and self.mantissa_bits > 0

    @property
    def max_code(self) -> int:
        """The code of `max`."""
        top = 1 << (self.exponent_bits + self.mantissa_bits)
        if self.specials is Specials.IEEE:
            return top - (1 << self.mantissa_bits) - 1
        return top - 2 if self.specials in (Specials.NAN_ONLY, Specials.P3109) else top - 1

    @property
    def nan_codes(self) -> tuple[range, ...]:
        """Every NaN code, as ranges because FP32 has 2^24 - 2 of them."""
        sign = 1 << (self.bits - 1)
        if not self.has_nan:
            return ()
        if self.specials in _NO_MINUS_ZERO:
            return (range(sign, sign + 1),)
        if not self.signed:
            return (range(self.max_code + 1, self.num_codes),)
        first = self.max_code + (2 if self.has_inf else 1)
        return range(first, sign), range(sign + first, 2 * sign)

    @property
    def nan_code(self) -> int | None:
        """The code that a positive NaN becomes; None if the format has no NaN."""
        if not self.has_nan:
            return None
        if self.specials is Specials.IEEE:
            return self.max_code + 1 + (1 << (self.mantissa_bits - 1))  # the quiet NaN
        return self.nan_codes[0][-1]

    def value(self, code: int) -> float:
        """The value of one code; bits above `bits` are ignored."""
        code %= self.num_codes
        if any(code in codes for codes in self.nan_codes):
            return nan
        sign_bit = self.num_codes >> int(self.signed)
        if self.is_integer:
            return (code - self.num_codes * (code >= sign_bit)) * self.min_subnormal
        size = self._magnitude(code % sign_bit)
        return -size if code >= sign_bit else size

    def values(self) -> Tensor:
        """The values of all codes, in the order of the codes: float32 of shape [num_codes].

        Raises UnsupportedError for FP32, whose 2^32 codes are its values.
        """
        if self.bits > 16:
            raise UnsupportedError(
                f"{self.name} has {self.num_codes} codes; values() is for formats of at most"
                " 16 bits. value(code) gives one"
            )
        values = [self.value(code) for code in range(self.num_codes)]
        return torch.tensor(values, dtype=torch.float32)

    def _magnitude(self, code: int) -> float:
        if code == self.max_code + 1 and self.has_inf:
            return inf
        field, mantissa = divmod(code, 1 << self.mantissa_bits)
        if field == 0 and self.signed:
            return mantissa * self.min_subnormal
        significand = (1 << self.mantissa_bits) + mantissa
        return ldexp(significand, field - self.bias - self.mantissa_bits)

    @property
    def max(self) -> float:
        """The largest finite value."""
        field = self.max_code >> self.mantissa_bits  # torch.compile cannot trace divmod
        mantissa = self.max_code & ((1 << self.mantissa_bits) - 1)
        if field == 0 and self.signed:
            return mantissa * self.min_subnormal
        significand = float((1 << self.mantissa_bits) + mantissa)
        return significand * 2.0 ** (field - self.bias - self.mantissa_bits)

    @property
    def min(self) -> float:
        """The most negative finite value: -max, or one step below -max for integers. For E8M0, its
        smallest value."""
        if not self.signed:
            return self.min_normal
        return -self.max - (self.min_subnormal if self.is_integer else 0.0)

    @property
    def min_normal(self) -> float:
        """The smallest positive value with an implicit bit. For integers, which have no implicit
        bit, the same formula."""
        return 2.0 ** (int(self.signed) - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value (`min_normal` if there are no subnormals)."""
        return 2.0 ** (int(self.signed) - self.bias - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The step from 1 to the next value. For integers, the step between any two values."""
        return self.min_subnormal if self.is_integer else 2.0**-self.mantissa_bits

    @property
    def policy(self) -> str:
        """Sentences that say how NaN, infinity, overflow, -0 and small numbers are cast."""
        if not self.signed:
            return (
                "NaN: 0xff. No zero and no sign: zero and negative numbers become NaN. No infinity:"
                ' it becomes max ("saturate") or NaN ("ieee"). Positive numbers below min become'
                " min; ties go up."
            )
        over = "infinity" if self.has_inf else "NaN" if self.has_nan else "the largest number"
        infinite = "Infinity has a code." if self.has_inf else "No infinity."
        zero = "-0 has a code." if self.has_signed_zero else "No -0: it becomes 0."
        small = (
            "Fixed point: one step everywhere."
            if self.is_integer
            else f"Subnormals down to 2^{frexp(self.min_subnormal)[1] - 1}."
            if self.has_subnormals
            else f"No subnormals: below 2^{frexp(self.min_normal)[1] - 1} there is only zero."
        )
        written = ""
        if self.storage_dtype in (torch.bfloat16, torch.float16, torch.float32):
            written = " torch's casts choose the NaN that is written."
        elif self.nan_code is not None and self.specials not in _NO_MINUS_ZERO:
            written = f" A NaN becomes 0x{self.nan_code:02x} and keeps its sign."
        return (
            f"{_NAN_SENTENCES[self.specials]}{written} {infinite} Beyond the largest number:"
            f' that number ("saturate") or {over} ("ieee"). {zero} {small}'
        )


# torch.compile takes a format as a constant, not as a source of symbolic integers.
register_constant(Format)
for _name in ("exponent_bits", "mantissa_bits", "bias"):
    setattr(Format, _name, _Integer(_name))

# --- the records ---------------------------------------------------------------------------------

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

# Integers of OCP MX 1.0 (section 5.3.4: int8 elements count steps of 2^-6) and of plain int8, int4.
MXINT8 = Format("mxint8", 0, 7, 0, Specials.INTEGER, torch.uint8)
INT8 = Format("int8", 0, 7, -6, Specials.INTEGER, torch.uint8, np.int8)
INT4 = Format("int4", 0, 3, -2, Specials.INTEGER, torch.uint8, ml_dtypes.int4)

# The upper half of binary32 (Kalamkar et al., arXiv 1905.12322).
BF16 = Format("bf16", 8, 7, 127, Specials.IEEE, torch.bfloat16, ml_dtypes.bfloat16)

# IEEE 754-2019, binary16 and binary32 (table 3.5).
FP16 = Format("fp16", 5, 10, 15, Specials.IEEE, torch.float16, np.float16)
FP32 = Format("fp32", 8, 23, 127, Specials.IEEE, torch.float32, np.float32)

#: All built-in formats by name.
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
            MXINT8,
            INT8,
            INT4,
            BF16,
            FP16,
            FP32,
        )
    }
)

_BY_DTYPE = {f.storage_dtype: f for f in FORMATS.values() if f.storage_dtype not in _RAW_STORAGE}


FormatLike: TypeAlias = Format | str | torch.dtype
"""A format as every function of this library takes it: the record, its name in any case, or the
torch dtype of its codes."""


def get(fmt: FormatLike) -> Format:
    """The format of that name, or of that torch dtype; a `Format` is returned as it is.

    Raises:
        FormatError: the name or the dtype is unknown.
    """
    if isinstance(fmt, Format):
        return fmt
    if isinstance(fmt, torch.dtype):
        return from_dtype(fmt)
    found = FORMATS.get(fmt.lower()) if isinstance(fmt, str) else None
    if found is None:
        raise FormatError(f"unknown format {fmt!r}; known are {', '.join(FORMATS)}")
    return found


def from_dtype(dtype: torch.dtype) -> Format:
    """The format whose codes torch stores in `dtype`."""
    fmt = _BY_DTYPE.get(dtype)
    if fmt is None:
        raise FormatError(
            f"no format is stored as {dtype}; those with a torch dtype of their own are"
            f" {', '.join(map(str, _BY_DTYPE))}. The others go by their names:"
            f" {', '.join(f.name for f in FORMATS.values() if f.storage_dtype in _RAW_STORAGE)}"
        )
    return fmt
