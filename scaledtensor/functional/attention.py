"""Scaled dot-product attention.

The logits are (mult / d) q'k, and not (mult / sqrt d) q'k: learning correlates queries and keys,
and d correlated terms add up to d (u-muP, Blake et al. 2024, section 2). At initialisation the
logits have standard deviation m = mult / sqrt(d).

Let E be the mean over queries of sum_j P_ij^2. E is 1/S if all S keys count alike, ln(S)/S if
query i sees i keys, and 1 if one key wins. With a = m^2 / (m^2 + 4), E is interpolated in the log
domain. For unit values and a unit incoming gradient

    out = sqrt(E)                        dv = sqrt(E Sq/Sk)
    dq  = (mult / sqrt d) h sqrt(E)      dk = (mult / sqrt d) h sqrt(E Sq/Sk)

Here h is the part of a gradient that passes a softmax (`_passed`), and Sq/Sk is the number of query
rows for each key row, in all heads that share it.

If the values have a correlation r between keys, they do not average out: out = sqrt(r + (1 - r) E).
The common part of the values gives a softmax no gradient, and the common part of the keys gives the
queries none. So dq and dk are multiplied by sqrt(1 - r) for the values, and dq once more for the
keys. `scaledtensor.ops.rules.attention` has these formulas for ScaledTensors, without r.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.functional.scaling import (
    Constraint,
    apply_constraint,
    interpolate,
    product,
    scale_bwd,
    scale_fwd,
    sharpness,
)
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["attention_scales", "scaled_dot_product_attention"]

#: The least 1 - r in a formula: if all values are alike, no gradient passes at all.
_LEAST = 1 / 64


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    constraint: Constraint = "to_output_scale",
    context_length: int | None = None,
    correlation: float = 0.0,
) -> Tensor:
    """softmax(mult / d query key') value at unit scale.

    Args:
        query: (..., Sq, d).
        key, value: (..., Sk, d) and (..., Sk, dv).
        attn_mask: boolean or additive. The closed form does not read the mask: for causal attention
            pass `is_causal`. The gradient of an additive mask has the scale of out.
        dropout_p: probability of dropping an attention weight.
        is_causal: whether query i sees the first i keys.
        mult: sharpness; the logits are mult / d times the products.
        scale: replaces mult / d: the logits are `scale * mult` times the products.
        enable_gqa: whether several heads of queries share one head of keys and values.
        constraint: "to_output_scale" gives out and the three gradients the scale of out. None gives
            each a scale of its own, so that dq and dk do not come out small.
        context_length: gives the scale of causal attention over this many keys, for any number of
            keys. With a cache, a step that decodes one token then computes the same as training;
            otherwise the scale depends on the number of keys.
        correlation: correlation between the values of two keys, and between the keys; from 0 to 1.
            Without a causal mask all queries see nearly the same, so the results of attention are
            correlated.
    """
    factor = mult / query.shape[-1] if scale is None else scale * mult
    scales = attention_scales(
        query.shape,
        key.shape,
        factor,
        dropout_p,
        is_causal,
        context_length=context_length,
        correlation=correlation,
    )
    output_scale, dq, dk, dv = apply_constraint(constraint, *scales)
    query = scale_bwd(query, dq)
    key = scale_bwd(key, dk)
    value = scale_bwd(value, dv)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = scale_bwd(attn_mask, output_scale)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=factor, enable_gqa=enable_gqa
    )
    if correlation and isinstance(out, ScaledTensor):
        # The operator's rule assumes independent values.
        independent = attention_scales(
            query.shape, key.shape, factor, dropout_p, is_causal, context_length=context_length
        )
        out = verbs.expect(out, independent[0] / scales[0])
    return scale_fwd(out, output_scale)


def attention_scales(
    query: Sequence[int],
    key: Sequence[int],
    factor: float,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    context_length: int | None = None,
    correlation: float = 0.0,
) -> tuple[float, float, float, float]:
    """Return the factors that give out, dq, dk and dv unit scale.

    Args:
        query, key: shapes.
        factor: the factor of the products, mult / d by default.
        dropout_p, is_causal, context_length, correlation: see `scaled_dot_product_attention`.
    """
    logits = factor * query[-1] ** 0.5
    keys = key[-2] if context_length is None else context_length
    causal = is_causal or context_length is not None
    flat = ((_torch.log(keys) if causal else 1) / keys) ** 0.5 if keys > 1 else 1.0
    # Unlike the fit of `softmax`, this one applies a = m^2 / (m^2 + 4) to sqrt(E).
    seen = interpolate(sharpness(logits, 4), flat, 1.0)
    undropped = (1 - dropout_p) ** 0.5
    passed = _passed(logits, keys) * logits * seen / undropped
    rows = (product(query) / max(product(key), 1)) ** 0.5
    own = max(1 - correlation, _LEAST) ** 0.5
    out = (correlation + (1 - correlation) * seen**2) ** 0.5
    dq, dk = 1 / (passed * own**2), 1 / (passed * own * rows)
    return undropped / out, dq, dk, undropped / (seen * rows)


def _passed(logits: float, keys: int) -> float:
    """Return h: y (g - sum y g) has RMS r_g r_y h. The fit is the one in
    `scaledtensor.ops.rules.softmax.selection`."""
    lost = 1 / max(keys, 2)
    log_n = _torch.log(max(keys, 2))
    h: float = ((1 - lost) / (1 + 5 * logits**2 / (log_n + 0.3)) ** 0.5) ** 0.5
    return h
