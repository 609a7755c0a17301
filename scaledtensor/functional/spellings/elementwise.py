"""Elementwise functions, softmax and dropout."""

from typing import Any

from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.functional import activations
from scaledtensor.functional.spellings.operands import OUTPUT, refuse_out


def gelu(input: Any, *, approximate: str = "none", constraint: Any = OUTPUT) -> Tensor:
    return activations.gelu(input, constraint=constraint, approximate=approximate)


def silu(input: Any, inplace: bool = False, *, constraint: Any = OUTPUT) -> Tensor:
    return activations.silu(input, constraint=constraint)


def relu(input: Any, inplace: bool = False, *, constraint: Any = OUTPUT) -> Tensor:
    return activations.relu(input, constraint)


def leaky_relu(
    input: Any, negative_slope: float = 0.01, inplace: bool = False, *, constraint: Any = OUTPUT
) -> Tensor:
    return activations.leaky_relu(input, negative_slope, constraint=constraint)


def tanh(input: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    refuse_out(out)
    return activations.tanh(input, constraint=constraint)


def sigmoid(input: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    refuse_out(out)
    return activations.sigmoid(input, constraint=constraint)


def f_softmax(
    input: Any,
    dim: Any = None,
    _stacklevel: int = 3,
    dtype: Any = None,
    *,
    constraint: Any = OUTPUT,
) -> Tensor:
    return activations.softmax(input, _checked_dim(dim), dtype, constraint)


def softmax(
    input: Any, dim: Any, dtype: Any = None, *, out: Any = None, constraint: Any = OUTPUT
) -> Tensor:
    refuse_out(out)
    return activations.softmax(input, dim, dtype, constraint)


def f_log_softmax(
    input: Any,
    dim: Any = None,
    _stacklevel: int = 3,
    dtype: Any = None,
    *,
    constraint: Any = OUTPUT,
) -> Tensor:
    return activations.log_softmax(input, _checked_dim(dim), dtype, constraint)


def log_softmax(
    input: Any, dim: Any, dtype: Any = None, *, out: Any = None, constraint: Any = OUTPUT
) -> Tensor:
    refuse_out(out)
    return activations.log_softmax(input, dim, dtype, constraint)


def _checked_dim(dim: Any) -> int:
    if not isinstance(dim, int):
        raise UnsupportedError(
            "a unit-scaled softmax takes dim=; torch's choice of one is deprecated"
        )
    return dim


def f_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return activations.dropout(input, p, training)


def dropout(input: Any, p: float, train: bool) -> Tensor:
    return activations.dropout(input, p, train)
