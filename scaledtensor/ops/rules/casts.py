"""The verbs of the tensor, and the ways into and out of it."""

import typing
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import FP32, encode, fake_quantize, from_dtype
from scaledtensor.formats import get as get_format
from scaledtensor.formats.rounding import Rounding
from scaledtensor.formats.tensors import in_pieces
from scaledtensor.ops.algebra import elements, mismatch, saved_format, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.products import sites
from scaledtensor.ops.products.table import cast_once
from scaledtensor.ops.registry import entered, rule
from scaledtensor.ops.results import OVERFLOW, covers_storage, store, write
from scaledtensor.ops.rules.sparse import wrapped
from scaledtensor.scales.cast_nodes import codes_of, values_of
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE, settle
from scaledtensor.scales.singles import copied, put, rms_of, scale_of, scaled_by
from scaledtensor.tensors import verbs
from scaledtensor.tensors.memo import after_overwrite, note
from scaledtensor.tensors.site import lend
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.tensor import SENT_AS_ONE, Context, ScaledTensor, from_plain, is_stored


@rule(verbs.to_format)
def to_format(x: ScaledTensor, format: str, rounding: Rounding = "nearest_even") -> ScaledTensor:
    """A cast: the elements are rounded; the scale never changes. 8-bit formats saturate, keep
    what is not finite as far as they have a code for it, and take any rounding, stochastic from
    torch's default generator; compute formats round to nearest even."""
    fmt = get_format(format)
    source = elements(x)
    how: dict[str, Any] = {}
    if rounding != "nearest_even" and fmt.storage_dtype.itemsize == 1:
        how = {"rounding": rounding, "overflow": "saturate_finite"}
        if rounding == "stochastic":  # drawn once, for both spellings of the result below
            how["generator"] = torch.ops.scaledtensor.random_key(source)
    traced = fmt.storage_dtype.itemsize == 1 and torch.compiler.is_compiling()
    if how:
        q = encode(source, fmt, **how)
    else:
        q = codes_of(source, fmt.name, OVERFLOW) if traced else store(source, fmt)
    if q is x.qdata:
        q = q.clone()
    scale, rms = copied(scale_of(x)), copied(rms_of(x))
    out = ScaledTensor.make(q, scale, rms, fmt, x.dtype, x.recipe, x.nonnegative)
    if traced and q.is_cpu:
        # What the emulated product multiplies, from the same registers; codes that nobody reads
        # are then never made. As bfloat16 also where products are float32 ones: what autograd
        # keeps is then two bytes an element.
        drawn = fake_quantize(source, fmt, **how).to(torch.bfloat16) if how else None
        decoded = values_of(source, fmt.name) if drawn is None else drawn
        passing = saved_format(x) is not None and not _torch.is_within_backward()
        note(out, decoded=decoded, passing=passing)
    return out


@rule(verbs.gradient_to_format)
def gradient_to_format(
    x: ScaledTensor,
    format: str,
    rounding: Rounding = "nearest_even",
    shift: int = 0,
    factors: Tensor | None = None,
    counts: bool = False,
    rows: bool = False,
) -> ScaledTensor:
    """The identity forward; the cast happens to the gradient."""
    return x.viewed(x.qdata)


@rule(verbs.rescale)
def rescale(x: ScaledTensor, scale: Tensor) -> ScaledTensor:
    """The same value under another power of two; the format never changes."""
    # In two factors: the ratio of two float32 numbers may be none, and 0 * inf is NaN.
    ratio = x.scale.double() / scale
    first = ratio.clamp(MIN_SCALE, MAX_SCALE)
    q = elements(x) * first.float() * (ratio / first).float()
    return x.like(store(q, x.format), scale.clone(), x.rms.clone())


@rule(verbs.expect)
def expect(x: ScaledTensor, growth: float) -> ScaledTensor:
    """The same value under the scale of another expected RMS, for who knows more than a rule does:
    that its operands are correlated."""
    rms = x.rms * growth
    scale, ratio = settle(rms, x.scale)
    return x.like(store(elements(x) * ratio, x.format), scale, rms)


@rule(verbs.drop)
def drop(x: ScaledTensor) -> ScaledTensor:
    """Forget the scale: the same elements at scale 1. A copy: writing to it must not reach `x`."""
    return x.like(x.qdata.clone(), torch.ones_like(x.scale), x.rms / x.scale)


@rule(verbs.dequantize, aten.dequantize.self)
def dequantize(x: ScaledTensor) -> Tensor:
    """The plain value in the dtype that the tensor appears in."""
    carrier = torch.promote_types(x.dtype, torch.float32)
    scale = scale_of(x)
    return in_pieces(
        lambda q, *_: scaled_by(q.to(carrier), scale).to(x.dtype), elements(x), x.dtype
    )


@rule(verbs.promote)
def promote(x: Tensor, like: ScaledTensor) -> ScaledTensor:
    """A plain tensor enters, an operand of a product or a gradient: its RMS is measured, once, at
    the door. For a sparse tensor it is the RMS of the values that the tensor stores."""
    if isinstance(x, ScaledTensor):
        return x
    if is_sparse(x):
        return wrapped(x, like)
    if not x.dtype.is_floating_point:
        raise mismatch(x.dtype, like.dtype)
    return entered(x, like.recipe)


@rule(aten._to_copy.default)
def to_copy(
    x: ScaledTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """`.to()`: the device moves every part; a float dtype is both appearance and element format,
    under the same scale; any other dtype leaves as a plain tensor. A stored frozen weight stays in
    8 bits."""
    move: dict[str, Any] = {"device": device, "non_blocking": non_blocking}
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        # In float64 any scale is exact, a power of two or not.
        plain = elements(x).double() * x.scale if dtype == torch.float64 else value(x)
        return plain.to(dtype=dtype, **move)
    keeps = dtype is None or dtype == x.dtype or is_stored(x)
    fmt = x.format if keeps else from_dtype(typing.cast(torch.dtype, dtype))
    q = x.qdata if fmt == x.format else store(elements(x), fmt)
    q = aten._to_copy.default(q, memory_format=memory_format, **move)
    if device is None or device == x.device:
        scale, rms = copied(scale_of(x)), copied(rms_of(x))
    else:
        scale, rms = (aten._to_copy.default(t, **move) for t in (x.scale, x.rms))
    made = ScaledTensor.make(q, scale, rms, fmt, dtype or x.dtype, x.recipe, x.nonnegative)
    made.site = x.site  # a weight that is moved or converted is looked at as it is itself
    lend(x, made)
    return made


@rule(aten.copy_.default)
def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """An overwrite. Into a whole ScaledTensor it brings the source's scale, or one that is measured
    where the source is plain, or was sent as one with others (DDP's parameters); into a part of
    one, the value is rescaled into the scale of the whole, unless that is all zeros. A stored
    frozen weight is cast anew, as its recipe casts weights."""
    if target.device != source.device:
        source = source.to(target.device)
    source = source.expand(target.shape)
    if not isinstance(target, ScaledTensor):
        return target.copy_(verbs.dequantize(source), non_blocking)
    held = _own_scale(source, target)
    if target.memo.agreed or covers_storage(target.qdata):
        after_overwrite(target)
        if held.format != target.format and is_stored(target):
            held = _cast_anew(held, target.recipe)
        target.qdata.copy_(
            held.qdata if held.format == target.format else store(elements(held), target.format)
        )
        put(target, scale_of(held), rms_of(held))
        target.nonnegative = held.nonnegative
        if target.site is not None:
            sites.take_over(target, source)
    else:
        if not _torch.is_tracing(target.qdata):  # zeros fit the scale that comes
            zero = target.rms == 0
            put(
                target,
                torch.where(zero, held.scale, target.scale),
                torch.where(zero, held.rms, target.rms),
            )
        write(target, held, [source])
    return target


def _own_scale(source: Tensor, target: ScaledTensor) -> ScaledTensor:
    if not isinstance(source, ScaledTensor):
        return from_plain(source, FP32, target.dtype, None)
    if not getattr(source.rms, SENT_AS_ONE, False) or covers_storage(source.qdata):
        return source
    measured = from_plain(value(source), source.format, source.dtype, source.recipe)
    measured.nonnegative = source.nonnegative
    return measured


def _cast_anew(x: ScaledTensor, recipe: Any) -> ScaledTensor:
    """From the master format, as when the model was wrapped."""
    fmt = recipe.master
    master = ScaledTensor.make(store(elements(x), fmt), x.scale, x.rms, fmt, x.dtype, recipe)
    return typing.cast(ScaledTensor, cast_once(master))


@rule(aten.is_pinned.default)
def is_pinned(x: ScaledTensor, device: Any = None) -> bool:
    """What torch.distributed.checkpoint asks of each tensor that it saves."""
    return x.qdata.is_pinned()


@rule(aten._local_scalar_dense.default)
def item(x: ScaledTensor) -> Any:
    """`.item()`: the value as a Python number."""
    return verbs.dequantize(x).item()


def as_tangent(x: Tensor, context: Context) -> ScaledTensor:
    """A plain gradient as the ScaledTensor that compiled code was made for."""
    fmt, dtype, recipe, _ = context
    return from_plain(x, fmt, dtype, recipe)


_torch.coerce_plain_tangents(ScaledTensor, as_tangent)
