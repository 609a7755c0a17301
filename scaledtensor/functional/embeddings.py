"""Look-ups and positions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import OptionError
from scaledtensor.functional.batch import batch_factor
from scaledtensor.functional.constraints import Constraint, parameter_scale
from scaledtensor.functional.scaling import scale_bwd

__all__ = ["apply_rotary", "check_options", "embedding"]


def check_options(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Raises OptionError for either."""
    if max_norm is not None or scale_grad_by_freq:
        raise OptionError(
            "embedding: max_norm and scale_grad_by_freq set the scale of rows or gradients "
            "themselves; leave them out"
        )


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    constraint: Constraint = None,
) -> Tensor:
    """Rows of `weight`. B look-ups in V rows: an element of the gradient sums B / V terms.

    Args:
        input: integers, of any shape.
        weight: (V, features), of unit variance.
        padding_idx: a row whose gradient is zero.
        constraint: "exact" gives the true gradient; no other reaches it.

    Raises:
        OptionError: `max_norm` or `scale_grad_by_freq`, under which that is not so.
    """
    check_options(max_norm, scale_grad_by_freq)
    terms = max(input.numel(), 1) * batch_factor() / weight.shape[0]
    weight = scale_bwd(weight, parameter_scale(constraint, terms**-0.5))
    return F.embedding(input, weight, padding_idx, sparse=sparse)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al. 2021), in the layout of two halves that Llama uses.

    A rotation keeps the RMS, forward and backward: its scale is 1.

    Args:
        query, key: (..., length, features), features even.
        cos, sin: of the angles, broadcastable to them; they are cast to their dtype.
    """
    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
