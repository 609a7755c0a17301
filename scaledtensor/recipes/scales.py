"""What chooses the scale of a cast. Frozen data; `scaledtensor.ops.quantize` computes them.

The scale s of elements x that share one, in a format of largest value F, amax = max|x| over the
finite x: code = round(x / s), value = code * s.

    Carried          the power of two that the rules propagated, times 2^shift: nothing is measured
    Amax             s = amax 2^margin / F, or the least power of two that is not below it
    Fixed            s = 2^exponent
    LeastError       the power of two s of least sum of (code s - x)^2
    Microscale       a power of two by amax as in OCP MX 1.0, section 6.3
    History          as Amax, of the amax of earlier steps
    TwoLevel         a float32 for the tensor, an E4M3FN number for each block (NVFP4)
"""

from dataclasses import dataclass
from typing import Any

from scaledtensor.errors import RecipeError
from scaledtensor.formats.blocks import MODES

__all__ = [
    "KINDS",
    "Amax",
    "Carried",
    "Fixed",
    "History",
    "LeastError",
    "Microscale",
    "Scale",
    "TwoLevel",
]

#: Exponents within which a scale, and a value of any 8-bit format under it, is a float32.
EXPONENTS = range(-100, 101)


@dataclass(frozen=True)
class Carried:
    """The scale that the rules propagated (Blake et al., arXiv 2303.11257), times 2^shift."""

    shift: int = 0
    """How many binades larger the values are than the rules expect."""

    def __post_init__(self) -> None:
        check_exponent(self, "shift", EXPONENTS)


@dataclass(frozen=True)
class Amax:
    """The scale that fills the format: amax in float64, as torchao has it."""

    power_of_two: bool = False
    margin: int = 0
    """Binades left free above amax."""

    def __post_init__(self) -> None:
        check_bool(self, "power_of_two")
        check_exponent(self, "margin", range(33))


@dataclass(frozen=True)
class Fixed:
    """2^exponent, whatever the values are."""

    exponent: int = 0

    def __post_init__(self) -> None:
        check_exponent(self, "exponent", EXPONENTS)


@dataclass(frozen=True)
class LeastError:
    """The power of two of least squared error, among the one under which nothing saturates and the
    `below` next smaller ones."""

    below: int = 8

    def __post_init__(self) -> None:
        check_exponent(self, "below", range(1, 33))


@dataclass(frozen=True)
class Microscale:
    """A power of two in E8M0, by the amax of its block."""

    mode: str = "rceil"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RecipeError(
                f"Microscale.mode is one of {', '.join(map(repr, MODES))}; got {self.mode!r}"
            )


@dataclass(frozen=True)
class History:
    """s = amax 2^margin / F with the amax of the last `length` steps, the largest or the latest."""

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
    """NVFP4's: amax / (448 F) for the tensor, and amax / F under it for each block."""


Scale = Carried | Amax | Fixed | History | LeastError | Microscale | TwoLevel

#: Their names in files.
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
