"""`unit_scaling.formats`: formats by their numbers of bits, and rounding forward or backward."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from scaledtensor.errors import FormatError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format, custom, fake_quantize
from scaledtensor.formats.rounding import Rounding

__all__ = ["FPFormat", "format_to_tuple", "tuple_to_format"]

#: (exponent bits, mantissa bits) -> the standard format.
_STANDARD = {(4, 3): E4M3FN, (5, 2): E5M2, (5, 10): FP16, (8, 7): BF16, (8, 23): FP32}
_ROUNDINGS: dict[str, Rounding] = {"stochastic": "stochastic", "nearest": "nearest_even"}


@dataclass(frozen=True)
class FPFormat:
    """A floating-point format, given by its numbers of bits, and a rounding mode.

    Args:
        exponent_bits: 2 to 8.
        mantissa_bits: the format has at most 16 bits with exponent and sign, or is FP32.
        rounding: "stochastic" or "nearest" (ties to even).
        srbits: number of random bits for "stochastic"; 0 uses all bits.

    Raises:
        FormatError: the rounding is unknown, `srbits` is given without "stochastic", or no format
            has these numbers of bits.
        UnsupportedError: the format has more than 16 bits.
    """

    exponent_bits: int
    mantissa_bits: int
    rounding: str = "stochastic"
    srbits: int = 0
    format: Format = field(init=False, repr=False, compare=False)
    """The format for scaledtensor's casts and transforms. It is OCP's E4M3FN or E5M2, or FP16, BF16
    or FP32, if it has their numbers of bits. Other formats have the published library's values: no
    infinity, no NaN, and a bias of 2^(exponent_bits - 1). With 8 exponent bits, which reach the end
    of float32, a format has IEEE's layout."""

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            allowed = ", ".join(map(repr, _ROUNDINGS))
            raise FormatError(f"unknown rounding {self.rounding!r}; allowed are {allowed}")
        if self.srbits and self.rounding != "stochastic":
            raise FormatError(f"srbits is for rounding 'stochastic', got it with {self.rounding!r}")
        if not isinstance(self.exponent_bits, int) or self.exponent_bits < 2:
            raise FormatError(f"exponent_bits is 2 to 8, got {self.exponent_bits!r}")
        # A field and not a property: Dynamo cannot trace the construction of a format.
        object.__setattr__(self, "format", _format(self.exponent_bits, self.mantissa_bits))

    @property
    def bits(self) -> int:
        """The number of bits, with the sign."""
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
        """Return `x` rounded to this format, in its dtype and shape. Large values saturate. No
        gradient flows.

        Raises:
            DTypeError: the dtype of `x` is not float64, float32, bfloat16 or float16.
        """
        random_bits = self.srbits or None
        rounding = _ROUNDINGS[self.rounding]
        return fake_quantize(x, self.format, rounding=rounding, random_bits=random_bits)

    def quantise_fwd(self, x: Tensor) -> Tensor:
        """Return `quantise(x)`; the gradient passes unchanged."""
        return cast(Tensor, _Quantised.apply(x, self, None))  # type: ignore[no-untyped-call]

    def quantise_bwd(self, x: Tensor) -> Tensor:
        """Return `x` unchanged; its gradient is rounded by `quantise`."""
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
    """Return `(exponent_bits, mantissa_bits)`."""
    return format.exponent_bits, format.mantissa_bits


def tuple_to_format(t: tuple[int, int]) -> FPFormat:
    """Return an `FPFormat` with `(exponent_bits, mantissa_bits)` and stochastic rounding."""
    return FPFormat(*t)
