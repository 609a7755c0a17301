"""LSTM, GRU and plain recurrent networks at unit scale.

The gates read (W x + U h) / sqrt(2) + b, of unit variance for an input and a state of unit
variance. With s = E sigmoid(z)^2 = 0.293 and t = E tanh(z)^2 = 0.394 for z ~ N(0, 1), the states of
torch's equations settle where what is forgotten equals what is new:

    LSTM   c = f c + i g                v = s t / (1 - s)      c / sqrt(v), and
           h = o tanh(c)                w = s E tanh(sqrt(v) z)^2          h / sqrt(w)
    GRU    h = (1 - u) n + u h          v = s t / (1 - s)      h / sqrt(v)
    tanh   h = tanh(z)                  t                      h / sqrt(t)
    relu   h = relu(z)                  1/2                    h / sqrt(1/2), by RMS

have unit RMS: these are the states and outputs here, but for a factor of sqrt(v) that is measured
(`_PERSISTENCE`). The reset gate of a GRU is divided by sqrt(s). The first steps, which start from
zero, come out at 0.6 to 0.8.

The gradient is the true one within a network, where all edges are in cycles; those of its
parameters are over the root of their number of terms, as everywhere.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaledtensor.functional.activations import dropout
from scaledtensor.functional.products import linear
from scaledtensor.functional.scaling import (
    batch_factor,
    gaussian_rms,
    parameter_scale,
    root,
    scale,
    scale_bwd,
)
from scaledtensor.ops.products.table import linear as product
from scaledtensor.ops.rules import recurrent
from scaledtensor.ops.rules.recurrent import Parts, State, Weights

__all__ = ["FUNCTIONS"]

#: Of the two products that the gates add.
_HALF = 0.5**0.5
#: A state that persists makes gates that persist, so that what a step adds is like what was added
#: before, and sqrt(v) is so many times as large. Measured with independent Gaussian inputs: outputs
#: after half of 32 and of 128 steps, of widths 64 and 256, then have an RMS from 1.00 to 1.06.
_PERSISTENCE = {"lstm": 1.2, "gru": 1.1}


@cache
def _sigmoid() -> float:
    """RMS of the sigmoid of a Gaussian."""
    return gaussian_rms(lambda z: (1 + np.tanh(z / 2)) / 2)


@cache
def _tanh(std: float = 1.0) -> float:
    return gaussian_rms(lambda z: np.tanh(std * z))


@cache
def _kept(name: str) -> float:
    """RMS of a state that is forgotten at the rate of a sigmoid and renewed by a tanh: sqrt(v)."""
    independent = _sigmoid() * _tanh() / (1 - _sigmoid() ** 2) ** 0.5
    kept: float = _PERSISTENCE[name] * independent
    return kept


def _read(h: Tensor, w: Weights) -> Tensor:
    """What the state gives to the gates, by weights that are prepared."""
    y: Tensor = product(h, w.hidden, None) * h.shape[-1] ** -0.5
    return y if w.hidden_bias is None else y + w.hidden_bias


def _lstm(gates: Tensor, state: State, w: Weights) -> State:
    h, c = state
    i, f, g, o = ((gates + _read(h, w)) * _HALF).chunk(4, -1)
    kept = _kept("lstm")
    c = f.sigmoid() * c + i.sigmoid() * g.tanh() * (1 / kept)
    h = o.sigmoid() * (c * kept).tanh() * (1 / (_sigmoid() * _tanh(kept)))
    if w.projection is not None:
        h = product(h, w.projection, None) * h.shape[-1] ** -0.5
    return h, c


def _gru(gates: Tensor, state: State, w: Weights) -> State:
    (h,) = state
    reset, update, new = gates.chunk(3, -1)
    reset_of_h, update_of_h, new_of_h = _read(h, w).chunk(3, -1)
    passed = ((reset + reset_of_h) * _HALF).sigmoid() * (1 / _sigmoid())
    n = ((new + passed * new_of_h) * _HALF).tanh() * (1 / _kept("gru"))
    return (n + ((update + update_of_h) * _HALF).sigmoid() * (h - n),)


def _elman(activation: Callable[[Tensor], Tensor], rms: Callable[[], float], *given: Any) -> State:
    gates, (h,), w = given
    return (activation((gates + _read(h, w)) * _HALF) * (1 / rms()),)


def _relu() -> float:
    return _HALF


def _gates(x: Tensor, w: Weights, constraint: Any) -> Tensor:
    gates = linear(x, w.input, None, constraint)
    bias = _bias(w.input_bias, x, constraint)
    return gates if bias is None else gates + bias


def _prepared(w: Weights, x: Tensor, constraint: Any) -> Weights:
    """Weights for one step after the other, with gradients over the root of how many rows there are
    in all: a packed sequence has fewer in later ones."""
    rows = _rows(x)
    free = [
        None
        if p is None
        else scale_bwd(p, parameter_scale(constraint, root(rows) * p.shape[-1] ** 0.5))
        for p in (w.hidden, w.projection)
    ]
    bias = _bias(w.hidden_bias, x, constraint)
    assert free[0] is not None
    return recurrent.PLAIN.prepared(
        w._replace(hidden=free[0], projection=free[1], hidden_bias=bias), x, constraint
    )


def _bias(bias: Tensor | None, x: Tensor, constraint: Any) -> Tensor | None:
    """As it is in the sum of both products, which is multiplied by 1 / sqrt(2)."""
    if bias is None:
        return None
    return scale(bias, 1 / _HALF, parameter_scale(constraint, root(_rows(x)), 1 / _HALF))


def _rows(x: Tensor) -> float:
    return math.prod(x.shape[:-1]) * batch_factor()


_UNIT = Parts(
    {
        "lstm": _lstm,
        "gru": _gru,
        "rnn_tanh": partial(_elman, torch.tanh, _tanh),
        "rnn_relu": partial(_elman, torch.relu, _relu),
    },
    _gates,
    _prepared,
    dropout,
)


def _network(name: str) -> Callable[..., Any]:
    def network(*args: Any, constraint: Any = "to_output_scale") -> Any:
        return recurrent.network(name, *args, made_of=_UNIT, constraint=constraint)

    return network


def _cell(name: str) -> Callable[..., Any]:
    def cell(*args: Any, constraint: Any = "to_output_scale", **kwargs: Any) -> Any:
        return recurrent.cell(name, *args, **kwargs, made_of=_UNIT, constraint=constraint)

    return cell


#: torch's functions of recurrent layers -> the same at unit scale.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _network(name) for name in recurrent.CELLS},
    **{getattr(torch, f"{name}_cell"): _cell(name) for name in recurrent.CELLS},
}
