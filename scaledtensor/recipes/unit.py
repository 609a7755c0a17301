"""Unit scaling: the scale follows from the shapes, so nothing is measured."""

from dataclasses import dataclass
from typing import ClassVar

from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import Cast

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
    """

    name: ClassVar[str] = "unit"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32

    def cast(self, role: str, gemm: str) -> Cast:
        return Cast(self.of_role(role), rounding=self.rounding_of(role))
