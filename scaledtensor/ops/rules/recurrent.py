"""LSTM, GRU and plain recurrent networks, from operators that have rules.

torch runs a whole network as one operator, or as operators that C++ calls. There autograd saves the
operands of a product before they are cast. This module has the same equations in Python. The
product with the input is one product for the whole sequence, and the weight of the recurrent
product is cast once for all steps. Under `Unit` the gradient of a recurrent product is not cast to
8 bits: its errors would add up over hundreds of steps.

Sigmoid, tanh, product and sum have closed forms, so a network of these operators needs none of its
own. In eager code one node runs all steps of a layer (`recurrent_layer`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.errors import ShapeError
from scaledtensor.ops.products.table import cast_once, linear, linear_in_time
from scaledtensor.ops.rules import recurrent_layer

__all__ = ["CELLS", "FUNCTIONS", "Parts", "State", "Weights", "cell", "network"]

State = tuple[Tensor, ...]
"""(h,) or, for an LSTM, (h, c); each is (batch, width)."""


class Weights(NamedTuple):
    """Weights of one layer in one direction."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


Cell = Callable[[Tensor, State, Weights], State]
"""(product of the input with its weight, state, weights) -> the next state."""


def _lstm(gates: Tensor, state: State, w: Weights) -> State:
    """Run one step of an LSTM (Hochreiter and Schmidhuber 1997) with forget gates. The order of the
    gates is torch's: i, f, g, o."""
    h, c = state
    i, f, g, o = (gates + linear_in_time(h, w.hidden, w.hidden_bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w.projection is None else linear_in_time(h, w.projection)), c


def _gru(gates: Tensor, state: State, w: Weights) -> State:
    """Run one step of a GRU (Cho et al. 2014). The reset comes after the product, as in torch."""
    (h,) = state
    reset, update, new = gates.chunk(3, -1)
    reset_of_h, update_of_h, new_of_h = linear_in_time(h, w.hidden, w.hidden_bias).chunk(3, -1)
    n = (new + (reset + reset_of_h).sigmoid() * new_of_h).tanh()
    return (n + (update + update_of_h).sigmoid() * (h - n),)


def _elman(
    activation: Callable[[Tensor], Tensor], gates: Tensor, state: State, w: Weights
) -> State:
    (h,) = state
    return (activation(gates + linear_in_time(h, w.hidden, w.hidden_bias)),)


class Parts(NamedTuple):
    """The functions that a network calls. The layers of `functional` pass others."""

    #: torch's name -> cell.
    cells: dict[str, Cell]
    #: (input of all steps, weights, constraint) -> its product with the weight, for all steps.
    gates: Callable[[Tensor, Weights, Any], Tensor]
    #: (weights, input of all steps, constraint) -> weights for the single steps.
    prepared: Callable[[Weights, Tensor, Any], Weights]
    #: (x, probability) -> dropout of x between two layers in training.
    dropout: Callable[[Tensor, float], Tensor]


def _gates(x: Tensor, w: Weights, constraint: Any) -> Tensor:
    gates: Tensor = linear(x, w.input, w.input_bias)
    return gates


def _cast(w: Weights, x: Tensor, constraint: Any) -> Weights:
    projection = None if w.projection is None else cast_once(w.projection, x)
    return w._replace(hidden=cast_once(w.hidden, x), projection=projection)


#: torch's name -> cell.
CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": partial(_elman, torch.tanh),
    "rnn_relu": partial(_elman, torch.relu),
}

PLAIN = Parts(CELLS, _gates, _cast, lambda x, p: torch.dropout(x, p, True))


# --- sequences -------------------------------------------------------------------------------


def _steps(
    cell: Cell, gates: Tensor, sizes: list[int] | None, start: State, w: Weights
) -> tuple[Tensor, list[Tensor]]:
    """Run one layer in one direction. Return outputs in the layout of `gates`, and the final state.

    `gates` is (time, batch, features). Packed sequences are (rows, features), and `sizes` lists the
    batch of each step, which never grows. A sequence that has ended keeps its state.
    """
    parts = gates.unbind(0) if sizes is None else gates.split(sizes)
    outputs, over = [], []
    state = start
    for part in parts:
        rows = part.shape[0]
        if rows < state[0].shape[0]:
            over.append([s[rows:] for s in state])
            state = tuple(s[:rows] for s in state)
        state = cell(part, state, w)
        outputs.append(state[0])
    final = zip(state, *reversed(over), strict=True)
    return _joined(outputs, sizes), [torch.cat(p) if len(p) > 1 else p[0] for p in final]


def _steps_back(
    cell: Cell, gates: Tensor, sizes: list[int] | None, start: State, w: Weights
) -> tuple[Tensor, list[Tensor]]:
    """Works like `_steps`, from the end. Each sequence starts at its last element."""
    parts = gates.unbind(0) if sizes is None else gates.split(sizes)
    outputs = []
    state = tuple(s[: parts[-1].shape[0]] for s in start)
    for part in reversed(parts):
        running, rows = state[0].shape[0], part.shape[0]
        if rows > running:
            state = tuple(
                torch.cat((s, s0[running:rows])) for s, s0 in zip(state, start, strict=True)
            )
        state = cell(part, state, w)
        outputs.append(state[0])
    return _joined(outputs[::-1], sizes), list(state)


def _joined(outputs: list[Tensor], sizes: list[int] | None) -> Tensor:
    return torch.stack(outputs) if sizes is None else torch.cat(outputs)


Way = Callable[..., tuple[Tensor, list[Tensor]]]


def _as_one(
    name: str, way: Way, gates: Tensor, sizes: list[int] | None, start: State, w: Weights
) -> tuple[Tensor, list[Tensor]] | None:
    """Run a layer in one direction as one node; None if operators have to run it."""
    if w.projection is not None:
        return None

    def operators(gates: Tensor, start: State, weight: Tensor, bias: Tensor | None) -> Any:
        again = w._replace(hidden=weight, hidden_bias=bias)
        return way(CELLS[name], gates, sizes, tuple(start), again)

    backwards = way is _steps_back
    hidden, bias = w.hidden, w.hidden_bias
    return recurrent_layer.run(name, gates, sizes, backwards, start, hidden, bias, operators)


# --- networks --------------------------------------------------------------------------------


def _layers(params: Sequence[Tensor], biased: bool, projected: bool) -> Iterator[Weights]:
    each = 2 + 2 * biased + projected
    rest = iter(params)
    while own := list(islice(rest, each)):
        w = Weights(*own[: 2 + 2 * biased])
        yield w._replace(projection=own[-1]) if projected else w


def network(
    name: str, *args: Any, made_of: Parts = PLAIN, constraint: Any = None
) -> tuple[Tensor, ...]:
    """Works like `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`.

    Args:
        name: Name of the function of torch.
        *args: input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
            batch_first. For packed sequences they are data, batch_sizes, hx, params, ..., and end
            with bidirectional.
        made_of: The functions that the network calls.
        constraint: Passed to these functions.
    """
    x, *rest = args
    # Packed sequences have sizes before the states: a tensor in the place of an LSTM's pair of
    # states, or of the list of weights.
    packed = isinstance(rest[0 if name == "lstm" else 1], Tensor)
    sizes = rest.pop(0).tolist() if packed else None
    hx, params, biased, layers, dropout, train, both_ways, *batch_first = rest
    start: State = tuple(hx) if name == "lstm" else (hx,)
    by_batch = bool(batch_first and batch_first[0])
    if by_batch:
        x = x.transpose(0, 1)
        x = x.contiguous() if made_of is PLAIN else x  # one node makes the product of such an input
    if x.shape[0] == 0:
        raise ShapeError(f"a recurrent layer takes at least one time step; got {[*args[0].shape]}")
    projected = name == "lstm" and start[0].shape[-1] != start[1].shape[-1]
    weights = _layers(params, biased, projected)
    ways = (_steps, _steps_back) if both_ways else (_steps,)
    finals: list[list[Tensor]] = []
    for layer in range(layers):
        outputs = []
        for way in ways:
            own = tuple(s[len(finals)] for s in start)
            w = next(weights)
            gates = made_of.gates(x, w, constraint)
            w = made_of.prepared(w, x, constraint)
            found = _as_one(name, way, gates, sizes, own, w) if made_of is PLAIN else None
            if found is None:
                found = way(made_of.cells[name], gates, sizes, own, w)
            output, final = found
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and train and layer < layers - 1:
            x = made_of.dropout(x, dropout)
    x = x.transpose(0, 1) if by_batch else x
    return x, *(torch.stack(parts) for parts in zip(*finals, strict=True))


def cell(
    name: str,
    x: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Any = None,
    b_hh: Any = None,
    *,
    made_of: Parts = PLAIN,
    constraint: Any = None,
) -> Any:
    """Works like `torch.lstm_cell`, `torch.gru_cell`, `torch.rnn_tanh_cell` and
    `torch.rnn_relu_cell`: one step."""
    state = tuple(hx) if name == "lstm" else (hx,)
    w = Weights(w_ih, w_hh, b_ih, b_hh)
    gates = made_of.gates(x, w, constraint)
    w = made_of.prepared(w, x, constraint)
    sizes = [len(gates)] if gates.dim() == 2 else None  # the steps of a packed sequence
    found = _as_one(name, _steps, gates, sizes, state, w) if sizes and made_of is PLAIN else None
    new = made_of.cells[name](gates, state, w) if found is None else found[1]
    return tuple(new) if name == "lstm" else new[0]


#: Function that `torch.nn` calls -> the same function from operators with rules.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): partial(network, name) for name in CELLS},
    **{getattr(torch, f"{name}_cell"): partial(cell, name) for name in CELLS},
}
