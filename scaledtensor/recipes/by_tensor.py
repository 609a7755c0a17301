"""Recipes with one scale per tensor (`Current` also has one per row), and `PerGemm`.

Unit       the scale that the rules propagated: nothing is measured
Current    the amax of each operand, measured before its cast
MinMSE     the power of two with the least squared error
Delayed    the amaxes of earlier steps
Constant   one power of two for the whole run
PerGemm    a cast of your own for each operand of each product
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E4M3FN, E5M2, FP32, Format
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import (
    EXPONENTS,
    GEMMS,
    Amax,
    Carried,
    Cast,
    Fixed,
    Gemm,
    Gemms,
    History,
    LeastError,
    Scale,
    check_bool,
    check_exponent,
    gemms_from,
)

__all__ = ["ROLES", "Constant", "Current", "Delayed", "MinMSE", "PerGemm", "Unit"]

ROLES = ("input", "weight", "gradient")


@register
@dataclass(frozen=True)
class Unit(Recipe):
    """Operands are cast under the power-of-two scale that the rules propagated.

    operand = cast(value / scale), scale = 2**round(log2(expected RMS)); no amax, no history.
    Formats by role after arXiv 2209.05433: E4M3FN forward, and E5M2 for gradients, since the
    gradients of a large vocabulary's logits span more than E4M3FN holds
    (`benchmarks.recipes --heads`). Closed-form scales after Blake et al., "Unit Scaling", ICML 2023
    (arXiv 2303.11257).

    The rules assume that the terms of a sum are independent. If terms are correlated (weights of
    one sign, averages, outlier channels), values can leave the format. `shifts` then correct the
    casts of that weight's products.
    """

    name: ClassVar[str] = "unit"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    guard: bool = True
    """Whether training looks for inputs and gradients that saturate or vanish in their cast, and
    corrects the `shifts` of that weight. It looks in its first step, in each step that rebalances
    parameters, and in the step after it lowered a shift. Eager code corrects the cast that it is
    about to make, compiled code the next casts."""
    shifts: tuple[int, int] = (0, 0)
    """Two numbers of binades: how much larger the inputs of this weight, and the gradients of its
    results, are than the rules expect. The guard and `scaledtensor.calibrate` set them for each
    weight."""

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
        for role in ("forward", "weight", "gradient"):
            fmt = getattr(self, role)
            if fmt is not None and fmt.exponent_bits == 0:
                raise RecipeError(
                    f"Unit.{role}={fmt.name}: the scales of this recipe give elements an RMS near "
                    f"1, and integers need a scale by the amax: take Current({role}={fmt.name!r})"
                )

    @property
    def uncorrected(self) -> "Unit":
        return self.with_shifts((0, 0))

    def with_shifts(self, shifts: tuple[int, int]) -> "Unit":
        """This recipe with other `shifts`. A second call returns the same object: each product of a
        corrected weight asks for its `uncorrected` recipe, and a new one takes 0.3 ms."""
        return self if self.shifts == shifts else _with_shifts(self, shifts)

    def cast(self, role: str, gemm: str) -> Cast:
        of = {"input": self.shifts[0], "gradient": self.shifts[1]}
        fmt = self.of_role(role)
        # A format of 16 bits has range enough without a shift.
        shift = of.get(role, 0) if fmt.bits <= 8 else 0
        return Cast(fmt, Carried(shift), rounding=self.rounding_of(role))


@lru_cache(maxsize=1024)
def _with_shifts(recipe: Unit, shifts: tuple[int, int]) -> Unit:
    return replace(recipe, shifts=shifts)


#: Granularity of `Current` -> its block.
GRANULARITIES = {"tensor": (0, 0), "row": (1, 0)}


@register
@dataclass(frozen=True)
class Current(Recipe):
    """Operands fill their format: the scale follows from the amax of the tensor, or of each row.

    scale = amax / max(format), or the least power of two that is not below it. The amax is
    measured, just before the cast, in float64, so that eager and compiled code agree. These are
    torchao's tensorwise and rowwise recipes. With `margin` and E5M2 gradients it is FP8-AMAX of
    "Training and inference of large language models using 8-bit floating point" (arXiv 2309.17224),
    which leaves 3 binades free for gradients.
    """

    name: ClassVar[str] = "current"

    forward: Format = E4M3FN
    gradient: Format = E4M3FN
    activation: Format = BF16
    master: Format = FP32
    granularity: str = "tensor"
    """"tensor"; or "row", a scale for each row of the left operand of a product and each column of
    the right one. With "row" each product casts its operands separately."""
    power_of_two: bool = False
    """Whether a scale is the least power of two that is not below amax / max(format)."""
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
    """Operands get the power of two under which their cast has the least squared error.

    scale = argmin over 2^k of sum((cast(x / 2^k) 2^k - x)^2). The largest k is the least under
    which nothing saturates; the smallest is `below` binades lower. This is the MSE variant of arXiv
    2309.17224, section 3.
    """

    name: ClassVar[str] = "min_mse"

    forward: Format = E4M3FN
    gradient: Format = E4M3FN
    activation: Format = BF16
    master: Format = FP32
    below: int = 8
    """Number of smaller powers of two that are tried."""

    def __post_init__(self) -> None:
        check_exponent(self, "below", range(1, 33))
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        scale = LeastError(self.below)
        return Cast(self.of_role(role), scale, rounding=self.rounding_of(role))


@register
@dataclass(frozen=True)
class Delayed(Recipe):
    """Operands get the scale that would have filled their format in the last steps.

    scale = amax 2^margin / max(format). amax is the largest (or the latest) of the last `history`
    steps of that input, weight or gradient; in the first step, its own amax. Micikevicius et al.,
    "FP8 formats for deep learning" (arXiv 2209.05433), and TransformerEngine's DelayedScaling.

    A step ends with `optimizer.step()`. The amaxes are a buffer beside each weight, `<name>_amax`.
    They are saved, loaded and moved with the module. `scaledtensor.calibrate` fills them from data.
    Products without a parameter (attention written out) have no history; the amax of each operand
    scales it.
    """

    name: ClassVar[str] = "delayed"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    history: int = 16
    """Number of steps in the history."""
    margin: int = 0
    """Binades left free above the amax of earlier steps."""
    choose: str = "max"
    """"max", the largest of the history; or "recent", the latest."""
    guard: bool = True
    """Whether an operand that would saturate is scaled by its own amax instead, so that a growth
    from one step to the next loses nothing. If False, it saturates, as in the published recipes.
    `scaledtensor.models.delayed.exceeded` counts both. After the step a warning names the operands
    that saturated."""
    current: tuple[str, ...] = ()
    """Operands, out of "input", "weight" and "gradient", that are scaled by their own amax in each
    step."""

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
        # One order for all makes equal recipes compare equal. Files have lists.
        object.__setattr__(self, "current", tuple(r for r in ROLES if r in given))
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        scale: Scale = History(self.history, self.margin, self.choose, self.guard)
        if role in self.current:
            scale = Amax(margin=self.margin)
        return Cast(self.of_role(role), scale, rounding=self.rounding_of(role))


@register
@dataclass(frozen=True)
class Constant(Recipe):
    """Operands are cast under a scale that is chosen once for the whole run.

    operand = cast(value / 2^exponent). This is FP8-CSCALE of arXiv 2309.17224, section 3, whose
    bias b is -exponent. Values outside of the range saturate or underflow. `benchmarks.recipes
    --sweep` prints the interval of exponents that work.
    """

    name: ClassVar[str] = "constant"

    forward: Format = E4M3FN
    gradient: Format = E5M2
    activation: Format = BF16
    master: Format = FP32
    input_exponent: int = 0
    """The scale of inputs is 2 to this power."""
    weight_exponent: int = -5
    """The exponent of weights. The default is for an RMS of 0.02 to 0.04, which is usual."""
    gradient_exponent: int = -16
    """The exponent of gradients. The default is for a mean over some thousands of tokens."""

    def __post_init__(self) -> None:
        for role in ("input", "weight", "gradient"):
            check_exponent(self, f"{role}_exponent", EXPONENTS)
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        scale = Fixed(getattr(self, f"{role}_exponent"))
        return Cast(self.of_role(role), scale, rounding=self.rounding_of(role))


#: (role, product) -> the side of the product that the operand is on.
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
    """A recipe of six casts, one for each operand of the forward product, dgrad and wgrad.

        PerGemm(casts=Gemms(
            forward=Gemm(Cast("e4m3fn"), Cast("e2m3fn", Microscale(), (1, 32))),
            dgrad=Gemm(Cast("e5m2"), Cast("e4m3fn")),
            wgrad=Gemm(),  # in the activation format
        ))

    Do not pass `forward`, `gradient` and `weight`: the casts decide these formats.
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
