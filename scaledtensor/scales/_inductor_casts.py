"""How Inductor writes casts and measured RMS. In C++, a cast to values is one operation of a kernel
(`_inductor_operations.py`). All else is written as the torch operators that define it, and each
value of such an operator is written once.

A site looks at the results of some casts (`scaledtensor.ops.products.counted`). That is a call
without a result, so nothing waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import map_arg

from scaledtensor.backends import backend_of
from scaledtensor.scales._inductor import called, numbers_of, product
from scaledtensor.scales._inductor_operations import rounded_values

__all__ = ["cast", "cast_and_look", "measured", "seen"]

# --- looking -------------------------------------------------------------------------------------


def seen(x: Any, *seen: Any) -> Any:
    """A call without a result. The elements are passed on unchanged, so nothing waits for it."""
    return _looked_at(_laid_out(x), *seen)


def _looked_at(x: Any, *seen: Any) -> Any:
    called(torch.ops.scaledtensor.look.default)(x, *seen)
    return x


# --- casts ---------------------------------------------------------------------------------------


def cast(function: Callable[..., Tensor], x: Any, leaves: list[Any], steps: str, *how: Any) -> Any:
    """Elements times a number, and then rounded."""
    from scaledtensor.scales.cast_nodes import rounded

    numbers = numbers_of(leaves, steps, 1) if steps else ()
    if function is rounded and backend_of(x.get_device()).writes_cpp:
        return rounded_values(product(x, numbers[0]) if numbers else x, *how)

    def multiplied(x: Tensor, *number: Tensor) -> Tensor:
        return function(x * number[0] if number else x, *how)

    return _inlined(multiplied, x, numbers)


def cast_and_look(
    function: Callable[..., Tensor], x: Any, leaves: list[Any], steps: str, *how: Any
) -> Any:
    """The same for a cast that a site looks at. The call reads the values that products read."""
    format, second, *watch = how
    made = _laid_out(cast(function, x, leaves, steps, format, second))
    if backend_of(made.get_device()).writes_cpp:
        _round_weights()
    factors, role, trains = watch
    return _looked_at(made, factors, format, role, trains)


def _laid_out(x: Any) -> Any:
    """A value in memory. The call fixes its strides, so they are chosen here for the convolution
    that reads it too. Otherwise the convolution would read a copy in other strides."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    node = graph.current_node
    if len(x.get_size()) == 4 and (
        node in graph.nodes_prefer_channels_last or any(map(_puts_channels_last, node.users))
    ):
        # The nodes that read the value are told its strides.
        with V.fake_mode:
            node.meta["val"] = node.meta["val"].contiguous(memory_format=torch.channels_last)
        return ir.ExternKernel.require_channels_last(x)
    x.realize()
    return x


def _puts_channels_last(user: Any) -> bool:
    """Whether a node is the backward pass of a convolution whose operands have channels last."""
    if user.target is not torch.ops.aten.convolution_backward.default:
        return False
    operands = [x.meta["val"] for x in user.args[1:3]]
    return any(x.is_contiguous(memory_format=torch.channels_last) for x in operands)


def _round_weights() -> None:
    """Write the casts of the weights that follow, up to the next cast that a site looks at, in the
    same C++ function as this one. The call would end the function before them."""
    from torch._inductor.virtualized import V

    ops = torch.ops.scaledtensor
    graph: Any = V.graph
    node = graph.current_node.next
    while node.op != "root" and node.target is not ops.rounded_seen.default:
        needed = node.all_input_nodes
        if node.target is ops.rounded.default and all(x in graph.env for x in needed):
            if node not in graph.env:
                graph.env[node] = graph.run_node(node)
            graph.env[node].realize()
        node = node.next


def measured(x: Any, below: float) -> Any:
    from scaledtensor.scales.measure import of_elements

    return _inlined(lambda given: of_elements(given, below), x)


@contextmanager
def _as_while_tracing() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true. Backward passes are lowered when they are first
    called, outside of any `torch.compile`."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _inlined(function: Callable[..., Tensor], x: Any, numbers: Sequence[Any] = ()) -> Any:
    """Write the torch operators that `function` calls, on `x`, which is the first argument of the
    current node, and on numbers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: Any = V.graph
    # Inductor takes graphs without in-place operators.
    trace = make_fx(torch.func.functionalize(function), select_decomp_table())
    made: dict[Any, Any] = {}
    once = _Once()
    with V.fake_mode, _as_while_tracing():
        given = graph.current_node.args[0].meta["val"]
        stand_ins = [torch.empty((), dtype=n.get_dtype(), device=n.get_device()) for n in numbers]
        traced = trace(given, *stand_ins).graph
    entering = iter((x, *numbers))
    for node in traced.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
        value = node.meta.get("val")
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            result = next(entering)
            made[node] = once.part(result) if value.dim() else result
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            made[node] = value.node.expr
        elif node.target is torch.ops.aten.as_strided.default:
            made[node] = _separate(args[0])
        else:
            result = lowerings[node.target](*args, **kwargs)
            made[node] = once.part(result) if value.dim() else result
    return None


def _separate(x: Any) -> Any:
    """The result of a loop of its own. A cast asks for it by a view of all elements
    (`loop_of_its_own`), which has the strides of the trace. Inductor chooses other strides for a
    buffer, so the view would read other elements."""
    x.realize()
    return x


class _Once:
    """Elementwise operators of one node, which calculate each of their values once.

    Inductor writes an elementwise operator by calling the functions that write its operands. If two
    operators read a value, its function is called twice, and all functions before it. A cast to
    codes reads its input five times, so the kernel before it would be written five times.
    """

    def __init__(self) -> None:
        #: The values of the element that is being written. None between two elements.
        self._values: dict[Any, Any] | None = None

    def part(self, x: Any) -> Any:
        """A value that operators of this node read. Two loops that write it share no values, and
        neither does a sum over it."""
        load = x.make_loader()
        key = object()

        def value(index: Any) -> Any:
            if self._values is not None:
                return kept(self._values, index)
            self._values = {}
            try:
                return kept(self._values, index)
            finally:
                self._values = None

        def kept(values: dict[Any, Any], index: Any) -> Any:
            place = key, tuple(index)
            if place not in values:
                values[place] = load(index)
            return values[place]

        return _elementwise(x, value)


def _elementwise(x: Any, value: Callable[[Any], Any]) -> Any:
    from torch._inductor import ir

    return ir.Pointwise.create(
        device=x.get_device(), dtype=x.get_dtype(), inner_fn=value, ranges=x.get_size()
    )
