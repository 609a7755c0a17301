"""Just-in-time scaling: the largest magnitude of each operand is measured before it is cast."""

from dataclasses import dataclass
from typing import ClassVar

from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import Cast
from scaledtensor.recipes.scales import Amax, LeastError, check_exponent

__all__ = ["Current", "MinMSE"]

GRANULARITIES = {"tensor": (0, 0), "row": (1, 0)}


@register
@dataclass(frozen=True)
class Current(Recipe):
    """Operands fill their format: one scale by the amax of the tensor, or of each row.

    scale = amax / max(format), or the least power of two that is not below it; amax in float64, so
    that eager and compiled code agree. torchao's tensorwise and rowwise recipes; with `margin` and
    E5M2 gradients FP8-AMAX of "Training and inference of large language models using 8-bit floating
    point" (arXiv 2309.17224), whose gradients leave 3 binades.
    """

    name: ClassVar[str] = "current"

    forward: Format = E4M3FN
    gradient: Format = E4M3FN
    activation: Format = BF16
    master: Format = FP32
    granularity: str = "tensor"
    """"tensor"; or "row", a scale for each row of the left operand of a product and each column of
    the right one, so that each product casts the operands for itself."""
    power_of_two: bool = False
    margin: int = 0
    """Binades left free above the amax of inputs and weights."""
    gradient_margin: int = 0
    """Binades left free above the amax of gradients."""

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise RecipeError(
                f"Current.granularity is one of {', '.join(map(repr, GRANULARITIES))}; got "
                f"{self.granularity!r}"
            )
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        margin = self.gradient_margin if role == "gradient" else self.margin
        block = GRANULARITIES[self.granularity]
        return Cast(
            self.of_role(role), Amax(self.power_of_two, margin), block, self.rounding_of(role)
        )


@register
@dataclass(frozen=True)
class MinMSE(Recipe):
    """Operands get the power of two under which their cast errs least.

    scale = argmin over 2^k of sum((cast(x / 2^k) 2^k - x)^2), k from where nothing saturates down
    `below` binades. The MSE variant of arXiv 2309.17224, section 3.
    """

    name: ClassVar[str] = "min_mse"

    forward: Format = E4M3FN
    gradient: Format = E4M3FN
    activation: Format = BF16
    master: Format = FP32
    below: int = 8

    def __post_init__(self) -> None:
        check_exponent(self, "below", range(1, 33))
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        scale = LeastError(self.below)
        return Cast(self.of_role(role), scale, rounding=self.rounding_of(role))
