"""How the operands of the three products of a layer are cast.

    forward    y  = input   @ weight       contracts the features that go in
    dgrad      dx = dy      @ weight^T     contracts the features that come out
    wgrad      dw = input^T @ dy           contracts the tokens

What shares a scale is said relative to the product, as (across, along): `along` elements in the
direction that the product sums over, by `across` in the other; 0 is all of them.

    (0, 0)       the tensor
    (1, 0)       a row of the left operand, a column of the right one
    (1, 32)      32 elements that are summed, as in OCP MX
    (128, 128)   a square
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, cast

from scaledtensor.errors import FormatError, RecipeError
from scaledtensor.formats import E5M2, Format
from scaledtensor.formats import get as get_format
from scaledtensor.recipes.scales import KINDS, Carried, Fixed, History, LeastError, Scale, TwoLevel

__all__ = ["GEMMS", "HADAMARD", "Cast", "Gemm", "Gemms"]

GEMMS = ("forward", "dgrad", "wgrad")

ROUNDINGS = ("nearest_even", "stochastic")

#: The elements that a random Hadamard transform mixes: those that share a scale in NVFP4.
HADAMARD = 16

#: Scales that are one number for a tensor.
_WHOLE = (Carried, Fixed, History, LeastError)


@dataclass(frozen=True)
class Cast:
    """The cast of one operand of one product.

    Raises:
        RecipeError: the fields contradict each other.
    """

    format: Format
    scale: Scale = Carried()  # noqa: RUF009 - frozen
    block: tuple[int, int] = (0, 0)
    """(across, along): what shares a scale."""
    rounding: str = "nearest_even"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "format", get_format(self.format))
        except FormatError as error:
            raise RecipeError(f"Cast.format: {error}") from error
        if not self.format.has_zero:
            raise RecipeError(
                f"{self.format.name} is a format of scales; elements need a sign and a zero"
            )
        if type(self.scale) not in KINDS.values():
            raise RecipeError(
                f"Cast.scale is one of {', '.join(k.__name__ for k in KINDS.values())}; got "
                f"{self.scale!r}"
            )
        if self.rounding not in ROUNDINGS:
            raise RecipeError(
                f"a rounding is one of {', '.join(map(repr, ROUNDINGS))}; got {self.rounding!r}"
            )
        if isinstance(self.block, list):
            object.__setattr__(self, "block", tuple(self.block))
        if (
            not isinstance(self.block, tuple)
            or len(self.block) != 2
            or not all(
                isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in self.block
            )
        ):
            raise RecipeError(
                "a block is (across, along), two sizes of which 0 is all, as (1, 32); got "
                f"{self.block!r}"
            )
        if isinstance(self.scale, _WHOLE) and self.block != (0, 0):
            raise RecipeError(
                f"{type(self.scale).__name__} is one scale for the tensor, and blocks of "
                f"{self.block} have many: take Amax or Microscale"
            )
        if isinstance(self.scale, TwoLevel) and self.format.bits > 8:
            raise RecipeError(
                f"two-level scales are for elements of 8 bits or fewer, not {self.format.name}"
            )
        if self.format.bits > 8 and not isinstance(self.scale, Carried):
            raise RecipeError(
                f"{self.format.name} is cast under the scale that it carries: "
                f"{type(self.scale).__name__} is for formats of 8 bits or fewer"
            )
        _keep_spec(self)

    @property
    def whole(self) -> bool:
        """Whether the tensor has one scale and torch a dtype for its elements: such a cast serves
        whatever product the tensor goes into, and all three of a layer."""
        storable = self.format.storage_dtype.is_floating_point
        return self.block == (0, 0) and storable and not isinstance(self.scale, TwoLevel)

    @property
    def spec(self) -> str:
        """This cast as a line of JSON, which is what an operator of torch can be given."""
        return cast(str, self._spec)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        kind = next(k for k, v in KINDS.items() if v is type(self.scale))
        across, along = ("all" if n == 0 else str(n) for n in self.block)
        shared = "" if self.block == (0, 0) else f" {across}x{along}"
        rounded = "" if self.rounding == ROUNDINGS[0] else f" {self.rounding}"
        return f"{self.format.name} {kind}{shared}{rounded}"


@dataclass(frozen=True)
class Gemm:
    """One product: the casts of its operands. None leaves one in the activation format."""

    left: Cast | None = None
    right: Cast | None = None
    hadamard: bool = False
    """Both operands are first mixed along what is summed, 16 at a time, by a Hadamard matrix with
    random signs, which their product undoes (Ashkboos et al., arXiv 2404.00456; arXiv 2509.25149):
    an outlier's size is shared out among 16 elements."""
    fast: bool = False
    """FP8 units that can add in fewer bits than float32 do so: as `Recipe.fast_accumulation` says,
    which sets it."""

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if side is not None and not isinstance(side, Cast):
                raise RecipeError(f"an operand has a Cast, or None; got {side!r}")

    def __str__(self) -> str:
        sides = (str(side) if side is not None else "-" for side in (self.left, self.right))
        return " @ ".join(sides) + (" hadamard" if self.hadamard else "")


@dataclass(frozen=True)
class Gemms:
    """The three products of a layer: (input, weight), (gradient, weight), (input, gradient)."""

    forward: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()

    def __post_init__(self) -> None:
        for name in GEMMS:
            if not isinstance(getattr(self, name), Gemm):
                raise RecipeError(f"{name} is a Gemm; got {getattr(self, name)!r}")
        _keep_spec(self)
        object.__setattr__(self, "_once", self._shared())
        sides = (getattr(getattr(self, n), s) for n in GEMMS for s in ("left", "right"))
        delayed = any(c is not None and isinstance(c.scale, History) for c in sides)
        if delayed and self._shared() is None:
            raise RecipeError(
                "scales by history are one for a tensor and the same for all its products, in a "
                "format that torch has a dtype for; where a product differs, take Amax"
            )

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {getattr(self, name)}" for name in GEMMS) + "}"

    @property
    def once(self) -> tuple[Cast, Cast, Cast] | None:
        """The casts of input, weight and gradient, where one of each serves all products."""
        found: tuple[Cast, Cast, Cast] | None = self._once  # type: ignore[attr-defined]
        return found

    @property
    def spec(self) -> str:
        """All casts as a line of JSON."""
        return cast(str, self._spec)  # type: ignore[attr-defined]

    def _shared(self) -> tuple[Cast, Cast, Cast] | None:
        casts = (
            (self.forward.left, self.wgrad.left),
            (self.forward.right, self.dgrad.right),
            (self.dgrad.left, self.wgrad.right),
        )
        found = [a for a, b in casts if a is not None and a == b and a.whole]
        if len(found) < len(casts) or any(getattr(self, name).hadamard for name in GEMMS):
            return None
        return found[0], found[1], found[2]


def _keep_spec(record: "Cast | Gemms") -> None:
    """Written once, not at every product."""
    object.__setattr__(record, "_spec", json.dumps(_plain(record), separators=(",", ":")))


def _plain(x: Any) -> Any:
    """Casts as what JSON has."""
    if isinstance(x, Cast):
        kind = next(k for k, v in KINDS.items() if v is type(x.scale))
        return {
            "format": x.format.name,
            "scale": {"kind": kind, **asdict(x.scale)},
            "block": list(x.block),
            "rounding": x.rounding,
        }
    if isinstance(x, (Gemm, Gemms)):
        return {f.name: _plain(getattr(x, f.name)) for f in fields(x)}
    return x


def cast_from(values: Any) -> Cast:
    """The cast of which `spec` has these values. Raises RecipeError."""
    kinds = dict(values["scale"])
    kind = kinds.pop("kind")
    if kind not in KINDS:
        raise RecipeError(f"unknown scale {kind!r}; known are {', '.join(KINDS)}")
    return Cast(**{**values, "scale": KINDS[kind](**kinds), "block": tuple(values["block"])})


def gemms_from(values: Any) -> Gemms:
    """The products of which `spec` has these values. Raises RecipeError."""

    def gemm(of: Any) -> Gemm:
        sides = {s: None if of[s] is None else cast_from(of[s]) for s in ("left", "right")}
        return Gemm(**{**of, **sides})

    return Gemms(**{name: gemm(of) for name, of in values.items()})


@lru_cache(maxsize=256)
def parsed_cast(spec: str) -> Cast:
    return cast_from(json.loads(spec))


@lru_cache(maxsize=256)
def parsed_gemms(spec: str) -> Gemms:
    return gemms_from(json.loads(spec))


def check_pairs(gemms: Gemms) -> None:
    """Raises RecipeError where the FP8 units of no device multiply the two formats of a product:
    two E5M2 operands, or a format of OCP with one of FNUZ."""
    for name in GEMMS:
        gemm: Gemm = getattr(gemms, name)
        if gemm.left is None or gemm.right is None:
            continue
        a, b = gemm.left.format, gemm.right.format
        both_wide = a == b == E5M2
        mixed = a.bits == b.bits == 8 and a.name.endswith("fnuz") != b.name.endswith("fnuz")
        if both_wide or mixed:
            raise RecipeError(
                f"{name} multiplies {a.name} by {b.name}, which no FP8 unit does: take E4M3FN for "
                "one of them, or pass emulate=True, which keeps to bfloat16 products of the same "
                "values"
            )


def kept_high(gemms: Gemms, names: tuple[str, ...]) -> Gemms:
    """The same with the named products left in the activation format."""
    return replace(gemms, **{name: Gemm() for name in names})
