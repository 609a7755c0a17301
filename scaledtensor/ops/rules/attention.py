"""Scaled dot-product attention.

With query q = s_q Q, key k = s_k K and value v = s_v V, the logits are s_q s_k (Q K'). Both scales
go into Q, which is exact, and the kernel runs on (s_q s_k Q, K, V). Its output carries the scale
s_v. The backward kernel gives derivatives by these operands. With s_g for the scale of the incoming
gradient, the gradients are

    dq = s_g s_v s_k (kernel dq)      dk = s_g s_v / s_k (kernel dk)      dv = s_g (kernel dv)

Let E be the mean over queries of sum_j P_ij^2 (`softmax.concentration`). Then the RMS are

    out = r_v sqrt(E)                           dv = r_g sqrt(E Sq/Sk)
    dq  = c sqrt(d) r_g r_v r_k h sqrt(E)       dk = c sqrt(d) r_g r_v r_q h sqrt(E Sq/Sk)

for the softmax scale c and the head size d. The gradient of the logits is dS = P (dP - sum P dP).
Its entries have the size P r_g r_v sqrt(d) h, with h from `softmax.selection`. Sq/Sk is the number
of query rows for each key row. The number of keys moves only the scale, never the value, so
decoding with a KV cache gives the same values.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import BF16
from scaledtensor.native.elements import converted
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import (
    Operand,
    bounded_square,
    elements,
    first_scaled,
    measured,
    operand,
)
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
from scaledtensor.scales.singles import Single, scale_of, scaled_by, tensor_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["FUNCTIONS"]


def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Works like `torch.nn.functional.scaled_dot_product_attention`, with a scaled result.

    If there are no queries or no keys, torch returns plain zeros and plain gradients. The formula
    itself gives the same zeros as ScaledTensors. On a CUDA device, torch chooses a kernel by the
    dtype in which a tensor appears, and has its fastest one for bfloat16 only. Here the dtype of
    the elements decides.
    """
    if invariant.is_on() and not all(isinstance(x, ScaledTensor) for x in (query, key, value)):
        raise UnsupportedError(
            "attention of scaled and plain tensors under scaledtensor.batch_invariant: plain keys "
            "and values lose the scale that the training forward has. Take a cache that keeps "
            "ScaledTensors, as transformers' DynamicCache does"
        )
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
    """Return the other arguments of CUDA's flash kernel; None if it does not take these
    operands."""
    serves = (
        attn_mask is None
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and all(_is_half(x) for x in (query, key, value))
        and all(x.shape[:2] == query.shape[:2] for x in (key, value))
        and all(x.shape[-1] == query.shape[-1] for x in (key, value))
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.backends.cuda.flash_sdp_enabled()
    )
    if not serves:
        return None
    return {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}


def _is_half(x: Any) -> bool:
    """Whether `x`, a batch of heads, has bfloat16 elements on a CUDA device with the flash
    kernel."""
    if not isinstance(x, ScaledTensor) or x.format is not BF16 or x.dim() != 4:
        return False
    flash = backend_of(x.qdata).flash(x.qdata.device)
    return flash == "_scaled_dot_product_flash_attention" and x.stride(-1) == 1


def _folded(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, list[Tensor]]:
    """Return the operands, and the elements for the kernel, with both scales of the logits in q.

    On a CPU the elements are float32. Its bfloat16 backward kernel takes 4 times as long at 64
    tokens and 0.8 times as long at 1024 (measured), and rounds more. On other devices they are
    bfloat16 if all operands are, because bfloat16 has the range of float32.
    """
    like = first_scaled(q, k, v)
    sides = [operand(x, like) for x in (q, k, v)]
    a, b, c = sides
    half = not backend_of(a.q).float32_attention and all(x.q.dtype is torch.bfloat16 for x in sides)
    dtype = torch.bfloat16 if half else torch.float32
    folded = scaled_by(a.q, a.scale * b.scale, dtype)
    return a, b, c, [folded, *(converted(x.q, dtype) for x in (b, c))]


def _mask(mask: Any, dtype: torch.dtype) -> Any:
    """Return an additive mask in the dtype of the kernel, and a boolean mask as it is."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if isinstance(mask, ScaledTensor):
        mask = elements(mask).float() * mask.scale
    # The finite fills of a float64 mask stay finite.
    limit = torch.finfo(torch.float32).max
    held = mask.float()
    return torch.where(mask.isinf(), held, held.clamp(-limit, limit)).to(dtype)


class _Call(NamedTuple):
    """One call of attention: the arguments of its kernel, and the scales of its results."""

    query: Any
    key: Any
    a: Operand
    b: Operand
    c: Operand
    operands: list[Tensor]
    mask: Any
    factor: float
    """The softmax scale."""
    visible: Visible
    """Statistics of the keys that each query sees."""

    @staticmethod
    def of(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: Any) -> "_Call":
        a, b, c, operands = _folded(query, key, value)
        mask = _mask(mask, operands[0].dtype)
        rows, n = query.shape[-2], key.shape[-2]
        if mask is not None:
            seen = visible(mask if mask.dtype == torch.bool else mask > MASKED, -1)
        else:
            seen = causally_visible(rows, n) if causal else all_visible(n)
        factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        return _Call(query, key, a, b, c, operands, mask, factor, seen)

    def attended(self, out: Tensor) -> Raw:
        keys = invariant.context_length()
        if keys is None:
            return Raw(out, self.c.scale, self.c.rms * self._moments()[0])
        # The same number for every number of keys and every kind of cache: the scale of the result
        # is the scale of the next cast.
        root = _known_moments(Single(1.0), causally_visible(keys, keys))[0]
        return Raw(out, self.c.scale, self.c.scale * root)

    def backward(self, g: Operand, out: ScaledTensor) -> tuple[Tensor, ...]:
        """Return the gradient, the folded query, key and value, and the output of these."""
        dtype = self.operands[0].dtype
        held = scaled_by(elements(out), scale_of(out) / self.c.scale, dtype)
        return converted(g.q, dtype), *self.operands, held

    def gradients(self, g: Operand, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Raw, Raw, Raw]:
        a, b, c = self.a, self.b, self.c
        # Each key row has Sq / Sk query rows, and all heads of the query that share it add up.
        shared = self.query.numel() / max(self.key.numel(), 1)
        root, moved = self._moments()
        score = g.rms * c.rms * root * moved * (self.factor * self.query.shape[-1] ** 0.5)
        held = product_of(g.scale, c.scale)
        return (
            Raw(dq, product_of(held, b.scale), score * b.rms),
            Raw(dk, quotient_of(held, b.scale), score * a.rms * shared**0.5),
            Raw(dv, g.scale, g.rms * root * shared**0.5),
        )

    def _moments(self) -> tuple[Any, Any]:
        """Return sqrt(E) and h."""
        logits = self.a.rms * self.b.rms * (self.factor * self.query.shape[-1] ** 0.5)
        if not isinstance(self.visible.log_share, float):
            return _moments(tensor_of(logits), self.visible)
        known = isinstance(logits, Single)
        return (_known_moments if known else _moments)(logits, self.visible)


def _moments(logits: Any, seen: Visible) -> tuple[Any, Any]:
    return concentration(logits, seen).sqrt(), selection(bounded_square(logits), seen)


_known_moments = lru_cache(maxsize=1 << 12)(_moments)


# --- the kernel of CPUs ----------------------------------------------------------------------


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
    """rv sqrt(E) for values of RMS rv, where E is the mean over queries of the sum of their squared
    weights. For S keys and logits of RMS m, E is S^(a - 1) with a = m^2 / (m^2 + 4). With a mask,
    1/S is the mean of 1/n over queries that see n keys."""
    call = _Call.of(query, key, value, attn_mask, is_causal, scale)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        *call.operands, dropout_p, is_causal, attn_mask=call.mask, scale=call.factor
    )
    return call.attended(out), lse


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
    """r_g sqrt(E) times c sqrt(d) rv rk h for the query, c sqrt(d) rv rq h sqrt(Sq / Sk) for the
    key, and sqrt(Sq / Sk) for the value. rq, rk and rv are their RMS, c is the softmax scale, d the
    head size, Sq / Sk the number of query rows for each key row, and h as in
    `_softmax_backward_data`."""
    call, g = _Call.of(query, key, value, attn_mask, is_causal, scale), operand(grad_out, query)
    grad, *operands = call.backward(g, out)
    raw = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad if grad.stride(-1) == 1 else grad.contiguous(),  # torch would read other elements
        *operands,
        logsumexp,
        dropout_p,
        is_causal,
        attn_mask=call.mask,
        scale=call.factor,
    )
    return call.gradients(g, *raw)


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
    """Same as `_scaled_dot_product_flash_attention_for_cpu`, on bfloat16 elements."""
    call = _Call.of(query, key, value, None, is_causal, scale)
    operands = [x.bfloat16() for x in call.operands]
    out, *rest = _flash.default(
        *operands, dropout_p, is_causal, return_debug_mask, scale=call.factor
    )
    return call.attended(out), *rest


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
    """Same as `_scaled_dot_product_flash_attention_for_cpu_backward`, on bfloat16 elements."""
    call, g = _Call.of(query, key, value, None, is_causal, scale), operand(grad_out, query)
    raw = aten._scaled_dot_product_flash_attention_backward.default(
        *(x.bfloat16() for x in call.backward(g, out)),
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=call.factor,
    )
    return call.gradients(g, *raw)


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
    """Same as `_scaled_dot_product_flash_attention_for_cpu`, in the dtype of the elements."""
    call = _Call.of(query, key, value, attn_bias, is_causal, scale)
    out, *rest = aten._scaled_dot_product_efficient_attention.default(
        *call.operands, call.mask, compute_log_sumexp, dropout_p, is_causal, scale=call.factor
    )
    return call.attended(out), *rest


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
    """Same as `_scaled_dot_product_flash_attention_for_cpu_backward`. The gradient of a mask, which
    is added to the logits, has a measured RMS."""
    call, g = _Call.of(query, key, value, attn_bias, is_causal, scale), operand(grad_out_, query)
    *operands, output = call.backward(g, out)
    *raw, bias = aten._scaled_dot_product_efficient_attention_backward.default(
        *operands,
        call.mask,
        output,
        logsumexp,
        philox_seed,
        philox_offset,
        dropout_p,
        grad_input_mask,
        is_causal,
        scale=call.factor,
    )
    of_mask = None
    if grad_input_mask[3] and bias is not None:
        of_mask = measured(bias.float(), tensor_of(product_of(g.scale, call.c.scale)).float())
    return *call.gradients(g, *raw), of_mask


#: Function of torch -> the same function with a scaled result.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
}
