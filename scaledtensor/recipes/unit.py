"""Unit scaling: the scale follows from the shapes, so nothing is measured."""

from dataclasses import dataclass, replace
from typing import ClassVar

from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import Cast
from scaledtensor.recipes.scales import EXPONENTS, Carried, check_bool

__all__ = ["Unit"]


@register
@dataclass(frozen=True)
class Unit(Recipe):
    """Operands are cast under the power-of-two scale that the rules propagated.

    operand = cast(value / scale), scale = 2**round(log2(expected RMS)); no amax, no history.
    Formats by role after arXiv 2209.05433: E4M3FN forward, and E5M2 for gradients, since the
    gradients of a large vocabulary's logits span more than E4M3FN holds
    (`benchmarks.recipes --heads`). Closed-form scales after Blake et al., "Unit Scaling", ICML 2023
    (arXiv 2303.11257).

    The rules take the terms of a sum as independent. Where terms are correlated (weights of one
    sign, averages, outlier channels), values leave the format, and a correction of the weight's
    casts makes up for it: `shifts`.
    """

    name: ClassVar[str] = "unit"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    guard: bool = True
    """Whether training looks, in its first step and at each step that rebalances parameters, for
    inputs and gradients that saturate or vanish in their cast, and corrects the `shifts` of that
    weight. Eager code corrects the cast that it is about to make, compiled code the next ones."""
    shifts: tuple[int, int] = (0, 0)
    """How many binades larger the inputs of this weight, and the gradients of its results, are than
    the rules expect. The guard and `scaledtensor.calibrate` set them for each weight."""

    def __post_init__(self) -> None:
        check_bool(self, "guard")
        given = tuple(self.shifts) if isinstance(self.shifts, (list, tuple)) else ()
        whole = all(type(n) is int and n in EXPONENTS for n in given)
        if len(given) != 2 or not whole:
            raise RecipeError(
                "Unit.shifts is two whole numbers, of inputs and gradients, from "
                f"{EXPONENTS[0]} to {EXPONENTS[-1]}; got {self.shifts!r}"
            )
        object.__setattr__(self, "shifts", given)  # files have lists
        super().__post_init__()

    @property
    def uncorrected(self) -> "Unit":
        return self if self.shifts == (0, 0) else replace(self, shifts=(0, 0))

    def cast(self, role: str, gemm: str) -> Cast:
        of = {"input": self.shifts[0], "gradient": self.shifts[1]}
        fmt = self.of_role(role)
        # A format of 16 bits holds what the rules do not expect.
        shift = of.get(role, 0) if fmt.bits <= 8 else 0
        return Cast(fmt, Carried(shift), rounding=self.rounding_of(role))
