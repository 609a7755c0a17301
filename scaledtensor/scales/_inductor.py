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
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from itertools import chain, count
from typing import Any, TypeVar

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.scales._inductor_nodes import Program, groups_of, is_pair, many, program
from scaledtensor.scales._inductor_scalars import Scalars, Value, Vector, ops_of_kernel
from scaledtensor.scales.forms import all_values, is_double, joined

__all__ = ["called", "imagined", "numbers_of", "product", "taught"]

F = TypeVar("F", bound=Callable[..., Tensor])

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

    _keep_order_of_writes()
    for operator, lowering in _lowerings().items():
        register_lowering(operator, type_promotion_kind=None)(lowering)


def imagined(name: str, library: torch.library.Library) -> Callable[[F], F]:
    """Register a function that gives an operator's result without elements, for tracing.

    FakeTensorMode would hash the arguments, in search of a result that it has made before. The
    program of an operator is nearly always another one, so that took most of its time.
    """

    def register(function: F) -> F:
        @wraps(function)
        def fake(*args: Any, **kwargs: Any) -> Tensor:
            teach()
            return function(*args, **kwargs)

        def at_once(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
            with mode:
                return fake(*args, **(kwargs or {}))

        place = f"scaledtensor::{name}"
        torch.library.register_fake(place, fake, lib=library)
        torch.library.register_torch_dispatch(place, _torch.FakeTensorMode, at_once, lib=library)
        return function

    return register


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


def _keep_order_of_writes() -> None:
    """Let a node that Inductor lays out again still read the results of writes in place.

    Inductor's C++ backend may lay out a loop again to fuse it. Up to torch 2.13 the loop then reads
    a buffer as it was before the writes of other loops into it, and runs before them: gradients of
    `topk`, `scatter` and max pooling are lost in silence (pytorch/pytorch#185509, #185873). Code
    without this library meets the error too, but our nodes make it likely, since a sum of gradients
    has more readers.
    """
    from torch._inductor.scheduler import SchedulerNode

    lay_out = SchedulerNode.recompute_size_and_body

    @wraps(lay_out)
    def laid_out(self: Any, *args: Any, **kwargs: Any) -> None:
        lay_out(self, *args, **kwargs)
        if any(read.name in self.mutation_renames for read in self.read_writes.reads):
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = laid_out  # type: ignore[method-assign]


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
    return user.op == "output" or user.target in pointwise or program(user) is not None


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

    Inductor's C++ ends a loop after a sum, so the product would be a loop of its own. The buffer of
    the sum takes the new terms: as dead code, the sum would cost as much as another kernel until
    Inductor's scheduler drops it.
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
    buffer.data = ir.Reduction(
        device=total.device,
        dtype=_F32,
        src_dtype=_F32,
        inner_fn=lambda *place: ops_of_kernel().mul(term(*place), factor([])),
        ranges=total.ranges,
        reduction_ranges=total.reduction_ranges,
        reduction_type="sum",
        reduction_hint=total.reduction_hint,
    )
    return x


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
            Vector(load) if x.get_size() else Value(load([]), x.get_dtype() is _F64)
            for x, load in zip(leaves, loaders, strict=True)
        ]
        found = all_values(Scalars, given, steps)
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
    ops = ops_of_kernel()
    place = ops.index_expr(index, _I32)
    chosen = values[0]
    for n, value in enumerate(values[1:], 1):
        chosen = ops.where(ops.eq(place, ops.constant(n, _I32)), value, chosen)
    return chosen


def _held(x: Any) -> Any:
    """A value of the kernel for a number, which a form may know when it is written."""
    return x.value if isinstance(x, Value) else ops_of_kernel().constant(x, _F32)


#: A call ends the kernel before it, so it has to make at least `_FEW` numbers. On another device a
#: kernel makes at most `_MANY`, since its compilation takes longer the more it makes.
_FEW, _MANY = 4, 128

#: How many plain operators, one after the other, may be lowered early for a number that follows.
_DEEP = 32


def _of_one_call() -> Sequence[Any] | None:
    """The numbers of the current node, from one call that makes them and all other numbers whose
    leaves are already calculated. None if these are few."""
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
            ([("form", places[x]) if x in places else x for x in own.leaves], own.steps)
            for own in ready.values()
        ]
    )
    inputs = [made[x][0] if x in made else graph.env[x] for x in leaves]
    values = {
        x: made_by[-own.many :] for (x, own), made_by in zip(ready.items(), of_all, strict=True)
    }
    make = _by_call if backend_of(device).writes_cpp else _by_kernel
    made.update(make(ready, values, inputs, steps))
    return made.get(current)


#: Node -> the steps of its numbers in the steps of a call.
_Places = dict[Any, list[int]]


def _by_call(
    ready: dict[Any, Program], values: _Places, inputs: list[Any], steps: str
) -> dict[Any, list[Any]]:
    """The numbers of nodes, from a call on the host. A number that leaves the graph, or is float64,
    has a tensor of its own."""
    from torch._inductor.virtualized import V

    pairs = [x for x in ready if is_pair(x)]
    lone = [x for x in ready if not is_pair(x) and (_leaves(x) or _has_double(values[x], steps))]
    apart, paired = (_steps_of(xs, values) for xs in (lone, pairs))
    others = {*lone, *pairs}
    shared = {x: own for x, own in values.items() if x not in others}
    groups = groups_of(V.graph, shared)
    tables = [_filled(group, shared) for group in groups]
    sizes = [len(table) for table in tables]
    call = called(torch.ops.scaledtensor.numbers.default)
    results = iter(call(inputs, steps, [*chain(*tables)], sizes, apart, paired))
    found: dict[Any, list[Any]] = {}
    for group in groups:
        made = _elements(next(results), group)
        found |= {x: numbers for x, numbers in made.items() if x in shared}
    found |= {x: [next(results) for _ in values[x]] for x in lone}
    return found | {x: [next(results)] for x in pairs}


def _filled(group: list[Any], values: _Places) -> list[int]:
    """The steps of the numbers of a group. Where another call makes a number, any step stands."""
    any_step = next(values[x][0] for x in group if x in values)
    return [n for x in group for n in values.get(x) or [any_step] * many(x)]


def _by_kernel(
    ready: dict[Any, Program], values: _Places, inputs: list[Any], steps: str
) -> dict[Any, list[Any]]:
    """The float32 numbers of nodes, from a kernel on the device, which writes one tensor."""
    from torch._inductor.lowering import lowerings

    pairs = [x for x in ready if is_pair(x)]
    single = [x for x in ready if x not in pairs and not _has_double(values[x], steps)]
    together = _steps_of((*single, *pairs), values)
    if not together:
        return {}
    tensor = _pointwise(inputs, steps, together)
    tensor.realize()
    part = lowerings[torch.ops.aten.slice.Tensor]
    place = count(len(together) - 2 * len(pairs), 2)
    found = {x: [part(tensor, 0, n, n + 2)] for x, n in zip(pairs, place, strict=False)}
    return found | _elements(tensor, single)


def _elements(tensor: Any, nodes: list[Any]) -> dict[Any, list[Any]]:
    """The numbers of nodes, which are the first elements of a tensor, in order."""
    from torch._inductor.lowering import lowerings

    select, place = lowerings[torch.ops.aten.select.int], count()
    return {x: [select(tensor, 0, next(place)) for _ in range(many(x))] for x in nodes}


def _steps_of(nodes: Iterable[Any], values: _Places) -> list[int]:
    return [n for x in nodes for n in values[x]]


def _has_double(own: list[int], steps: str) -> bool:
    return any(is_double(steps, n) for n in own)


def _ready(graph: Any, device: torch.device, made: dict[Any, Any]) -> dict[Any, Program]:
    """Nodes with numbers that are not made yet, in order. Their leaves are already calculated."""
    most = sys.maxsize if backend_of(device).writes_cpp else _MANY
    found: dict[Any, Program] = {}
    for node in graph.current_node.graph.nodes:
        own = program(node)
        if own is None or node in made or len(found) == most:
            continue
        here = node.meta["val"].device == device
        if here and all(x in found or x in made or _is_there(x, graph) for x in own.leaves):
            found[node] = own
    return found


def _leaves(node: Any) -> bool:
    """Whether the graph returns the node."""
    return any(user.op == "output" for user in node.users)


def _is_there(node: Any, graph: Any, depth: int = 0) -> bool:
    """Whether a node has been lowered. A node that only needs lowered nodes is lowered now."""
    if node in graph.env:
        return True
    if depth == _DEEP or not _may_be_early(node):
        return False
    if not all(_is_there(x, graph, depth + 1) for x in node.all_input_nodes):
        return False
    graph.env[node] = graph.run_node(node)  # Inductor skips it later
    return True


def _may_be_early(node: Any) -> bool:
    """Whether a node may be lowered before its place in the graph, because a number follows from
    it. A norm's statistics are measured in the backward pass, from tensors that exist when it
    begins. The angles of rotary embeddings are calculated from positions, and are measured."""
    if node.op == "get_attr":
        return True
    op, ops = node.target, torch.ops
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    made = ops.aten.cat, ops.aten.clone, ops.aten.full, ops.prims.iota, ops.scaledtensor.measured
    elementwise = torch.Tag.pointwise in op.tags and not op._schema.is_mutable
    converts = op is ops.prims.convert_element_type.default
    return elementwise or converts or op.is_view or op.overloadpacket in made


def called(operator: Any) -> Any:
    """A call of an operator between kernels."""
    from torch._inductor import lowering

    handler: Any = lowering.fallback_handler
    return handler(operator, add_to_fallback_set=False)
