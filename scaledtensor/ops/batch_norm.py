"""Batch, instance and group normalisation: over pixels, by channel.

As for layer norm, what is normalised has no scale left. In evaluation a batch norm divides by
running statistics, which were measured on the data: where they are there, the result has the RMS of
the weight whatever the rules expect of the input, and what they miss over a deep network ends here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor.ops.algebra import first_scaled, operand, plain, quadrature, side
from scaledtensor.ops.norm import Normalised, affine_rms, norm_gradients
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Raw, rule
from scaledtensor.ops.results import write
from scaledtensor.tensor import ScaledTensor


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
