"""Scaled dot-product attention.

Logits are (mult / d) q'k, not (mult / sqrt d): queries and keys that learn are correlated, and d
correlated terms add up to d (u-muP, Blake et al. 2024, section 2). At initialisation they have
standard deviation m = mult / sqrt(d).

Let E be the mean over queries of sum_j P_ij^2: 1/S where all S keys count alike, ln(S)/S where
query i sees i of them, 1 where one wins. With a = m^2 / (m^2 + 4), E is interpolated in the log
domain. For unit values and a unit incoming gradient

    out = sqrt(E)                        dv = sqrt(E Sq/Sk)
    dq  = (mult / sqrt d) h sqrt(E)      dk = (mult / sqrt d) h sqrt(E Sq/Sk)

where h is what a softmax lets pass of a gradient, and Sq/Sk counts the query rows, in all heads
that share it, for each key row. Values that have a correlation r between keys do not average out:
out = sqrt(r + (1 - r) E). What they share passes no softmax, and nor does what keys share: dq and
dk have sqrt(1 - r), dq for the keys once more.
`scaledtensor.ops.rules.attention` says the same, but for
r, of ScaledTensors.
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

#: Of 1 - r: nothing is left of what passes where all values are alike.
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
        attn_mask: boolean or additive. The closed form does not know what it hides: for causal
            attention say `is_causal`. The gradient of an additive one has the scale of out.
        dropout_p: probability of dropping an attention weight.
        is_causal: whether query i sees the first i keys.
        mult: how sharp: the logits are mult / d times the products.
        scale: factor of the products instead of mult / d.
        enable_gqa: several heads of queries to one of keys and values.
        constraint: "to_output_scale" gives out and the three gradients the scale of out. None gives
            each its own, so that dq and dk do not come out small.
        context_length: the scale of causal attention over so many keys, whatever is given. With a
            cache, a step that decodes one token then computes what training computed; otherwise the
            scale depends on the number of keys.
        correlation: between the values of two keys, and between the keys; from 0 to 1. Without a
            causal mask all queries see much the same, so that what attention returns is correlated.
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
        # The rule of the operator knows of independent values alone.
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
    """What out, dq, dk and dv are multiplied by for each to be at unit scale.

    Args:
        query, key: shapes.
        factor: what the products are multiplied by.
        dropout_p, is_causal, context_length, correlation: as of `scaled_dot_product_attention`.
    """
    logits = factor * query[-1] ** 0.5
    keys = key[-2] if context_length is None else context_length
    causal = is_causal or context_length is not None
    flat = ((_torch.log(keys) if causal else 1) / keys) ** 0.5 if keys > 1 else 1.0
    # Unlike softmax's own fit this takes a at m^2 / (m^2 + 4) in sqrt(E).
    seen = interpolate(sharpness(logits, 4), flat, 1.0)
    kept = (1 - dropout_p) ** 0.5
    passed = _passed(logits, keys) * logits * seen / kept
    rows = (product(query) / max(product(key), 1)) ** 0.5
    own = max(1 - correlation, _LEAST) ** 0.5
    out = (correlation + (1 - correlation) * seen**2) ** 0.5
    return kept / out, 1 / (passed * own**2), 1 / (passed * own * rows), kept / (seen * rows)


def _passed(logits: float, keys: int) -> float:
    """h: y (g - sum y g) has RMS r_g r_y h.
    The fit is `scaledtensor.ops.rules.softmax.selection`."""
    lost = 1 / max(keys, 2)
    log_n = _torch.log(max(keys, 2))
    h: float = ((1 - lost) / (1 + 5 * logits**2 / (log_n + 0.3)) ** 0.5) ** 0.5
    return h
