"""Adapters for torch's spellings of matrix products, sums and elementwise functions."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor.errors import UnsupportedError
from scaledtensor.functional import activations, products, residual
from scaledtensor.functional.scaling import (
    apply_constraint,
    batch_factor,
    parameter_scale,
    repeats,
    root,
    scale_bwd,
    scale_fwd,
)
from scaledtensor.ops.products.by_gemm import tensordot_equation

__all__ = [
    "OUTPUT",
    "add",
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bilinear",
    "bmm",
    "chain_matmul",
    "dropout",
    "einsum",
    "f_dropout",
    "f_log_softmax",
    "f_softmax",
    "grouped_mm",
    "inner",
    "is_weight",
    "leaky_relu",
    "log_softmax",
    "matmul",
    "mm",
    "mul",
    "multi_dot",
    "mv",
    "radd",
    "reflected_matmul",
    "refuse_out",
    "relu",
    "rsub",
    "sigmoid",
    "silu",
    "softmax",
    "sub",
    "tanh",
    "tensordot",
]

#: The default constraint of an adapter.
OUTPUT = "to_output_scale"


def is_weight(x: Any) -> bool:
    """Return whether `x` is a parameter, or a view of one such as its transpose."""
    if not isinstance(x, Tensor):
        return False
    return isinstance(x, nn.Parameter) or isinstance(getattr(x, "_base", None), nn.Parameter)


def refuse_out(out: Any) -> None:
    """Raise UnsupportedError if `out` is given."""
    if out is not None:
        raise UnsupportedError(
            "unit-scaled functions take no out=, as autograd takes none; assign the result instead"
        )


# --- matrix products -------------------------------------------------------------------------


def matmul(input: Any, other: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    refuse_out(out)
    if is_weight(other) and other.dim() == 2:
        return products.linear(input, other.mT, None, constraint)
    return products.matmul(input, other, constraint)


def reflected_matmul(self: Any, other: Any, *, constraint: Any = OUTPUT) -> Tensor:
    return matmul(other, self, constraint=constraint)


def mm(input: Any, mat2: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    return matmul(input, mat2, out=out, constraint=constraint)


def mv(input: Any, vec: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    return matmul(input, vec, out=out, constraint=constraint)


def bmm(input: Any, mat2: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    refuse_out(out)
    return products.bmm(input, mat2, constraint)


def inner(input: Any, other: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    right = other.mT if other.dim() > 1 else other
    return matmul(input, right, out=out, constraint=constraint)


def tensordot(
    a: Any, b: Any, dims: Any = 2, *, out: Any = None, constraint: Any = OUTPUT
) -> Tensor:
    refuse_out(out)
    equation = tensordot_equation(a.dim(), b.dim(), dims)
    return products.einsum(equation, a, b, constraint=constraint)


def multi_dot(tensors: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    """Multiply from left to right, so that each product has the shapes of its constants."""
    refuse_out(out)
    total: Tensor = reduce(partial(matmul, constraint=constraint), tensors)
    return total


def chain_matmul(*matrices: Any, out: Any = None, constraint: Any = OUTPUT) -> Tensor:
    listed = len(matrices) == 1 and isinstance(matrices[0], (list, tuple))
    return multi_dot(matrices[0] if listed else matrices, out=out, constraint=constraint)


def bilinear(
    input1: Any, input2: Any, weight: Any, bias: Any = None, *, constraint: Any = OUTPUT
) -> Tensor:
    y = products.einsum("...i,...j,oij->...o", input1, input2, weight, constraint=constraint)
    return y if bias is None else y + bias


def einsum(equation: Any, *operands: Any, constraint: Any = OUTPUT) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise UnsupportedError("a unit-scaled einsum takes its equation as a string, 'ij,jk->ik'")
    return products.einsum(equation, *operands, constraint=constraint)


def addmm(
    input: Any,
    mat1: Any,
    mat2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
    constraint: Any = OUTPUT,
) -> Tensor:
    """`addmm` is a linear layer if `mat2` is a weight and `input` its bias (Conv1D of GPT-2)."""
    refuse_out(out)
    if is_weight(mat2) and input.dim() == 1 and beta == alpha == 1:
        return products.linear(mat1, mat2.mT, input, constraint)
    product = matmul(mat1, mat2, constraint=constraint)
    return _added(input, product, beta, alpha, constraint)


def baddbmm(
    input: Any,
    batch1: Any,
    batch2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
    constraint: Any = OUTPUT,
) -> Tensor:
    refuse_out(out)
    return _added(input, products.bmm(batch1, batch2, constraint), beta, alpha, constraint)


def addmv(
    input: Any,
    mat: Any,
    vec: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
    constraint: Any = OUTPUT,
) -> Tensor:
    product = matmul(mat, vec, out=out, constraint=constraint)
    return _added(input, product, beta, alpha, constraint)


def addbmm(
    input: Any,
    batch1: Any,
    batch2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
    constraint: Any = OUTPUT,
) -> Tensor:
    """The terms of the product include the sum over the batch."""
    refuse_out(out)
    product = products.einsum("bij,bjk->ik", batch1, batch2, constraint=constraint)
    return _added(input, product, beta, alpha, constraint)


def _added(input: Any, product: Tensor, beta: float, alpha: float, constraint: Any) -> Tensor:
    """Return beta input + alpha product. With beta = 0, torch does not read `input`: its NaNs have
    no effect."""
    product = product if alpha == 1 else product * alpha
    if not beta:
        return product
    total: Tensor = add(input if beta == 1 else input * beta, product, constraint=constraint)
    return total


def grouped_mm(
    mat_a: Any,
    mat_b: Any,
    *,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
    constraint: Any = OUTPUT,
) -> Tensor:
    if bias is not None or offs is None or mat_a.dim() != 2 or mat_b.dim() != 3:
        raise UnsupportedError(
            "a unit-scaled grouped_mm takes rows (n, k), experts (e, k, m) and offs, without a bias"
        )
    out = products.grouped_linear(mat_a, mat_b, offs, constraint)
    return out if out_dtype is None else out.to(out_dtype)


# --- sums and elementwise products -----------------------------------------------------------


def _free(x: Tensor, other: Tensor, constraint: Any, true: float = 1.0) -> Tensor:
    """Return the parameter `x`, with its gradient divided by the root of its number of uses."""
    times, _ = repeats(x.shape, other.shape)
    return scale_bwd(x, parameter_scale(constraint, root(times * batch_factor()), true))


def add(
    input: Any, other: Any, *, alpha: float = 1, out: Any = None, constraint: Any = OUTPUT
) -> Any:
    """A bias, which is a parameter of one dimension, is added unscaled. A parameter of more
    dimensions, such as a table of positions, is a term of the sum."""
    refuse_out(out)
    tensors = isinstance(input, Tensor) and isinstance(other, Tensor)
    if tensors and is_weight(input) != is_weight(other):
        parameter, rest = (input, other) if is_weight(input) else (other, input)
        terms = 1.0 if parameter.dim() <= 1 else (1 + alpha**2) ** -0.5
        output_scale, rest_scale = apply_constraint(constraint, terms, 1.0)
        free = _free(parameter, rest, constraint, output_scale)
        held = scale_bwd(rest, rest_scale)
        x, y = (free, held) if parameter is input else (held, free)
        return scale_fwd(torch.add(x, y, alpha=alpha), output_scale)
    return residual.add(input, other, constraint, alpha)


def radd(self: Any, other: Any, *, constraint: Any = OUTPUT) -> Any:
    return add(other, self, constraint=constraint)


def sub(
    input: Any, other: Any, *, alpha: float = 1, out: Any = None, constraint: Any = OUTPUT
) -> Any:
    return add(input, other, alpha=-alpha, out=out, constraint=constraint)


def rsub(self: Any, other: Any, *, constraint: Any = OUTPUT) -> Any:
    return sub(other, self, constraint=constraint)


def mul(input: Any, other: Any, *, out: Any = None, constraint: Any = OUTPUT) -> Any:
    refuse_out(out)
    tensors = isinstance(input, Tensor) and isinstance(other, Tensor)
    if tensors and is_weight(input) != is_weight(other):
        gain, rest = (input, other) if is_weight(input) else (other, input)
        return _free(gain, rest, constraint) * rest
    return residual.mul(input, other, constraint)


# --- elementwise functions, softmax and dropout ----------------------------------------------


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


def _by_dim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt `softmax` or `log_softmax` to torch's spelling in `torch` and `Tensor`."""

    def by_dim(
        input: Any, dim: Any, dtype: Any = None, *, out: Any = None, constraint: Any = OUTPUT
    ) -> Tensor:
        refuse_out(out)
        return function(input, dim, dtype, constraint)

    return by_dim


def _f_by_dim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt `softmax` or `log_softmax` to torch's spelling in `torch.nn.functional`."""

    def f_by_dim(
        input: Any,
        dim: Any = None,
        _stacklevel: int = 3,
        dtype: Any = None,
        *,
        constraint: Any = OUTPUT,
    ) -> Tensor:
        if not isinstance(dim, int):
            raise UnsupportedError(
                "a unit-scaled softmax takes dim=; torch's choice of one is deprecated"
            )
        return function(input, dim, dtype, constraint)

    return f_by_dim


softmax = _by_dim(activations.softmax)
log_softmax = _by_dim(activations.log_softmax)
f_softmax = _f_by_dim(activations.softmax)
f_log_softmax = _f_by_dim(activations.log_softmax)


def f_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return activations.dropout(input, p, training)


def dropout(input: Any, p: float, train: bool) -> Tensor:
    return activations.dropout(input, p, train)
