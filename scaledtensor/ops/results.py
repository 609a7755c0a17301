"""Results of rules as tensors: new ones, and those that are written into tensors that are there."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import DTypeError, SaturationWarning, ShapeError
from scaledtensor.formats import BF16, FP32, Format, encode
from scaledtensor.formats.bits import Overflow
from scaledtensor.ops.masks import is_table, saturated
from scaledtensor.ops.raw import Raw
from scaledtensor.scale import is_one, larger, settle, settle_in_place
from scaledtensor.singles import (
    Single,
    copied,
    multiplier,
    put,
    rms_of,
    scale_of,
    scaled_by,
    single_of,
    tensor_of,
)
from scaledtensor.steps import watch
from scaledtensor.tensor import ScaledTensor, from_plain, is_stored

__all__ = ["OVERFLOW", "covers_storage", "dequantized", "narrowest", "store", "wrap", "write"]

# --- new tensors -----------------------------------------------------------------------------


#: What casts of operands do with what lies beyond the format.
OVERFLOW: Overflow = "saturate_finite"


def wrap(raw: Raw, operands: list[Tensor]) -> ScaledTensor:
    scaled = [x for x in operands if isinstance(x, ScaledTensor)]
    fmt = raw.format or narrowest(scaled)
    q, rms = raw.q if type(raw.q) is Tensor else tensor_of(raw.q), raw.rms
    if type(rms) is not Single:
        rms = single_of(rms)
    if raw.settled:
        # Only views share a scale object with another tensor: writing in place changes it.
        scale = copied(single_of(raw.held))
    else:
        scale, ratio = settle(rms, single_of(raw.held))
        # Elements of an operand are copied in either case: by the product, or by the store below.
        if q.dtype == fmt.storage_dtype or not is_one(ratio):
            q = scaled_by(q, ratio)
    if q.dtype != fmt.storage_dtype:
        q = store(q, fmt)
    recipe = None
    for x in scaled:
        if x.recipe is not None:
            recipe = x.recipe.uncorrected
            break
    dtype = raw.dtype or _appearance(operands)
    # No other copy: of outputs that a compiled graph copies, it makes one where they are equal, and
    # then two gradients share the scale that follows from it.
    if isinstance(rms, Tensor) and any(rms is x.rms for x in scaled):
        rms = rms.clone()
    made = ScaledTensor.make(q, scale, rms, fmt, dtype, recipe, raw.nonnegative)
    if raw.towards is not None and torch.compiler.is_compiling():  # no code is compiled to keep it
        made.towards = raw.towards
    return made


def store(q: Tensor, fmt: Format) -> Tensor:
    """Round elements into a format. Numbers beyond its range saturate in 8 bits; what is not finite
    stays so, as far as the format has a code for it."""
    if fmt.storage_dtype.itemsize > 1:
        return q.to(fmt.storage_dtype)
    return encode(q, fmt, overflow=OVERFLOW)


def narrowest(scaled: Iterable[Any]) -> Format:
    """The compute format of a result: the narrowest among its operands', 8-bit ones counting as the
    recipe's activation format. Parameters in FP32 so meet BF16 activations as BF16, and FP32
    statistics and optimizer states stay FP32 among themselves."""
    found: Format = FP32
    for x in scaled:
        fmt = x.format
        if fmt is found:
            continue
        if fmt.storage_dtype.itemsize == 1:
            fmt = x.recipe.activation if x.recipe is not None else BF16
        if fmt.storage_dtype.itemsize < found.storage_dtype.itemsize or fmt is BF16:
            found = fmt
    return found


def _appearance(operands: list[Tensor]) -> torch.dtype:
    first = operands[0]
    if isinstance(first, ScaledTensor):
        dtype = first.dtype
        if len(operands) == 1:
            return dtype
        if len(operands) == 2 and isinstance(operands[1], ScaledTensor):
            other = operands[1].dtype
            return dtype if other == dtype else torch.promote_types(dtype, other)
    return _promoted(operands)


def _promoted(operands: list[Tensor]) -> torch.dtype:
    dtype: torch.dtype | None = None
    for x in operands:
        counts = isinstance(x, ScaledTensor) or (x.dim() > 0 and x.dtype.is_floating_point)
        if counts and dtype is None:
            dtype = x.dtype
        elif counts and dtype is not None and x.dtype != dtype:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype or torch.float32


# --- into tensors that are there -------------------------------------------------------------


def write(target: Tensor, value: "Raw | Tensor", operands: list[Tensor]) -> None:
    """Put a result into an existing tensor, which keeps its identity, aliases, format and scale.

    A scale is shared with every view of the tensor, so the value is rescaled into it. A tensor
    known to be zero has no scale to keep and takes the result's: optimizer states so start at the
    scale of the first gradient. Nor has one that is replaced, whole, by values of another order, or
    by what its 8-bit format does not reach; but what other ranks hold parts of (`agreed`) keeps
    what it shares with them. What does not fit into a part of an 8-bit tensor saturates, and a
    SaturationWarning counts it.
    """
    shape = tuple(value.q.shape if isinstance(value, Raw) else value.shape)
    if target.shape != shape:
        raise ShapeError(f"cannot write a result of shape {shape} into {tuple(target.shape)}")
    if not target.dtype.is_floating_point:
        raise DTypeError(f"a scaled result does not fit into a tensor of {target.dtype}")
    if not isinstance(target, ScaledTensor):
        plain = wrap(value, operands) if isinstance(value, Raw) else value
        target.copy_(dequantized(plain))
        return
    watch(target)  # what is no parameter by `requires_grad_` is known at its first step
    raw = value if isinstance(value, Raw) else _as_raw(value)
    whole = covers_storage(target.qdata)
    if whole and is_stored(target):  # which is cast anew, by its recipe
        target.copy_(wrap(raw._replace(format=FP32), [target, *operands]))
        return
    kept, expected = scale_of(target), rms_of(target)
    was, free = (kept, False) if target.agreed else (expected, whole)
    target.whole_amax = None
    scale, ratio = settle_in_place(kept, was, raw.rms, raw.held, free, *_reach(target.format))
    place, q = _apart(target.qdata, raw.q)
    wide = q if q.dtype.itemsize > 1 else q.float()
    if any(is_table(x) for x in operands):
        place.copy_(store(saturated(wide, wide * ratio), target.format))
    elif place.dtype.itemsize == 1 or _torch.is_tracing(wide):
        moved = scaled_by(wide, ratio)
        if not (whole or _torch.is_tracing(wide)):
            _tell_of_clipped(moved, target)
        place.copy_(store(moved, target.format))
    elif is_one(ratio):
        place.copy_(wide)
    else:
        torch.mul(wide, multiplier(ratio), out=place)
    # A part that became zero does not make the whole known to be zero.
    rms = raw.rms if whole else larger(expected, raw.rms)
    put(target, None if scale is kept else scale, rms)
    target.nonnegative = raw.nonnegative


def _apart(place: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor to be written to and what comes there, without the repetitions of both: what is
    expanded can be filled, as in torch."""
    if 0 in place.stride():
        for dim, (into, out_of) in enumerate(zip(place.stride(), q.stride(), strict=True)):
            if into == out_of == 0 and place.shape[dim] > 1:
                place, q = place.narrow(dim, 0, 1), q.narrow(dim, 0, 1)
    return place, q


def _reach(fmt: Format) -> tuple[float, ...]:
    """How far the RMS of what is written in place may be from the scale of an 8-bit tensor: eight
    times the RMS is still in range."""
    return (max(fmt.max / 8, 2.0),) if fmt.storage_dtype.itemsize == 1 else ()


def _tell_of_clipped(moved: Tensor, target: ScaledTensor) -> None:
    largest = target.format.max
    clipped = int((moved.abs() > largest).sum())
    if clipped:
        warnings.warn(
            f"{clipped} of {moved.numel()} elements that were written into a part of a "
            f"ScaledTensor saturated: {target.format.name} holds {largest * float(target.scale):g} "
            "at most under the scale of the whole tensor. Write the whole tensor, which may take "
            "another scale, or hold it in a compute format first: x.to_format('bf16')",
            SaturationWarning,
            stacklevel=2,
        )


def _as_raw(x: Tensor) -> Raw:
    if not x.dtype.is_floating_point:  # what comparisons write in place
        x = x.float()
    held = x if isinstance(x, ScaledTensor) else from_plain(x, FP32, torch.float32, None)
    return Raw(held.qdata, scale_of(held), rms_of(held))


def covers_storage(q: Tensor) -> bool:
    """Whether nothing outside `q` shares its memory: it is no part of a larger tensor."""
    return q.numel() * q.itemsize == q.untyped_storage().nbytes()


def dequantized(x: Any) -> Any:
    """Plain value of `x`; anything else as it is."""
    return torch.ops.scaledtensor.dequantize(x) if isinstance(x, ScaledTensor) else x
