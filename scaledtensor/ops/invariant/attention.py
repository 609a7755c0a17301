"""Attention of a CPU in a fixed order: query i sums over its keys, one after another.

    out_i = (sum_j e_ij v_j) / (sum_j e_ij)
    e_ij  = exp(s_ij - max_j s_ij),   s = scale q k' + mask

A masked key has e = 0 exactly. The sums add one key after another, so zeros change no bit, wherever
they are. So a query has the same bits in a prefill of T tokens, in a step of decoding, which sees
fewer keys, beside padding on either side, and in a window that slides over a cache.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.invariant.sums import rows, weighted, wide

__all__ = ["contiguous_heads", "flash"]

#: The number of logits that are kept at once: 256 MiB in float32.
_HELD = 1 << 26


def flash(
    torchs: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of `_scaled_dot_product_flash_attention_for_cpu`: (B, Hq, Sq, d), and the
    logarithm of each query's sum, (B, Hq, Sq).

    query (B, Hq, Sq, d), key and value (B, Hk, Sk, d). Hq is a multiple of Hk. `torchs` is called
    if there are no queries or no keys.
    """
    if not (query.numel() and key.numel()):
        return torchs(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    batch, heads, n, d = query.shape
    dtype = wide(query.dtype)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    mask = None if attn_mask is None else _additive(attn_mask, dtype)
    factor = 1 / math.sqrt(d) if scale is None else scale
    out = query.new_empty(batch, n, heads, d).transpose(1, 2)
    log = query.new_empty(batch, n, heads, dtype=dtype).transpose(1, 2)
    step = max(1, _HELD // max(batch * heads * k.shape[2], 1))
    for i in range(0, n, step):
        part = slice(i, min(i + step, n))
        seen = min(part.stop, k.shape[2]) if is_causal else k.shape[2]
        shown = mask
        if mask is not None:
            shown = (mask if mask.shape[-2] == 1 else mask[..., part, :])[..., :seen]
        elif is_causal:
            queries = torch.arange(part.start, part.stop).unsqueeze(1)
            hidden = queries < torch.arange(seen)
            shown = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)
        made = _attended(q[:, :, part], k[:, :, :seen], v[:, :, :seen], shown, factor)
        out[:, :, part], log[:, :, part] = made
    return out, log


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """The same for some of the queries."""
    (batch, heads, n, d), (_, kept, keys, _) = q.shape, k.shape
    groups = batch * kept
    logits = rows(q.reshape(groups, -1, d), k.reshape(groups, keys, d)) * factor
    s = logits.view(batch, heads, n, keys)
    if mask is not None:
        s = s + mask
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    e = (s - top).exp()
    y, sums = weighted(e.view(groups, -1, keys), v.reshape(groups, keys, d))
    y, sums = y.view(batch, heads, n, d), sums.view(batch, heads, n, 1)
    none = sums == 0  # no key is visible
    y = (y / sums).masked_fill(none, 0.0)
    return y, (top + sums.log()).masked_fill(none, 0.0).squeeze(-1)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    return mask.to(dtype)


def contiguous_heads(torchs: Any, query: Any, key: Any, value: Any, *args: Any, **how: Any) -> Any:
    """`scaled_dot_product_attention` with adjacent elements of a head. torch takes another kernel
    for other layouts, and a single query has no other layout."""
    held = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    return torchs(*held, *args, **how)
