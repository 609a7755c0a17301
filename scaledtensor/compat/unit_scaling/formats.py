"""`unit_scaling.formats`: a format by its bits, and rounding to it in either direction."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from scaledtensor.errors import FormatError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format, custom, fake_quantize
from scaledtensor.formats.rounding import Rounding

__all__ = ["FPFormat", "format_to_tuple", "tuple_to_format"]

#: Those that have a name and hardware: laid out as their standards say.
_STANDARD = {(4, 3): E4M3FN, (5, 2): E5M2, (5, 10): FP16, (8, 7): BF16, (8, 23): FP32}
_ROUNDINGS: dict[str, Rounding] = {"stochastic": "stochastic", "nearest": "nearest_even"}


@dataclass(frozen=True)
class FPFormat:
    """A floating-point format of so many bits, and how numbers are rounded to it.

    Args:
        exponent_bits: 2 to 8.
        mantissa_bits: with exponent bits and sign at most 16 bits, and those of FP32.
        rounding: "stochastic" or "nearest" (ties to even).
        srbits: of "stochastic", how many random bits decide; 0 is all there are.

    Raises:
        FormatError: an unknown rounding, `srbits` for another than "stochastic", or bits that make
            no format.
        UnsupportedError: more than 16 bits.
    """

    exponent_bits: int
    mantissa_bits: int
    rounding: str = "stochastic"
    srbits: int = 0
    format: Format = field(init=False, repr=False, compare=False)
    """For every cast and transform of scaledtensor. OCP's E4M3FN and E5M2, FP16, BF16 and FP32 for
    their numbers of bits. Any other has the published library's values: no infinity, no NaN, a bias
    of 2^(exponent_bits - 1); of 8 exponent bits, which reach the end of float32, IEEE's layout."""

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            allowed = ", ".join(map(repr, _ROUNDINGS))
            raise FormatError(f"unknown rounding {self.rounding!r}; allowed are {allowed}")
        if self.srbits and self.rounding != "stochastic":
            raise FormatError(f"srbits is for rounding 'stochastic', got it with {self.rounding!r}")
        if not isinstance(self.exponent_bits, int) or self.exponent_bits < 2:
            raise FormatError(f"exponent_bits is 2 to 8, got {self.exponent_bits!r}")
        # Here and not in a property: Dynamo cannot trace the making of a format.
        object.__setattr__(self, "format", _format(self.exponent_bits, self.mantissa_bits))

    @property
    def bits(self) -> int:
        """How many bits a number takes, the sign's included."""
        return self.format.bits

    def __str__(self) -> str:
        suffix = {"stochastic": "SR", "nearest": "RN"}[self.rounding]
        return f"E{self.exponent_bits}M{self.mantissa_bits}-{suffix}"

    @property
    def max_absolute_value(self) -> float:
        """The largest number."""
        return self.format.max

    @property
    def min_absolute_normal(self) -> float:
        """The smallest positive number of full precision."""
        return self.format.min_normal

    @property
    def min_absolute_subnormal(self) -> float:
        """The smallest positive number."""
        return self.format.min_subnormal

    def quantise(self, x: Tensor) -> Tensor:
        """`x` rounded to this format, saturating, in its dtype and shape. No gradient flows.

        Raises:
            DTypeError: `x` is not of float64, float32, bfloat16 or float16.
        """
        random_bits = self.srbits or None
        rounding = _ROUNDINGS[self.rounding]
        return fake_quantize(x, self.format, rounding=rounding, random_bits=random_bits)

    def quantise_fwd(self, x: Tensor) -> Tensor:
        """`quantise`; the gradient passes as it is."""
        return cast(Tensor, _Quantised.apply(x, self, None))  # type: ignore[no-untyped-call]

    def quantise_bwd(self, x: Tensor) -> Tensor:
        """`x` as it is; its gradient is what `quantise` makes of it."""
        return cast(Tensor, _Quantised.apply(x, None, self))  # type: ignore[no-untyped-call]


def _format(exponent_bits: int, mantissa_bits: int) -> Format:
    standard = _STANDARD.get((exponent_bits, mantissa_bits))
    if standard is not None:
        return standard
    if exponent_bits == 8:
        return custom(8, mantissa_bits)
    bias = 2 ** (exponent_bits - 1)
    return custom(exponent_bits, mantissa_bits, bias, has_inf=False, has_nan=False)


class _Quantised(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: FPFormat | None, backward: FPFormat | None) -> Tensor:
        return x.view_as(x) if forward is None else forward.quantise(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.of_gradient = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.of_gradient is None else ctx.of_gradient.quantise_fwd(grad), None, None


def format_to_tuple(format: FPFormat) -> tuple[int, int]:
    """`(exponent_bits, mantissa_bits)`."""
    return format.exponent_bits, format.mantissa_bits


def tuple_to_format(t: tuple[int, int]) -> FPFormat:
    """An `FPFormat` of `(exponent_bits, mantissa_bits)`, rounding stochastically."""
    return FPFormat(*t)
