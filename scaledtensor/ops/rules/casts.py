"""Casts, rescaling and conversions: the verbs of the tensor, and the ways into and out of it."""

import typing
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.formats import FP32, encode, fake_quantize, from_dtype
from scaledtensor.formats import get as get_format
from scaledtensor.formats.format import Format
from scaledtensor.formats.rounding import Rounding
from scaledtensor.formats.tensors import covers_storage, in_pieces
from scaledtensor.ops.algebra import elements, mismatch, saved_format, value
from scaledtensor.ops.operators import aten
from scaledtensor.ops.plausible import compounding, either, is_wild
from scaledtensor.ops.products import sites
from scaledtensor.ops.products.dtype import product_dtype
from scaledtensor.ops.products.table import cast_once
from scaledtensor.ops.registry import entered, rule
from scaledtensor.ops.results import OVERFLOW, store
from scaledtensor.ops.rules.arithmetic import chosen, under
from scaledtensor.ops.rules.sparse import wrapped
from scaledtensor.ops.writes import write
from scaledtensor.scales.cast_nodes import Watch, codes_of, seen, values_of
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import amax, measured_rms
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE, nearest_power_of_two, settle
from scaledtensor.scales.singles import (
    Amount,
    asked_for,
    calculates,
    copied,
    put,
    rms_of,
    scale_of,
    scaled_by,
)
from scaledtensor.tensors import verbs
from scaledtensor.tensors.coded import refuse_part
from scaledtensor.tensors.memo import Source, after_overwrite, count_write, note
from scaledtensor.tensors.site import lend
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.tensor import (
    SENT_AS_ONE,
    Context,
    ScaledTensor,
    from_plain,
    is_parameter,
    is_stored,
    near_its_elements,
)

#: An expectation that is off by more than this factor ran away.
_FAR = 16.0


@rule(verbs.to_format)
def to_format(
    x: ScaledTensor, format: str, rounding: Rounding = "nearest_even", unless_wild: bool = False
) -> ScaledTensor:
    """A cast rounds the elements and keeps the scale. 8-bit formats saturate. They keep infinities
    and NaN if they have a code for them, and take any rounding; stochastic rounding draws from
    torch's default generator. Compute formats round to nearest even. In traced code, an operand of
    a product without a weight is not cast if its RMS is marked as `wild`, as after `exp`."""
    if unless_wild and is_wild(rms_of(x)):
        return x.viewed(x.qdata)
    return _cast(x, get_format(format), rounding, scale_of(x))


@rule(verbs.to_format_at)
def to_format_at(
    x: ScaledTensor,
    format: str,
    rounding: Rounding,
    factors: Tensor,
    role: int,
    counts: bool,
    trains: bool,
) -> ScaledTensor:
    """Same as `to_format`, under the scale times the factor of a role, within the range of
    float32."""
    scale = (scale_of(x) * Form.element(factors, role)).clamp_min(MIN_SCALE).clamp_max(MAX_SCALE)
    watch = Watch(factors, role, trains) if counts else None
    return _cast(x, get_format(format), rounding, scale, scale_of(x) / scale, watch)


def _cast(
    x: ScaledTensor,
    fmt: Format,
    rounding: Rounding,
    scale: Amount,
    ratio: Any = None,
    watch: Watch | None = None,
) -> ScaledTensor:
    """Return the elements of `x`, times `ratio`, rounded into a format. `scale` is their scale. A
    site looks at them for `watch`."""
    narrow = fmt.storage_dtype.itemsize == 1
    traced = narrow and torch.compiler.is_compiling()
    source, name = elements(x), fmt.name
    on_values = traced and backend_of(source).writes_cpp
    of_codes, of_values = (None, watch) if on_values else (watch, None)
    how: dict[str, Any] = {}
    if narrow and rounding != "nearest_even":
        how = {"rounding": rounding, "overflow": "saturate_finite"}
        if rounding == "stochastic":  # one draw, for both forms of the result below
            how["generator"] = torch.ops.scaledtensor.random_key(source)
    if ratio is not None and (how or not traced):
        source, ratio = scaled_by(source, ratio), None
    if how:
        q = seen(encode(source, fmt, **how), name, of_codes)
    else:
        q = codes_of(source, ratio, name, OVERFLOW, of_codes) if traced else store(source, fmt)
    if q is x.qdata:
        q = q.clone()
    rms = copied(rms_of(x))
    out = ScaledTensor.make(q, copied(scale), rms, fmt, x.dtype, x.recipe, x.nonnegative)
    if on_values:
        # The emulated product reads these values, which come from the same registers. Codes without
        # a reader are then never made.
        dtype = product_dtype(q.device)
        if how:
            decoded = seen(fake_quantize(source, fmt, **how).to(dtype), name, of_values)
        else:
            decoded = values_of(source, ratio, name, dtype, of_values)
        passing = saved_format(x) is not None and not _torch.is_within_backward()
        is_weight = x.memo.lent is not None and x.dim() == 2
        kept = Source(source) if is_weight and ratio is None and not how else None
        note(out, decoded=decoded, passing=passing, source=kept)
    return out


@rule(verbs.gradient_to_format)
def gradient_to_format(
    x: ScaledTensor,
    format: str,
    rounding: Rounding = "nearest_even",
    shift: int = 0,
    factors: Tensor | None = None,
    counts: bool = False,
    fits: bool = False,
) -> ScaledTensor:
    """The identity in the forward pass. In the backward pass the gradient is cast."""
    if fits:
        compounding(rms_of(x))
    return x.viewed(x.qdata)


@rule(verbs.fit)
def fit(x: ScaledTensor, format: str, marks: bool = False) -> ScaledTensor:
    """The identity, unless traced code derives the scale of `x` from a product without a weight.
    Then the elements are measured. If the cast would saturate some, or their RMS is 16 times larger
    or smaller than the scale, the value gets the measured RMS, and the power of two nearest to it
    under which nothing saturates."""
    rms = rms_of(x)
    if not isinstance(rms, Form) or _torch.is_transforming():
        return x.viewed(x.qdata)
    if not rms.compounds:
        if not marks:
            return x.viewed(x.qdata)
        rms = rms * 1.0  # a form of its own, which keeps the mark
        compounding(rms)
        return x.like(x.qdata, scale_of(x), rms)
    q, fmt, scale = elements(x), get_format(format), x.scale
    seen, largest = measured_rms(q), amax(q).float()
    off = (largest > fmt.max) | (seen > _FAR) | ((seen > 0) & (seen < 1 / _FAR))
    needed = largest / fmt.max
    power = nearest_power_of_two(torch.maximum(seen, needed))
    power = torch.where(power < needed, power * 2, power)
    moved = (scale * power).clamp(MIN_SCALE, MAX_SCALE)
    found = torch.where(off, moved, scale)
    found_rms = either(Form.of(torch.where(off, seen * scale, x.rms)), rms)
    compounding(found_rms)
    return x.like(store(q * (scale / found), x.format), Form.of(found), found_rms)


@rule(verbs.rescale)
def rescale(x: ScaledTensor, scale: Tensor) -> ScaledTensor:
    """The same value under another power of two. The format stays."""
    # Two factors are needed: the ratio of two float32 numbers may be out of range, and 0 * inf is
    # NaN.
    ratio = x.scale.double() / scale
    first = ratio.clamp(MIN_SCALE, MAX_SCALE)
    q = elements(x) * first.float() * (ratio / first).float()
    return x.like(store(q, x.format), scale.clone(), x.rms.clone())


@rule(verbs.expect)
def expect(x: ScaledTensor, growth: float) -> ScaledTensor:
    """The same value with the expected RMS times `growth`, and the scale of that RMS. Callers use
    it if they know more than the rule, for example that operands are correlated."""
    rms = x.rms * growth
    scale, ratio = settle(rms, x.scale)
    return x.like(store(elements(x) * ratio, x.format), scale, rms)


@rule(verbs.drop)
def drop(x: ScaledTensor) -> ScaledTensor:
    """A copy of the elements at scale 1."""
    return x.like(x.qdata.clone(), torch.ones_like(x.scale), x.rms / x.scale)


@rule(verbs.dequantize, aten.dequantize.self)
def dequantize(x: ScaledTensor) -> Tensor:
    """The plain value, in the dtype of the tensor."""
    carrier = torch.promote_types(x.dtype, torch.float32)
    scale = scale_of(x)
    return in_pieces(
        lambda q, *_: scaled_by(q.to(carrier), scale).to(x.dtype), elements(x), x.dtype
    )


@rule(verbs.promote)
def promote(x: Tensor, like: ScaledTensor) -> ScaledTensor:
    """Makes a ScaledTensor of a plain operand or gradient, by its measured RMS. The RMS of a sparse
    tensor is the RMS of its stored values."""
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
    """`.to()`. A device moves every part. A float dtype changes the dtype and the format of the
    elements; the scale stays. Any other dtype gives a plain tensor. A frozen weight that is stored
    in 8 bits stays in 8 bits."""
    move: dict[str, Any] = {"device": device, "non_blocking": non_blocking}
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        # A float64 product is exact, even if the scale is no power of two.
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
    made.site = x.site  # a site treats a moved or converted weight as the same weight
    lend(x, made)
    return made


@rule(aten.copy_.default)
def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """A whole ScaledTensor takes the value and the scale of the source. The scale is measured if
    the source is plain, or is a part of one message with others (DDP's parameters). A part of a
    ScaledTensor keeps the scale of the whole, unless the whole is all zeros. A frozen weight that
    is stored in 8 bits is cast again by its recipe. The source is measured, too, if its expected
    RMS is off by more than a factor of 4."""
    if not isinstance(source, ScaledTensor) and source.is_neg():  # torch's own copy resolves it
        source = source.resolve_neg()
    if target.device != source.device:
        source = source.to(target.device)
    source = source.expand(target.shape)
    if not isinstance(target, ScaledTensor):
        return target.copy_(verbs.dequantize(source), non_blocking)
    refuse_part(target)
    held = _own_scale(source, target)
    if target.memo.agreed or covers_storage(target.qdata):
        if held is source and not target.memo.agreed:  # nothing has measured it yet
            held = near_its_elements(held)
        after_overwrite(target)
        count_write(target)
        if held.format != target.format and is_stored(target):
            # Cast from the master format, like the weights of a wrapped model.
            recipe: Any = target.recipe
            fmt = recipe.master
            parts = held.scale, held.rms, fmt, held.dtype, recipe
            master = ScaledTensor.make(store(elements(held), fmt), *parts)
            held = typing.cast(ScaledTensor, cast_once(master))
        target.qdata.copy_(
            held.qdata if held.format == target.format else store(elements(held), target.format)
        )
        put(target, scale_of(held), rms_of(held))
        target.nonnegative = held.nonnegative
        if target.site is not None:
            sites.take_over(target, source)
    else:
        if not _torch.is_tracing(target.qdata):
            _adopt_scale(target, held)
        write(target, held, [source])
    return target


def _adopt_scale(target: ScaledTensor, source: ScaledTensor) -> None:
    """Zeros take the scale of the source, which is written into them."""
    if calculates(target) and calculates(source):
        if not rms_of(target):
            put(target, scale_of(source), rms_of(source))
        return
    zero = target.rms == 0
    put(
        target,
        torch.where(zero, source.scale, target.scale),
        torch.where(zero, source.rms, target.rms),
    )


def _own_scale(source: Tensor, target: ScaledTensor) -> ScaledTensor:
    """Return the source under a scale of its own."""
    if not isinstance(source, ScaledTensor):
        numbers = source if source.dtype.is_floating_point else source.float()
        if is_parameter(target) or not numbers.dim():
            return from_plain(numbers, FP32, target.dtype, None)
        part = chosen(numbers, target)  # its RMS leaves out the fills of a mask
        (scale,) = settle(part.rms)
        q = under(part, part.scale / scale, target).float()
        return ScaledTensor.make(q, scale, part.rms, FP32, target.dtype, None)
    if not getattr(asked_for(source, "rms"), SENT_AS_ONE, False) or covers_storage(source.qdata):
        return source
    measured = from_plain(value(source), source.format, source.dtype, source.recipe)
    measured.nonnegative = source.nonnegative
    return measured


@rule(aten.is_pinned.default)
def is_pinned(x: ScaledTensor, device: Any = None) -> bool:
    """The answer for the elements. `torch.distributed.checkpoint` asks each tensor that it
    saves."""
    return x.qdata.is_pinned()


@rule(aten._local_scalar_dense.default)
def item(x: ScaledTensor) -> Any:
    """`.item()`: the value as a Python number."""
    return verbs.dequantize(x).item()


def as_tangent(x: Tensor, context: Context) -> ScaledTensor:
    """Make a ScaledTensor of a plain gradient for compiled code, which expects one."""
    fmt, dtype, recipe, _ = context
    return from_plain(x, fmt, dtype, recipe)


_torch.coerce_plain_tangents(ScaledTensor, as_tangent)
