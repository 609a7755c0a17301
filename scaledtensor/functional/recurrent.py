"""LSTM, GRU and plain recurrent networks at unit scale.

The gates read (W x + U h) / sqrt(2) + b, of unit variance for an input and a state of unit
variance. Let s = E sigmoid(z)^2 = 0.293 and t = E tanh(z)^2 = 0.394 for z ~ N(0, 1). The states of
torch's equations settle at a variance v at which a step forgets as much as it adds:

    LSTM   c = f c + i g                v = s t / (1 - s)      c / sqrt(v), and
           h = o tanh(c)                w = s E tanh(sqrt(v) z)^2          h / sqrt(w)
    GRU    h = (1 - u) n + u h          v = s t / (1 - s)      h / sqrt(v)
    tanh   h = tanh(z)                  t                      h / sqrt(t)
    relu   h = relu(z)                  1/2                    h / sqrt(1/2), by RMS

The last column has unit RMS: these are the states and outputs of the networks here, where sqrt(v)
has a measured factor (`_PERSISTENCE`). The reset gate of a GRU is divided by sqrt(s). States start
from zero, so the first steps come out at 0.6 to 0.8.

Within a network the gradient is the true one, since all edges lie on cycles. The gradients of
parameters are divided by the root of their number of terms, like all gradients of parameters.
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
from scaledtensor.ops.products import table
from scaledtensor.ops.rules import recurrent
from scaledtensor.ops.rules.recurrent import Parts, State, Weights

__all__ = ["FUNCTIONS"]

#: The scale of the sum of two products in the gates.
_HALF = 0.5**0.5
#: A state that persists makes the gates persist. A step then adds something similar to earlier
#: steps, which makes sqrt(v) larger by this factor. It is measured with independent Gaussian
#: inputs: with it, outputs after half of 32 and of 128 steps, of widths 64 and 256, have an RMS
#: from 1.00 to 1.06.
_PERSISTENCE = {"lstm": 1.2, "gru": 1.1}


@cache
def _sigmoid() -> float:
    """Return the RMS of the sigmoid of a Gaussian."""
    return gaussian_rms(lambda z: (1 + np.tanh(z / 2)) / 2)


@cache
def _tanh(std: float = 1.0) -> float:
    return gaussian_rms(lambda z: np.tanh(std * z))


@cache
def _state(name: str) -> float:
    """Return sqrt(v), the RMS of a state that a sigmoid forgets and a tanh renews."""
    independent = _sigmoid() * _tanh() / (1 - _sigmoid() ** 2) ** 0.5
    rms: float = _PERSISTENCE[name] * independent
    return rms


def _read(h: Tensor, w: Weights) -> Tensor:
    """Return the state's term in the gates. `w` has been prepared (`_prepared`)."""
    y: Tensor = table.linear_in_time(h, w.hidden, None) * h.shape[-1] ** -0.5
    return y if w.hidden_bias is None else y + w.hidden_bias


def _lstm(gates: Tensor, state: State, w: Weights) -> State:
    h, c = state
    i, f, g, o = ((gates + _read(h, w)) * _HALF).chunk(4, -1)
    rms = _state("lstm")
    c = f.sigmoid() * c + i.sigmoid() * g.tanh() * (1 / rms)
    h = o.sigmoid() * (c * rms).tanh() * (1 / (_sigmoid() * _tanh(rms)))
    if w.projection is not None:
        h = table.linear_in_time(h, w.projection, None) * h.shape[-1] ** -0.5
    return h, c


def _gru(gates: Tensor, state: State, w: Weights) -> State:
    (h,) = state
    reset, update, new = gates.chunk(3, -1)
    reset_of_h, update_of_h, new_of_h = _read(h, w).chunk(3, -1)
    passed = ((reset + reset_of_h) * _HALF).sigmoid() * (1 / _sigmoid())
    n = ((new + passed * new_of_h) * _HALF).tanh() * (1 / _state("gru"))
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
    """Return the weights for all steps. Their gradients are divided by the root of the number of
    rows in all steps, since later steps of a packed sequence have fewer rows."""
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
    """Return `bias` times sqrt(2): the gates multiply their sum, with the bias, by 1 / sqrt(2)."""
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
