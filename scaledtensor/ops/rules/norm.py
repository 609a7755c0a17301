"""Batch, instance and group normalisation: over pixels, by channel.

As for layer norm, what is normalised has no scale left. In evaluation a batch norm divides by
running statistics, which were measured on the data: where they are there, the result has the RMS of
the weight whatever the rules expect of the input, and what they miss over a deep network ends here.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import first_scaled, operand, plain, quadrature, side, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import write
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import product_of, settle
from scaledtensor.scales.singles import ONE, multiplier, rms_of, single_of
from scaledtensor.tensors.tensor import ScaledTensor


# Normalisation layers. What is normalised has no scale left: the output's is that of the weight.
# The backward rules use the saved reciprocal deviation, not the expected RMS of the input: it is
# there already, one number a row, and keeps the gradient's scale true in networks whose residual
# stream outgrows independence.
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


def _operands(x: Any, weight: Any) -> tuple[Tensor, Tensor | None]:
    """Values for a kernel: the data as it is, and the weight in float32, which mixes with it. One
    of ones, where there is none and the data are narrower: statistics then are float32 too."""
    v = plain(x)
    if weight is not None:
        return v, plain(weight).float()
    wide = v.dtype == torch.float32 or v.dim() < 2
    return v, None if wide else torch.ones(v.shape[1], device=v.device)


def _asked(raw: Sequence[Tensor | None], mask: Sequence[bool]) -> list[Tensor | None]:
    return [r if wanted else None for r, wanted in zip(raw, mask, strict=True)]


# --- group norm ------------------------------------------------------------------------------


@rule(aten.native_group_norm.default)
def group_norm(
    x: ScaledTensor, weight: Any, bias: Any, *sizes_and_eps: Any
) -> tuple[Raw, Tensor, Tensor]:
    """r = sqrt(r_gamma^2 + r_beta^2). Mean and reciprocal deviation leave as plain float32."""
    v, w = _operands(x, weight)
    b = None if bias is None else plain(bias).float()
    out, mean, rstd = aten.native_group_norm.default(v.contiguous(), w, b, *sizes_and_eps)
    return Raw(out, None, affine_rms(weight, bias, v)), mean, rstd


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    g: Any, x: Any, mean: Tensor, rstd: Tensor, weight: Any, *sizes: Any
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """dx: r_g r_gamma rms(rstd); d_gamma, d_beta: r_g sqrt(images * pixels)."""
    *extents, mask = sizes
    left = side(g, first_scaled(g, x, weight))
    held = Normalised.of(x, mean, rstd, left.rms)
    v, w = _operands(held.v, weight)
    raw = aten.native_group_norm_backward.default(
        left.q.to(v.dtype).contiguous(), v.contiguous(), held.mean, held.rstd, w, *extents, mask
    )
    found: tuple[Raw | None, Raw | None, Raw | None] = norm_gradients(
        _asked(raw, mask), left, weight, held, v.shape[1]
    )
    return found


# --- running statistics ----------------------------------------------------------------------


class Running(NamedTuple):
    """Running statistics in float32, and the module's own tensors that hold them."""

    mean: Tensor | None
    var: Tensor | None
    owners: tuple[Any, Any]

    @staticmethod
    def of(mean: Any, var: Any) -> "Running":
        now = [None if t is None else plain(t).float() for t in (mean, var)]
        return Running(now[0], now[1], (mean, var))

    def write_back(self) -> None:
        """What a kernel wrote into copies, into the module's own tensors."""
        for owner, now in zip(self.owners, (self.mean, self.var), strict=True):
            if isinstance(owner, ScaledTensor) and now is not None:
                write(owner, now, [owner])
            elif owner is not None and owner is not now:
                owner.copy_(now)

    def deviations(self, x: Any) -> Tensor:
        """RMS of (x - mean) / sqrt(var): 1, for that is what they were measured for. A module
        starts with 0 and 1, which say nothing about `x`: then it is what is expected of `x`."""
        if self.mean is None or self.var is None or not isinstance(x, ScaledTensor):
            return torch.ones((), device=x.device)
        fresh = (self.mean == 0).all() & (self.var == 1).all()
        return torch.where(fresh, x.rms, torch.ones_like(x.rms))


# --- batch norm ------------------------------------------------------------------------------


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running: Running,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Raw, Tensor, Tensor]:
    v, w = _operands(x, weight)
    b = None if bias is None else plain(bias).float()
    out, mean, rstd = aten.native_batch_norm.default(
        v, w, b, running.mean, running.var, training, momentum, eps
    )
    if training:
        return Raw(out, None, affine_rms(weight, bias, v)), mean, rstd
    rms = affine_rms(weight, None, v) * running.deviations(x)
    if bias is not None:
        rms = quadrature(rms, operand(bias, x).rms)
    return Raw(out, None, rms), mean, rstd


@rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten.miopen_batch_norm.default,
)
def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *options: float
) -> tuple[Raw, Tensor, Tensor]:
    """r = sqrt(r_gamma^2 + r_beta^2); the saved statistics leave as plain float32. Running ones are
    updated where they are, plain or scaled. In evaluation under those that a module starts with,
    r = sqrt((rx r_gamma)^2 + r_beta^2)."""
    running = Running.of(mean, var)
    result = _batch_norm(x, weight, bias, running, training, *options)
    if training:
        running.write_back()
    return result


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_of_batch(
    x: Any, weight: Any, bias: Any, training: bool, *options: float
) -> tuple[Raw, Tensor, Tensor]:
    """As batch_norm, by the statistics of the batch."""
    return _batch_norm(x, weight, bias, Running.of(None, None), training, *options)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Raw, Tensor, Tensor]:
    """As batch_norm in evaluation."""
    return _batch_norm(x, weight, bias, Running.of(mean, var), False, *options)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *options: float
) -> tuple[Any, ...]:
    """As batch_norm; the running statistics are returned."""
    copies = mean.clone(), var.clone()
    return *batch_norm(x, weight, bias, *copies, training, *options), *copies


@rule(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Any, ...]:
    """As batch_norm in training; nothing is reserved."""
    return *batch_norm(x, weight, bias, mean, var, True, *options), _reserve(x)


@rule(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Any, ...]:
    """As batch_norm in training; the running statistics are returned."""
    copies = mean.clone(), var.clone()
    return *batch_norm(x, weight, bias, *copies, True, *options), _reserve(x), *copies


@rule(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Any, ...]:
    """As batch_norm in evaluation; nothing is reserved."""
    return *batch_norm_in_evaluation(x, weight, bias, mean, var, *options), _reserve(x)


@rule(aten.cudnn_batch_norm.default)
def batch_norm_of_cudnn(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *options: float
) -> tuple[Any, ...]:
    """As batch_norm, by torch's own kernel; nothing is reserved."""
    return *batch_norm(x, weight, bias, mean, var, training, *options), _reserve(x)


def _reserve(x: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device)


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    g: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """dx: r_g r_gamma rms(rstd); d_gamma, d_beta: r_g sqrt(images * pixels)."""
    left = side(g, first_scaled(g, x, weight))
    running = Running.of(running_mean, running_var)
    if training:
        held = Normalised.of(x, mean, rstd, left.rms)
        mean, rstd = held.mean, held.rstd
    else:
        deviation = rstd if running.var is None else (running.var + eps).rsqrt()
        held = Normalised.in_evaluation(x, deviation)
    v, w = _operands(held.v, weight)
    raw = aten.native_batch_norm_backward.default(
        *(left.q.to(v.dtype), v, w, running.mean, running.var, mean, rstd, training, eps, mask)
    )
    found = norm_gradients(_asked(raw, mask), left, weight, held, v.shape[1])
    dx, dw, db = found
    if dw is not None and not training:
        dw = dw._replace(rms=dw.rms * running.deviations(x))
    return dx, dw, db


@rule(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(
    g: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, *saved: Any
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """As native_batch_norm_backward."""
    return batch_norm_backward(g, x, weight, running_mean, running_var, *saved[:-1])


@rule(aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default)
def batch_norm_backward_of_vendor(
    x: Any,
    g: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    eps: float,
    *reserve: Any,
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """As native_batch_norm_backward in training."""
    saved = (mean, rstd, True, eps, [True, True, True])
    return batch_norm_backward(g, x, weight, running_mean, running_var, *saved)
