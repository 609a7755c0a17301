"""Results of rules: `Raw`, new tensors made of it, and writes into existing tensors.

The first section has the numbers that mark masked elements. `Raw` is the result of a rule. `wrap`
makes a tensor of it, and `write` stores it in an existing tensor. `foreach` applies an operator to
lists of tensors.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import is_readable
from scaledtensor.errors import DTypeError, MissingRuleError, SaturationWarning, ShapeError
from scaledtensor.formats import BF16, FP32, Format, encode
from scaledtensor.formats.bits import Overflow
from scaledtensor.formats.tensors import covers_storage
from scaledtensor.native.elements import converted
from scaledtensor.ops.plausible import believed
from scaledtensor.recipes import Recipe
from scaledtensor.scales.forms import Form, program
from scaledtensor.scales.measure import measured_if_real
from scaledtensor.scales.powers import is_one, larger, settle, settle_in_place
from scaledtensor.scales.singles import (
    ONE,
    Amount,
    Single,
    copied,
    multiplier,
    put,
    rms_of,
    scale_of,
    scaled_by,
    scaled_in_place,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.coded import refuse_part
from scaledtensor.tensors.memo import after_write, note
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.steps import watch
from scaledtensor.tensors.tensor import ScaledTensor, from_plain, is_parameter, is_stored

__all__ = [
    "FILL",
    "HUGE",
    "LARGEST",
    "OVERFLOW",
    "Raw",
    "Total",
    "Towards",
    "dequantized",
    "foreach",
    "is_table",
    "is_wide",
    "limited",
    "narrowest",
    "saturated",
    "starts_at",
    "store",
    "wrap",
    "write",
    "written",
]


# --- numbers that mask -----------------------------------------------------------------------
# Such a number is so large that it means "not this element" and is no datum.

#: The largest finite bfloat16, to which the fill of a mask is limited.
LARGEST = torch.finfo(torch.bfloat16).max

#: The smallest fill of masks in use (BERT's -10000). A logit at or below it is masked.
FILL = -1e4

#: No datum is as large. A running extremum may start at such a number.
HUGE = 2.0**63


def is_table(x: Any) -> bool:
    """Whether an operand is a plain float tensor with dimensions, which may be an additive mask."""
    if isinstance(x, ScaledTensor) or not isinstance(x, Tensor):
        return False
    return x.dim() > 0 and x.dtype.is_floating_point


def saturated(source: Tensor, q: Tensor, fmt: Format) -> Tensor:
    """Return `q`, a rescaled `source`. Elements that are finite stay so in a format. Infinities of
    masks stay."""
    made = limited(q)
    if fmt.storage_dtype.itemsize > 1 and fmt.max < LARGEST:
        made = made.clamp(-fmt.max, fmt.max)
    return torch.where(source.isinf(), source, made)


def limited(q: Tensor) -> Tensor:
    """Return elements limited to finite numbers of bfloat16 and of their own dtype."""
    largest = min(LARGEST, torch.finfo(q.dtype).max)
    return q.clamp(-largest, largest)


# --- the result of a rule --------------------------------------------------------------------


class Towards(NamedTuple):
    """The facts about a difference y - x that its value does not show."""

    start: Tensor
    """The elements of x."""
    rms: Tensor
    """The RMS of y."""


def starts_at(difference: Any, x: Any) -> bool:
    """Whether `difference` is y - x."""
    if not (isinstance(difference, ScaledTensor) and isinstance(x, ScaledTensor)):
        return False
    towards = difference.memo.towards
    return towards is not None and towards.start is x.qdata


class Total(NamedTuple):
    """The elements of a sum in traced code: `x * first + alpha * y * second`. It becomes one node,
    in the dtype of the tensor that gets the sum."""

    x: Tensor
    first: Form
    y: Tensor
    second: Form
    alpha: float

    def made(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum in a dtype of at least 16 bits; None stands for the dtype of torch's sum."""
        dtype = dtype or torch.promote_types(self.x.dtype, self.y.dtype)
        numbers = program(self.first, self.second)
        made: Tensor = torch.ops.scaledtensor.total(self.x, self.y, *numbers, self.alpha, dtype)
        return made


class Raw(NamedTuple):
    """The result of a rule: the value is `q * scale`, and its RMS is expected to be near `rms`."""

    q: Any
    """The elements: a tensor, or a `Total`."""
    scale: Amount | None
    """Any positive float32 number, 0-dim; None stands for 1."""
    rms: Amount
    """A float32 number that is not negative, 0-dim."""
    settled: bool = False
    """True keeps `scale`, a power of two. False derives the scale of the result from `rms`."""
    format: Format | None = None
    """None stands for the narrowest compute format among the operands."""
    dtype: torch.dtype | None = None
    """The dtype in which the result appears; None promotes the dtypes of the operands."""
    nonnegative: bool = False
    towards: Towards | None = None
    fresh: bool = False
    """Whether the rule made the elements `q`, and nobody else holds them. They may then be
    multiplied in place."""

    @property
    def held(self) -> Any:
        """The scale of `q`: an Amount, like `rms`."""
        if self.scale is not None:
            return self.scale
        return torch.ones_like(self.rms) if isinstance(self.rms, Tensor) else ONE


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


# --- new tensors -----------------------------------------------------------------------------


#: The overflow of all casts of operands: finite numbers saturate, infinities stay.
OVERFLOW: Overflow = "saturate_finite"


def wrap(raw: Raw, operands: list[Tensor]) -> ScaledTensor:
    fmt, dtype, recipe = _inherited(raw, operands)
    q, rms = raw.q, raw.rms
    wide = fmt.storage_dtype if fmt.storage_dtype.itemsize > 1 else None
    if type(q) is not Tensor:
        q = q.made(wide) if type(q) is Total else tensor_of(q, operands[0].device)
    if type(rms) is not Single:
        rms = single_of(rms)
    held = single_of(raw.held)
    expected, rms = rms, believed(rms, q, held)
    if raw.settled and rms is expected:
        # A write in place changes the scale object, so only views share one with another tensor.
        scale = copied(held)
    else:
        scale, ratio = settle(rms, held)
        # The elements of an operand are copied, by this product or by the store below.
        stays = q.dtype == fmt.storage_dtype
        if raw.fresh and stays and type(ratio) is Single and not _torch.is_tracing(q):
            q = q if is_one(ratio) else scaled_in_place(q, ratio)
        elif not is_one(ratio) or (stays and _is_held(q, operands)):
            q = scaled_by(q, ratio, wide)
    if q.dtype != fmt.storage_dtype:
        q = store(q, fmt)
    # There is no other copy: a compiled graph makes one copy of outputs that are equal, and then
    # two gradients share the scale that follows from it.
    if isinstance(rms, Tensor) and any(
        rms is x.rms for x in operands if isinstance(x, ScaledTensor)
    ):
        rms = rms.clone()
    made = ScaledTensor.make(q, scale, rms, fmt, dtype, recipe, raw.nonnegative)
    if raw.towards is not None and torch.compiler.is_compiling():  # only a trace reads it
        note(made, towards=raw.towards)
    return made


#: A parameter's expectation that is beyond its scale by more than this factor is measured.
_JUMP = 4.0


def _inherited(raw: Raw, operands: list[Tensor]) -> tuple[Format, torch.dtype, Recipe | None]:
    """Return the format, the dtype and the recipe of a result. The operands have those that the
    rule leaves open."""
    first = operands[0]
    if type(first) is ScaledTensor and first.format.storage_dtype.itemsize > 1:
        fmt, dtype, recipe = first.format, first.dtype, first.recipe
        for x in operands:
            if x is first:
                continue
            if type(x) is not ScaledTensor or x.format is not fmt:
                break
            if x.dtype is not dtype or x.recipe is not recipe:
                break
        else:  # nearly always
            recipe = None if recipe is None else recipe.uncorrected
            return raw.format or fmt, raw.dtype or dtype, recipe
    scaled = [x for x in operands if isinstance(x, ScaledTensor)]
    recipe = next((x.recipe.uncorrected for x in scaled if x.recipe is not None), None)
    return raw.format or narrowest(scaled), raw.dtype or _appearance(operands), recipe


def _is_held(q: Tensor, operands: list[Tensor]) -> bool:
    """Whether an operand may have its elements in the same memory as `q`. To compare addresses
    takes less time than a copy."""
    if type(q) is not Tensor or is_sparse(q) or _torch.is_transforming():
        return True
    place = q.untyped_storage().data_ptr()
    for x in operands:
        held = x.qdata if isinstance(x, ScaledTensor) else x
        if is_sparse(held) or held.untyped_storage().data_ptr() == place:
            return True
    return False


def store(q: Tensor, fmt: Format) -> Tensor:
    """Round elements into a format. In 8 bits, numbers beyond its range saturate. Infinities and
    NaNs stay if the format has a code for them."""
    if fmt.storage_dtype.itemsize > 1:
        return converted(q, fmt.storage_dtype)
    return encode(q, fmt, overflow=OVERFLOW)


def narrowest(scaled: Iterable[Any]) -> Format:
    """Return the compute format of a result: the narrowest format of its operands.

    An 8-bit operand counts as the activation format of its recipe. The result of FP32 parameters
    and BF16 activations is then BF16, and results of FP32 statistics and optimizer states are FP32.
    """
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


def is_wide(*operands: Any) -> bool:
    """Whether a result of these operands is float32."""
    return narrowest([x for x in operands if isinstance(x, ScaledTensor)]) is FP32


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


# --- writes into existing tensors ------------------------------------------------------------


def write(target: Tensor, value: "Raw | Tensor", operands: list[Tensor]) -> None:
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
    under their scale, so its format must hold them. So are parameters, where `_plausible` can
    measure. An optimizer's step rebalances them, but code may write into them without one (fastai's
    optimizers, loops by hand).
    """
    size = target.format.storage_dtype.itemsize
    if size == 1:
        return (max(target.format.max / 8, 2.0),)
    own = type(rms) is Single and target.recipe is not None and is_parameter(target)
    return (_CAST,) if size == 2 or (own and is_readable(q)) else ()


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


def dequantized(x: Any) -> Any:
    """Return the plain value of a ScaledTensor, and anything else as it is."""
    return torch.ops.scaledtensor.dequantize(x) if isinstance(x, ScaledTensor) else x
