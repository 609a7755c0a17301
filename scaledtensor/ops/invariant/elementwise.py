"""Functions of single elements, which get the same bits at every position of a tensor.

torch computes most elements by a vector function, and the last few of each thread's part by a
scalar one. The two round differently in some functions (sigmoid, silu, gelu, softplus, pow). Here
the elements are one contiguous line, filled up so that no thread has a scalar remainder.
"""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["BINARY", "UNARY", "as_tensors", "glu", "of_one", "of_two", "power"]

#: Operators of one tensor, as ATen names them.
UNARY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "sigmoid", "tanh"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "erfinv", "lgamma", "digamma", "logit", "sinc", "i0"),
    *("gelu", "silu", "mish", "softplus", "elu", "hardswish", "hardsigmoid"),
)
#: Operators of two tensors. torch calls them for a number and a tensor too.
BINARY = ("atan2", "hypot", "logaddexp", "logaddexp2", "pow.Tensor_Tensor")

#: No vector of a CPU has more elements.
_VECTOR = 64
#: torch gives a thread at least this number of elements: 2048 in functions of Intel's library, else
#: 32768 (`at::internal::GRAIN_SIZE`).
_GRAINS = (2048, 32768)


def _filled(n: int) -> int:
    """The least number of elements, from `n` on, that torch divides into parts of whole vectors."""
    most = torch.get_num_threads()
    if most == 1:
        return -(-n // _VECTOR) * _VECTOR
    size = 0
    while size < n:
        size = n
        threads = [min(most, -(-n // grain)) for grain in _GRAINS]
        whole = _VECTOR * math.lcm(*threads)
        n = -(-n // whole) * whole
    return n


def of_one(torchs: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `torchs(x, ...)` of one contiguous line of whole vectors."""
    n = x.numel()
    filled = _filled(n)
    if filled == n and x.dim() and x.is_contiguous():
        return torchs(x, *args, **kwargs)  # type: ignore[no-any-return]
    y: Tensor = torchs(_line(x, n, filled), *args, **kwargs)
    return y[:n].view(x.shape)


def power(torchs: Any, x: Tensor, exponent: float) -> Tensor:
    """A square is one product, which rounds alike everywhere."""
    return torchs(x, exponent) if exponent == 2 else of_one(torchs, x, exponent)


def of_two(torchs: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return `torchs(x, y)` in the same way."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    n = math.prod(shape)
    if n == 0:
        return torchs(x, y)  # type: ignore[no-any-return]
    # A tensor of no dimension stays one, since it counts as a number in the choice of the dtype.
    given = [_line(t.expand(shape), n, _filled(n)) if t.dim() or not shape else t for t in (x, y)]
    made: Tensor = torchs(*given)
    return made[:n].view(shape)


def as_tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return both operands as tensors. torch hands a number over as a number, and its own operator
    takes tensors only."""
    if not isinstance(x, Tensor):
        x = torch.scalar_tensor(x, dtype=torch.result_type(x, y))
    if not isinstance(y, Tensor):
        y = torch.scalar_tensor(y, dtype=torch.result_type(x, y))
    return x, y


def _line(x: Tensor, n: int, filled: int) -> Tensor:
    line = x.reshape(n)
    return line.contiguous() if filled == n else torch.constant_pad_nd(line, (0, filled - n), 1.0)


def glu(torchs: Any, x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()
