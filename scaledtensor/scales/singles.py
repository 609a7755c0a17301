"""Scales and expected RMS as numbers of the host.

A 0-dim tensor costs as much per operator as the elements of a small layer, and a rule is a dozen
such operators. On a CPU, outside tracing, a rule that reads its operands by `scale_of` and `rms_of`
calculates with `Single`s in their place: Python numbers with the arithmetic of float32, which take
a tenth of the time. Elsewhere both give the tensors.

What such a rule makes keeps its numbers in a `Cell`, which views share, until somebody reads
`x.scale`: from then on the tensor that was handed out is what counts, and may be written to.
"""

import math
import typing
from collections.abc import Callable
from ctypes import c_float
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.scales.forms import Form, written

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "CELLS",
    "ONE",
    "Amount",
    "Cell",
    "Single",
    "amounts_of",
    "asked",
    "calculates",
    "copied",
    "exponential",
    "hold",
    "multiplier",
    "put",
    "quotient",
    "remembered",
    "rms_of",
    "rounded",
    "scale_of",
    "scaled_by",
    "shared",
    "single_of",
    "tensor_of",
]


def rounded(number: float) -> float:
    """A number rounded to float32, to infinity beyond its range."""
    return c_float(number).value


class Single(float):
    """A float32 number that calculates as a 0-dim float32 tensor on a CPU does.

    Beside Python numbers, which are rounded to float32 first, and other Singles. A tensor takes it
    as the number that it is. Float64 holds sums, products, quotients and roots of two float32
    numbers well enough that rounding the result a second time changes nothing. A root is the
    nearest number, as in compiled code; eager tensors get MKL's, which may be the one beside it.
    """

    __slots__ = ()

    def __mul__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(float.__mul__(self, number)).value)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(float.__add__(self, number)).value)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(float.__sub__(self, number)).value)

    def __rsub__(self, other: Any) -> Any:
        return -(self - other)

    def __truediv__(self, other: Any) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        return Single(c_float(quotient(self, number)).value)

    def __rtruediv__(self, other: Any) -> Any:
        return self.reciprocal() * other  # As torch divides a number by a tensor.

    def __pow__(self, exponent: Any, modulus: None = None) -> Any:
        if exponent == 0.5:
            return self.sqrt()
        return self.square() if exponent == 2 else self.pow(exponent)

    def __neg__(self) -> "Single":
        return Single(float.__neg__(self))

    def __abs__(self) -> "Single":
        return Single(float.__abs__(self))

    abs = __abs__

    def sqrt(self) -> "Single":
        return Single(rounded(math.sqrt(self)) if self >= 0 else math.nan)

    def square(self) -> "Single":
        return Single(rounded(float.__mul__(self, self)))

    def exp(self) -> "Single":
        return Single(rounded(exponential(self)))

    def reciprocal(self) -> "Single":
        return Single(rounded(quotient(1.0, self)))

    def rsqrt(self) -> "Single":
        return Single(rounded(quotient(1.0, math.sqrt(self))) if self >= 0 else math.nan)

    def clamp_max(self, most: float) -> "Single":
        return Single(rounded(most)) if self > most else self

    def clamp_min(self, least: float) -> "Single":
        return Single(rounded(least)) if self < least else self

    def pow(self, exponent: float) -> "Single":
        return Single(self.tensor().pow(exponent).item())

    def tensor(self) -> Tensor:
        """The same as a 0-dim float32 tensor."""
        return torch.scalar_tensor(self, dtype=torch.float32)


ONE = Single(1.0)

Amount: TypeAlias = Tensor | Single | Form
"""A scale or an RMS: a 0-dim float32 tensor, the number that one would hold, or in code that is
being traced the closed form of one."""


def _number(x: Any) -> float | None:
    if type(x) is Single:
        return x
    return c_float(x).value if isinstance(x, (float, int)) else None


def exponential(x: float) -> float:
    """e^x in float64, to infinity beyond its range."""
    return math.exp(x) if x < 709 else math.inf if x == x else x


def quotient(a: float, b: float) -> float:
    """a / b in float64, where a divisor of 0 gives what IEEE 754 says."""
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return float.__truediv__(a, b)


class Cell:
    """A number that a tensor and its views share, and the 0-dim tensor of it, once there is one."""

    __slots__ = ("made", "number")

    def __init__(self, number: Single | Form) -> None:
        self.made: Tensor | None = None
        self.number = number
        if type(number) is Form:
            # A graph may end with any tensor, when nothing can be added to it. What nobody reads
            # is dropped from it.
            self.made = number.fresh()

    def write(self, number: Single) -> None:
        if self.made is None:
            self.number = number
        else:
            self.made.fill_(number)

    def tensor(self, inference: bool) -> Tensor:
        """The tensor that counts from now on: a real one, whatever is being traced."""
        if self.made is None:
            with _torch.outside_modes(), torch.inference_mode(inference):
                number: Any = self.number
                self.made = torch.scalar_tensor(number, dtype=torch.float32, device="cpu")
        return self.made


def single_of(x: Amount) -> Any:
    """What a 0-dim float32 tensor holds, where reading it costs nothing; elsewhere itself."""
    if type(x) is not Tensor or not x.is_cpu or x.dim() or torch.compiler.is_compiling():
        return x
    return Single(x.item())


def scale_of(x: Any) -> Any:
    """The scale of a ScaledTensor to calculate with: an Amount."""
    return _read(x, "scale", "_scale")


def rms_of(x: Any) -> Any:
    """The RMS that the rules expect of a ScaledTensor to calculate with: an Amount."""
    return _read(x, "rms", "_rms")


def amounts_of(x: Any) -> tuple[Any, Any]:
    """Both, of an operand of a rule that runs hundreds of times in a step."""
    if torch.compiler.is_compiling():
        return _form_of(x, "scale", "_scale"), _form_of(x, "rms", "_rms")
    held = x.__dict__
    return _held(held, "scale", "_scale"), _held(held, "rms", "_rms")


def _read(x: Any, name: str, numbered: str) -> Any:
    if torch.compiler.is_compiling():
        return _form_of(x, name, numbered)
    return _held(x.__dict__, name, numbered)


def _held(held: dict[str, Any], name: str, numbered: str) -> Any:
    if name in held:
        return single_of(held[name])
    cell = held[numbered]
    return cell.number if cell.made is None else single_of(cell.made)


def _form_of(x: Any, name: str, numbered: str) -> Form:
    cell = x.__dict__.get(numbered)
    known = None if cell is None else cell.number
    counts = isinstance(known, Form) and known.counts
    return known if counts else Form.of(getattr(x, name))  # type: ignore[return-value]


def remembered(function: F) -> F:
    """A function of numbers, which eager code calculates in each step from the numbers of the step
    before: parameters take another RMS in one step of ten."""
    return typing.cast(F, lru_cache(maxsize=1 << 14)(function))


def tensor_of(x: Amount) -> Tensor:
    """As a 0-dim tensor."""
    return x if isinstance(x, Tensor) else x.tensor()


def hold(x: Any, scale: "Amount | Cell", rms: "Amount | Cell") -> None:
    """Give a new ScaledTensor its scale and RMS."""
    if type(scale) is type(rms) is Single:
        x._scale, x._rms = Cell(scale), Cell(rms)
        return
    if isinstance(scale, Tensor):
        x.scale = scale
    else:
        x._scale = cell = scale if isinstance(scale, Cell) else Cell(scale)
        if cell.made is not None:
            x.scale = cell.made
    if isinstance(rms, Tensor):
        x.rms = rms
    else:
        x._rms = cell = rms if isinstance(rms, Cell) else Cell(rms)
        if cell.made is not None:
            x.rms = cell.made


#: The attributes that hold the cells.
CELLS = ("_scale", "_rms")


class Asked:
    """An attribute that is held as a number until somebody reads it; a tensor from then on, among
    the attributes of the object itself, which come before this one.

    `__getattr__` would do the same, but Dynamo reads no attribute of a tensor that has one.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.cell = name, f"_{name}"

    @_torch.inlined_only
    def __get__(self, x: Any, owner: type) -> Any:
        if x is None:
            return self
        cell = x.__dict__.get(self.cell)
        if cell is None:
            raise AttributeError(f"{type(x).__name__!r} object has no attribute {self.name!r}")
        made = x.__dict__[self.name] = cell.tensor(x.is_inference())
        return made


def asked() -> Any:
    """`Asked`, for an attribute that is declared as a Tensor."""
    return Asked()


def shared(x: Any, name: str) -> Tensor | Cell:
    """What a view of `x` has as its "scale" or "rms": the same one."""
    held = x.__dict__
    cell: Cell | None = held.get(f"_{name}")
    if cell is not None and (name not in held or isinstance(cell.number, Form)):
        return cell
    return held[name]  # type: ignore[no-any-return]


#: What a view has of a tensor, by name, besides its elements.
_SHARED = ("scale", "_scale", "rms", "_rms", "format", "recipe", "nonnegative", "site")


def view_of(x: Any, qdata: Tensor, made: Any) -> Any:
    """A new wrapper as a view of `x` around `qdata`: eager code makes hundreds in a step."""
    held, new = x.__dict__, made.__dict__
    new["qdata"] = qdata
    for name in _SHARED:
        if name in held:
            new[name] = held[name]
    return made


def multiplier(x: Amount) -> Tensor | Single:
    """What to multiply a tensor by: of a power of two a 0-dim tensor that is there already, which
    takes a third of the time of the number. Not to be written to."""
    if not isinstance(x, Single):
        return tensor_of(x)
    found = _FACTORS.get(x)
    if found is None:
        if abs(math.frexp(x)[0]) != 0.5:
            return x
        found = _FACTORS[x] = Cell(x).tensor(False)
    return found


def scaled_by(q: Tensor, x: Amount) -> Tensor:
    """Elements times a number."""
    if isinstance(x, Form) and q.dim() and q.is_floating_point() and not _torch.is_transforming():
        return x.times(q)
    return q * multiplier(x)


_FACTORS: dict[float, Tensor] = {}


def calculates(x: Any) -> bool:
    """Whether `scale_of` and `rms_of` give numbers for a ScaledTensor."""
    return isinstance(scale_of(x), Single)


def copied(x: Amount) -> Any:
    """One of its own for another tensor: numbers never change."""
    return x.clone() if isinstance(x, Tensor) else x


def put(x: Any, scale: Amount | None = None, rms: Amount | None = None) -> None:
    """Write a scale and an RMS into a ScaledTensor and into its views; None leaves one."""
    given = {"scale": scale, "rms": rms}
    # Of both before either is written: one may follow from the other.
    given = {name: tensor_of(n) if isinstance(n, Form) else n for name, n in given.items()}
    for name, number in given.items():
        held = x.__dict__.get(name)
        if number is None:
            continue
        if held is None and isinstance(number, Single):
            x.__dict__[f"_{name}"].write(number)
        elif isinstance(number, Single):
            held.fill_(number)
        else:
            written()
            getattr(x, name).copy_(number)
