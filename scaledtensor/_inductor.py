"""What Inductor is taught of operators of this library: the one module that uses Inductor's names.

torch has no public way to say how a backend writes an operator. Without one, each number that a
`Form` stands for would be a call between kernels, which ends the kernel before it. Written as
torch's operators, Inductor's C++ would inline them into the loops that read the number, and
calculate it for each vector of elements. Here it is one value in memory, made by a few scalar
operations in the kernel that is there.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from scaledtensor.forms import is_double, valued

__all__ = ["taught", "teach"]

_F32, _F64, _I32 = torch.float32, torch.float64, torch.int32

_taught = False


def taught() -> tuple[Any, ...]:
    """The operators that Inductor writes itself."""
    return (torch.ops.scaledtensor.form.default,)


def teach() -> None:
    """Register how Inductor writes our operators, once it is loaded. Tracing calls this; a graph
    that no Inductor compiles needs none of it."""
    global _taught
    if _taught or "torch._inductor.lowering" not in sys.modules:
        return
    _taught = True
    from torch._inductor.lowering import register_lowering

    register_lowering(torch.ops.scaledtensor.form.default, type_promotion_kind=None)(_form)


def _form(leaves: list[Any], steps: str) -> Any:
    from torch._inductor import ir

    loaders = [x.make_loader() for x in leaves]
    doubles = [x.get_dtype() is _F64 for x in leaves]

    def value(index: Any) -> Any:
        found = [_Value(load(index), d) for load, d in zip(loaders, doubles, strict=True)]
        return valued(_Scalars, found, steps).value

    dtype = _F64 if is_double(steps) else _F32
    made = ir.Pointwise.create(
        device=leaves[0].get_device(), dtype=dtype, inner_fn=value, ranges=[]
    )
    made.realize()
    return made


class _Value(NamedTuple):
    """A scalar of a kernel."""

    value: Any
    double: bool


def _ops() -> Any:
    from torch._inductor.virtualized import ops

    return ops


def _both(name: str) -> Callable[[Any, Any], _Value]:
    """A binary operation; a number beside a scalar has the scalar's dtype."""

    def made(x: Any, y: Any) -> _Value:
        double = x.double if isinstance(x, _Value) else y.double
        dtype = _F64 if double else _F32
        a, b = (v.value if isinstance(v, _Value) else _ops().constant(v, dtype) for v in (x, y))
        return _Value(getattr(_ops(), name)(a, b), double)

    return made


def _one(name: str) -> Callable[[_Value], _Value]:
    return lambda x: _Value(getattr(_ops(), name)(x.value), x.double)


class _Scalars:
    """The arithmetic of `scaledtensor.forms.OPERATIONS` in a kernel."""

    mul, add, sub, div = map(staticmethod, map(_both, ("mul", "add", "sub", "truediv")))
    least, most = map(staticmethod, map(_both, ("minimum", "maximum")))
    sqrt, neg, abs = map(staticmethod, map(_one, ("sqrt", "neg", "abs")))
    number = float

    @staticmethod
    def single(x: _Value) -> _Value:
        return _Value(_ops().to_dtype(x.value, _F32, _F64), False) if x.double else x

    @staticmethod
    def double(x: Any) -> Any:
        if not isinstance(x, _Value) or x.double:
            return x
        return _Value(_ops().to_dtype(x.value, _F64, _F32), True)

    @staticmethod
    def power(x: _Value) -> _Value:
        """`scaledtensor.scale.nearest_power_of_two`."""
        from scaledtensor.scale import NEAREST

        ops = _ops()
        carry, exponent, most, one = (ops.constant(n, _I32) for n in NEAREST)
        bits = ops.add(ops.to_dtype_bitcast(x.value, _I32, _F32), carry)
        bits = ops.minimum(ops.bitwise_and(bits, exponent), most)
        bits = ops.where(ops.eq(bits, ops.constant(0, _I32)), one, bits)
        return _Value(ops.to_dtype_bitcast(bits, _F32, _I32), False)

    @staticmethod
    def is_zero(x: _Value) -> Any:
        return _ops().eq(x.value, _ops().constant(0.0, _F32))

    @staticmethod
    def is_beyond(x: _Value) -> Any:
        ops = _ops()
        return ops.logical_or(ops.isinf(x.value), ops.isnan(x.value))

    @staticmethod
    def otherwise(x: _Value, condition: Any, number: float) -> _Value:
        return _Value(_ops().where(condition, _ops().constant(number, _F32), x.value), False)
