"""Writes into existing tensors: results of rules, operators on lists, operators on the elements.

`write` stores the result of a rule in a tensor. `foreach` applies an operator to lists of tensors.
`IN_PLACE` has the operators that eager code calculates on the elements of the tensor itself.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import is_readable
from scaledtensor.errors import DTypeError, MissingRuleError, SaturationWarning, ShapeError
from scaledtensor.formats import FP32
from scaledtensor.formats.tensors import covers_storage
from scaledtensor.ops import invariant
from scaledtensor.ops.operators import Overload
from scaledtensor.ops.plausible import believed
from scaledtensor.ops.results import (
    FILL,
    HUGE,
    Raw,
    Total,
    dequantized,
    is_table,
    saturated,
    store,
    wrap,
)
from scaledtensor.scales.measure import finite_norm, measured_if_real
from scaledtensor.scales.powers import is_one, larger, settle_in_place
from scaledtensor.scales.singles import (
    ONE,
    Single,
    amounts_of,
    multiplier,
    put,
    rms_of,
    rounded,
    scale_of,
    scaled_by,
    single_of,
)
from scaledtensor.tensors.coded import refuse_part
from scaledtensor.tensors.memo import after_write
from scaledtensor.tensors.steps import is_update, watch
from scaledtensor.tensors.tensor import ScaledTensor, from_plain, is_parameter, is_stored

__all__ = [
    "IN_PLACE",
    "Amounts",
    "amounts_in_place",
    "change",
    "elements_in_place",
    "foreach",
    "in_place",
    "write",
    "written",
]

F = TypeVar("F", bound=Callable[..., bool])

# --- operators on lists of tensors, as torch's optimizers run them ---------------------------


def written(*lists: Sequence[Tensor]) -> None:
    """Count a write into each tensor of `lists`, so that autograd refuses its saved copies of them.

    For an operator on a single tensor, torch counts the write before it dispatches to a subclass.
    For an operator on lists, torch counts in its own kernel, which does not run for a subclass.
    Torch's fused kernels for the CPU count nothing: a later backward pass reads the new values.
    """
    if not torch.compiler.is_compiling():  # a compiled graph counts its own writes
        torch.autograd.graph.increment_version([x for tensors in lists for x in tensors])


def foreach(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run `_foreach_<name>` as `<name>` of each tensor in the lists, called through torch."""
    name = op._schema.name.split("::")[1].removeprefix("_foreach_")
    call = _FOREACH.get(name) or getattr(Tensor, name, None)
    if call is None:
        raise MissingRuleError(f"{op}: torch.Tensor has no method {name} to apply to each element")
    # addcmul and addcdiv take their factor by keyword only; the list form calls it `scalars`.
    spelling = {"scalars": "value"} if name.startswith("addc") else {}
    by_keyword = {"alpha", "value", "dtype", *spelling}
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    if isinstance(given.get("scalars"), Tensor):  # torch takes a tensor of the CPU
        given["scalars"] = given["scalars"].tolist()
    results = []
    for i in range(len(args[0])):
        each = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in given.items()}
        named = {spelling.get(k, k): v for k, v in each.items() if k in by_keyword}
        results.append(call(*(v for k, v in each.items() if k not in by_keyword), **named))
    if not op._schema.is_mutable:
        return results
    written(args[0])
    return None


def _maximum(x: Tensor, other: Any) -> Tensor:
    return torch.maximum(x, other) if isinstance(other, Tensor) else x.clamp_min(other)


def _minimum(x: Tensor, other: Any) -> Tensor:
    return torch.minimum(x, other) if isinstance(other, Tensor) else x.clamp_max(other)


def _maximum_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(torch.maximum(x, other)) if isinstance(other, Tensor) else x.clamp_min_(other)


def _minimum_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(torch.minimum(x, other)) if isinstance(other, Tensor) else x.clamp_max_(other)


#: name of a foreach operator -> its per-tensor form, if that is no method of the same name.
_FOREACH: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm,
    "maximum": _maximum,
    "minimum": _minimum,
    "maximum_": _maximum_,
    "minimum_": _minimum_,
}


#: A parameter's expectation that is beyond its scale by more than this factor is measured.
_JUMP = 4.0


# --- writes into existing tensors ------------------------------------------------------------


def write(target: Tensor, value: "Raw | Tensor", operands: Sequence[Tensor]) -> None:
    """Store a result in an existing tensor, which keeps its identity, aliases, format and scale.

    All views of the tensor share its scale, so the value is rescaled to it. Two kinds of tensors
    take the scale of the result instead: a tensor that is known to be zero, so that optimizer
    states start at the scale of the first gradient; and a whole tensor whose new values are of
    another order, or beyond its 8-bit format. A tensor that shares its scale with other ranks
    (`agreed`) keeps it. Values that do not fit into a part of an 8-bit tensor saturate, and a
    SaturationWarning counts them.
    """
    if isinstance(value, Raw) and type(value.q) is Total:
        value = value._replace(q=value.q.made())
    shape = tuple(value.q.shape if isinstance(value, Raw) else value.shape)
    if target.shape != shape:
        raise ShapeError(f"cannot write a result of shape {shape} into {tuple(target.shape)}")
    floats = isinstance(value, Raw) or value.dtype.is_floating_point
    if floats and not target.dtype.is_floating_point:
        raise DTypeError(f"a scaled result does not fit into a tensor of {target.dtype}")
    if not isinstance(target, ScaledTensor):
        target.copy_(dequantized(wrap(value, operands) if isinstance(value, Raw) else value))
        return
    refuse_part(target)
    watch(target)  # a parameter without `requires_grad_` becomes known at its first step
    raw = value if isinstance(value, Raw) else _as_raw(value)
    whole = covers_storage(target.qdata)
    if whole and is_stored(target):  # it is cast again, by its recipe
        target.copy_(wrap(raw._replace(format=FP32), [target, *operands]))
        return
    kept, expected = scale_of(target), rms_of(target)
    was, free = (kept, False) if target.memo.agreed else (expected, whole)
    rms = _plausible(raw, target, kept, expected)
    after_write(target)
    scale, ratio = settle_in_place(kept, was, rms, raw.held, free, *_reach(target, raw.q, rms))
    place, q = _apart(target.qdata, raw.q)
    wide = q if q.dtype.itemsize > 1 else q.float()
    if any(is_table(x) for x in operands):
        place.copy_(store(saturated(wide, wide * ratio, target.format), target.format))
    elif place.dtype.itemsize == 1 or _torch.is_tracing(wide):
        moved = scaled_by(wide, ratio)
        if not (whole or _torch.is_tracing(wide)):
            _tell_of_clipped(moved, target)
        place.copy_(store(moved, target.format))
    elif is_one(ratio):
        place.copy_(wide)
    else:
        torch.mul(wide, multiplier(ratio), out=place)
    # The whole is not known to be zero when a part became zero.
    rms = rms if whole else larger(expected, rms)
    put(target, None if scale is kept else scale, rms)
    target.nonnegative = raw.nonnegative


def _plausible(raw: Raw, target: ScaledTensor, scale: Any, before: Any) -> Any:
    """Return the RMS of a result that is written into a tensor of this scale and RMS. In a
    parameter it is measured if it is far from the scale: each of many writes may add a little
    (LBFGS, averages), and their terms depend on each other."""
    rms = believed(single_of(raw.rms), raw.q, raw.held)
    if not (type(rms) is type(before) is type(scale) is Single) or not before:
        return rms
    jumps = not scale / _JUMP <= rms <= scale * _JUMP
    if not (jumps and is_parameter(target)):
        return rms
    return measured_if_real(rms, raw.q, raw.held, waits=True)


def _apart(place: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target and the new elements without the dimensions that both only repeat. An
    expanded tensor can so be filled, as in torch."""
    if 0 in place.stride():
        for dim, (into, out_of) in enumerate(zip(place.stride(), q.stride(), strict=True)):
            if into == out_of == 0 and place.shape[dim] > 1:
                place, q = place.narrow(dim, 0, 1), q.narrow(dim, 0, 1)
    return place, q


#: The most by which the RMS of a tensor that the next product casts may differ from its scale.
_CAST = 16.0


def _reach(target: ScaledTensor, q: Tensor, rms: Any) -> tuple[float, ...]:
    """Return the limit of the RMS of new values, in units of the scale. In an 8-bit tensor eight
    times the RMS is still in range. Tensors of 16 bits are results that the next product casts
    under their scale, so its format must hold them. So are float32 tensors with a recipe, except
    the states of optimizers, and parameters, where `_plausible` can measure. An optimizer's step
    rebalances them, but code may write into them without one (fastai's optimizers, loops by hand).
    """
    size = target.format.storage_dtype.itemsize
    if size == 1:
        return (max(target.format.max / 8, 2.0),)
    if size == 2:
        return (_CAST,)
    if type(rms) is not Single or target.recipe is None:
        return ()
    cast = is_readable(q) if is_parameter(target) else not is_update()
    return (_CAST,) if cast else ()


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
    if not x.dtype.is_floating_point:  # the result of a comparison in place
        x = x.float()
    held = x if isinstance(x, ScaledTensor) else from_plain(x, FP32, torch.float32, None)
    return Raw(held.qdata, scale_of(held), rms_of(held))


# --- operators on the elements ---------------------------------------------------------------
# An optimizer's step consists of in-place operators on float32 tensors whose scales stay. A rule
# makes a new tensor, which `write` copies. For a large parameter that is three times the traffic of
# the operator itself, and for a small one twice the Python.

Amounts: TypeAlias = tuple[Single, Single]
"""The scale and the expected RMS of a tensor."""

#: functional overload -> the function that calculates it on the elements of its first operand. It
#: returns False if `write` has to serve.
IN_PLACE: dict[Overload, Callable[..., bool]] = {}


def in_place(*ops: Overload) -> Callable[[F], F]:
    """Register a function in `IN_PLACE`."""

    def register(function: F) -> F:
        IN_PLACE.update(dict.fromkeys(ops, function))
        return function

    return register


def amounts_in_place(target: Any, *others: Any) -> list[Amounts] | None:
    """Return the Amounts of the target and of the other operands of an operator on elements. A
    plain operand is measured. The result is None unless all operands have one shape, one dtype of
    at least 16 bits, and Amounts that the host knows."""
    if torch.compiler.is_compiling() or type(target) is not ScaledTensor:
        return None
    first = target.qdata
    if type(first) is not Tensor or first.itemsize == 1 or first.layout is not torch.strided:
        return None
    found = [amounts_of(target)]
    for x in others:
        q = elements_in_place(x)
        if type(q) is not Tensor or q.dtype is not first.dtype or q.shape != first.shape:
            return None
        found.append(amounts_of(x) if q is not x else _measured(x))
    known = all(type(scale) is Single and type(rms) is Single for scale, rms in found)
    return found if known else None


def elements_in_place(x: Any) -> Any:
    """Return the elements of an operand, which is a ScaledTensor or plain."""
    return x.qdata if type(x) is ScaledTensor else x


def _measured(x: Tensor) -> tuple[Any, Any]:
    """Return the Amounts of a plain tensor; no numbers for a mask, and for elements that cannot be
    read now."""
    norm = None if invariant.assumes_unit_scale() else finite_norm(x)
    if norm is None or norm >= -FILL or not x.dim():
        return None, None
    return ONE, Single(rounded(norm / max(x.numel(), 1) ** 0.5))


def change(
    x: ScaledTensor,
    before: Amounts,
    rms: Any,
    function: Callable[..., Any],
    *operands: Any,
    nonnegative: bool = False,
    **factor: float,
) -> bool:
    """Call `function` on the elements of `x`, which get the expected RMS `rms`, and on `operands`.
    Return False, and change nothing, if the scale would not stay or the factor is out of range.

    `before` are the scale and RMS of `x`, and `factor` is the number by which the function
    multiplies.
    """
    scale, was = before
    if type(rms) is not Single or not was:
        return False
    whole = covers_storage(x.qdata)
    if not scale / _JUMP <= rms <= scale * _JUMP:
        if is_parameter(x) or believed(rms, x.qdata, scale) is not rms:
            return False  # it is measured
        if settle_in_place(scale, was, rms, scale, whole, *_reach(x, x.qdata, rms))[0] is not scale:
            return False
    for number in factor.values():
        if not 1 / HUGE < abs(number) < HUGE:
            return False
    if not whole and 0 in x.qdata.stride():
        return False
    refuse_part(x)
    watch(x)
    function(x.qdata, *operands, **factor)
    after_write(x)
    put(x, rms=rms if whole or rms > was else was)
    x.nonnegative = nonnegative
    return True
