"""The operators that make the numbers of `Form`s, and that multiply elements by them.

The leaves are 0-dim tensors on one device. On a CPU the operators calculate with numbers of the
host. Elsewhere they calculate with 0-dim tensors, which waits for no device. Inductor does not call
`form`, `times` and `total`, but writes code for them (`scaledtensor.scales._inductor`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from scaledtensor import native
from scaledtensor.backends import backend_of
from scaledtensor.native import numbers as loops
from scaledtensor.scales import _inductor
from scaledtensor.scales.forms import all_values, is_double, parsed_steps
from scaledtensor.scales.singles import Single, exponential, multiplied, quotient, rounded

__all__ = ["Numbers", "Tensors", "elementwise_result", "numbers_of"]

aten = torch.ops.aten


def _rounds(operation: Callable[[float, float], float]) -> Callable[[Any, Any], Any]:
    """An operation on float64 numbers. Its result is rounded if both operands are float32."""

    def calculated(x: float, y: float) -> float:
        result = operation(x, y)
        return Single(rounded(result)) if type(x) is type(y) is Single else result

    return calculated


class Numbers:
    """The arithmetic of host numbers: float32 numbers are `Single`s, float64 numbers are floats."""

    mul = staticmethod(_rounds(float.__mul__))
    add = staticmethod(_rounds(float.__add__))
    sub = staticmethod(_rounds(float.__sub__))
    div = staticmethod(_rounds(quotient))

    number = single = staticmethod(lambda x: Single(rounded(x)))
    double = float
    neg = staticmethod(lambda x: -x)
    abs = staticmethod(lambda x: abs(x))
    exp = staticmethod(exponential)

    @staticmethod
    def sqrt(x: float) -> float:
        if isinstance(x, Single):
            return x.sqrt()
        return math.sqrt(x) if x >= 0 else math.nan

    @staticmethod
    def least(x: float, y: float) -> float:
        return _of_both(y if x > y else x, x, y)

    @staticmethod
    def most(x: float, y: float) -> float:
        return _of_both(y if x < y or y != y else x, x, y)

    @staticmethod
    def power(x: float) -> float:
        from scaledtensor.scales.powers import power_of_two_near

        return Single(power_of_two_near(x))

    @staticmethod
    def element(x: tuple[float, ...], n: float) -> float:
        return Single(x[int(n)])

    @staticmethod
    def is_zero(x: float) -> bool:
        return x == 0

    @staticmethod
    def is_beyond(x: float) -> bool:
        return not math.isfinite(x)

    @staticmethod
    def otherwise(x: float, condition: bool, number: float) -> float:
        return type(x)(number) if condition else x


def _of_both(chosen: float, x: float, y: float) -> float:
    """One of two operands: a float64 number if one of them is."""
    return chosen if type(x) is type(y) is Single else float(chosen)


class Tensors:
    """The arithmetic of 0-dim tensors. Their other operands may be Python numbers."""

    mul, add, sub, div = torch.mul, torch.add, torch.sub, torch.div
    sqrt, exp, neg, abs = torch.sqrt, torch.exp, torch.neg, torch.abs

    number = float
    single = staticmethod(lambda x: x.float())
    double = staticmethod(lambda x: x.double() if isinstance(x, Tensor) else x)

    @staticmethod
    def least(x: Tensor, y: Any) -> Tensor:
        return torch.minimum(x, y) if isinstance(y, Tensor) else x.clamp_max(y)

    @staticmethod
    def most(x: Tensor, y: Any) -> Tensor:
        return torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp_min(y)

    @staticmethod
    def power(x: Tensor) -> Tensor:
        from scaledtensor.scales.powers import nearest_power_of_two

        return nearest_power_of_two(x)

    @staticmethod
    def element(x: Tensor, n: float) -> Tensor:
        return x[int(n)]

    @staticmethod
    def is_zero(x: Tensor) -> Tensor:
        return x == 0

    @staticmethod
    def is_beyond(x: Tensor) -> Tensor:
        return ~x.isfinite()

    @staticmethod
    def otherwise(x: Tensor, condition: Tensor, number: float) -> Tensor:
        return torch.where(condition, torch.full_like(x, number), x)


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define("form(Tensor[] leaves, str steps) -> Tensor")


_LIBRARY.define("times(Tensor x, Tensor[] leaves, str steps, ScalarType? dtype=None) -> Tensor")
_LIBRARY.define(
    "total(Tensor x, Tensor y, Tensor[] leaves, str steps, float alpha, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(
    "numbers(Tensor[] leaves, str steps, int[] wanted, int[] sizes, int[] apart, int[] pairs) "
    "-> Tensor[]"
)
_LIBRARY.define("pair(Tensor[] leaves, str steps) -> Tensor")


def _numbers(leaves: list[Tensor]) -> tuple[Any, ...]:
    found: list[Any] = []
    for x in leaves:
        if x.dim():
            found.append(tuple(x.tolist()))
        else:
            found.append(Single(x.item()) if x.dtype is torch.float32 else x.item())
    return tuple(found)


def _dtype(steps: str, step: int = -1) -> torch.dtype:
    return torch.float64 if is_double(steps, step) else torch.float32


def numbers_of(leaves: list[Tensor], steps: str, count: int = 1) -> list[Tensor]:
    """The numbers of the last `count` steps, as 0-dim tensors."""
    if all(backend_of(x).host for x in leaves):
        found = all_values(Numbers, _numbers(leaves), steps)
        places = range(len(found) - count, len(found))
        return [torch.scalar_tensor(found[n], dtype=_dtype(steps, n)) for n in places]
    made = all_values(Tensors, leaves, steps)[-count:]
    return [x if isinstance(x, Tensor) else leaves[0].new_full((), x) for x in made]


def _form(leaves: list[Tensor], steps: str) -> Tensor:
    (made,) = numbers_of(leaves, steps)
    return made


@dataclass(frozen=True)
class _Layout:
    """The results of one call of `numbers`: tensors of several numbers each, tensors of one number,
    and tensors of two."""

    steps: str
    wanted: tuple[int, ...]
    sizes: tuple[int, ...]
    apart: tuple[int, ...]
    pairs: tuple[int, ...]

    @cached_property
    def wide(self) -> list[int]:
        """The steps whose numbers are float64 results."""
        return [n for n in self.apart if is_double(self.steps, n)]

    @cached_property
    def narrow(self) -> list[int]:
        """The steps whose numbers are float32 results, in order."""
        return [*self.wanted, *(n for n in self.apart if n not in self.wide), *self.pairs]

    @cached_property
    def parts(self) -> list[int]:
        """How many numbers each float32 result has."""
        alone = len(self.apart) - len(self.wide)
        return [*self.sizes, *[1] * alone, *[2] * (len(self.pairs) // 2)]

    def results(self, narrow: Sequence[Tensor], wide: Sequence[Tensor]) -> list[Tensor]:
        """The results in the order of the operator, from its float32 and its float64 results."""
        found, doubles = iter(narrow), iter(wide)
        several = [next(found) for _ in self.sizes]
        alone = [next(doubles) if n in self.wide else next(found).reshape(()) for n in self.apart]
        return [*several, *alone, *found]


#: A step in Python takes as long as the cast of this number of elements.
_WORK = 64


def _called(
    leaves: list[Tensor],
    steps: str,
    wanted: list[int],
    sizes: list[int],
    apart: list[int],
    pairs: list[int],
) -> list[Tensor]:
    """Calculate several forms whose leaves are on a CPU. Float32 tensors of these sizes hold the
    numbers of the steps `wanted`. Each step of `apart` has its own tensor, and so have each two
    steps of `pairs`. Compiled code may write into the results.

    There is no cache of results: the RMS of parameters change in each step of an optimizer.
    """
    layout = _layout(steps, tuple(wanted), tuple(sizes), tuple(apart), tuple(pairs))
    if native.ready(_WORK * steps.count(";")) and loops.serves(leaves):
        kinds = tuple([(x.numel(), x.dtype is torch.float64) for x in leaves])
        narrow, wide = _program(layout, kinds).run(leaves)
    else:
        found = all_values(Numbers, _numbers(leaves), steps)
        narrow, wide = (
            torch.tensor([found[n] for n in asked], dtype=dtype, device="cpu")
            for asked, dtype in ((layout.narrow, torch.float32), (layout.wide, torch.float64))
        )
    # Results that shared their memory would share a counter of writes too.
    several: Any = aten.split_with_sizes_copy.default(narrow, layout.parts)
    return layout.results(several, aten.unbind_copy.int(wide))


#: Blocks that share their code share these too.
_layout = lru_cache(maxsize=256)(_Layout)


@lru_cache(maxsize=256)
def _program(layout: _Layout, leaves: tuple[tuple[int, bool], ...]) -> loops.Program:
    """The program of the loop. Each leaf is given as its size, and whether it is float64."""
    starts = [0, *accumulate(size for size, _ in leaves)]
    constants, places, made = _flat(layout.steps, starts)
    narrow, wide = ([places[n] for n in steps] for steps in (layout.narrow, layout.wide))
    return loops.Program(leaves, constants, made, narrow, wide)


def _flat(steps: str, starts: list[int]) -> tuple[list[float], list[int], list[loops.Step]]:
    """The constants of a program, the place of each step's number, and the steps of the loop."""
    parsed = parsed_steps(steps)
    spelled = {p for _, operands in parsed for p in operands if p[0] not in "tds"}
    constants = {p: starts[-1] + i for i, p in enumerate(sorted(spelled))}
    first = starts[-1] + len(constants)
    places: list[int] = []
    made: list[loops.Step] = []

    def place(operand: str) -> int:
        if operand[0] in "td":
            return starts[int(operand[1:])]
        return places[int(operand[1:])] if operand[0] == "s" else constants[operand]

    def add(operation: str, a: int, b: int, single: bool) -> int:
        made.append(loops.Step(loops.OPERATIONS.index(operation), a, b, single))
        return first + len(made) - 1

    for n, (operation, operands) in enumerate(parsed):
        single = not is_double(steps, n)
        if operation == "element":
            leaf, index = operands
            places.append(place(leaf) + int(float.fromhex(index)))
            continue
        given = [place(p) for p in operands]
        if operation == "quadrature":
            total = add("square", given[0], given[0], False)
            for other in given[1:]:
                total = add("add_square", total, other, False)
            operation, given = "sqrt", [total]
        name = _SPELLED.get(operation, operation)
        places.append(add(name, given[0], given[-1], single))
    return [float(rounded(float.fromhex(p))) for p in constants], places, made


#: Operation of a form -> the operation of the loop that gives the same number.
_SPELLED = {"product": "mul", "quotient": "div", "after": "same"}


def _pair(leaves: list[Tensor], steps: str) -> Tensor:
    return torch.stack(numbers_of(leaves, steps, 2))


def _summed(
    x: Tensor, y: Tensor, first: Tensor, second: Tensor, alpha: float, dtype: torch.dtype
) -> Tensor:
    return torch.add(x * first, y * second, alpha=alpha).to(dtype)


def _times(x: Tensor, leaves: list[Tensor], steps: str, dtype: torch.dtype | None = None) -> Tensor:
    return multiplied(x, _form(leaves, steps), dtype)


def _total(
    x: Tensor, y: Tensor, leaves: list[Tensor], steps: str, alpha: float, dtype: torch.dtype
) -> Tensor:
    first, second = numbers_of(leaves, steps, 2)
    return _summed(x, y, first, second, alpha, dtype)


def elementwise_result(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without elements, in the shape and with the strides of an elementwise operator's
    result."""
    return x.new_empty(x.shape, dtype=dtype) if _is_contiguous(x) else x.abs().to(dtype)


def _is_contiguous(x: Tensor) -> bool:
    """Whether an elementwise operator's result is contiguous, as far as it is known without a guard
    on a symbolic size. A graph is traced several times, and such a result takes one operator."""
    return all(type(n) is int for n in x.shape) and x.is_contiguous()


_LIBRARY.impl("times", _times, "CompositeExplicitAutograd")
_LIBRARY.impl("total", _total, "CompositeExplicitAutograd")
_LIBRARY.impl("pair", _pair, "CompositeExplicitAutograd")
_LIBRARY.impl("form", _form, "CompositeExplicitAutograd")
_LIBRARY.impl("numbers", _called, "CPU")


@torch.library.register_fake("scaledtensor::numbers", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _called_fake(
    leaves: list[Tensor],
    steps: str,
    wanted: list[int],
    sizes: list[int],
    apart: list[int],
    pairs: list[int],
) -> list[Tensor]:
    layout = _layout(steps, tuple(wanted), tuple(sizes), tuple(apart), tuple(pairs))
    made = leaves[0].new_empty
    narrow = [made(size, dtype=torch.float32) for size in layout.parts]
    return layout.results(narrow, [made((), dtype=torch.float64) for _ in layout.wide])


@_inductor.imagined("times", _LIBRARY)
def _times_fake(
    x: Tensor, leaves: list[Tensor], steps: str, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@_inductor.imagined("total", _LIBRARY)
def _total_fake(
    x: Tensor, y: Tensor, leaves: list[Tensor], steps: str, alpha: float, dtype: torch.dtype
) -> Tensor:
    alike = _is_contiguous(x) and _is_contiguous(y) and x.shape == y.shape
    return elementwise_result(x if alike else torch.add(x, y), dtype)


@_inductor.imagined("form", _LIBRARY)
def _form_fake(leaves: list[Tensor], steps: str) -> Tensor:
    return torch.empty((), dtype=_dtype(steps), device=leaves[0].device)


@_inductor.imagined("pair", _LIBRARY)
def _pair_fake(leaves: list[Tensor], steps: str) -> Tensor:
    return torch.empty(2, device=leaves[0].device, dtype=torch.float32)
