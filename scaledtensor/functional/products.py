"""Matrix products, linear layers, look-ups in a table, rotary positions, and mixtures of experts.

A sum of K independent products has a standard deviation sqrt(K) times as large (Blake et al. 2023,
section 4.1). Forward, K is the contracted size. In the backward pass, K is the product of the
dimensions that the other operand and the output share. The operands of every product, forward and
backward, stay at unit scale: the constants are applied to the results.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaledtensor.errors import OptionError, ShapeError
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    batch_factor,
    cached_constants,
    parameter_scale,
    product,
    repeats,
    root,
    scale,
    scale_bwd,
    scale_fwd,
)

__all__ = [
    "apply_rotary",
    "bmm",
    "check_options",
    "einsum",
    "embedding",
    "grouped_linear",
    "linear",
    "linear_readout",
    "matmul",
    "moe_route",
    "unshrunk",
]


def matmul(left: Tensor, right: Tensor, constraint: Constraint = "to_output_scale") -> Tensor:
    """left @ right at unit scale, with torch.matmul's shapes.

    For (..., n, k) @ (..., k, m) the result has k terms, the left gradient m and the right gradient
    n. If an operand is repeated over the other's leading dimensions, its gradient has as many times
    more terms.
    """
    inner = left.shape[-1]
    # A vector is a matrix of one row, or of one column.
    left_size = left.shape[-2] if left.dim() > 1 else 1
    right_size = right.shape[-1] if right.dim() > 1 else 1
    of_left, of_right = repeats(left.shape[:-2], right.shape[:-2])
    output_scale, left_scale, right_scale = apply_constraint(
        constraint,
        root(inner),
        root(right_size * of_left),
        root(left_size * of_right),
    )
    left = scale_bwd(left, left_scale)
    right = scale_bwd(right, right_scale)
    return scale_fwd(torch.matmul(left, right), output_scale)


def bmm(left: Tensor, right: Tensor, constraint: Constraint = "to_output_scale") -> Tensor:
    """(b, n, k) @ (b, k, m) at unit scale.

    Raises:
        ShapeError: an operand does not have three dimensions.
    """
    if left.dim() != 3 or right.dim() != 3:
        raise ShapeError(
            f"bmm takes two tensors of three dimensions; got {tuple(left.shape)} and "
            f"{tuple(right.shape)}. Use matmul for others"
        )
    return matmul(left, right, constraint)


def einsum(equation: str, *operands: Tensor, constraint: Constraint = "to_output_scale") -> Tensor:
    """torch.einsum at unit scale. The output, and each gradient, is a sum over the indices that it
    does not have.

    Args:
        equation: such as "bij,jk->bik"; "..." and the implicit form work as in torch.
        operands: one for each term of the equation.
        constraint: constrains the scales of the output and of the gradients, in order.

    Raises:
        ShapeError: the equation does not fit the operands, or repeats an index within one operand.
    """
    sizes, output, terms = _einsum_sizes(equation, operands)
    output_scale, *grad_scales = apply_constraint(
        constraint,
        *(root(product([sizes[i] for i in set(sizes) - set(own)])) for own in (output, *terms)),
    )
    held = [scale_bwd(x, c) for x, c in zip(operands, grad_scales, strict=True)]
    return scale_fwd(torch.einsum(equation, *held), output_scale)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: Constraint = "to_output_scale",
    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5),
) -> Tensor:
    """input @ weight.T at unit scale, plus the bias as it is.

    Args:
        input: (..., fan_in).
        weight: (fan_out, fan_in), of unit variance.
        bias: (fan_out,), or None. It is added to the scaled product.
        constraint: constrains the scales of the output and of the input's gradient.
        scale_power: powers p of the scales, which are fan_in^-p forward, fan_out^-p for the input's
            gradient, and batch^-p for the gradients of weight and bias. `global_batch` multiplies
            the batch.
    """
    fan_out, fan_in = weight.shape
    batch = input.numel() // max(fan_in, 1) * batch_factor()
    output_scale, input_scale = apply_constraint(
        constraint, root(fan_in, scale_power[0]), root(fan_out, scale_power[1])
    )
    over_batch = root(batch, scale_power[2])
    weight_scale = parameter_scale(constraint, over_batch, output_scale)
    bias_scale = parameter_scale(constraint, over_batch)
    if type(input) is Tensor and type(weight) in (Tensor, nn.Parameter) and output_scale > 0:
        # addmm's alpha scales the result and both gradients, without a pass over any of them.
        input = scale_bwd(input, input_scale / output_scale)
        weight = scale_bwd(weight, weight_scale / output_scale)
        bias = None if bias is None else scale_bwd(bias, bias_scale)
        return _scaled_linear(input, weight, bias, output_scale)
    input = scale_bwd(input, input_scale)
    weight = scale_bwd(weight, weight_scale)
    bias = unshrunk(bias, output_scale, bias_scale)
    return scale_fwd(F.linear(input, weight, bias), output_scale)


def _scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    added, beta = (x.new_zeros(()), 0) if bias is None else (bias, 1)
    y = torch.addmm(added, rows, weight.mT, beta=beta, alpha=factor)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_readout(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: Constraint = None,
) -> Tensor:
    """`linear` for the last layer. Its scale forward is 1 / fan_in, so logits at initialisation
    vanish as the width grows, and the layer learns at the rate of the other layers (u-muP, Blake et
    al. 2024, section 2)."""
    return linear(input, weight, bias, constraint=constraint, scale_power=(1.0, 0.5, 0.5))


def unshrunk(bias: Tensor | None, output_scale: float, grad_scale: float) -> Tensor | None:
    """Return a bias for torch's operator, whose result is then multiplied by `output_scale`."""
    return None if bias is None else scale(bias, 1 / output_scale, grad_scale)


def _einsum_sizes(
    equation: str, operands: Sequence[Tensor]
) -> tuple[dict[str, int], str, list[str]]:
    """Return the size of every index, the indices of the output, and the indices of each operand.
    The dimensions of an ellipsis get letters of their own, counted from the last dimension."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    spelled = inputs.split(",")
    if len(spelled) != len(operands):
        raise ShapeError(
            f"einsum: {equation!r} has {len(spelled)} terms; got {len(operands)} operands"
        )
    sizes: dict[str, int] = {}
    terms = []
    for term, x in zip(spelled, operands, strict=True):
        hidden = x.dim() - len(term.replace("...", ""))
        own = term.replace("...", "".join(chr(_HIDDEN + i) for i in reversed(range(hidden))))
        if len(own) != x.dim() or len(set(own)) != len(own):
            raise ShapeError(
                f"einsum: {term!r} in {equation!r} does not name each dimension of a tensor of "
                f"shape {tuple(x.shape)} once"
            )
        for index, n in zip(own, x.shape, strict=True):
            sizes[index] = max(sizes.get(index, 1), n)
        terms.append(own)
    if not arrow:  # the implicit form: the indices that occur once, in alphabetical order
        once = (i for i in sizes if sum(i in own for own in terms) == 1 and ord(i) < _HIDDEN)
        output = "..." + "".join(sorted(once))
    hidden_letters = "".join(i for i in sizes if ord(i) >= _HIDDEN)
    return sizes, output.replace("...", hidden_letters), terms


#: The first letter of an ellipsis, beyond the letters of an equation.
_HIDDEN = 0x100


# --- look-ups and positions ------------------------------------------------------------------


def check_options(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Raise OptionError if one of these options of an embedding is set."""
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
    """Return rows of `weight`. For B look-ups in V rows, an element of the gradient has B / V
    terms.

    Args:
        input: integers, of any shape.
        weight: (V, features), of unit variance.
        padding_idx: a row whose gradient is zero.
        constraint: "exact" gives the true gradient. No other constraint reaches it.

    Raises:
        OptionError: `max_norm` or `scale_grad_by_freq` is set. They scale rows or gradients
            themselves.
    """
    check_options(max_norm, scale_grad_by_freq)
    terms = max(input.numel(), 1) * batch_factor() / weight.shape[0]
    weight = scale_bwd(weight, parameter_scale(constraint, terms**-0.5))
    return F.embedding(input, weight, padding_idx, sparse=sparse)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `query` and `key` by their positions (Su et al. 2021), in Llama's layout of two
    halves.

    A rotation keeps the RMS, forward and backward: its scale is 1.

    Args:
        query, key: (..., length, features), with an even number of features.
        cos, sin: of the angles, broadcastable to `query` and `key`; they are cast to the dtype of
            `query`.
    """
    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# --- mixtures of experts ---------------------------------------------------------------------


def moe_route(
    logits: Tensor,
    top_k: int,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and the weights that combine the experts' outputs.

    Weights are softmax(mult logits) over the chosen experts, divided by sqrt(sum_k p_k^2). Here p
    is the softmax of the expected order statistics of E Gaussians, by Blom's formula (1958). With
    this scale sum_k weight_k output_k has unit variance if the outputs are independent and have
    unit variance.

    Args:
        logits: (..., experts), of unit variance.
        top_k: number of experts for each token, from 1 to `experts`.
        mult: sharpness of the logits.
        constraint: constrains the scales of the weights and of the logits' gradient.

    Returns:
        Weights and indices, each (..., top_k), the largest weight first.

    Raises:
        ShapeError: `top_k` is less than 1 or more than the number of experts.
    """
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ShapeError(f"top_k is from 1 to the {experts} experts; got {top_k}")
    output_scale, grad_scale = apply_constraint(
        constraint, *_route_scales(int(experts), int(top_k), float(mult))
    )
    chosen, indices = scale(logits, mult, mult * grad_scale).topk(top_k, dim=-1)
    return scale_fwd(F.softmax(chosen, dim=-1), output_scale), indices


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    constraint: Constraint = "to_output_scale",
) -> Tensor:
    """The linear layers of experts, each on its own rows, at unit scale.

    Each group has the scales of `linear`. The scale of a weight's gradient assumes rows / experts
    terms, as in balanced routing, so a favoured expert keeps a larger gradient.

    Args:
        input: (rows, fan_in), the rows of the first expert first.
        weight: (experts, fan_in, fan_out), of unit variance.
        offsets: (experts,) int32, the end of each expert's rows.
        constraint: constrains the scales of the output and of the input's gradient.

    Raises:
        ShapeError: the tensors do not have these shapes.
    """
    if input.dim() != 2 or weight.dim() != 3 or offsets.shape != weight.shape[:1]:
        raise ShapeError(
            "grouped_linear takes input (rows, fan_in), weight (experts, fan_in, fan_out) and "
            f"offsets (experts,); got {tuple(input.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    experts, fan_in, fan_out = weight.shape
    output_scale, input_scale = apply_constraint(constraint, root(fan_in), root(fan_out))
    over_rows = root(input.shape[0] / max(experts, 1) * batch_factor())
    input = scale_bwd(input, input_scale)
    weight = scale_bwd(weight, parameter_scale(constraint, over_rows, output_scale))
    return scale_fwd(F.grouped_mm(input, weight, offs=offsets), output_scale)


@cached_constants
def _route_scales(experts: int, top_k: int, mult: float) -> tuple[float, ...]:
    normal = NormalDist()
    z = [normal.inv_cdf((experts - i - 0.375) / (experts + 0.25)) for i in range(top_k)]
    raw = [math.exp(mult * (x - z[0])) for x in z]
    p = [x / sum(raw) for x in raw]
    energy = sum(x * x for x in p)
    # d logit_j = p_j (g_j - sum p g), for unit g. It is zero for experts that were not chosen.
    moved = sum(x * x * (1 - 2 * x + energy) for x in p) / experts
    # One expert chosen alone has weight 1 for any logit: the gradient is zero.
    return energy**-0.5, (1.0 if moved < 1e-12 else moved**-0.5 / mult)
