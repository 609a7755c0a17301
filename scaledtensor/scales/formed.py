"""The operators that make the numbers of `Form`s, and that multiply elements by them.

The leaves are 0-dim tensors on one device. On a CPU the operators calculate with numbers of the
host. Elsewhere they calculate with 0-dim tensors, which waits for no device. Inductor does not call
`form`, `times` and `total`, but writes code for them (`scaledtensor.scales._inductor`).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.scales import _inductor
from scaledtensor.scales.forms import all_values, is_double
from scaledtensor.scales.singles import Single, exponential, multiplied, quotient, rounded

__all__ = ["Numbers", "Tensors", "numbers_of"]


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
        return y if x > y else x

    @staticmethod
    def most(x: float, y: float) -> float:
        return y if x < y or y != y else x

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
        return Single(number) if condition else x


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


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("form(Tensor[] leaves, str steps) -> Tensor")  # type: ignore[no-untyped-call]


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "times(Tensor x, Tensor[] leaves, str steps, ScalarType? dtype=None) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "total(Tensor x, Tensor y, Tensor[] leaves, str steps, float alpha, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "numbers(Tensor[] leaves, str steps, int[] wanted, int[] apart, int[] pairs, int together) "
    "-> Tensor[]"
)
_LIBRARY.define("pair(Tensor[] leaves, str steps) -> Tensor")  # type: ignore[no-untyped-call]


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


@lru_cache(maxsize=1024)
def _calculated(
    steps: str,
    numbers: tuple[Any, ...],
    wanted: tuple[int, ...],
    apart: tuple[int, ...],
    pairs: tuple[int, ...],
    together: int,
) -> tuple[Tensor, ...]:
    """All numbers of a graph, with a cache. Scales of parameters change in one step of ten. Blocks
    that share their code have different scales, so the cache holds many entries."""
    found = all_values(Numbers, numbers, steps)
    alone = [torch.scalar_tensor(found[n], dtype=_dtype(steps, n)) for n in apart]
    several = torch.tensor([found[n] for n in wanted], dtype=torch.float32)
    both = torch.tensor([found[n] for n in pairs], dtype=torch.float32).view(-1, 2)
    return *(several[start:end] for start, end in _parts(wanted, together)), *alone, *both


def _parts(wanted: Sequence[int], together: int) -> list[tuple[int, int]]:
    return [(i, min(i + together, len(wanted))) for i in range(0, len(wanted), together)]


def _called(
    leaves: list[Tensor],
    steps: str,
    wanted: list[int],
    apart: list[int],
    pairs: list[int],
    together: int,
) -> list[Tensor]:
    """Calculate several forms whose leaves are on a CPU. Float32 tensors of `together` elements
    hold the numbers of the steps `wanted`. Each step of `apart` has its own tensor, and so have
    each two steps of `pairs`."""
    found = _calculated(
        steps, _numbers(leaves), tuple(wanted), tuple(apart), tuple(pairs), together
    )
    return [x.clone() for x in found]  # compiled code may write into the results


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


_LIBRARY.impl("times", _times, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("total", _total, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("pair", _pair, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("form", _form, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("numbers", _called, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::numbers", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _called_fake(
    leaves: list[Tensor],
    steps: str,
    wanted: list[int],
    apart: list[int],
    pairs: list[int],
    together: int,
) -> list[Tensor]:
    made = leaves[0].new_empty
    alone = [made((), dtype=_dtype(steps, n)) for n in apart]
    parts = _parts(wanted, together)
    both = [made(2, dtype=torch.float32) for _ in range(len(pairs) // 2)]
    return [*(made(end - start, dtype=torch.float32) for start, end in parts), *alone, *both]


@torch.library.register_fake("scaledtensor::times", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _times_fake(
    x: Tensor, leaves: list[Tensor], steps: str, dtype: torch.dtype | None = None
) -> Tensor:
    _inductor.teach()
    return torch.empty_like(x, dtype=dtype)


@torch.library.register_fake("scaledtensor::total", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _total_fake(
    x: Tensor, y: Tensor, leaves: list[Tensor], steps: str, alpha: float, dtype: torch.dtype
) -> Tensor:
    number = _form_fake(leaves, steps)
    return _summed(x, y, number, number, alpha, dtype)


@torch.library.register_fake("scaledtensor::form", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _form_fake(leaves: list[Tensor], steps: str) -> Tensor:
    _inductor.teach()
    return torch.empty((), dtype=_dtype(steps), device=leaves[0].device)


@torch.library.register_fake("scaledtensor::pair", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _pair_fake(leaves: list[Tensor], steps: str) -> Tensor:
    _inductor.teach()
    return torch.empty(2, device=leaves[0].device)
