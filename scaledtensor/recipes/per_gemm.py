"""A recipe of one's own: the cast of each operand of each product."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import GEMMS, Cast, Gemm, Gemms, gemms_from

__all__ = ["PerGemm"]

_SIDES = {
    ("input", "forward"): "left",
    ("weight", "forward"): "right",
    ("gradient", "dgrad"): "left",
    ("weight", "dgrad"): "right",
    ("input", "wgrad"): "left",
    ("gradient", "wgrad"): "right",
}


@register
@dataclass(frozen=True)
class PerGemm(Recipe):
    """Six casts, one for each operand of the forward product, of dgrad and of wgrad.

        PerGemm(casts=Gemms(
            forward=Gemm(Cast("e4m3fn"), Cast("e2m3fn", Microscale(), (1, 32))),
            dgrad=Gemm(Cast("e5m2"), Cast("e4m3fn")),
            wgrad=Gemm(),  # in the activation format
        ))

    `forward`, `gradient` and `weight` of the other recipes follow from the casts and are not given.
    """

    name: ClassVar[str] = "per_gemm"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    casts: Gemms = Gemms(  # noqa: RUF009 - frozen
        Gemm(Cast(E4M3FN), Cast(E4M3FN)),
        Gemm(Cast(E5M2), Cast(E4M3FN)),
        Gemm(Cast(E4M3FN), Cast(E5M2)),
    )

    def __post_init__(self) -> None:
        if isinstance(self.casts, dict):
            object.__setattr__(self, "casts", _read(self.casts))
        if not isinstance(self.casts, Gemms):
            raise RecipeError(f"PerGemm.casts is a Gemms; got {self.casts!r}")
        if any(getattr(self.casts, name).fast for name in GEMMS):
            raise RecipeError("PerGemm chooses fast sums by fast_accumulation, not by Gemm.fast")
        super().__post_init__()

    @property
    def hadamard(self) -> tuple[str, ...]:
        return tuple(name for name in GEMMS if getattr(self.casts, name).hadamard)

    def cast(self, role: str, gemm: str) -> Cast | None:
        found: Cast | None = getattr(getattr(self.casts, gemm), _SIDES[role, gemm])
        return found


def _read(values: dict[str, Any]) -> Gemms:
    try:
        return gemms_from(values)
    except (KeyError, TypeError, AttributeError) as error:
        names = ", ".join(f.name for f in fields(Gemms))
        raise RecipeError(
            f"PerGemm.casts has {names}, as Gemms.spec writes them: {error}"
        ) from error
