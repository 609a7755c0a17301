"""This module tells torch's compilers about the operators of this library, and how Inductor writes
their numbers. `_inductor_casts.py` has the casts. No other module uses names of Inductor or of
AOTAutograd's partitioner.

torch has no public way to tell a backend how to write an operator. An unknown operator is a call
between kernels, which ends the kernel before it, so each number of a `Form` would cost a kernel. If
a form were written as torch's operators, Inductor's C++ would inline them into the loops that read
the number, and calculate it for each vector of elements.

On a CPU one call (`scaledtensor::numbers`) at the beginning of a graph makes all numbers that
follow from its inputs, which is nearly all of them. It remembers them until a scale changes. On
another device one kernel makes them. Any other number is a value in memory, made by a few scalar
operations in the kernel at its place.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from scaledtensor.backends import backend_of
from scaledtensor.scales.forms import all_values, is_double, joined

__all__ = ["called", "numbers_of", "product", "taught", "teach"]

_F32, _F64, _I32 = torch.float32, torch.float64, torch.int32

_taught = False


def taught() -> tuple[Any, ...]:
    """The operators that Inductor writes into kernels."""
    return tuple(_lowerings())


def teach() -> None:
    """Register how Inductor writes our operators, once Inductor is loaded, and which of them a
    backward pass may recompute. Tracing calls this."""
    global _taught
    ops = torch.ops.scaledtensor
    _may_be_recomputed(ops.times, ops.total)
    if _taught or "torch._inductor.lowering" not in sys.modules:
        return
    _taught = True
    from torch._inductor.lowering import register_lowering

    for operator, lowering in _lowerings().items():
        register_lowering(operator, type_promotion_kind=None)(lowering)


def _lowerings() -> dict[Any, Callable[..., Any]]:
    from scaledtensor.scales import _inductor_casts as casts
    from scaledtensor.scales import cast_nodes

    ops = torch.ops.scaledtensor
    return {
        ops.form.default: _form,
        ops.pair.default: _pair,
        ops.times.default: _times,
        ops.total.default: _total,
        ops.rounded.default: partial(casts.cast, cast_nodes.rounded),
        ops.encoded.default: partial(casts.cast, cast_nodes.encoded),
        ops.rounded_seen.default: partial(casts.cast_and_look, cast_nodes.rounded),
        ops.encoded_seen.default: partial(casts.cast_and_look, cast_nodes.encoded),
        ops.seen.default: casts.seen,
        ops.measured.default: casts.measured,
    }


def _may_be_recomputed(*operators: Any) -> None:
    """Let backward passes recompute these elementwise operators, so that their results need not be
    kept in memory.

    AOTAutograd's partitioner keeps the result of each operator that is not on its list. The only
    way to add an operator is to change the list. Otherwise a compiled GPT keeps 1.15 times the
    bytes.
    """
    from torch._functorch.partitioners import pointwise_ops

    known = pointwise_ops()
    known.extend(op for op in operators if op not in known)


# --- numbers -------------------------------------------------------------------------------------


class _Program(NamedTuple):
    """The numbers of a node: its last `many` steps."""

    leaves: Any
    steps: str
    many: int


def _program(node: Any) -> _Program | None:
    """The program of a node of the graph, or None if it has none."""
    place, many = _programs().get(node.target, (0, 0))
    if not many:
        return None
    leaves, steps = node.args[place : place + 2]
    return _Program(leaves, steps, many) if steps else None


@cache
def _programs() -> dict[Any, tuple[int, int]]:
    """Operator -> the place of its program among its arguments, and its number of numbers."""
    ops = torch.ops.scaledtensor
    one = ops.times, ops.rounded, ops.encoded, ops.rounded_seen, ops.encoded_seen
    found = {ops.form: (0, 1), ops.pair: (0, 2), ops.total: (2, 2), **dict.fromkeys(one, (1, 1))}
    return {op.default: where for op, where in found.items()}


def _form(leaves: list[Any], steps: str) -> Any:
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    together = _of_one_call()
    if together is not None:
        (found,) = together
        graph: Any = V.graph
        users = graph.current_node.users
        if found.get_device().type == "cpu" or all(_reads_an_element(x) for x in users):
            return found
        # If its scale is an element of a tensor, a product's template would read the whole tensor.
        found = clone(found)
        found.realize()
        return found
    made = _pointwise(leaves, steps)
    made.realize()
    return made


def _pair(leaves: list[Any], steps: str) -> Any:
    """Two numbers as a tensor of two elements."""
    together = _of_one_call()
    if together is not None:
        (found,) = together
        return found
    made = _pointwise(leaves, steps, [-2, -1])
    made.realize()
    return made


def _reads_an_element(user: Any) -> bool:
    aten = torch.ops.aten
    pointwise = aten.mul.Tensor, aten.div.Tensor
    return user.op == "output" or user.target in pointwise or _program(user) is not None


def _times(x: Any, leaves: list[Any], steps: str, dtype: torch.dtype | None = None) -> Any:
    """`scaledtensor.scales.singles.multiplied`."""
    from torch._inductor.lowering import to_dtype

    (number,) = numbers_of(leaves, steps, 1)
    own = x.get_dtype()
    total = None if dtype not in (None, own) else _sum_of_products(x, number)
    return to_dtype(product(x, number, dtype), dtype or own) if total is None else total


def product(x: Any, number: Any, dtype: torch.dtype | None = None) -> Any:
    """Elements times a number, not rounded yet: an operator that follows rounds the result.

    torch's own lowering of a product rounds the number and the result to the dtype of the elements.
    Inductor then takes most of these conversions out again, after it has handled each of them.
    """
    from torch._inductor import config
    from torch._inductor.lowering import lowerings, to_dtype

    own = x.get_dtype()
    wide = torch.promote_types(own, dtype or own)
    if not config.emulate_precision_casts:
        wide = torch.promote_types(wide, _F32)
    return lowerings[torch.ops.aten.mul.Tensor](to_dtype(x, wide), number)


def _sum_of_products(x: Any, number: Any) -> Any:
    """A sum times a number as a sum whose terms are multiplied by the number. None if `x` is no
    float32 sum, or if another node needs it.

    Inductor's C++ ends a loop after a sum, so the product would be a loop of its own. The sum
    without the number becomes dead code.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    buffer: Any = getattr(x.data, "data", None)
    total: Any = getattr(buffer, "data", None)
    if not (
        isinstance(buffer, ir.ComputedBuffer)
        and isinstance(total, ir.Reduction)
        and total.reduction_type == "sum"
        and len(graph.current_node.args[0].users) == 1
        and {total.dtype, total.src_dtype, number.get_dtype()} == {_F32}
        and backend_of(total.device).writes_cpp
    ):
        return None
    term, factor = total.inner_fn, number.make_loader()
    made = ir.Reduction.create(
        device=total.device,
        dst_dtype=_F32,
        src_dtype=_F32,
        inner_fn=lambda *place: _ops().mul(term(*place), factor([])),
        ranges=total.ranges,
        reduction_ranges=total.reduction_ranges,
        reduction_type="sum",
        reduction_hint=total.reduction_hint,
    )
    made.realize()
    return made


def _total(x: Any, y: Any, leaves: list[Any], steps: str, alpha: float, dtype: torch.dtype) -> Any:
    """A sum of two terms, each times a number, as `scaledtensor.scales.formed` calculates it."""
    from torch._inductor.lowering import lowerings, to_dtype

    first, second = numbers_of(leaves, steps, 2)
    add: Any = lowerings[torch.ops.aten.add.Tensor]
    return to_dtype(add(product(x, first), product(y, second), alpha=alpha), dtype)


def numbers_of(leaves: list[Any], steps: str, count: int) -> Sequence[Any]:
    """The numbers of the current node. On a CPU they are in memory, since a kernel would calculate
    them for each vector. Elsewhere the kernel calculates them."""
    together = _of_one_call()
    if together is not None:
        return together
    found = []
    for n in range(-count, 0):
        number = _pointwise(leaves, steps, n)
        if number.get_device().type == "cpu":
            number.realize()
        found.append(number)
    return found


def _pointwise(leaves: list[Any], steps: str, wanted: int | list[int] = -1) -> Any:
    """Write the number of a step as a 0-dim tensor. If `wanted` is a list, write the numbers of
    these steps, all of them float32, as the elements of one tensor."""
    from torch._inductor import ir

    loaders = [x.make_loader() for x in leaves]

    def value(index: Any) -> Any:
        given = [
            _Vector(load) if x.get_size() else _Value(load([]), x.get_dtype() is _F64)
            for x, load in zip(leaves, loaders, strict=True)
        ]
        found = all_values(_Scalars, given, steps)
        if isinstance(wanted, list):
            return _chosen([_held(found[n]) for n in wanted], index[0])
        return _held(found[wanted])

    return ir.Pointwise.create(
        device=leaves[0].get_device(),
        dtype=_F32 if isinstance(wanted, list) or not is_double(steps, wanted) else _F64,
        inner_fn=value,
        ranges=[len(wanted)] if isinstance(wanted, list) else [],
    )


def _chosen(values: list[Any], index: Any) -> Any:
    ops = _ops()
    place = ops.index_expr(index, _I32)
    chosen = values[0]
    for n, value in enumerate(values[1:], 1):
        chosen = ops.where(ops.eq(place, ops.constant(n, _I32)), value, chosen)
    return chosen


def _held(x: Any) -> Any:
    """A value of the kernel for a number, which a form may know when it is written."""
    return x.value if isinstance(x, _Value) else _ops().constant(x, _F32)


#: A call ends the kernel before it, so it has to make at least `_FEW` numbers. On another device a
#: kernel makes at most `_MANY`, since its compilation takes longer the more it makes.
_FEW, _MANY = 4, 128

#: The number of results of a call that share a tensor. Inductor's scheduler makes a node of each
#: tensor, and compares all nodes that read the same tensor with each other.
_TOGETHER = 8


def _of_one_call() -> Sequence[Any] | None:
    """The numbers of the current node, from one call that makes them and all other numbers whose
    leaves are already calculated. None if these are few."""
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    current: Any = graph.current_node
    made: dict[Any, Any] = vars(graph).setdefault("_scaledtensor_forms", {})
    if current in made:
        return made[current]  # type: ignore[no-any-return]
    device = current.meta["val"].device
    ready = _ready(graph, device, made)
    if len(ready) < _FEW or current not in ready:
        return None
    places = {x: place for place, x in enumerate(ready)}
    leaves, steps, of_all = joined(
        [
            ([("form", places[x]) if x in places else x for x in program.leaves], program.steps)
            for program in ready.values()
        ]
    )
    inputs = [made[x][0] if x in made else graph.env[x] for x in leaves]
    values = {
        x: own[-program.many :] for (x, program), own in zip(ready.items(), of_all, strict=True)
    }
    pairs = {x: own for x, own in values.items() if _is_pair(x)}
    alone = {x: own for x, own in values.items() if x not in pairs}
    paired = [n for own in pairs.values() for n in own]
    every = {n for own in alone.values() for n in own}
    doubles = {n for n in every if is_double(steps, n)}
    number: dict[int, Any] = {}
    if backend_of(device).writes_cpp:
        leaving = (own for x, own in alone.items() if any(u.op == "output" for u in x.users))
        apart = sorted(doubles.union(*leaving))
        wanted, size = sorted(every - {*apart}), _TOGETHER
        call = called(torch.ops.scaledtensor.numbers.default)
        results = call(inputs, steps, wanted, apart, paired, size)
        several, rest = results[: -(-len(wanted) // size)], results[-(-len(wanted) // size) :]
        number.update(zip(apart, rest, strict=False))
        both = rest[len(apart) :]
    else:
        wanted = sorted(every - doubles)
        together, size = [*wanted, *paired], len(wanted)
        if not together:
            return None
        several = [_pointwise(inputs, steps, together)]
        several[0].realize()
        part = lowerings[torch.ops.aten.slice.Tensor]
        both = [part(several[0], 0, n, n + 2) for n in range(size, len(together), 2)]
    select = lowerings[torch.ops.aten.select.int]
    number.update({n: select(several[i // size], 0, i % size) for i, n in enumerate(wanted)})
    made.update({x: [one] for x, one in zip(pairs, both, strict=True)})
    for x, steps_of_x in alone.items():
        if all(n in number for n in steps_of_x):
            made[x] = [number[n] for n in steps_of_x]
    return made.get(current)


def _ready(graph: Any, device: torch.device, made: dict[Any, Any]) -> dict[Any, _Program]:
    """Nodes with numbers that are not made yet, in order. Their leaves are already calculated."""
    most = sys.maxsize if backend_of(device).writes_cpp else _MANY
    found: dict[Any, _Program] = {}
    for node in graph.current_node.graph.nodes:
        program = _program(node)
        if program is None or node in made or len(found) == most:
            continue
        here = node.meta["val"].device == device
        if here and all(x in found or x in made or _is_there(x, graph) for x in program.leaves):
            found[node] = program
    return found


def _is_pair(node: Any) -> bool:
    return node.target is torch.ops.scaledtensor.pair.default


def _is_there(node: Any, graph: Any) -> bool:
    """Whether a node has been lowered. A node that only needs lowered nodes is lowered now."""
    if node in graph.env:
        return True
    needed = node.all_input_nodes
    if node.target not in _early() or not all(_is_there(x, graph) for x in needed):
        return False
    graph.env[node] = graph.run_node(node)  # Inductor skips it later
    return True


def _early() -> tuple[Any, ...]:
    """The operators on numbers that may be lowered before their place in the graph. A norm's
    statistics are measured in the backward pass, from tensors that exist when it begins."""
    aten = torch.ops.aten
    return torch.ops.scaledtensor.measured.default, aten.clone.default, aten.div.Tensor


def called(operator: Any) -> Any:
    """A call of an operator between kernels."""
    from torch._inductor import lowering

    handler: Any = lowering.fallback_handler
    return handler(operator, add_to_fallback_set=False)


class _Value(NamedTuple):
    """A scalar in a kernel."""

    value: Any
    double: bool


class _Vector(NamedTuple):
    """A leaf that is a tensor of several numbers."""

    load: Callable[[Any], Any]

    def element(self, n: int) -> Any:
        from sympy import Integer  # type: ignore[import-untyped]

        return self.load([Integer(n)])


def _ops() -> Any:
    from torch._inductor.virtualized import ops

    return ops


def _both(name: str) -> Callable[[Any, Any], _Value]:
    """A binary operation. It is in float64 if an operand is a float64 scalar. A Python number takes
    the dtype of the other operand."""

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
    """The arithmetic of kernels, for `scaledtensor.scales.forms.OPERATIONS`."""

    mul, add, sub, div = map(staticmethod, map(_both, ("mul", "add", "sub", "truediv")))
    least, most = map(staticmethod, map(_both, ("minimum", "maximum")))
    sqrt, exp, neg, abs = map(staticmethod, map(_one, ("sqrt", "exp", "neg", "abs")))
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
        """`scaledtensor.scales.powers.nearest_power_of_two`."""
        from scaledtensor.scales.powers import NEAREST

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
