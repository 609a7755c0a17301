"""Casts as single nodes of a graph.

As torch's operators, a cast to 8 bits is eight to forty nodes. Most codes in a traced graph are
never read, since an emulated product takes the values. So in traced code a cast is one of the
operators here, together with the number that multiplies the elements before it. Inductor writes
the torch operators of the cast into the kernels around it (`scaledtensor.scales._inductor`). Other
backends call the operator.
"""

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import encode, get
from scaledtensor.formats.bits import Overflow
from scaledtensor.formats.rounding import round_by_arithmetic
from scaledtensor.scales import _inductor
from scaledtensor.scales.formed import elementwise_result, numbers_of
from scaledtensor.scales.forms import Form, program
from scaledtensor.scales.singles import scaled_by

__all__ = ["Watch", "as_stored", "codes_of", "encoded", "rounded", "seen", "values_of"]


class Watch(NamedTuple):
    """The site of a weight that looks at the results of a cast when the code runs
    (`scaledtensor.ops.products.counted`)."""

    factors: Tensor
    """The tensor that the site lent to the graph, by which it is found."""
    role: int
    trains: bool


def values_of(
    x: Tensor, ratio: Any, format: str, dtype: torch.dtype, watch: Watch | None = None
) -> Tensor:
    """The values of `x * ratio` rounded to an 8-bit format (`round_by_arithmetic`), in a dtype that
    holds them. `ratio` is a Form, or None for 1."""
    return _node("rounded", rounded, x, ratio, watch, format, dtype)


def codes_of(
    x: Tensor, ratio: Any, format: str, overflow: Overflow, watch: Watch | None = None
) -> Tensor:
    """The codes of `x * ratio` (`encode`), to nearest even."""
    return _node("encoded", encoded, x, ratio, watch, format, overflow)


def _node(
    name: str,
    function: Callable[..., Tensor],
    x: Tensor,
    ratio: Any,
    watch: Watch | None,
    *how: Any,
) -> Tensor:
    """A cast as the node of that name. A transform of torch takes the function in its place."""
    if _torch.is_transforming():
        return function(_moved(x, ratio), *how)
    suffix, more = ("", ()) if watch is None else ("_seen", tuple(watch))
    operator = getattr(torch.ops.scaledtensor, name + suffix)
    made: Tensor = operator(*_given(x, ratio), *how, *more)
    return made


def seen(x: Tensor, format: str, watch: Watch | None) -> Tensor:
    """`x` itself, the result of another cast. `watch` looks at it when the code runs."""
    made: Tensor = (
        x if watch is None else torch.ops.scaledtensor.seen(x, watch.factors, format, *watch[1:])
    )
    return made


def _given(x: Tensor, ratio: Any) -> tuple[Tensor, list[Tensor], str]:
    """The operand of a node, and the program of the number that multiplies it first."""
    if isinstance(ratio, Form) and x.dim():
        return x, *program(ratio)
    return _moved(x, ratio), [], ""


def _moved(x: Tensor, ratio: Any) -> Tensor:
    return x if ratio is None else scaled_by(x, ratio)


# --- the operators ---------------------------------------------------------------------------


def rounded(x: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return round_by_arithmetic(x, get(format)).to(dtype)


def encoded(x: Tensor, format: str, overflow: str) -> Tensor:
    return encode(x, format, overflow=typing.cast(Overflow, overflow))


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")


def _define(name: str, function: Callable[..., Tensor], second: str) -> None:
    """Define a cast as two operators. A site looks at the results of the second one."""

    def operator(x: Tensor, leaves: list[Tensor], steps: str, *how: Any) -> Tensor:
        return function(x * numbers_of(leaves, steps)[0] if steps else x, *how)

    def seen(
        x: Tensor, leaves: list[Tensor], steps: str, format: str, how: Any, *watch: Any
    ) -> Tensor:
        factors, role, trains = watch
        made = operator(x, leaves, steps, format, how)
        torch.ops.scaledtensor.look(made, factors, format, role, trains)
        return made

    def fake(
        x: Tensor, leaves: list[Tensor], steps: str, format: str, how: Any, *watch: Any
    ) -> Tensor:
        dtype = how if isinstance(how, torch.dtype) else get(format).storage_dtype
        return elementwise_result(x, dtype)

    for suffix, more, run in (
        ("", "", operator),
        ("_seen", ", Tensor factors, int role, bool trains", seen),
    ):
        given = f"Tensor x, Tensor[] leaves, str steps, str format, {second}{more}"
        _LIBRARY.define(f"{name}{suffix}({given}) -> Tensor")
        _LIBRARY.impl(f"{name}{suffix}", run, "CompositeExplicitAutograd")
        _inductor.imagined(f"{name}{suffix}", _LIBRARY)(fake)


_define("rounded", rounded, "ScalarType dtype")
_define("encoded", encoded, "str overflow")


# --- elements as memory holds them -----------------------------------------------------------

_LIBRARY.define("stored(Tensor x) -> Tensor")
_LIBRARY.impl("stored", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("scaledtensor::stored", torch.empty_like, lib=_LIBRARY)


def as_stored(q: Tensor) -> Tensor:
    """Elements as memory holds them. In compiled code this is a call between kernels.

    Inductor leaves out roundings to 16 bits between the operators of a kernel, and a backward pass
    may calculate an element again from rounded numbers. A comparison with the largest element would
    then find none. The call reads memory, and its result is kept and not calculated again.
    """
    if q.dtype.itemsize != 2 or not torch.compiler.is_compiling() or _torch.is_transforming():
        return q
    made: Tensor = torch.ops.scaledtensor.stored(q)
    return made
