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
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import BF16
from scaledtensor.ops.algebra import bounded_square, elements, first_scaled, measured, side
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.rules.softmax import (
    MASKED,
    Visible,
    all_visible,
    causally_visible,
    concentration,
    selection,
    visible,
)
from scaledtensor.scales.powers import product_of, quotient_of
from scaledtensor.scales.singles import Amount, Single, scale_of, scaled_by, tensor_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Where there is nothing to attend with or to, torch's answer is plain zeros, as is then every
    gradient; the same zeros spelled out are scaled. On a CUDA device torch chooses a kernel by the
    dtype that a tensor appears in, and has its fastest one for bfloat16 alone: here the elements
    choose."""
    if query.numel() and key.numel() and value.numel():
        held = _for_flash(query, key, value, *args, **kwargs)
        if held is not None:
            return _flash.default(query, key, value, **held)[0]
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    if query.dim() > 2:  # grouped queries
        group = query.shape[-3] // max(key.shape[-3], 1)
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    return torch.softmax(query @ key.mT, -1) @ value


_flash = aten._scaled_dot_product_flash_attention


def _for_flash(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any] | None:
    """What the flash kernel of CUDA takes besides these operands; None where it is not for them."""
    serves = (
        attn_mask is None
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and all(_is_half(x) for x in (query, key, value))
        and all(x.shape[:2] == query.shape[:2] for x in (key, value))
        and all(x.shape[-1] == query.shape[-1] for x in (key, value))
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    )
    if not serves:
        return None
    return {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}


def _is_half(x: Any) -> bool:
    """Whether a batch of heads holds bfloat16 on a CUDA device that has the flash kernel."""
    if not isinstance(x, ScaledTensor) or x.format is not BF16 or x.dim() != 4:
        return False
    capability = _torch.compute_capability(x.qdata)
    return capability is not None and capability >= (8, 0) and x.stride(-1) == 1


def _scale(scale: float | None, q: ScaledTensor) -> float:
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1])


def _folded(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, list[Tensor]]:
    """The operands, and the folded elements that the kernel takes.

    In float32 on a CPU, whose bfloat16 backward takes 4 times as long at 64 tokens and 0.8 times at
    1024 (measured), and rounds more. Elsewhere in bfloat16 where all are, which has the range of
    float32.
    """
    like = first_scaled(q, k, v)
    sides = [side(x, like) for x in (q, k, v)]
    a, b, c = sides
    half = not a.q.is_cpu and all(x.q.dtype is torch.bfloat16 for x in sides)
    dtype = torch.bfloat16 if half else torch.float32
    held = [x.q.to(dtype) for x in sides]
    return a, b, c, [scaled_by(held[0], a.scale * b.scale), *held[1:]]


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
    seen = _visible(query, key, is_causal, mask)
    return _attended(out, a, b, c, query, factor, seen), lse


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
    back, factor = _back(grad_out, query, key, value, out, attn_mask, is_causal, scale)
    grad, *operands = back.operands
    raw = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad.contiguous(),
        *operands,
        logsumexp,
        dropout_p,
        is_causal,
        attn_mask=back.mask,
        scale=factor,
    )
    return back.gradients(*raw)


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


def _attended(out: Tensor, a: Any, b: Any, c: Any, query: Any, factor: float, seen: Any) -> Raw:
    logits = a.rms * b.rms * (factor * query.shape[-1] ** 0.5)
    return Raw(out, c.scale, c.rms * _moments(logits, seen)[0])


class _Back(NamedTuple):
    """What the backward kernels take, and what their results are then."""

    operands: tuple[Tensor, ...]
    """The gradient, folded query, key and value, and the output of those."""
    mask: Any
    gradients: Callable[..., tuple[Raw, Raw, Raw]]
    held: Any
    """The scale of a gradient for a plain mask, which adds to logits as they are."""


def _back(
    grad: Any, query: Any, key: Any, value: Any, out: Any, mask: Any, causal: bool, scale: Any
) -> tuple[_Back, float]:
    factor = _scale(scale, query)
    a, b, c, operands = _folded(query, key, value)
    g, held = side(grad, query), operands[0].dtype
    mask = None if mask is None else _cast_mask(mask, held)
    given = (
        g.q.to(held),
        *operands,
        scaled_by(elements(out).to(held), scale_of(out) / c.scale),
    )
    seen = _visible(query, key, causal, mask)

    def gradients(*raw: Tensor) -> tuple[Raw, Raw, Raw]:
        dq, dk, dv = raw
        return _gradients((dq, dk, dv), g, a, b, c, query, key, factor, seen)

    return _Back(given, mask, gradients, product_of(g.scale, c.scale)), factor


def _cast_mask(mask: Any, dtype: torch.dtype) -> Any:
    held = _mask(mask)
    return held if held.dtype == torch.bool else held.to(dtype)


# --- the kernels of CUDA ---------------------------------------------------------------------


@rule(_flash.default)
def flash_cuda(
    query: ScaledTensor,
    key: ScaledTensor,
    value: ScaledTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As on a CPU, in bfloat16."""
    factor = _scale(scale, query)
    a, b, c, operands = _folded(query, key, value)
    operands = [x.bfloat16() for x in operands]
    out, *rest = _flash.default(*operands, dropout_p, is_causal, return_debug_mask, scale=factor)
    seen = _visible(query, key, is_causal, None)
    return _attended(out, a, b, c, query, factor, seen), *rest


@rule(aten._scaled_dot_product_flash_attention_backward.default)
def flash_cuda_backward(
    grad_out: Any,
    query: ScaledTensor,
    key: ScaledTensor,
    value: ScaledTensor,
    out: ScaledTensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Raw, Raw, Raw]:
    """As on a CPU, in bfloat16."""
    back, factor = _back(grad_out, query, key, value, out, None, is_causal, scale)
    raw = aten._scaled_dot_product_flash_attention_backward.default(
        *(x.bfloat16() for x in back.operands),
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=factor,
    )
    return back.gradients(*raw)


@rule(aten._scaled_dot_product_efficient_attention.default)
def efficient(
    query: ScaledTensor,
    key: ScaledTensor,
    value: ScaledTensor,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As on a CPU, in the dtype of the elements."""
    factor = _scale(scale, query)
    a, b, c, operands = _folded(query, key, value)
    mask = None if attn_bias is None else _cast_mask(attn_bias, operands[0].dtype)
    out, *rest = aten._scaled_dot_product_efficient_attention.default(
        *operands, mask, compute_log_sumexp, dropout_p, is_causal, scale=factor
    )
    seen = _visible(query, key, is_causal, mask)
    return _attended(out, a, b, c, query, factor, seen), *rest


@rule(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(
    grad_out_: Any,
    query: ScaledTensor,
    key: ScaledTensor,
    value: ScaledTensor,
    attn_bias: Any,
    out: ScaledTensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As on a CPU. The gradient of a mask, which is added to the logits, has a measured RMS."""
    back, factor = _back(grad_out_, query, key, value, out, attn_bias, is_causal, scale)
    *raw, bias = aten._scaled_dot_product_efficient_attention_backward.default(
        *back.operands[:4],
        back.mask,
        back.operands[4],
        logsumexp,
        philox_seed,
        philox_offset,
        dropout_p,
        grad_input_mask,
        is_causal,
        scale=factor,
    )
    asked = grad_input_mask[3] and bias is not None
    told = measured(bias.float(), tensor_of(back.held).float()) if asked else None
    return *back.gradients(*raw), told


#: function that a user may call -> the same with a scaled result.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
}
