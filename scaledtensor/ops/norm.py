"""Normalisation layers. What is normalised has no scale left: the output's is that of the weight.

The backward rules use the saved reciprocal deviation, not the expected RMS of the input: it is
there already, one number a row, and keeps the gradient's scale true in networks whose residual
stream outgrows independence.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.forms import Form
from scaledtensor.measure import measured_rms
from scaledtensor.ops.algebra import first_scaled, plain, quadrature, side, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.scale import product_of, settle
from scaledtensor.singles import ONE, multiplier, rms_of, single_of
from scaledtensor.tensor import ScaledTensor


def _rms(x: Any, like: Any) -> Any:
    if x is None:
        return torch.ones_like(like) if isinstance(like, Tensor) else ONE
    return rms_of(x) if isinstance(x, ScaledTensor) else single_of(measured_rms(x))


def affine_rms(weight: Any, bias: Any, v: Tensor) -> Any:
    """What a normalised `v` has after weight and bias: sqrt(r_gamma^2 + r_beta^2)."""
    like = (
        single_of(v.new_ones((), dtype=torch.float32)) if weight is None or bias is None else None
    )
    rms = _rms(weight, like)
    return rms if bias is None else quadrature(rms, _rms(bias, like))


def norm_operands(x: Any, *others: Any) -> list[Any]:
    """Values for the kernel: the data as it is, the parameters in float32, which mixes with it."""
    v = plain(x)
    return [v, *(None if o is None else plain(o).float() for o in others)]


class Normalised(NamedTuple):
    """What a norm had, for its backward pass: data near 1, their statistics, and what is expected
    of the reciprocal deviation of the values.

    The data are divided by a power of two next to their deviation. The elements of a gradient may
    be far smaller than their rule expects. Times the reciprocal deviation of large values they
    would be no float32.
    """

    v: Tensor
    mean: Any
    rstd: Any
    power: Any
    """A gradient for `v` times this is one for the values."""
    rms: Any

    @staticmethod
    def of(x: Any, mean: Any, rstd: Any, gradient: Any) -> "Normalised":
        """For the backward pass of the RMS `gradient`."""
        rms = single_of(measured_rms(rstd))
        (power,) = settle(rms)
        if isinstance(power, Form):  # or compiled code would multiply in the forward pass
            power = power.after(gradient)
        held = multiplier(power)
        mean = None if mean is None else mean * held
        v = value(x, power) if isinstance(x, ScaledTensor) else x * held
        return Normalised(v, mean, rstd / held, power, rms)

    @staticmethod
    def in_evaluation(x: Any, rstd: Any) -> "Normalised":
        """By running statistics, which are of the values."""
        return Normalised(plain(x), None, rstd, ONE, single_of(measured_rms(rstd)))


@rule(aten.native_layer_norm.default)
def layer_norm(
    x: ScaledTensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Raw, Tensor, Tensor]:
    """r = sqrt(r_gamma^2 + r_beta^2). Mean and reciprocal deviation leave as plain float32."""
    v, w, b = norm_operands(x, weight, bias)
    if w is None and v.dtype == torch.bfloat16:
        w = torch.ones(shape, device=v.device)  # float32 statistics need a float32 weight
    out, mean, rstd = aten.native_layer_norm.default(v, shape, w, b, eps)
    return Raw(out, None, affine_rms(weight, bias, v)), mean, rstd


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    g: Any,
    x: Any,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    bias: Any,
    mask: Sequence[bool],
) -> Any:
    """dx: r_g r_gamma rms(rstd); d_gamma, d_beta: r_g sqrt(rows)."""
    like = first_scaled(g, x, weight)
    left = side(g, like)
    held = Normalised.of(x, mean, rstd, left.rms)
    v, w, b = norm_operands(held.v, weight, bias)
    if w is None and v.dtype == torch.bfloat16:
        w = torch.ones(shape, device=v.device)
    raw = aten.native_layer_norm_backward.default(
        left.q.to(v.dtype), v, shape, held.mean, held.rstd, w, b, mask
    )
    return norm_gradients(raw, left, weight, held, math.prod(shape))


@rule(aten._fused_rms_norm.default)
def rms_norm(
    x: ScaledTensor, shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Raw, Tensor]:
    """r = r_gamma. The reciprocal RMS leaves as plain float32."""
    v = plain(x).float()
    dims = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rrms = torch.rsqrt(v.square().mean(dims, keepdim=True) + eps)
    out = v * rrms
    if weight is not None:
        out = out * plain(weight)
    return Raw(out, None, _rms(weight, v.new_ones(()))), rrms


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    g: Any, x: Any, shape: Sequence[int], rstd: Tensor, weight: Any, mask: Sequence[bool]
) -> tuple[Raw | None, Raw | None]:
    """dx: r_g r_gamma rms(rstd); d_gamma: r_g sqrt(rows)."""
    like = first_scaled(g, x, weight)
    left = side(g, like)
    held = Normalised.of(x, None, rstd, left.rms)
    v = held.v.float()
    q = left.q.float()
    dims = tuple(range(-len(shape), 0))
    normal = v * held.rstd
    gw = q if weight is None else q * plain(weight)
    dx = (gw - normal * (gw * normal).mean(dims, keepdim=True)) * held.rstd if mask[0] else None
    rows = tuple(range(v.dim() - len(shape)))
    dw = (q * normal).sum(rows) if rows else q * normal
    raw = dx, dw if mask[1] else None
    out = norm_gradients(raw, left, weight, held, math.prod(shape))
    return out[0], out[1]


@rule(aten._weight_norm_interface.default)
def weight_norm(v: Any, g: Any, dim: int = 0) -> tuple[Raw, Tensor]:
    """g v / |v| for each of the slices along `dim`: a direction of n elements has r = 1 / sqrt(n),
    so r = r_g / sqrt(n). The norms leave as plain float32."""
    left, right = plain(v).float(), plain(g).float()
    w, norms = aten._weight_norm_interface.default(left, right, dim)
    return Raw(w, None, _rms(g, left.new_ones(())) * _slice(v, dim) ** -0.5), norms


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Tensor, dim: int) -> tuple[Raw, Raw]:
    """dv: r_w r_g rms(1 / |v|); dg, a product with a direction: r_w."""
    upstream = side(grad, first_scaled(grad, v, g))
    left, right = plain(v).float(), plain(g).float()
    dv, dg = aten._weight_norm_interface_backward.default(
        upstream.q.float(), left, right, norms, dim
    )
    rms = upstream.rms * _rms(g, upstream.rms) * single_of(measured_rms(norms.reciprocal()))
    return Raw(dv, upstream.scale, rms, format=FP32), Raw(
        dg, upstream.scale, upstream.rms, format=FP32
    )


def _slice(v: Tensor, dim: int) -> int:
    return max(v.numel() // max(v.shape[dim], 1), 1)


def norm_gradients(
    raw: Sequence[Tensor | None], g: Any, weight: Any, held: Normalised, width: int
) -> Any:
    """The gradients that a kernel gave for the elements of `g` and the data that it was given; None
    for those not asked for."""
    rows = (held.v.numel() / max(width, 1)) ** 0.5
    dx, *parameters = raw
    rms = g.rms * _rms(weight, g.rms) * held.rms
    return (
        None if dx is None else Raw(dx, product_of(g.scale, held.power), rms),
        *(None if d is None else Raw(d, g.scale, g.rms * rows, format=FP32) for d in parameters),
    )
