"""Delayed scaling: the largest magnitudes of earlier steps."""

from dataclasses import dataclass
from typing import ClassVar

from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import Cast
from scaledtensor.recipes.scales import Amax, History, Scale, check_bool, check_exponent

__all__ = ["ROLES", "Delayed"]

ROLES = ("input", "weight", "gradient")


@register
@dataclass(frozen=True)
class Delayed(Recipe):
    """Operands get the scale that would have filled their format in the last steps.

    scale = amax 2^margin / max(format), amax the largest (or the latest) of the last `history`
    steps of that input, weight or gradient; in the first step, its own. Micikevicius et al., "FP8
    formats for deep learning" (arXiv 2209.05433), and TransformerEngine's DelayedScaling.

    A step ends with `optimizer.step()`. The amaxes are a buffer beside each weight, `<name>_amax`:
    they are saved, loaded and moved with the module. `scaledtensor.calibrate` fills them from data.
    Products without a parameter (attention written out) have none and are scaled by their own amax.
    """

    name: ClassVar[str] = "delayed"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    history: int = 16
    margin: int = 0
    """Binades left free above the amax of earlier steps."""
    choose: str = "max"
    """"max", the largest of the history; or "recent", the latest."""
    guard: bool = True
    """What would saturate is scaled by its own amax instead, so that growth from one step to the
    next loses nothing. False lets it saturate, as the published recipes do. Both are counted
    (`scaledtensor.histories.exceeded`); what saturated is warned of after the step."""
    current: tuple[str, ...] = ()
    """Operands, of "input", "weight" and "gradient", whose scale is their own amax in each step."""

    def __post_init__(self) -> None:
        check_exponent(self, "history", range(1, 1025))
        check_exponent(self, "margin", range(33))
        check_bool(self, "guard")
        if self.choose not in ("max", "recent"):
            raise RecipeError(f"Delayed.choose is 'max' or 'recent'; got {self.choose!r}")
        given = tuple(self.current) if isinstance(self.current, (list, tuple)) else None
        if given is None or not set(given) < set(ROLES):
            raise RecipeError(
                "Delayed.current has one or two of 'input', 'weight' and 'gradient', or none; got "
                f"{self.current!r}. With all of them it is Current()"
            )
        # In one order, so that equal recipes are equal; files have lists.
        object.__setattr__(self, "current", tuple(r for r in ROLES if r in given))
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        scale: Scale = History(self.history, self.margin, self.choose, self.guard)
        if role in self.current:
            scale = Amax(margin=self.margin)
        return Cast(self.of_role(role), scale, rounding=self.rounding_of(role))
