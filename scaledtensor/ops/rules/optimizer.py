"""Fused optimizer steps: the steps of torch's for-loop, in operators that have rules.

The arithmetic is the same, so the three forms of an optimizer (for-loop, foreach, fused) train
alike. A gradient scaler passes its scale to these operators, and whether it found an infinity.

In eager code on a CPU, Adam's step is calculated on the elements themselves. This takes a tenth of
the operators, and one operator on a ScaledTensor costs as much as the elements of a small layer.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import native
from scaledtensor.backends import backend_of
from scaledtensor.formats.tensors import covers_storage, in_pieces
from scaledtensor.native import adam as adam_loop
from scaledtensor.ops.algebra import elements, gaussian_moment
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, rule
from scaledtensor.ops.writes import written
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import (
    MAX_SCALE,
    MIN_SCALE,
    nearest_power_of_two,
    quadrature,
    settle_in_place,
    times,
)
from scaledtensor.scales.singles import (
    ONE,
    Single,
    amounts_of,
    multiplier,
    put,
    rounded,
    single_of,
)
from scaledtensor.tensors.memo import after_write
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.steps import watch
from scaledtensor.tensors.tensor import ScaledTensor

Number = float | Tensor

_LARGEST = torch.finfo(torch.float32).max


def _gradients(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (index, parameter, gradient to descend along), and nothing after an infinity was
    found."""
    if found_inf is not None and bool(found_inf):
        return
    for i, (p, g) in enumerate(zip(parameters, grads, strict=True)):
        if grad_scale is not None:
            g.div_(grad_scale)
        yield i, p, -g if maximize else g


@rule(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiplies gradients by the inverse of a gradient scaler's factor. The power of two of the
    factor goes into the scale, so a factor that is a power of two changes no element."""
    inverse = inverse.reshape(())
    for g in grads:
        if not isinstance(g, ScaledTensor):
            aten._amp_foreach_non_finite_check_and_unscale_.default([g], found_inf, inverse)
            continue
        finite = elements(g).isfinite().all()
        found_inf.copy_(torch.where(finite, found_inf, torch.ones_like(found_inf)))
        if covers_storage(g.qdata):
            moved = (g.scale * nearest_power_of_two(inverse.float())).clamp(MIN_SCALE, MAX_SCALE)
            ratio = moved.double() / g.scale
            put(g, moved, (g.rms * ratio).float())
            g.mul_((inverse / ratio).float())
        else:  # other parts of a larger tensor share the scale
            g.mul_(inverse)
    written(grads)


def _minus(p: Tensor, direction: Tensor, rate: Number) -> None:
    if isinstance(rate, Tensor):
        p.sub_(direction * rate)
    else:
        p.sub_(direction, alpha=rate)


@rule(
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    pass_op=True,
)
def adam(
    op: Overload,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    largest: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    **options: Any,
) -> None:
    """p - lr m / (sqrt(v) + eps) with running means m of g and v of g^2, both corrected for their
    start (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019)."""
    decoupled = "adamw" in op._schema.name
    together: list[_Stepped] = []

    def step_together() -> None:
        if together:
            coupled = 0.0 if decoupled else 1.0
            _adam_together(together, float(lr), beta1, beta2, weight_decay, eps, coupled)
            together.clear()

    for i, p, g in _gradients(parameters, grads, **options):
        tensors = (g, p, firsts[i], seconds[i])
        if not amsgrad and _are_elements(*tensors):
            free = [_freedom(x) for x in tensors[1:]]
            alone = _FROM_ZERO in free  # another parameter may share its scale
            if alone:
                step_together()
            known = _amounts(*tensors)
            if known is not None:
                together.append(_Stepped(tensors, known, free, float(steps[i])))
                if alone:
                    step_together()
                continue
        if weight_decay and decoupled:
            _minus(p, p, lr * weight_decay)
        elif weight_decay:
            g = g.add(p, alpha=weight_decay)
        first, second = firsts[i].lerp_(g, 1 - beta1), seconds[i]
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if amsgrad:
            second = largest[i].copy_(torch.maximum(largest[i], second))
        step = steps[i].double()
        start1, start2 = 1 - beta1**step, 1 - beta2**step
        _minus(p, first / (second.sqrt() / start2.sqrt()).add_(eps), lr / start1)
    step_together()
    written(parameters, firsts, seconds, largest)


class _Stepped(NamedTuple):
    """A parameter that Adam steps on its elements."""

    tensors: tuple[Any, ...]
    """The gradient, the parameter, the first moment and the second moment."""
    amounts: list[tuple[Single, Single]]
    """The scale and the RMS of each."""
    free: list[int]
    """The `_freedom` of each, without the gradient."""
    step: float


def _adam_together(entries: Sequence[_Stepped], *options: float) -> None:
    """Make Adam's step on the elements of several parameters, in one call of C++ if there is a
    library. `options` are lr, beta1, beta2, weight_decay, eps, and 1 if the decay is a term of the
    gradient, or else 0."""
    _, beta1, beta2, *_ = options
    given: list[Sequence[float]] = []
    served: list[_Stepped] = []
    starts: dict[float, tuple[float, float]] = {}
    ready = native.ready(sum([entry.tensors[1].qdata.numel() for entry in entries]))
    for entry in entries:
        gradient, *held = map(_elements_of, entry.tensors)
        if not ready or not adam_loop.serves(gradient, *held):
            _adam_elements(*entry, *options)
            continue
        step = entry.step
        if step not in starts:
            starts[step] = 1 - beta1**step, 1 - beta2**step
        places = [x.data_ptr() for x in (gradient, *held)]
        size = gradient.numel(), gradient.dtype is torch.bfloat16
        amounts = [number for pair in entry.amounts for number in pair]
        free = sum([level << 2 * i for i, level in enumerate(entry.free)])
        given.append((*places, *size, free, *starts[step], *amounts))
        served.append(entry)
    growth = gaussian_moment(2) * (1 - beta2)
    found = adam_loop.step(given, adam_loop.Options(*options, growth)) if given else ()
    for entry, now in zip(served, found, strict=True):
        targets = zip(entry.tensors[1:], entry.amounts[1:], entry.free, strict=True)
        for (x, was, free), scale, rms in zip(targets, now[::2], now[1::2], strict=True):
            _changed(x, was, free, Single(scale), Single(rms))
        _signed(entry.tensors)


#: How far a write may change the scale of a tensor: never, if the tensor was zero, or always.
_NEVER, _FROM_ZERO, _ALWAYS = range(3)


def _freedom(x: Any) -> int:
    """Return how far a write may change the scale of `x`, as `ops.results.write` does."""
    if x.memo.agreed:  # other ranks rely on it
        return _NEVER
    return _ALWAYS if covers_storage(x.qdata) else _FROM_ZERO


def _changed(x: Any, before: tuple[Single, Single], free: int, scale: Single, rms: Single) -> None:
    """Give a tensor whose elements were written its scale and its RMS. `before` are both as they
    were."""
    watch(x)
    # A larger tensor does not become zero with one of its parts.
    now = max(before[1], rms) if free == _FROM_ZERO else rms
    put(x, None if scale == before[0] else scale, now)
    after_write(x)


def _signed(tensors: tuple[Any, ...]) -> None:
    """Say which of the tensors that a step of Adam wrote have no negative elements."""
    _, p, first, second = tensors
    p.nonnegative, first.nonnegative, second.nonnegative = False, False, True


def _are_elements(g: Tensor, *held: Tensor) -> bool:
    """Whether Adam's step reads and writes the elements of these tensors. The gradient may have any
    compute format, or be plain, as with FSDP2. The tensors that are written are in float32."""
    q = _elements_of(g)
    return (
        q.itemsize > 1
        and q.dtype is not torch.float64
        and not is_sparse(q)
        and all(isinstance(x, ScaledTensor) and x.qdata.dtype is torch.float32 for x in held)
    )


def _amounts(g: Tensor, *held: Tensor) -> list[tuple[Single, Single]] | None:
    """Return (scale, RMS) of each, if the host holds them as numbers, or else None. The RMS of a
    plain gradient is measured."""
    found = [amounts_of(x) for x in held]
    if isinstance(g, ScaledTensor):
        found.insert(0, amounts_of(g))
    elif all(type(scale) is Single for scale, _ in found):
        found.insert(0, (ONE, single_of(measured_rms(g))))
    numbers = all(type(scale) is Single and type(rms) is Single for scale, rms in found)
    return found if numbers else None


def _elements_of(g: Tensor) -> Tensor:
    return g.qdata if isinstance(g, ScaledTensor) else g


def _adam_elements(
    tensors: tuple[Any, ...],
    amounts: list[tuple[Single, Single]],
    free: list[int],
    step: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    coupled: float,
) -> None:
    """Calculate `adam` on the elements of (gradient, parameter, first moment, second moment), as
    `native/adam.cpp` does.

    Factors are float64 numbers until they multiply elements, so that powers of two beyond the range
    of float32 cancel first.
    """
    g, p, first, second = tensors
    (of_gradient, spread), of_parameter, of_first, of_second = amounts
    gradient, unit = _elements_of(g).float(), float(of_gradient)

    decay = weight_decay * coupled
    spread = quadrature(spread, of_parameter[1] * decay)
    # The expected RMS are the RMS of a lerp and of a sum of squares (`arithmetic`).
    weight, share = 1 - beta1, 1 - beta2
    rms = quadrature(of_first[1] * (1 - weight), spread * weight)
    m, scale = _moved(first, of_first, free[1], rms)
    rms_second = of_second[1] * beta2 + spread.square() * (gaussian_moment(2) * share)
    v, scale_second = _moved(second, of_second, free[2], rms_second)

    start1, start2 = 1 - beta1**step, 1 - beta2**step
    # The root of an even power of two is exact. So the digits do not depend on the scale.
    odd = _odd_part(scale_second)
    unit_root = math.sqrt(scale_second / odd / start2)
    expected = quadrature(Single(rounded(math.sqrt(rms_second / start2))), Single(rounded(eps)))
    rate, kept = lr / start1, 1 - lr * (weight_decay - decay)
    rms_parameter = quadrature(of_parameter[1] * kept, rms / expected * rate)
    q, scale_parameter = _moved(p, of_parameter, free[0], rms_parameter)
    _signed(tensors)

    to_first, to_second = _finite(unit / scale), _finite(share * unit * unit / scale_second)
    least = _finite(eps / unit_root)
    by = _finite(-rate * scale / unit_root / scale_parameter)
    if decay:
        gradient = gradient + times(q, _finite(decay * scale_parameter / unit))
    m.lerp_(times(gradient, to_first), weight)
    v.mul_(beta2).addcmul_(gradient, gradient, value=to_second)
    if kept != 1:
        q.mul_(kept)
    q.add_(m.mul(by).div_(_root(v, odd).add_(least)))  # `addcdiv_` would divide first


def _root(x: Tensor, factor: float) -> Tensor:
    """Return the roots of elements times a power of two. On the host, PyTorch's root of a float32
    number is not always the nearest number, so it is taken in float64."""
    if not backend_of(x).host:
        return x.mul(factor).sqrt_()
    return in_pieces(lambda t, *_: t.mul(factor).double().sqrt_().float(), x, torch.float32)


def _odd_part(scale: float) -> float:
    """Return 2 if the exponent of a scale is odd, and 1 if it is even."""
    return 2.0 - math.frexp(scale)[1] % 2


def _moved(x: Any, amounts: tuple[Single, Single], free: int, rms: Single) -> tuple[Tensor, float]:
    """Return the elements of `x`, for a change in place to values of RMS `rms`, and their scale.
    `amounts` are its scale and RMS. The scale stays unless `settle_in_place` chooses another."""
    kept, was = amounts
    scale, ratio = settle_in_place(kept, was if free else kept, rms, kept, free == _ALWAYS)
    if scale is not kept:
        x.qdata.mul_(multiplier(ratio))
    _changed(x, amounts, free, scale, rms)
    return x.qdata, float(scale)


def _finite(factor: float) -> Single:
    """Return a factor as a float32 number. The largest one replaces infinity, as 0 * inf is NaN."""
    return Single(rounded(max(min(factor, _LARGEST), -_LARGEST)))


@rule(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
def sgd(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Number,
    dampening: float,
    nesterov: bool,
    is_first_step: bool,
    **options: Any,
) -> None:
    """p - lr b with b = mu b + (1 - d) g for momentum mu and dampening d; Nesterov's form is p - lr
    (g + mu b)."""
    for i, p, g in _gradients(parameters, grads, **options):
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        if momentum:
            buffer = buffers[i]
            if is_first_step:
                buffer.copy_(g)
            else:
                buffer.mul_(momentum).add_(g, alpha=1 - dampening)
            g = g.add(buffer, alpha=momentum) if nesterov else buffer
        _minus(p, g, lr)
    written(parameters, buffers)


@rule(aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr)
def adagrad(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Number,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    **options: Any,
) -> None:
    """p - lr / (1 + (t - 1) decay) g / (sqrt(s) + eps) with s the sum of g^2 (Duchi et al.
    2011)."""
    for i, p, g in _gradients(parameters, grads, **options):
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        total = sums[i].addcmul_(g, g)
        rate = lr / (1 + (steps[i].double() - 1) * lr_decay)
        _minus(p, g / total.sqrt().add_(eps), rate)
    written(parameters, sums)
