"""Constant scaling: one power of two for the whole run."""

from dataclasses import dataclass
from typing import ClassVar

from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import Cast
from scaledtensor.recipes.scales import EXPONENTS, Fixed, check_exponent

__all__ = ["Constant"]


@register
@dataclass(frozen=True)
class Constant(Recipe):
    """Operands are cast under a scale that was chosen beforehand.

    operand = cast(value / 2^exponent). FP8-CSCALE of arXiv 2309.17224, section 3, whose bias b is
    -exponent; what lies outside saturates or underflows. `benchmarks.recipes --sweep` prints the
    interval of exponents that serves.
    """

    name: ClassVar[str] = "constant"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    input_exponent: int = 0
    weight_exponent: int = -5
    """Weights are usually around 2^-5 (an RMS of 0.02 to 0.04)."""
    gradient_exponent: int = -16
    """Gradients of a mean over some thousands of tokens."""

    def __post_init__(self) -> None:
        for role in ("input", "weight", "gradient"):
            check_exponent(self, f"{role}_exponent", EXPONENTS)
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        scale = Fixed(getattr(self, f"{role}_exponent"))
        return Cast(self.of_role(role), scale, rounding=self.rounding_of(role))
