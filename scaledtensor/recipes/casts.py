"""How the operands of the three products of a layer are cast.

    forward    y  = input   @ weight       contracts the features that go in
    dgrad      dx = dy      @ weight^T     contracts the features that come out
    wgrad      dw = input^T @ dy           contracts the tokens

A `Cast` has a format, a rounding, a block and a scale.

The elements of a block share a scale. A block is (across, along), relative to the product: `along`
elements in the direction that the product sums over, by `across` in the other direction. 0 stands
for all elements of a direction.

    (0, 0)       the tensor
    (1, 0)       a row of the left operand, a column of the right one
    (1, 32)      32 elements that are summed, as in OCP MX
    (128, 128)   a square

A scale is frozen data that says how a scale s is chosen for the elements x of a block, in a format
of largest value F: code = round(x / s), value = code * s. amax is the largest finite |x|.
`scaledtensor.ops.products.quantize` computes them.

    Carried      the power of two that the rules propagated, times 2^shift: nothing is measured
    Amax         amax 2^margin / F, or the least power of two that is not below it
    Fixed        2^exponent
    LeastError   the power of two with the least sum of (code s - x)^2
    Microscale   a power of two by amax, as in OCP MX 1.0, section 6.3
    History      same as Amax, with the amax of earlier steps
    TwoLevel     a float32 for the tensor, an E4M3FN number for each block (NVFP4)

With `least_error`, Amax, Microscale and TwoLevel try scales near the one by amax. Of these, a block
takes the one with the least sum of (code s - x)^2.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, cast

from scaledtensor.errors import FormatError, RecipeError
from scaledtensor.formats import E5M2, Format
from scaledtensor.formats import get as get_format
from scaledtensor.formats.blocks import MODES

__all__ = [
    "EXPONENTS",
    "GEMMS",
    "HADAMARD",
    "KINDS",
    "Amax",
    "Carried",
    "Cast",
    "Fixed",
    "Gemm",
    "Gemms",
    "History",
    "LeastError",
    "Microscale",
    "Scale",
    "TwoLevel",
    "cast_from",
    "check_bool",
    "check_exponent",
    "check_pairs",
    "gemms_from",
    "kept_high",
    "parsed_cast",
    "parsed_gemms",
]

#: For these exponents, a scale and every value of an 8-bit format under it are float32 numbers.
EXPONENTS = range(-100, 101)
GEMMS = ("forward", "dgrad", "wgrad")
ROUNDINGS = ("nearest_even", "stochastic")
#: The number of elements that a random Hadamard transform mixes, which share a scale in NVFP4.
HADAMARD = 16


# --- scales --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Carried:
    """The scale that the rules propagated (Blake et al., arXiv 2303.11257), times 2^shift."""

    shift: int = 0
    """How many binades larger the values are than the rules expect."""

    def __post_init__(self) -> None:
        check_exponent(self, "shift", EXPONENTS)


@dataclass(frozen=True)
class Amax:
    """The scale by which amax fills the format: amax 2^margin / F in float64, as in torchao."""

    power_of_two: bool = False
    margin: int = 0
    """Binades left free above amax."""
    least_error: bool = False
    """Whether a scale near this one is taken in place of it, if its sum of (code s - x)^2 is
    less."""

    def __post_init__(self) -> None:
        check_bool(self, "power_of_two")
        check_bool(self, "least_error")
        check_exponent(self, "margin", range(33))


@dataclass(frozen=True)
class Fixed:
    """The scale 2^exponent, for any values."""

    exponent: int = 0

    def __post_init__(self) -> None:
        check_exponent(self, "exponent", EXPONENTS)


@dataclass(frozen=True)
class LeastError:
    """The power of two with the least squared error. The candidates are the least one under which
    nothing saturates, and the next `below` smaller ones."""

    below: int = 8

    def __post_init__(self) -> None:
        check_exponent(self, "below", range(1, 33))


@dataclass(frozen=True)
class Microscale:
    """A power of two in E8M0, by the amax of its block."""

    mode: str = "rceil"
    least_error: bool = False
    """The same as in `Amax`."""

    def __post_init__(self) -> None:
        check_bool(self, "least_error")
        if self.mode not in MODES:
            raise RecipeError(
                f"Microscale.mode is one of {', '.join(map(repr, MODES))}; got {self.mode!r}"
            )


@dataclass(frozen=True)
class History:
    """The scale amax 2^margin / F, with the largest or the latest amax of the last `length`
    steps."""

    length: int = 16
    margin: int = 0
    choose: str = "max"
    guard: bool = True

    def __post_init__(self) -> None:
        check_exponent(self, "length", range(1, 1025))
        check_exponent(self, "margin", range(33))
        check_bool(self, "guard")
        if self.choose not in ("max", "recent"):
            raise RecipeError(f"History.choose is 'max' or 'recent'; got {self.choose!r}")


@dataclass(frozen=True)
class TwoLevel:
    """The scales of NVFP4: t = amax / (448 F) for the tensor, and amax / (F t) for each block."""

    least_error: bool = False
    """The same as in `Amax`, for the scales of blocks."""

    def __post_init__(self) -> None:
        check_bool(self, "least_error")


Scale = Carried | Amax | Fixed | History | LeastError | Microscale | TwoLevel


#: Name of a scale in files -> its class.
KINDS: dict[str, type[Any]] = {
    "carried": Carried,
    "amax": Amax,
    "fixed": Fixed,
    "history": History,
    "least_error": LeastError,
    "microscale": Microscale,
    "two_level": TwoLevel,
}


def check_bool(record: Any, name: str) -> None:
    value = getattr(record, name)
    if not isinstance(value, bool):
        raise RecipeError(f"{type(record).__name__}.{name} is True or False; got {value!r}")


def check_exponent(record: Any, name: str, allowed: range) -> None:
    value = getattr(record, name)
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise RecipeError(
            f"{type(record).__name__}.{name} is a whole number from {allowed[0]} to {allowed[-1]}; "
            f"got {value!r}"
        )


# --- casts and products --------------------------------------------------------------------------

#: Scales that are one number for a tensor.
_WHOLE = (Carried, Fixed, History, LeastError)


@dataclass(frozen=True)
class Cast:
    """The cast of one operand of one product.

    Raises:
        RecipeError: the fields contradict each other.
    """

    format: Format
    scale: Scale = Carried()
    block: tuple[int, int] = (0, 0)
    """(across, along): the elements that share a scale."""
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
        """Whether the tensor has one scale, and torch has a dtype for its elements. Such a cast can
        serve every product that the tensor goes into, as all three products of a layer."""
        storable = self.format.storage_dtype.is_floating_point
        return self.block == (0, 0) and storable and not isinstance(self.scale, TwoLevel)

    @property
    def spec(self) -> str:
        """This cast as a line of JSON, since an operator of torch can take a string."""
        return cast(str, self._spec)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        kind = next(k for k, v in KINDS.items() if v is type(self.scale))
        across, along = ("all" if n == 0 else str(n) for n in self.block)
        kind += " least_error" if getattr(self.scale, "least_error", False) else ""
        shared = "" if self.block == (0, 0) else f" {across}x{along}"
        rounded = "" if self.rounding == ROUNDINGS[0] else f" {self.rounding}"
        return f"{self.format.name} {kind}{shared}{rounded}"


@dataclass(frozen=True)
class Gemm:
    """One product: the casts of its operands. None leaves an operand in the activation format."""

    left: Cast | None = None
    right: Cast | None = None
    hadamard: bool = False
    """Whether a Hadamard matrix with random signs first mixes both operands along the summed
    dimension, 16 elements at a time. The product undoes it (Ashkboos et al., arXiv 2404.00456;
    arXiv 2509.25149). So 16 elements share the size of an outlier."""
    fast: bool = False
    """Whether FP8 units may add in fewer bits than float32. `Recipe.fast_accumulation` sets it."""

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
        """The casts of input, weight and gradient, if one cast of each serves all products; else
        None."""
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
    """Write `spec` once, and not again at every product."""
    object.__setattr__(record, "_spec", json.dumps(_plain(record), separators=(",", ":")))


def _plain(x: Any) -> Any:
    """Casts as dicts and lists for JSON."""
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
    """The cast with the values that its `spec` lists. Raises RecipeError."""
    kinds = dict(values["scale"])
    kind = kinds.pop("kind")
    if kind not in KINDS:
        raise RecipeError(f"unknown scale {kind!r}; known are {', '.join(KINDS)}")
    return Cast(**{**values, "scale": KINDS[kind](**kinds), "block": tuple(values["block"])})


def gemms_from(values: Any) -> Gemms:
    """The products with the values that their `spec` lists. Raises RecipeError."""

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
    """Raise RecipeError if no device has FP8 units for the two formats of a product: two E5M2
    operands, or an OCP format with an FNUZ format."""
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
    """`gemms` with the named products left in the activation format."""
    return replace(gemms, **{name: Gemm() for name in names})
