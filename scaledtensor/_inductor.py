"""What Inductor is taught of operators of this library: the one module that uses Inductor's names.

torch has no public way to say how a backend writes an operator. Without one, each number that a
`Form` stands for would be a call between kernels, which ends the kernel before it. Written as
torch's operators, Inductor's C++ would inline them into the loops that read the number, and
calculate it for each vector of elements.

On a CPU one call (`scaledtensor::forms`) makes the numbers that follow from what is there: nearly
all of a graph, where it begins. It remembers them until a scale changes. Any other number is a
value in memory, made by a few scalar operations in the kernel that is there.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from scaledtensor.forms import is_double, joined, valued

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
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    found = _of_one_call(graph).get(graph.current_node)
    if found is not None:
        return found
    loaders = [x.make_loader() for x in leaves]

    def value(index: Any) -> Any:
        found = [
            _Vector(load) if x.get_size() else _Value(load(index), x.get_dtype() is _F64)
            for x, load in zip(leaves, loaders, strict=True)
        ]
        return valued(_Scalars, found, steps).value

    dtype = _F64 if is_double(steps) else _F32
    made = ir.Pointwise.create(
        device=leaves[0].get_device(), dtype=dtype, inner_fn=value, ranges=[]
    )
    made.realize()
    return made


#: So many numbers are worth a call, which ends the kernel before it.
_FEW = 4


def _of_one_call(graph: Any) -> dict[Any, Any]:
    """The numbers of a graph by node, after one call that makes the current node's and all others
    that follow from what is there already, unless these are few."""
    made: dict[Any, Any] = vars(graph).setdefault("_scaledtensor_forms", {})
    if graph.current_node in made:
        return made
    from torch._inductor import lowering

    places: dict[Any, int] = {}
    forms: list[tuple[list[Any], str]] = []
    for node in graph.current_node.graph.nodes:
        if node.target is not torch.ops.scaledtensor.form.default or node in made:
            continue
        leaves, steps = node.args
        on_host = node.meta["val"].device.type == "cpu"
        if on_host and all(x in graph.env or x in places for x in leaves):
            own = [("form", places[x]) if x in places else x for x in leaves]
            places[node] = len(forms)
            forms.append((own, steps))
    if len(forms) < _FEW:
        return made
    inputs, steps, wanted = joined(forms)
    of_one_call: Any = lowering.fallback_handler
    call = of_one_call(torch.ops.scaledtensor.forms.default, add_to_fallback_set=False)
    results = call([graph.env[x] for x in inputs], steps, wanted)
    made.update(zip(places, results, strict=True))
    return made


class _Value(NamedTuple):
    """A scalar of a kernel."""

    value: Any
    double: bool


class _Vector(NamedTuple):
    """A leaf of several numbers."""

    load: Callable[[Any], Any]

    def element(self, n: int) -> Any:
        from sympy import Integer  # type: ignore[import-untyped]

        return self.load([Integer(n)])


def _ops() -> Any:
    from torch._inductor.virtualized import ops

    return ops


def _both(name: str) -> Callable[[Any, Any], _Value]:
    """A binary operation, of float64 numbers where one is. A number beside a scalar is of its
    dtype."""

    def made(x: Any, y: Any) -> _Value:
        double = any(isinstance(v, _Value) and v.double for v in (x, y))

        def value(v: Any) -> Any:
            if not isinstance(v, _Value):
                return _ops().constant(v, _F64 if double else _F32)
            return (_Scalars.double(v) if double else v).value

        return _Value(getattr(_ops(), name)(value(x), value(y)), double)

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
    def element(x: Any, n: float) -> _Value:
        return _Value(x.element(int(n)), False)

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
