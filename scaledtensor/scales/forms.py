"""Scales and expected RMS in traced code: closed forms, not nodes of a graph.

The scale of nearly every tensor follows from shapes and from the scales of a few other tensors.
torch's operators would take a dozen nodes of the graph for each scale. A `Form` describes such a
number: it is an operation on other forms, and the first forms (the leaves) are 0-dim tensors of the
graph. It has the arithmetic of `Single`, to the bit. If elements are multiplied by a number, or the
graph returns it, one node of the graph makes it: `scaledtensor::form(leaves, steps)`. Inductor
writes this node into the kernels around it (`scaledtensor.scales._inductor`). Other backends
calculate it on the host, or by torch's operators if its leaves are on another device
(`scaledtensor.scales.formed`).

For an operation that a `Form` does not have, its tensor is used.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor._version import source_digest

__all__ = [
    "OPERATIONS",
    "Form",
    "all_values",
    "is_double",
    "joined",
    "parsed_steps",
    "program",
    "written",
]

#: The largest number of operations of a form. In a larger one, a form that it is made of rests: it
#: gets a node of its own, which is a leaf of the forms that use it.
_LARGEST = 32

#: Operations that a rule does last, to make a scale or a ratio of an RMS. The RMS rests in their
#: place, since other numbers follow from it too.
_LAST = ("power", "ratio", "product", "quotient", "after", "least", "most")

#: The number of writes to scales and RMS so far. After a write, the leaves of an older form may
#: hold other numbers.
_writes = 0


def written() -> None:
    """Count a write to a scale or an RMS. The writer calls this first."""
    global _writes
    _writes += 1


class Form:
    """A number that a graph calculates: one of its 0-dim tensors, or an operation on forms."""

    __slots__ = ("arguments", "compounds", "made", "operation", "rests", "size", "when", "wild")

    def __init__(self, operation: str, *arguments: Any) -> None:
        self.operation = operation
        self.arguments = [Form.of(a) if isinstance(a, Tensor) else a for a in arguments]
        self.made: Tensor | None = None
        self.when = _writes
        self.rests = False
        #: Whether it follows from an RMS that may be of any order (`scaledtensor.ops.plausible`).
        self.wild: bool = any(a.wild for a in self.arguments if isinstance(a, Form))
        #: Whether it follows from a product without a weight (`compounding`, in the same place).
        self.compounds: bool = any(a.compounds for a in self.arguments if isinstance(a, Form))
        self.size: int = self._counted()
        while self.size > _LARGEST:
            self._lighten()

    def _counted(self) -> int:
        return 1 + sum(a.size for a in self.arguments if isinstance(a, Form))

    def _lighten(self) -> None:
        """Let the largest of the forms that this one is made of rest."""
        largest = max((a for a in self.arguments if isinstance(a, Form)), key=lambda a: a.size)
        if largest.operation in _LAST and largest.size > 1:
            largest._lighten()
        else:
            largest.rests, largest.size = True, 0
        self.size = self._counted()

    @staticmethod
    def of(x: "Tensor | Form") -> "Form":
        """A 0-dim float32 or float64 tensor as a form."""
        if isinstance(x, Form):
            return x
        leaf = Form("leaf")
        leaf.size = 0
        leaf.made = x
        return leaf

    @staticmethod
    def element(x: Tensor, n: int) -> "Form":
        """Element `n` of a 1-dim float32 tensor."""
        return Form("element", x, n)

    def after(self, other: Any) -> Any:
        """The same number, made to depend on `other` too. AOTAutograd's partitioner may calculate a
        number in the forward pass, and keep it, if the number depends on the forward pass alone."""
        return Form("after", self, other) if isinstance(other, Form) else self

    # --- the number as a tensor ------------------------------------------------------------------

    @property
    def counts(self) -> bool:
        """Whether its leaves still hold the numbers that they held when it was made."""
        return self.when == _writes

    def tensor(self) -> Tensor:
        """The number as a node of the graph, which other tensors may share."""
        if self.made is None:
            self.made = self.fresh()
        return self.made

    def fresh(self) -> Tensor:
        """The number as a new node."""
        if self.operation == "leaf":
            assert self.made is not None
            return self.made.clone()
        leaves: list[Tensor] = []
        steps: list[str] = []
        self._write(leaves, steps, {})
        made: Tensor = torch.ops.scaledtensor.form(leaves, _text(steps))
        return made

    def times(self, q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor with at least one dimension times the number, as one node of the graph. The
        product is rounded to `dtype`; None stands for the dtype of `q`."""
        made: Tensor = torch.ops.scaledtensor.times(q, *program(self), dtype)
        return made

    def _write(self, leaves: list[Tensor], steps: list[str], places: dict[int, str]) -> str:
        known = places.get(id(self))
        if known is not None:
            return known
        wanted = [
            a._place(leaves, steps, places) if isinstance(a, Form) else float(a).hex()
            for a in self.arguments
        ]
        steps.append(" ".join((self.operation, *wanted)))
        places[id(self)] = place = f"s{len(steps) - 1}"
        return place

    def _place(self, leaves: list[Tensor], steps: list[str], places: dict[int, str]) -> str:
        """The place of an argument of another form: a leaf, or an earlier step."""
        if self.made is None and not self.rests:
            return self._write(leaves, steps, places)
        tensor = self.tensor()
        kind = "d" if tensor.dtype is torch.float64 else "t"
        for i, leaf in enumerate(leaves):
            if leaf is tensor:
                return f"{kind}{i}"
        leaves.append(tensor)
        return f"{kind}{len(leaves) - 1}"

    # --- what `Single` has -----------------------------------------------------------------------

    def __mul__(self, other: Any) -> Any:
        return _both("mul", self, other, torch.mul)

    def __rmul__(self, other: Any) -> Any:
        return _both("mul", self, other, _second(torch.mul))

    def __add__(self, other: Any) -> Any:
        return _both("add", self, other, torch.add)

    def __radd__(self, other: Any) -> Any:
        return _both("add", self, other, _second(torch.add))

    def __sub__(self, other: Any) -> Any:
        return _both("sub", self, other, torch.sub)

    def __rsub__(self, other: Any) -> Any:
        return -(self - other)

    def __truediv__(self, other: Any) -> Any:
        return _both("div", self, other, torch.div)

    def __rtruediv__(self, other: Any) -> Any:
        return self.reciprocal() * other  # as torch divides a number by a tensor

    def __pow__(self, exponent: Any, modulus: None = None) -> Any:
        if exponent == 0.5:
            return self.sqrt()
        return self.square() if exponent == 2 else Form.of(self.tensor().pow(exponent))

    def __neg__(self) -> "Form":
        return Form("neg", self)

    def __abs__(self) -> "Form":
        return Form("abs", self)

    abs = __abs__

    def sqrt(self) -> "Form":
        return Form("sqrt", self)

    def square(self) -> "Form":
        return Form("mul", self, self)

    def exp(self) -> "Form":
        return Form("exp", self)

    def reciprocal(self) -> "Form":
        return Form("div", 1.0, self)

    def rsqrt(self) -> "Form":
        return Form("rsqrt", self)

    def clamp_max(self, most: float) -> "Form":
        return Form("least", self, most)

    def clamp_min(self, least: float) -> "Form":
        return Form("most", self, least)

    # --- what only a tensor has ------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = torch.utils._pytree.tree_map(_made, (tuple(args), kwargs or {}))
        return func(*made[0], **made[1])

    def __lt__(self, other: Any) -> Any:
        return self.tensor() < _made(other)

    def __le__(self, other: Any) -> Any:
        return self.tensor() <= _made(other)

    def __gt__(self, other: Any) -> Any:
        return self.tensor() > _made(other)

    def __ge__(self, other: Any) -> Any:
        return self.tensor() >= _made(other)

    def __eq__(self, other: object) -> Any:
        return self.tensor() == _made(other)

    def __ne__(self, other: object) -> Any:
        return self.tensor() != _made(other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __float__(self) -> float:
        return float(self.tensor())


def program(*forms: Form) -> tuple[list[Tensor], str]:
    """The leaves and the steps of several numbers. The last steps give the numbers, in order."""
    leaves: list[Tensor] = []
    steps: list[str] = []
    places: dict[int, str] = {}
    found = [form._place(leaves, steps, places) for form in forms]
    if found != [f"s{len(steps) - 1}"]:
        steps += [f"same {place}" for place in found]
    return leaves, _text(steps)


def _text(steps: Sequence[str]) -> str:
    # Inductor's cache on disk identifies a graph by its text. The text does not show the code that
    # this package tells Inductor to write, so it contains the version of this package.
    return f"{_version()}/{';'.join(steps)}"


@_torch.constant_if_compiled
def _version() -> str:
    return source_digest()


def _made(x: Any) -> Any:
    return x.tensor() if isinstance(x, Form) else x


def _second(function: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """`function` with its operands swapped. Their order decides how torch reads a 16-bit
    operand."""
    return lambda a, b: function(b, a)


def _both(operation: str, a: Form, b: Any, otherwise: Callable[[Tensor, Any], Tensor]) -> Any:
    if isinstance(b, Tensor):
        if b.dim() or b.dtype not in (torch.float32, torch.float64):
            return otherwise(a.tensor(), b)
    elif isinstance(b, (torch.SymFloat, torch.SymInt)):  # follows from a symbolic size
        return Form.of(otherwise(a.tensor(), b))
    elif not isinstance(b, (Form, float, int)):
        return NotImplemented
    return Form(operation, a, b)


# --- the operations, in any arithmetic -----------------------------------------------------------

_F32_MAX = torch.finfo(torch.float32).max

#: Operation -> its value in an arithmetic `a`. `scaledtensor.scales.formed` has the arithmetics of
#: numbers and of tensors, `scaledtensor.scales._inductor` the arithmetic of kernels. An operation
#: on float32 numbers gives a float32 number, as with `Single`. If one operand is a float64 number,
#: the result is one too.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "mul": lambda a, x, y: a.mul(x, y),
    "add": lambda a, x, y: a.add(x, y),
    "sub": lambda a, x, y: a.sub(x, y),
    "div": lambda a, x, y: a.div(x, y),
    "neg": lambda a, x: a.neg(x),
    "abs": lambda a, x: a.abs(x),
    "sqrt": lambda a, x: a.sqrt(x),
    "exp": lambda a, x: a.single(a.exp(a.double(x))),
    "rsqrt": lambda a, x: a.single(a.div(1.0, a.sqrt(a.double(x)))),
    "least": lambda a, x, y: a.least(x, y),
    "most": lambda a, x, y: a.most(x, y),
    "quadrature": lambda a, *xs: a.single(a.sqrt(_sum_of_squares(a, xs))),
    "product": lambda a, x, y: a.mul(a.double(x), a.double(y)),
    "quotient": lambda a, x, y: a.div(a.double(x), a.double(y)),
    "power": lambda a, x: a.power(a.single(x)),
    "ratio": lambda a, x, y: a.single(a.least(a.div(a.double(x), a.double(y)), _F32_MAX)),
    "nonzero": lambda a, x: a.otherwise(x, a.is_zero(x), 1.0),
    "finite": lambda a, x: a.otherwise(x, a.is_beyond(x), 1.0),
    "element": lambda a, x, n: a.element(x, n),
    "after": lambda a, x, y: x,
    "same": lambda a, x: x,
}

#: Operations whose result is always a float64 number, and always a float32 number. All others give
#: a float64 number if an operand is one.
_DOUBLE = ("product", "quotient")
_SINGLE = ("exp", "rsqrt", "quadrature", "power", "ratio", "element", "after")


@lru_cache(maxsize=1 << 14)
def parsed_steps(steps: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The operation and the operands of each step."""
    split = (step.split(" ") for step in steps.rpartition("/")[2].split(";"))
    return tuple((operation, tuple(places)) for operation, *places in split)


def joined(forms: Sequence[tuple[Sequence[Any], str]]) -> tuple[list[Any], str, list[list[int]]]:
    """Several programs as one list of steps. Returns their leaves, the steps, and for each program
    the places of its steps. A leaf may be the last step of an earlier program: `("form", its
    number)`."""
    leaves: list[Any] = []
    steps: dict[str, int] = {}
    values: list[list[int]] = []
    for own, text in forms:
        places: list[int] = []

        def moved(place: str, own: Sequence[Any] = own, places: list[int] = places) -> str:
            if place[0] == "s":
                return f"s{places[int(place[1:])]}"
            if place[0] not in "td":
                return place
            leaf = own[int(place[1:])]
            if isinstance(leaf, tuple):
                return f"s{values[leaf[1]][-1]}"
            if leaf not in leaves:
                leaves.append(leaf)
            return f"{place[0]}{leaves.index(leaf)}"

        for operation, arguments in parsed_steps(text):
            step = " ".join((operation, *map(moved, arguments)))
            places.append(steps.setdefault(step, len(steps)))
        values.append(places)
    return leaves, ";".join(steps), values


def all_values(arithmetic: Any, leaves: Sequence[Any], steps: str) -> list[Any]:
    """The value of each step of a form, for these leaves."""
    found: list[Any] = []

    def argument(place: str) -> Any:
        if place[0] in "td":
            return leaves[int(place[1:])]
        return found[int(place[1:])] if place[0] == "s" else arithmetic.number(float.fromhex(place))

    for operation, places in parsed_steps(steps):
        found.append(OPERATIONS[operation](arithmetic, *map(argument, places)))
    return found


def is_double(steps: str, step: int = -1) -> bool:
    """Whether the value of a step is a float64 number."""
    return _doubles(steps)[step]


@lru_cache(maxsize=1 << 14)
def _doubles(steps: str) -> list[bool]:
    found: list[bool] = []
    for operation, places in parsed_steps(steps):
        given = any(p[0] == "d" or (p[0] == "s" and found[int(p[1:])]) for p in places)
        found.append(operation in _DOUBLE or (given and operation not in _SINGLE))
    return found


def _sum_of_squares(a: Any, xs: tuple[Any, ...]) -> Any:
    squares = [a.mul(a.double(x), a.double(x)) for x in xs]
    total = squares[0]
    for square in squares[1:]:
        total = a.add(total, square)
    return total
