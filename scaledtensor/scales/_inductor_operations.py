"""Casts as single operations of Inductor's C++ kernels.

Inductor writes a kernel from operations on scalars: sums, products, comparisons. It handles each of
them several times in Python, and a cast is seventeen of them. In a GPT the casts made an eighth of
the Python calls of a first call. Here a cast is one operation. Its C++ is written from the torch
function that defines the cast, so the two cannot differ.

Inductor has no public way to add an operation. Its handlers of operations are classes, and an
operation is a method of that name in each of them.
"""

from functools import cache
from typing import Any

import torch

from scaledtensor.formats import Format, get
from scaledtensor.formats.rounding import round_by_arithmetic

__all__ = ["rounded_values"]


def rounded_values(x: Any, format: str, dtype: torch.dtype) -> Any:
    """Write `round_by_arithmetic(x, get(format)).to(dtype)` for a kernel in C++."""
    from torch._inductor import ir
    from torch._inductor.lowering import to_dtype
    from torch._inductor.virtualized import ops

    name = _operation(get(format))
    load = to_dtype(x, torch.float32).make_loader()
    made = ir.Pointwise.create(
        device=x.get_device(),
        dtype=torch.float32,
        inner_fn=lambda index: getattr(ops, name)(load(index)),
        ranges=x.get_size(),
    )
    return to_dtype(made, dtype)


@cache
def _operation(fmt: Format) -> str:
    """Add the rounding to a format to Inductor's operations, and return its name."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.ops_handler import DefaultHandler

    name = f"scaledtensor_rounded_{len(_NAMES)}"
    _NAMES.append(name)

    def handled(self: Any, *args: Any) -> Any:
        return self._default(name, args, {})

    def dtype(x: Any) -> torch.dtype:
        return torch.float32

    scalar, vector = _text(fmt, "float", _SCALAR), _text(fmt, "auto", _VECTOR)

    def of_scalar(x: Any) -> str:
        return f"{scalar}({x})"

    def of_vector(x: Any) -> str:
        return f"{vector}({x})"

    of_scalar.__name__ = of_vector.__name__ = name  # by this name vectors ask for the scalar form
    setattr(DefaultHandler, name, handled)
    setattr(DtypePropagationOpsHandler, name, staticmethod(dtype))
    setattr(CppOverrides, name, staticmethod(of_scalar))
    setattr(CppVecOverrides, name, staticmethod(of_vector))
    return name


#: The operations that were added.
_NAMES: list[str] = []


# --- the C++ of a function on tensors ------------------------------------------------------------

#: Operations of float32 in C++. A clamp of NaN is NaN.
_SCALAR = {
    "clamp": "std::min(std::max({}, {}), {})",
    "clamp_min": "std::max({}, {})",
    "and": "c10::bit_cast<float>(c10::bit_cast<int32_t>({}) & {})",
}

#: The same of vectors of float32.
_VECTOR = {
    "clamp": "at::vec::clamp({}, {}, {})",
    "clamp_min": "at::vec::clamp_min({}, {})",
    "and": "{} & T(c10::bit_cast<float>({}))",
}


def _text(fmt: Format, type: str, operations: dict[str, str]) -> str:
    """The cast as a lambda of C++, for float or for vectors."""
    x: Any = _Value("x", [], operations)
    result = round_by_arithmetic(x, fmt)
    lines = " ".join(x.lines)
    return f"[]({type} x) {{ using T = decltype(x); {lines} return {result}; }}"


class _Value:
    """A value of a C++ function that a function on tensors writes."""

    def __init__(self, text: str, lines: list[str], operations: dict[str, str]) -> None:
        self.text = text
        self.lines = lines
        self.operations = operations

    def __str__(self) -> str:
        return self.text

    def _made(self, text: str, *operands: Any) -> "_Value":
        name = f"v{len(self.lines)}"
        given = (x if isinstance(x, (_Value, str)) else f"T({x + 0.0!r}f)" for x in operands)
        self.lines.append(f"const auto {name} = {text.format(*given)};")
        return _Value(name, self.lines, self.operations)

    def float(self) -> "_Value":
        return self

    def clamp(self, min: Any, max: Any = None) -> "_Value":
        if max is None:
            return self._made(self.operations["clamp_min"], self, min)
        return self._made(self.operations["clamp"], self, min, max)

    def view(self, dtype: torch.dtype) -> "_Value":
        return self  # `__and__` reads the bits

    def __and__(self, mask: int) -> "_Value":
        return self._made(self.operations["and"], self, str(mask))

    def __add__(self, other: Any) -> "_Value":
        return self._made("{} + {}", self, other)

    def __sub__(self, other: Any) -> "_Value":
        return self._made("{} - {}", self, other)

    def __mul__(self, other: Any) -> "_Value":
        return self._made("{} * {}", self, other)
