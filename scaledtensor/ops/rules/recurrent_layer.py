"""The steps of a recurrent layer as one node of autograd, in eager code.

Twenty operators on ScaledTensors make one step of an LSTM. Each of them is a node of autograd, and
takes more time than the elements of a small layer. This module runs the steps on float32 elements
(`recurrent_loops`). It rounds both factors of the recurrent product to the format of the recipe,
and leaves the gradient of each step's gates unrounded. The operators do the same. The module rounds
other results once, at the end of the sequence, to the activation format. The scales of states are
closed forms of the whole layer. Gradients are measured, since gates that saturate bound them,
whatever the weights are.

The backward pass needs the terms of the gates, the weight, the cells and the rounded states. So no
gate is kept.

A call that a mode or an observer sees, and a derivative that is differentiated again, run the
operators.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch, native
from scaledtensor.backends import backend_of
from scaledtensor.formats import BF16, FP32, Format, fake_quantize
from scaledtensor.formats.bits import Mode
from scaledtensor.formats.native import value_loop
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import elements, plain, value
from scaledtensor.ops.products import linear
from scaledtensor.ops.products.dtype import multiplied
from scaledtensor.ops.results import OVERFLOW, Raw, narrowest, wrap
from scaledtensor.ops.rules.recurrent_loops import (
    KINDS,
    Expected,
    Kind,
    Order,
    Product,
    Round,
    State,
)
from scaledtensor.recipes.casts import Carried, Cast
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import product_of, quadrature, settle
from scaledtensor.scales.singles import (
    ONE,
    Single,
    amount,
    calculates,
    multiplier,
    rms_of,
    scale_of,
    scaled_by,
)
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["run"]

Operators = Callable[..., tuple[Tensor, list[Tensor]]]
"""(gates, initial state, weight, bias) -> outputs and last states, by operators."""


class _Call(NamedTuple):
    """One layer in one direction."""

    kind: Kind
    order: Order
    cast: Cast
    """The cast of a state for the recurrent product."""
    from_zero: bool
    operators: Operators


def run(
    name: str,
    gates: Any,
    sizes: Sequence[int] | None,
    backwards: bool,
    start: Sequence[Any],
    weight: Any,
    bias: Any,
    operators: Operators,
) -> tuple[Tensor, list[Tensor]] | None:
    """Return outputs and last states of a layer in one direction. None if operators have to run it.

    Args:
        name: torch's name of the kind of layer.
        gates: Products of all inputs, (time, batch, features), or (rows, features) if packed.
        sizes: Rows of each step of packed sequences.
        backwards: Whether the layer starts at the end.
        start: The initial states, (batch, width).
        weight: The recurrent weight, cast.
        bias: The recurrent bias, or None.
        operators: Runs the same layer by operators.
    """
    kind, cast = KINDS.get(name), _cast_of_states(weight)
    if kind is None or cast is None or not _serves(gates, weight, bias, *start):
        return None
    from_zero = all(map(_is_zero, start))
    order = Order((gates.shape[1],) * len(gates) if sizes is None else tuple(sizes), backwards)
    held = [s if from_zero or isinstance(s, ScaledTensor) else _entered(s, gates) for s in start]
    call = _Call(kind, order, cast, from_zero, operators)
    output, *last = _Steps.apply(call, gates, weight, bias, *held)  # type: ignore[no-untyped-call]
    return output, last


def _cast_of_states(weight: Any) -> Cast | None:
    """Return the cast of states for the product with a weight, if the recipe is a `Unit` that keeps
    no activations in 8 bits. Else None."""
    if type(weight) is not ScaledTensor or weight.recipe is None or weight.recipe.saved is not None:
        return None
    once = weight.recipe.gemms.once
    if once is None or weight.format != once[1].format:
        return None
    carried = all(isinstance(c.scale, Carried) for c in once)
    # The loops round to nearest, under the scale of the states.
    return once[0] if carried and once[0] == Cast(once[0].format) else None


def _serves(gates: Any, weight: Any, bias: Any, *start: Any) -> bool:
    if not linear.is_alone() or invariant.is_on() or _torch.is_transforming():
        return False
    if not gates.numel():
        return False
    scaled = [gates, weight, *(x for x in (bias, *start) if isinstance(x, ScaledTensor))]
    return (
        (bias is None or isinstance(bias, ScaledTensor))
        and all(type(x) is ScaledTensor and x.dtype == weight.dtype for x in scaled)
        and all(x.dtype == weight.dtype for x in start)
        and all(map(calculates, scaled))
    )


def _is_zero(start: Any) -> bool:
    """Whether an initial state is the one that torch makes if the caller gives none. Reading it
    would wait for another device than the host."""
    is_plain = type(start) is Tensor and not start.requires_grad and backend_of(start).host
    return is_plain and not bool(start.any())


def _entered(start: Tensor, gates: Any) -> Any:
    return verbs.promote(start, gates.detach())


# --- numbers ---------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 10)
def _expected(
    kind: Kind, gates: Single, weight: Single, width: int, start: Single, steps: int
) -> Expected:
    return kind.expected(gates, weight * width**0.5, start, steps)


def _expected_of(call: _Call, gates: Any, weight: Any, bias: Any, start: Sequence[Any]) -> Expected:
    rms = rms_of(gates) if bias is None else quadrature(rms_of(gates), rms_of(bias))
    first = ONE * 0 if call.from_zero else rms_of(start[-1])
    steps = len(call.order.sizes)
    return _expected(call.kind, rms, rms_of(weight), weight.shape[1], first, steps)


# --- elements --------------------------------------------------------------------------------


def _rounding(fmt: Format, unit: Single, dtype: torch.dtype, like: Tensor) -> Round:
    """Return the function that rounds elements under the scale `unit` to values of `fmt` in
    `dtype`."""
    if fmt is FP32:
        return lambda x: x.float()
    inverse = multiplier(1 / unit)
    loop = value_loop(fmt, Mode("nearest_even", OVERFLOW), dtype) if native.takes(like) else None
    if loop is not None:
        halves = torch.float16  # the loop reads float32 and bfloat16
        return lambda x: loop.values((x.float() if x.dtype is halves else x) * inverse)
    return lambda x: fake_quantize(x * inverse, fmt, overflow=OVERFLOW).to(dtype)


#: A product of up to so many multiplications is made in float32. A bfloat16 product takes 25 us
#: longer to start (measured on a Xeon with AMX), and is as exact.
_SMALL = 1 << 20


def _matrix(weight: Any, unit: Single, fmt: Format, rows: int) -> Tensor:
    """Return the weight times a unit, in the dtype of products with `rows` rows in `fmt`."""
    (q,) = multiplied(elements(weight), wide=fmt is FP32 or rows * weight.numel() <= _SMALL)
    return scaled_by(q, product_of(unit, scale_of(weight)), q.dtype)


def _rows(x: Any) -> Tensor:
    """Return the value in float32 as rows."""
    rows: Tensor = plain(x).float().reshape(-1, x.shape[-1])
    return rows


def _plain(start: Sequence[Any]) -> State:
    return [plain(s).float() for s in start]


# --- the node --------------------------------------------------------------------------------


class _Steps(torch.autograd.Function):
    """(call, gates, weight, bias, initial states) -> (outputs, last states)."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, gates: Any, weight: Any, bias: Any, *start: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        kind, order, sources = call.kind, call.order, [gates, weight]
        expected = _expected_of(call, gates, weight, bias, start)
        z, product = _terms(call, expected, gates, weight, bias)
        initial, fmt = _plain(start), narrowest(sources)
        hs = z.new_empty(z.shape[0], weight.shape[1], dtype=fmt.storage_dtype)
        cells = kind.run(z, order, product, initial, product.round(initial[0]), hs)
        last = [wrap(Raw(order.last(hs), None, expected.h, fresh=True), sources)]
        if cells is not None:
            last.append(wrap(Raw(order.last(cells), None, expected.c, fresh=True), sources))
            cells = cells.bfloat16() if fmt is BF16 else cells
        # The backward pass reads the states, and the caller may write into the output.
        own = hs if cells is not None else hs.clone()
        shape = (*gates.shape[:-1], hs.shape[1])
        output = wrap(Raw(own.view(shape), None, expected.h, fresh=True), sources)
        kept = hs if cells is None else _cast(output, call.cast)
        ctx.call, ctx.expected = call, expected
        ctx.save_for_backward(gates, weight, bias, kept, cells, *start)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gates, weight, bias, kept, cells, *start = ctx.saved_tensors
        operands = (gates, weight, bias, *start)
        if all(g is None for g in grads):
            return None, *(None for _ in operands)
        held = [
            g if g is None or isinstance(g, ScaledTensor) else _entered(g, gates) for g in grads
        ]
        alone = linear.is_alone() and not torch.is_grad_enabled()
        if alone and all(g is None or ("qdata" in vars(g) and calculates(g)) for g in held):
            with _torch.disable_torch_function():
                found = _gradients(ctx, operands, kept, cells, held)
        else:
            found = _by_operators(ctx.call, operands, held)
        return None, *found


def _cast(x: Any, cast: Cast) -> Any:
    if x.format == cast.format:
        return x
    operator, *arguments = linear.operand_cast(x, cast)
    return operator(*arguments)


def _terms(
    call: _Call, expected: Expected, gates: Any, weight: Any, bias: Any
) -> tuple[Tensor, Product]:
    """Return the terms of the gates that do not depend on a state, and the recurrent product."""
    z, fmt = _rows(gates), call.cast.format
    if z.data_ptr() == gates.qdata.data_ptr():  # the steps overwrite it
        z = z.clone()
    unit = ONE if fmt is FP32 else settle(expected.h)[0]
    matrix = _matrix(weight, unit, fmt, max(call.order.sizes)).t()
    added = None if bias is None else value(bias).float()
    if added is not None and call.kind.one_bias:
        z, added = z.add_(added), None
    return z, Product(matrix, _rounding(fmt, unit, matrix.dtype, z), unit, added)


def _gradients(
    ctx: Any, operands: Sequence[Any], kept: Any, cells: Any, grads: Sequence[Any]
) -> list[Any]:
    """Return the gradients of gates, weight, bias and initial states."""
    call, order = ctx.call, ctx.call.order
    gates, weight, bias, *start = operands
    initial = _plain(start)
    z, product = _terms(call, ctx.expected, gates, weight, bias)
    states = _rows(kept)
    read = order.earlier(product.round(states), product.round(initial[0]))
    after = states if cells is None else cells.float()
    y = product.of_rounded(read)
    factors = call.kind.factors(z, y, order.earlier(after, initial[-1]), after)

    scale, grad, last = _together(grads, states, initial)
    sources = [gates, weight]
    matrix = _matrix(weight, ONE, narrowest(sources), max(order.sizes))
    back = Product(matrix, lambda x: x.to(matrix.dtype))
    dz, dy, first = call.kind.back(factors, order, back, grad, last)

    def measured(x: Tensor) -> Any:
        return amount(measured_rms(x)) * scale

    _, of_gates, of_weight, of_bias, *of_start = ctx.needs_input_grad
    found: list[Any] = [None, None, None]
    rms, rows = measured(dy), len(dy)
    if of_gates:
        of_z = rms if dz is dy else measured(dz)
        found[0] = wrap(Raw(dz.view(gates.shape), scale, of_z), sources)
    if of_weight:
        sums = torch.mm(dy.to(matrix.dtype).t(), read.to(matrix.dtype))
        of_sums = rms * ctx.expected.h * rows**0.5
        found[1] = wrap(Raw(sums, product_of(scale, product.unit), of_sums), sources)
    if of_bias:
        raw = Raw(dy.sum(0), scale, rms * rows**0.5, format=bias.format)
        found[2] = wrap(raw, sources)
    for g, needed in zip(first, of_start, strict=False):
        found.append(wrap(Raw(g, scale, measured(g)), sources) if needed else None)
    return found


def _together(grads: Sequence[Any], states: Tensor, initial: State) -> tuple[Single, Tensor, State]:
    """Return the gradients of outputs and last states under one scale."""
    shapes = [states.shape] + [initial[0].shape] * (len(grads) - 1)
    share = (initial[0].numel() / states.numel()) ** 0.5
    given = [g for g in grads if g is not None]
    rms = quadrature(*(rms_of(g) if g is grads[0] else rms_of(g) * share for g in given))
    scale, *ratios = settle(rms, *map(scale_of, given))
    left = iter(ratios)
    found = [
        torch.zeros(shape, dtype=torch.float32, device=states.device)
        if g is None
        else scaled_by(elements(g).float(), next(left)).reshape(shape)
        for g, shape in zip(grads, shapes, strict=True)
    ]
    grad, *last = found
    return scale, grad, last


def _by_operators(call: _Call, operands: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Return the same by operators, which are differentiable."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [_alias(x, again) for x in operands]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        gates, weight, bias, *start = aliases
        output, last = call.operators(gates, start, weight, bias)
        results = [(y, g) for y, g in zip([output, *last], grads, strict=True) if g is not None]
        ys, gs = zip(*results, strict=True)
        found = torch.autograd.grad(ys, wanted, gs, create_graph=again, allow_unused=True)
    left = iter(found)
    return [None if x is None or not x.requires_grad else next(left) for x in operands]


def _alias(x: Any, differentiable: bool) -> Any:
    """Return an alias of an operand, at which autograd stops: the operand itself has the graph of
    other calls. A second derivative goes on to the operand through a `differentiable` alias."""
    if x is None or not x.requires_grad:
        return x
    return x.view_as(x) if differentiable else x.detach().requires_grad_()
