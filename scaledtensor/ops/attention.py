"""Scaled dot-product attention.

With q = s_q Q and so on, the logits are s_q s_k (Q K'): both scales fold into Q, exactly, and the
kernel runs on (s_q s_k Q, K, V). Its output carries s_v. Backward the kernel gives derivatives by
those folded operands, so (with s_g for the incoming gradient)

    dq = s_g s_v s_k (kernel dq)      dk = s_g s_v / s_k (kernel dk)      dv = s_g (kernel dv)

Moments: let E be the mean over queries of sum_j P_ij^2, the `concentration` of a softmax. Then

    out = r_v sqrt(E)                           dv = r_g sqrt(E Sq/Sk)
    dq  = c sqrt(d) r_g r_v r_k h sqrt(E)       dk = c sqrt(d) r_g r_v r_q h sqrt(E Sq/Sk)

for softmax scale c and head size d: dS = P (dP - sum P dP) has entries P r_g r_v sqrt(d) h, with h
the `selection` of softmax. Only the
representation depends on the number of keys, never the value, so a KV cache decodes alike.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import bounded_square, elements, first_scaled, side
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.softmax import (
    MASKED,
    Visible,
    all_visible,
    causally_visible,
    concentration,
    selection,
    visible,
)
from scaledtensor.scale import product_of, quotient_of
from scaledtensor.singles import Amount, Single, scale_of, scaled_by, tensor_of
from scaledtensor.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Where there is nothing to attend with or to, torch's answer is plain zeros, as is then every
    gradient; the same zeros spelled out are scaled."""
    if query.numel() and key.numel() and value.numel():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    if query.dim() > 2:  # grouped queries
        group = query.shape[-3] // max(key.shape[-3], 1)
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    return torch.softmax(query @ key.mT, -1) @ value


def _scale(scale: float | None, q: ScaledTensor) -> float:
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1])


def _folded(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, list[Tensor]]:
    """The operands, and the folded elements that the kernel takes.

    In float32: on a CPU the bfloat16 backward takes 4 times as long at 64 tokens and 0.8 times at
    1024 (measured), and it rounds more.
    """
    like = first_scaled(q, k, v)
    a, b, c = (side(x, like) for x in (q, k, v))
    return a, b, c, [scaled_by(a.q.float(), a.scale * b.scale), b.q.float(), c.q.float()]


def _mask(mask: Any) -> Any:
    """An additive mask in float32, as the kernel wants it; a boolean one as it is."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if isinstance(mask, ScaledTensor):
        mask = elements(mask).float() * mask.scale
    # The finite fills of a float64 mask stay finite.
    limit = torch.finfo(torch.float32).max
    held = mask.float()
    return torch.where(mask.isinf(), held, held.clamp(-limit, limit))


def _visible(query: Tensor, key: Tensor, causal: bool, mask: Any) -> Visible:
    """What the queries see of the keys. A causal mask is told; any other is read."""
    if mask is None:
        rows, n = query.shape[-2], key.shape[-2]
        return causally_visible(rows, n) if causal else all_visible(n)
    return visible(mask if mask.dtype == torch.bool else mask > MASKED, -1)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_cpu(
    query: ScaledTensor,
    key: ScaledTensor,
    value: ScaledTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Raw, Tensor]:
    """out = r_v sqrt(E)."""
    factor = _scale(scale, query)
    a, b, c, operands = _folded(query, key, value)
    mask = _mask(attn_mask)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        *operands, dropout_p, is_causal, attn_mask=mask, scale=factor
    )
    logits = a.rms * b.rms * (factor * query.shape[-1] ** 0.5)
    seen = _visible(query, key, is_causal, mask)
    return Raw(out, c.scale, c.rms * _moments(logits, seen)[0]), lse


def _moments(logits: Amount, seen: Visible) -> tuple[Any, Any]:
    """sqrt(E) and h, for logits of that RMS."""
    if not isinstance(seen.log_share, float):
        return _found_moments(tensor_of(logits), seen)
    known = isinstance(logits, Single)
    return _known_moments(float(logits), seen) if known else _found_moments(logits, seen)


def _found_moments(logits: Any, seen: Visible) -> tuple[Any, Any]:
    return concentration(logits, seen).sqrt(), selection(bounded_square(logits), seen)


@lru_cache(maxsize=1 << 12)
def _known_moments(logits: float, seen: Visible) -> tuple[Single, Single]:
    root, moved = _found_moments(Single(logits), seen)
    return root, moved


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_cpu_backward(
    grad_out: Any,
    query: ScaledTensor,
    key: ScaledTensor,
    value: ScaledTensor,
    out: ScaledTensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Raw, Raw, Raw]:
    """dq = c sqrt(d) r_g r_v r_k sqrt(E), dk and dv likewise: see the module."""
    factor = _scale(scale, query)
    a, b, c, operands = _folded(query, key, value)
    g = side(grad_out, query)
    mask = _mask(attn_mask)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        g.q.float().contiguous(),
        *operands,
        scaled_by(elements(out).float(), scale_of(out) / c.scale),
        logsumexp,
        dropout_p,
        is_causal,
        attn_mask=mask,
        scale=factor,
    )
    seen = _visible(query, key, is_causal, mask)
    return _gradients((dq, dk, dv), g, a, b, c, query, key, factor, seen)


def _gradients(
    raw: tuple[Tensor, Tensor, Tensor],
    g: Any,
    a: Any,
    b: Any,
    c: Any,
    query: ScaledTensor,
    key: ScaledTensor,
    factor: float,
    seen: Visible,
) -> tuple[Raw, Raw, Raw]:
    d = query.shape[-1]
    # Query rows for each key row: Sq / Sk, and query heads that share a key head add up.
    shared = query.numel() / max(key.numel(), 1)
    root, moved = _moments(a.rms * b.rms * (factor * d**0.5), seen)
    score = g.rms * c.rms * root * moved * (factor * d**0.5)
    dq, dk, dv = raw
    held = product_of(g.scale, c.scale)
    return (
        Raw(dq, product_of(held, b.scale), score * b.rms),
        Raw(dk, quotient_of(held, b.scale), score * a.rms * shared**0.5),
        Raw(dv, g.scale, g.rms * root * shared**0.5),
    )


#: function that a user may call -> the same with a scaled result.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
}
