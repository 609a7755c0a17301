"""Results of rules: `Raw`, and new tensors made of it.

The first section has the numbers that mark masked elements. `Raw` is the result of a rule. `wrap`
makes a tensor of it. `ops/writes.py` stores it in an existing tensor.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import BF16, FP32, Format, encode
from scaledtensor.formats.bits import Overflow
from scaledtensor.native.elements import converted
from scaledtensor.ops.plausible import believed
from scaledtensor.recipes import Recipe
from scaledtensor.scales.forms import Form, program
from scaledtensor.scales.powers import is_one, settle
from scaledtensor.scales.singles import (
    ONE,
    Amount,
    Single,
    copied,
    scaled_by,
    scaled_in_place,
    single_of,
    tensor_of,
)
from scaledtensor.tensors.memo import note
from scaledtensor.tensors.sparse import is_sparse
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "FILL",
    "HUGE",
    "LARGEST",
    "OVERFLOW",
    "Raw",
    "Total",
    "Towards",
    "dequantized",
    "is_table",
    "is_wide",
    "limited",
    "narrowest",
    "saturated",
    "starts_at",
    "store",
    "wrap",
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


# --- new tensors -----------------------------------------------------------------------------


#: The overflow of all casts of operands: finite numbers saturate, infinities stay.
OVERFLOW: Overflow = "saturate_finite"


def wrap(raw: Raw, operands: Sequence[Tensor]) -> ScaledTensor:
    fmt, dtype, recipe = _inherited(raw, operands)
    q, rms = raw.q, raw.rms
    wide = fmt.storage_dtype if fmt.storage_dtype.itemsize > 1 else None
    if type(q) is not Tensor:
        q = q.made(wide) if type(q) is Total else tensor_of(q, operands[0].device)
    if type(rms) is not Single:
        rms = single_of(rms)
    held = raw.held
    if type(held) is not Single:
        held = single_of(held)
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


def _inherited(raw: Raw, operands: Sequence[Tensor]) -> tuple[Format, torch.dtype, Recipe | None]:
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


def _is_held(q: Tensor, operands: Sequence[Tensor]) -> bool:
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


def _appearance(operands: Sequence[Tensor]) -> torch.dtype:
    first = operands[0]
    if isinstance(first, ScaledTensor):
        dtype = first.dtype
        if len(operands) == 1:
            return dtype
        if len(operands) == 2 and isinstance(operands[1], ScaledTensor):
            other = operands[1].dtype
            return dtype if other == dtype else torch.promote_types(dtype, other)
    return _promoted(operands)


def _promoted(operands: Sequence[Tensor]) -> torch.dtype:
    dtype: torch.dtype | None = None
    for x in operands:
        counts = isinstance(x, ScaledTensor) or (x.dim() > 0 and x.dtype.is_floating_point)
        if counts and dtype is None:
            dtype = x.dtype
        elif counts and dtype is not None and x.dtype != dtype:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype or torch.float32


def dequantized(x: Any) -> Any:
    """Return the plain value of a ScaledTensor, and anything else as it is."""
    return torch.ops.scaledtensor.dequantize(x) if isinstance(x, ScaledTensor) else x
