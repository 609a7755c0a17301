"""The arithmetic of numbers in Inductor's kernels, for the steps of forms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Scalars", "Value", "Vector", "ops_of_kernel"]

_F32, _F64, _I32 = torch.float32, torch.float64, torch.int32


class Value(NamedTuple):
    """A scalar in a kernel."""

    value: Any
    double: bool


class Vector(NamedTuple):
    """A leaf that is a tensor of several numbers."""

    load: Callable[[Any], Any]

    def element(self, n: int) -> Any:
        from sympy import Integer  # type: ignore[import-untyped]

        return self.load([Integer(n)])


def ops_of_kernel() -> Any:
    """The operations of the kernel that Inductor writes."""
    from torch._inductor.virtualized import ops

    return ops


def _both(name: str) -> Callable[[Any, Any], Value]:
    """A binary operation. It is in float64 if an operand is a float64 scalar. A Python number takes
    the dtype of the other operand."""

    def made(x: Any, y: Any) -> Value:
        double = any(isinstance(v, Value) and v.double for v in (x, y))

        def value(v: Any) -> Any:
            if not isinstance(v, Value):
                return ops_of_kernel().constant(v, _F64 if double else _F32)
            return (Scalars.double(v) if double else v).value

        return Value(getattr(ops_of_kernel(), name)(value(x), value(y)), double)

    return made


def _one(name: str) -> Callable[[Value], Value]:
    return lambda x: Value(getattr(ops_of_kernel(), name)(x.value), x.double)


class Scalars:
    """The arithmetic of kernels, for `scaledtensor.scales.forms.OPERATIONS`."""

    mul, add, sub, div = map(staticmethod, map(_both, ("mul", "add", "sub", "truediv")))
    least, most = map(staticmethod, map(_both, ("minimum", "maximum")))
    sqrt, exp, neg, abs = map(staticmethod, map(_one, ("sqrt", "exp", "neg", "abs")))
    number = float

    @staticmethod
    def single(x: Value) -> Value:
        return Value(ops_of_kernel().to_dtype(x.value, _F32, _F64), False) if x.double else x

    @staticmethod
    def double(x: Any) -> Any:
        if not isinstance(x, Value) or x.double:
            return x
        return Value(ops_of_kernel().to_dtype(x.value, _F64, _F32), True)

    @staticmethod
    def power(x: Value) -> Value:
        """`scaledtensor.scales.powers.nearest_power_of_two`."""
        from scaledtensor.scales.powers import NEAREST

        ops = ops_of_kernel()
        carry, exponent, most, one = (ops.constant(n, _I32) for n in NEAREST)
        bits = ops.add(ops.to_dtype_bitcast(x.value, _I32, _F32), carry)
        bits = ops.minimum(ops.bitwise_and(bits, exponent), most)
        bits = ops.where(ops.eq(bits, ops.constant(0, _I32)), one, bits)
        return Value(ops.to_dtype_bitcast(bits, _F32, _I32), False)

    @staticmethod
    def element(x: Any, n: float) -> Value:
        return Value(x.element(int(n)), False)

    @staticmethod
    def is_zero(x: Value) -> Any:
        return ops_of_kernel().eq(x.value, ops_of_kernel().constant(0.0, _F32))

    @staticmethod
    def is_beyond(x: Value) -> Any:
        ops = ops_of_kernel()
        return ops.logical_or(ops.isinf(x.value), ops.isnan(x.value))

    @staticmethod
    def otherwise(x: Value, condition: Any, number: float) -> Value:
        return Value(
            ops_of_kernel().where(condition, ops_of_kernel().constant(number, _F32), x.value), False
        )
