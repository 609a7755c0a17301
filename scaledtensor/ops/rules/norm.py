"""Normalisation: layer, RMS, weight, group, instance and batch norm.

Normalised data have RMS 1, so the result has the RMS of the weight. The backward rules use the
saved reciprocal deviation and not the expected RMS of the input. It is there anyway, one number for
each row. It keeps the scale of the gradient right in networks whose residual stream is larger than
the rules expect.

In evaluation a batch norm divides by running statistics, which were measured on the data. So its
result has the RMS of the weight too, and errors of the rules over a deep network end here.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.formats import FP32
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import constant, first_scaled, operand, plain, quadrature, read_value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.writes import write
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import product_of, settle, times
from scaledtensor.scales.singles import (
    ONE,
    Single,
    rms_of,
    scale_of,
    scaled_by,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.tensor import ScaledTensor

#: The default of the RMS norm. torch calculates it in float32 for each dtype of ours.
DEFAULT_EPS = torch.finfo(torch.float32).eps


def _rms(x: Any, like: Any) -> Any:
    """RMS of a weight or a bias; 1 if there is none."""
    if x is None:
        return torch.ones_like(like) if isinstance(like, Tensor) else ONE
    return rms_of(x) if isinstance(x, ScaledTensor) else single_of(measured_rms(x))


def _affine_rms(weight: Any, bias: Any, v: Tensor) -> Any:
    """RMS of normalised data after weight and bias: sqrt(rw^2 + rb^2)."""
    like = (
        single_of(v.new_ones((), dtype=torch.float32)) if weight is None or bias is None else None
    )
    rms = _rms(weight, like)
    return rms if bias is None else quadrature(rms, _rms(bias, like))


def _values(x: Any, *parameters: Any, unit: Any = ONE) -> list[Any]:
    """Return the data in a unit, and the weight and bias in float32. They are only read."""
    floats = (None if p is None else read_value(p).float() for p in parameters)
    return [read_value(x, ONE if unit is ONE else 1 / unit), *floats]


def _unit(x: Any) -> Any:
    """Return a unit in which the data are read: their scale, for which nothing multiplies them, or
    1. The norm of x / s with eps / s^2 has the bits of the norm of x, for each power of two s whose
    square is far inside of the range."""
    if not isinstance(x, ScaledTensor) or x.qdata.itemsize == 1:
        return ONE
    scale = scale_of(x)
    serves = type(scale) is Single and 2.0**-40 < scale < 2.0**40
    return scale if serves and math.frexp(scale)[0] == 0.5 else ONE


def _in_unit(eps: float, unit: Any) -> float:
    return eps / float(unit) ** 2  # as exact as `eps`, which some kernels add in float64


def _for_kernel(v: Tensor) -> Tensor:
    """Return the data in the dtype in which the kernels of layer norm and group norm take them
    beside a float32 weight. The statistics are then float32 too."""
    return v if backend_of(v).mixed_norms else v.float()


class _Normalised(NamedTuple):
    """The input of a norm, for its backward pass.

    The data are divided by a power of two close to their deviation. The elements of a gradient may
    be far smaller than their rule expects. Times the reciprocal deviation of large values, they
    would be too small for float32.
    """

    v: Tensor
    mean: Any
    rstd: Any
    power: Any
    """The gradient of the values is the gradient of `v` times this power."""
    rms: Any
    """RMS of the reciprocal deviation of the values."""

    @staticmethod
    def of(x: Any, mean: Any, rstd: Any, gradient: Any) -> "_Normalised":
        """Make it from the statistics of the values. `gradient` is the RMS of the gradient."""
        rms = single_of(measured_rms(rstd))
        (power,) = settle(rms)
        unit = _unit(x)
        if unit is not ONE and type(power) is Single and 2.0**-20 < unit * power < 2.0**20:
            power = 1 / unit  # then `v` are the elements of `x`
        if isinstance(power, Form):  # otherwise compiled code multiplies in the forward pass
            power = power.after(gradient)
        mean = None if mean is None else scaled_by(mean, power)
        return _Normalised(read_value(x, power), mean, scaled_by(rstd, 1 / power), power, rms)

    @staticmethod
    def in_evaluation(x: Any, rstd: Any) -> "_Normalised":
        """Make it from running statistics, for which the data are not divided."""
        return _Normalised(plain(x), None, rstd, ONE, single_of(measured_rms(rstd)))


def _gradients(
    raw: Sequence[Tensor | None], g: Any, weight: Any, held: _Normalised, width: int
) -> Any:
    """Return the gradients that a kernel computed from the elements of `g` and from `held`; None
    for a gradient that nobody asked for."""
    rows = (held.v.numel() / max(width, 1)) ** 0.5
    dx, *parameters = raw
    rms = g.rms * _rms(weight, g.rms) * held.rms
    return (
        None
        if dx is None
        else Raw(dx.to(held.v.dtype), product_of(g.scale, held.power), rms, fresh=True),
        *(None if d is None else Raw(d, g.scale, g.rms * rows, format=FP32) for d in parameters),
    )


# --- layer norm and RMS norm -----------------------------------------------------------------


@rule(aten.native_layer_norm.default)
def layer_norm(
    x: ScaledTensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Raw, Tensor, Tensor]:
    """r = sqrt(rw^2 + rb^2) for weight and bias. The mean and the reciprocal deviation are plain
    float32."""
    unit = _unit(x)
    v, w, b = _values(x, weight, bias, unit=unit)
    data = _for_kernel(v)
    if w is None and data.dtype == torch.bfloat16:
        # float32 statistics need a float32 weight
        w = torch.ones(shape, device=v.device, dtype=torch.float32)
    out, mean, rstd = aten.native_layer_norm.default(data, shape, w, b, _in_unit(eps, unit))
    raw = Raw(out.to(v.dtype), None, _affine_rms(weight, bias, v), fresh=True)
    return raw, times(mean, unit), times(rstd, 1 / unit)


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
    """r_g rw s for the input, where s is the measured RMS of the reciprocal deviation; r_g
    sqrt(rows) for weight and bias."""
    like = first_scaled(g, x, weight)
    left = operand(g, like)
    held = _Normalised.of(x, mean, rstd, left.rms)
    v, w, b = _values(held.v, weight, bias)
    data = _for_kernel(v)
    if w is None and data.dtype == torch.bfloat16:
        w = torch.ones(shape, device=v.device, dtype=torch.float32)
    raw = aten.native_layer_norm_backward.default(
        left.q.to(data.dtype), data, shape, held.mean, held.rstd, w, b, mask
    )
    return _gradients(raw, left, weight, held, math.prod(shape))


@rule(aten._fused_rms_norm.default)
def rms_norm(
    x: ScaledTensor, shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Raw, Tensor]:
    """r = rw for the weight. The reciprocal RMS of the rows is plain float32."""
    fuses = backend_of(first_scaled(x, weight).qdata).fused_rms_norm
    if invariant.is_on() and not fuses:
        # It arrives in inference mode only. With gradients, torch runs the operators one by one.
        parts: Any = aten._fused_rms_norm.default.decompose(x, shape, weight, eps)
        return parts  # type: ignore[no-any-return]
    unit = _unit(x)
    v = _values(x, unit=unit)[0].float()
    dims = tuple(range(-len(shape), 0))
    eps = _in_unit(DEFAULT_EPS if eps is None else eps, unit)
    rrms = torch.rsqrt(v.square().mean(dims, keepdim=True) + eps)
    out = v * rrms
    if weight is not None:
        out = out * plain(weight)
    rms = constant(1.0, rms_of(x)) if weight is None else _rms(weight, ONE)
    return Raw(out, None, rms), times(rrms, 1 / unit)


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    g: Any, x: Any, shape: Sequence[int], rstd: Tensor, weight: Any, mask: Sequence[bool]
) -> tuple[Raw | None, Raw | None]:
    """r_g rw s for the input, where s is the measured RMS of the reciprocal RMS; r_g sqrt(rows) for
    the weight."""
    like = first_scaled(g, x, weight)
    left = operand(g, like)
    held = _Normalised.of(x, None, rstd, left.rms)
    v = held.v.float()
    q = left.q.float()
    dims = tuple(range(-len(shape), 0))
    normal = v * held.rstd
    gw = q if weight is None else q * plain(weight)
    dx = (gw - normal * (gw * normal).mean(dims, keepdim=True)) * held.rstd if mask[0] else None
    rows = tuple(range(v.dim() - len(shape)))
    dw = (q * normal).sum(rows) if rows else q * normal
    raw = dx, dw if mask[1] else None
    out = _gradients(raw, left, weight, held, math.prod(shape))
    return out[0], out[1]


# --- weight norm -----------------------------------------------------------------------------


@rule(aten._weight_norm_interface.default)
def weight_norm(v: Any, g: Any, dim: int = 0) -> tuple[Raw, Tensor]:
    """r = rg / sqrt(n) for weights g v / |v|: the direction of a slice of n elements has the RMS
    1 / sqrt(n), and rg is the RMS of the lengths g. The norms are plain float32."""
    left, right = plain(v).float(), plain(g).float()
    w, norms = aten._weight_norm_interface.default(left, right, dim)
    return Raw(w, None, _rms(g, left.new_ones(())) * _slice(v, dim) ** -0.5), norms


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Tensor, dim: int) -> tuple[Raw, Raw]:
    """r_g rg s for v, where rg is the RMS of the lengths and s the measured RMS of 1 / |v|; r_g for
    the lengths, by a product with a direction."""
    upstream = operand(grad, first_scaled(grad, v, g))
    left, right = plain(v).float(), plain(g).float()
    dv, dg = aten._weight_norm_interface_backward.default(
        upstream.q.float(), left, right, norms, dim
    )
    rms = upstream.rms * _rms(g, upstream.rms) * single_of(measured_rms(norms.reciprocal()))
    held = upstream.scale
    return Raw(dv, held, rms, format=FP32), Raw(dg, held, upstream.rms, format=FP32)


def _slice(v: Tensor, dim: int) -> int:
    return max(v.numel() // max(v.shape[dim], 1), 1)


# --- group norm and batch norm: the weight is by channel -------------------------------------


def _by_channel(x: Any, weight: Any, unit: Any = ONE) -> tuple[Tensor, Tensor | None]:
    """Return the data in a unit, and a float32 weight. For 16-bit data it is never None, so that
    the kernel computes float32 statistics."""
    v, w = _values(x, weight, unit=unit)
    if w is None and v.dtype != torch.float32 and v.dim() > 1:
        w = torch.ones(v.shape[1], device=v.device, dtype=torch.float32)
    return v, w


def _asked(raw: Sequence[Tensor | None], mask: Sequence[bool]) -> list[Tensor | None]:
    return [r if wanted else None for r, wanted in zip(raw, mask, strict=True)]


@rule(aten.native_group_norm.default)
def group_norm(
    x: ScaledTensor, weight: Any, bias: Any, *sizes_and_eps: Any
) -> tuple[Raw, Tensor, Tensor]:
    """r = sqrt(rw^2 + rb^2) for weight and bias. The mean and the reciprocal deviation are plain
    float32."""
    unit = _unit(x)
    v, w = _by_channel(x, weight, unit)
    b = None if bias is None else plain(bias).float()
    data = _for_kernel(v).contiguous()
    *sizes, eps = sizes_and_eps
    out, mean, rstd = aten.native_group_norm.default(data, w, b, *sizes, _in_unit(eps, unit))
    raw = Raw(out.to(v.dtype), None, _affine_rms(weight, bias, v), fresh=True)
    return raw, times(mean, unit), times(rstd, 1 / unit)


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    g: Any, x: Any, mean: Tensor, rstd: Tensor, weight: Any, *sizes: Any
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """r_g rw s for the input, where s is the measured RMS of the reciprocal deviation; r_g
    sqrt(images * pixels) for weight and bias."""
    *extents, mask = sizes
    left = operand(g, first_scaled(g, x, weight))
    held = _Normalised.of(x, mean, rstd, left.rms)
    v, w = _by_channel(held.v, weight)
    data = _for_kernel(v).contiguous()
    raw = aten.native_group_norm_backward.default(
        left.q.to(data.dtype).contiguous(), data, held.mean, held.rstd, w, *extents, mask
    )
    dx, dw, db = _gradients(_asked(raw, mask), left, weight, held, v.shape[1])
    return dx, dw, db


class _Running(NamedTuple):
    """Running statistics in float32, and the tensors of the module that hold them."""

    mean: Tensor | None
    var: Tensor | None
    owners: tuple[Any, Any]

    @staticmethod
    def of(mean: Any, var: Any) -> "_Running":
        now = [None if t is None else plain(t).float() for t in (mean, var)]
        return _Running(now[0], now[1], (mean, var))

    def write_back(self) -> None:
        """Write the statistics that a kernel updated into the tensors of the module."""
        for owner, now in zip(self.owners, (self.mean, self.var), strict=True):
            if isinstance(owner, ScaledTensor) and now is not None:
                write(owner, now, [owner])
            elif owner is not None and owner is not now:
                owner.copy_(now)

    def deviations(self, x: Any) -> Any:
        """RMS of (x - mean) / sqrt(var). It is 1 for measured statistics. A new module has mean 0
        and variance 1, so there it is the RMS of `x`."""
        if self.mean is None or self.var is None or not isinstance(x, ScaledTensor):
            return torch.ones((), device=x.device, dtype=torch.float32)
        fresh = (self.mean == 0).all() & (self.var == 1).all()
        rms = rms_of(x)
        if type(rms) is Single and backend_of(fresh).host:
            return rms if fresh else ONE
        return torch.where(fresh, tensor_of(rms, x.device), 1.0)


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running: _Running,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Raw, Tensor, Tensor]:
    v, w = _by_channel(x, weight)
    b = None if bias is None else plain(bias).float()
    out, mean, rstd = aten.native_batch_norm.default(
        v, w, b, running.mean, running.var, training, momentum, eps
    )
    if training:
        return Raw(out, None, _affine_rms(weight, bias, v)), mean, rstd
    rms = _affine_rms(weight, None, v) * running.deviations(x)
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
    """r = sqrt(rw^2 + rb^2) for weight and bias. The saved statistics are plain float32. Running
    statistics, plain or scaled, are updated in place. In evaluation with the running statistics of
    a new module, r = sqrt((rx rw)^2 + rb^2)."""
    running = _Running.of(mean, var)
    result = _batch_norm(x, weight, bias, running, training, *options)
    if training:
        running.write_back()
    return result


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_of_batch(
    x: Any, weight: Any, bias: Any, training: bool, *options: float
) -> tuple[Raw, Tensor, Tensor]:
    """Same as `native_batch_norm`, by the statistics of the batch."""
    return _batch_norm(x, weight, bias, _Running.of(None, None), training, *options)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Raw, Tensor, Tensor]:
    """Same as `native_batch_norm` in evaluation."""
    return _batch_norm(x, weight, bias, _Running.of(mean, var), False, *options)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *options: float
) -> tuple[Any, ...]:
    """Same as `native_batch_norm`. It returns the running statistics."""
    copies = mean.clone(), var.clone()
    return *batch_norm(x, weight, bias, *copies, training, *options), *copies


@rule(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Any, ...]:
    """Same as `native_batch_norm` in training. The reserve for the backward pass is empty."""
    return *batch_norm(x, weight, bias, mean, var, True, *options), _reserve(x)


@rule(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Any, ...]:
    """Same as `native_batch_norm` in training. It returns the running statistics; the reserve for
    the backward pass is empty."""
    copies = mean.clone(), var.clone()
    return *batch_norm(x, weight, bias, *copies, True, *options), _reserve(x), *copies


@rule(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, *options: float
) -> tuple[Any, ...]:
    """Same as `native_batch_norm` in evaluation. The reserve for the backward pass is empty."""
    return *batch_norm_in_evaluation(x, weight, bias, mean, var, *options), _reserve(x)


@rule(aten.cudnn_batch_norm.default)
def batch_norm_of_cudnn(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *options: float
) -> tuple[Any, ...]:
    """Same as `native_batch_norm`, by torch's own kernel. The reserve for the backward pass is
    empty."""
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
    """r_g rw s for the input, where s is the measured RMS of the reciprocal deviation; r_g
    sqrt(images * pixels) for weight and bias."""
    left = operand(g, first_scaled(g, x, weight))
    running = _Running.of(running_mean, running_var)
    if training:
        held = _Normalised.of(x, mean, rstd, left.rms)
        mean, rstd = held.mean, held.rstd
    else:
        deviation = rstd if running.var is None else (running.var + eps).rsqrt()
        held = _Normalised.in_evaluation(x, deviation)
    v, w = _by_channel(held.v, weight)
    raw = aten.native_batch_norm_backward.default(
        *(left.q.to(v.dtype), v, w, running.mean, running.var, mean, rstd, training, eps, mask)
    )
    dx, dw, db = _gradients(_asked(raw, mask), left, weight, held, v.shape[1])
    if dw is not None and not training:
        dw = dw._replace(rms=dw.rms * running.deviations(x))
    return dx, dw, db


@rule(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(
    g: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, *saved: Any
) -> tuple[Raw | None, Raw | None, Raw | None]:
    """Same as `native_batch_norm_backward`."""
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
    """Same as `native_batch_norm_backward` in training."""
    saved = (mean, rstd, True, eps, [True, True, True])
    return batch_norm_backward(g, x, weight, running_mean, running_var, *saved)
