"""ScaledTensor: a tensor whose value is `qdata * scale`."""

import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import CheckpointError, DTypeError, UnsupportedError
from scaledtensor.formats import Format, FormatLike, Granularity, PerTensor, encode, from_dtype
from scaledtensor.formats import get as get_format
from scaledtensor.formats.rounding import Overflow
from scaledtensor.formats.tensors import covers_storage, in_pieces
from scaledtensor.recipes import Recipe
from scaledtensor.recipes import get as get_recipe
from scaledtensor.scales.forms import Form
from scaledtensor.scales.measure import measured_if_real, measured_rms
from scaledtensor.scales.powers import checked_scale, settle
from scaledtensor.scales.singles import (
    Amount,
    Cell,
    Single,
    amount,
    asked,
    cells,
    held_anew,
    hold,
    pair_of,
    rms_of,
    scale_of,
    scaled_by,
    shared,
    single_of,
    view_of,
)
from scaledtensor.tensors.memo import NOTHING, Memo, after_overwrite, note
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.site import Site, lend
from scaledtensor.tensors.storable import (
    APPEARANCES,
    appearance,
    check_part,
    check_storable,
    check_strided,
)
from scaledtensor.tensors.wrapper import is_parameter, is_wrapper, rebuild, with_autograd

__all__ = [
    "SENT_AS_ONE",
    "Context",
    "ScaledTensor",
    "from_plain",
    "is_parameter",
    "is_stored",
    "under_scale",
    "with_autograd",
]

#: The attribute of an RMS that belongs to several tensors, which were sent as one.
SENT_AS_ONE = "of_several"

Context: TypeAlias = tuple[Format, torch.dtype, Recipe | None, bool]
"""The facts that flatten keeps beside the inner tensors: format, dtype, recipe, nonnegative."""


class ScaledTensor(Ruled):
    """A tensor that carries its scale: the value is exactly `qdata * scale`.

    Args:
        qdata: the elements, in `format.storage_dtype`, of any shape.
        scale: one power of two (a float or a 0-dim tensor).
        format: the number format of the elements: a `Format`, its name or its torch dtype.
        dtype: the dtype that autograd and optimizers see as `.dtype`; by default `qdata.dtype` if
            that is a 16-bit or wider float, else float32.
        recipe: how matrix products cast this tensor, or the name of a recipe; None leaves its
            elements as they are.
        power_of_two: False allows any positive scale (amax recipes); rescaling then rounds.

    Attributes:
        qdata, scale, format, recipe: as above; `scale` is a 0-dim float32 tensor.
        rms: the RMS that the rules expect of the value, 0-dim float32. It is unrounded, so that the
            scales of a deep network do not drift. Zero marks a tensor known to be all zeros.
        nonnegative: whether the rules know that no element is negative (squares, softmax): a sum of
            such grows by n, not by sqrt(n).
        granularity: the elements that share a scale; here all of them.
        memo: facts that rules, gathers and compiled code note about this tensor (`memo.py`).
        site: measurements of the operands of a weight's products (`site.py`).

    Raises:
        ScaleError, FormatError, DTypeError, RecipeError: an argument is not one of the allowed.
    """

    INNER: tuple[str, ...] = ("qdata", "scale", "rms")

    scale: Tensor = asked()
    rms: Tensor = asked()
    granularity: Granularity = PerTensor()
    memo: Memo = NOTHING

    # --- construction ------------------------------------------------------------------------

    @staticmethod
    def __new__(
        cls,
        qdata: Tensor,
        scale: float | Tensor,
        format: FormatLike,
        *,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str | None = None,
        power_of_two: bool = True,
    ) -> Self:
        fmt = get_format(format)
        if is_wrapper(qdata) or not isinstance(qdata, Tensor):
            raise DTypeError(f"qdata is a plain torch.Tensor; got {type(qdata).__name__}")
        if qdata.dtype != fmt.storage_dtype:
            raise DTypeError(
                f"{fmt.name} is stored as {fmt.storage_dtype}; got qdata of {qdata.dtype}. "
                f"To convert values, use scaledtensor.scaled(tensor, {fmt.name!r})"
            )
        check_storable(fmt)
        check_strided(qdata)
        single = checked_scale(scale, qdata.device, power_of_two=power_of_two)
        chosen = None if recipe is None else get_recipe(recipe)
        if dtype is None:
            dtype = qdata.dtype if qdata.dtype in APPEARANCES else torch.float32
        return cls.make(qdata.detach(), single, single.clone(), fmt, appearance(dtype), chosen)

    @classmethod
    @_torch.inlined_only
    def make(
        cls,
        qdata: Tensor,
        scale: Amount | Cell,
        rms: Amount | Cell,
        format: Format,
        dtype: torch.dtype,
        recipe: Recipe | None,
        nonnegative: bool = False,
    ) -> Self:
        """The one constructor path, unchecked: for rules, which make only valid tensors."""
        self: Self = cls._wrapper(qdata, dtype)
        self.qdata, self.format = qdata, format
        self.recipe, self.nonnegative = recipe, nonnegative
        hold(self, scale, rms)
        return self

    @classmethod
    def _wrapper(cls, qdata: Tensor, dtype: torch.dtype) -> Any:
        return _torch.make_wrapper(cls, qdata, dtype)

    @classmethod
    def put_together(cls, inner: Sequence[Tensor], shape: Sequence[int], context: Any) -> Self:
        qdata, scale, rms = inner
        return cls.make(qdata, scale, rms, *context)

    def like(self, *inner: Any) -> Self:
        """A tensor with this one's format, dtype and recipe around other tensors for `INNER`."""
        qdata, scale, rms = inner
        return self.make(qdata, scale, rms, *self.context)

    @property
    @_torch.inlined_only
    def context(self) -> Context:
        """The facts by which the inner tensors are read."""
        return self.format, self.dtype, self.recipe, self.nonnegative

    def viewed(self, qdata: Tensor) -> Self:
        """A view of this tensor, around a view of its elements: the very same scale."""
        if torch.is_inference_mode_enabled() and not self.is_inference():
            with torch.inference_mode(False):  # as torch makes a view of a tensor from outside
                return self.viewed(qdata)
        if not torch.compiler.is_compiling():
            return cast(Self, view_of(self, qdata, self._wrapper(qdata, self.dtype)))
        made = self.like(qdata, *[shared(self, name) for name in self.INNER[1:]])
        lend(self, made)
        return made

    def widened(self) -> "ScaledTensor":
        """This tensor itself."""
        return self

    # --- operators ---------------------------------------------------------------------------

    @classmethod
    # Beside a graph that broke, dynamo would compile the Python of rules.
    @_torch.uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Rules read shapes and dtypes of tensors. Each read would ask `__torch_function__`.
        with _torch.disable_torch_function():
            if len(types) > 1 and any(map(_is_read_first, types)):
                return NotImplemented  # torch asks its class next
            return cls._engine.dispatch(func, args, kwargs or {})

    # --- torch.compile -----------------------------------------------------------------------

    @property
    @_torch.inlined_only
    def lent(self) -> Tensor | None:
        """The tensor by which compiled code reads a weight's site (`Site.lends`); None of other
        tensors."""
        if type(self) is not ScaledTensor or _torch.is_tracing(self.qdata):
            return self.memo.traced_lent
        if self.site is None:
            if not is_parameter(self):
                return None
            self.site = Site()
        return self.site.lends(self)

    @property
    @_torch.inlined_only
    def _pair(self) -> Tensor:
        """Scale and RMS as one tensor of two elements, which compiled code passes on."""
        held = pair_of(self)
        return torch.stack((self.scale, self.rms)) if held is None else held

    @property
    @_torch.inlined_only
    def _is_paired(self) -> bool:
        """Whether compiled code made this tensor, with scale and RMS as one tensor."""
        return _torch.is_tracing(self.qdata) and pair_of(self) is not None

    @_torch.inlined_only
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.lent is None:
            if self._is_paired:
                return ["qdata", "_pair"], self.context
            return list(self.INNER), self.context
        fmt, dtype, recipe, nonnegative = self.context
        return [*self.INNER, "lent"], (fmt, dtype, recipe and recipe.uncorrected, nonnegative)

    @classmethod
    @_torch.inlined_only
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: Context,
        outer_size: Any,
        outer_stride: Any,
    ) -> Self:
        if "_pair" in inner:
            pair = inner["_pair"]
            of_scale, of_rms = cells(pair) if _torch.is_tracing(pair) else pair.unbind()
            return cls.make(inner["qdata"], of_scale, of_rms, *context)
        qdata, scale, rms = (inner[name] for name in cls.INNER)
        made = cls.make(qdata, scale, rms, *context)
        if "lent" in inner:
            note(made, traced_lent=inner["lent"])
        return made

    @_torch.inlined_only
    def __coerce_tangent_metadata__(self) -> Self:
        # AOTAutograd guesses a gradient's metadata from its output's. The scale is a tensor, so
        # nothing about it is guessed; a sign may not be.
        return self.make(self.qdata, self.scale, self.rms, self.format, self.dtype, self.recipe)

    @_torch.inlined_only
    def __coerce_same_metadata_as_tangent__(
        self, expected: Context, expected_type: Any = None
    ) -> Tensor:
        if expected_type is Tensor:
            return self.dequantize()
        held = self if self.format == expected[0] else self.to_format(expected[0])
        return self.make(held.qdata, held.scale, held.rms, *expected)

    # --- files -------------------------------------------------------------------------------

    @classmethod
    def from_facts(
        cls,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        context: tuple[Any, ...],
        facts: Mapping[str, Any],
    ) -> Self:
        inner = [parts[name] for name in cls.INNER]
        kinds = (context[0].storage_dtype, shape), (torch.float32, ()), (torch.float32, ())
        for name, x, (dtype, size) in zip(cls.INNER, inner, kinds, strict=True):
            check_part(name, x, dtype, size)
        scale = inner[1]
        if not scale.is_meta and not 0 < float(scale) < float("inf"):
            raise CheckpointError(f"its scale is {float(scale)}; scales are positive and finite")
        return cls.put_together(inner, shape, context)

    # --- assignment of `.data` ---------------------------------------------------------------

    def _as_data(self, new: Tensor) -> Tensor:
        if new.dtype == torch.float64 != self.dtype:
            raise UnsupportedError(
                f"no format has the bits of float64; this tensor computes in {self.format.name}. "
                "A float64 model (for gradcheck, say): scaledtensor.unscale_model(model).double()"
            )
        if isinstance(new, ScaledTensor):
            # A part of a flat buffer has to stay one.
            return near_its_elements(new) if covers_storage(new.qdata) else new
        if not covers_storage(new):
            warnings.warn(
                "`.data = x` copies the values of x, here a part of a larger plain tensor. A write "
                "into that tensor, such as an optimizer's step on a flat buffer, does not reach "
                "this ScaledTensor. Make the buffer of scaled tensors, by torch.cat, to share it",
                stacklevel=2,
            )
        held = self.recipe.master if self.recipe is not None and is_stored(self) else self.format
        fmt = held if new.dtype == self.dtype else from_dtype(new.dtype)
        return from_plain(new, fmt, new.dtype, self.recipe)

    def _adopt(self, held: Any) -> None:
        super()._adopt(held)
        held_anew(self)
        after_overwrite(self)

    # --- fully_shard, which looks for these methods on the class of a part -------------------

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> Any:
        """The elements to send of this part of a tensor."""
        return _gathering().before(self, mesh, outer_size, module, mp_policy)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole tensor, of the elements that all ranks sent."""
        return _gathering().after(all_gather_outputs, metadata, out)


def _is_read_first(kind: type) -> bool:
    """Whether operators read tensors of this class as ScaledTensors before rules compute."""
    return issubclass(kind, Ruled) and not issubclass(kind, ScaledTensor)


def _gathering() -> Any:
    """The module of gathers, which belongs to a higher floor and is loaded on use."""
    return import_module("scaledtensor.distributed.gather")


def _rebuild(inner: Any, context: Any, *flags: Any) -> ScaledTensor:
    """Unpickle a file of version 0.1. New files name `wrapper.rebuild`."""
    return rebuild(ScaledTensor, inner, inner[0].shape, context, *flags)


torch.serialization.add_safe_globals([_rebuild, ScaledTensor])


def is_stored(x: ScaledTensor) -> bool:
    """Whether `x` has the format in which its recipe stores frozen weights."""
    if x.recipe is None or not x.recipe.store_frozen:
        return False
    once = x.recipe.gemms.once
    return once is not None and x.format == once[1].format


# --- plain tensors become ScaledTensors ------------------------------------------------------

_LARGEST = torch.finfo(torch.float32).max


def from_plain(x: Tensor, fmt: Format, dtype: torch.dtype, recipe: Recipe | None) -> ScaledTensor:
    """Wrap plain data under the power of two nearest to its RMS, which is measured.

    This runs where plain tensors enter (inputs, tables), never on tensors that rules made. It
    neither checks its arguments nor records a gradient.
    """
    rms = amount(measured_rms(x))
    (scale,) = settle(rms)
    # No float32 element is so far above the RMS that its quotient leaves the range.
    return _divided(x, scale, rms, fmt, dtype, recipe, x.dtype == torch.float64)


def under_scale(
    x: Tensor, scale: Tensor, rms: Tensor, fmt: Format, dtype: torch.dtype, recipe: Recipe | None
) -> ScaledTensor:
    """Wrap plain data under a scale that is already chosen. No gradient is recorded."""
    return _divided(x, single_of(scale), single_of(rms), fmt, dtype, recipe, True)


#: The most by which the expected RMS of values that replace a whole tensor may be off.
_OFF = 4.0


def near_its_elements(x: ScaledTensor) -> ScaledTensor:
    """Return `x` under a scale that fits its elements, if its expected RMS is far from theirs. An
    average of copies of a parameter (Lookahead, federated learning) is a sum of terms that depend
    on each other. Each round would multiply the error of the round before."""
    expected, scale = rms_of(x), scale_of(x)
    if type(expected) is not Single or x.qdata.itemsize == 1:
        return x
    found = measured_if_real(expected, x.qdata, scale, waits=True)
    if not found or found / _OFF <= expected <= found * _OFF:
        return x
    power, ratio = settle(found, scale)
    return x.like(scaled_by(x.qdata, ratio), power, found)


def _divided(
    x: Tensor,
    scale: Amount,
    rms: Amount,
    fmt: Format,
    dtype: torch.dtype,
    recipe: Recipe | None,
    clamps: bool,
) -> ScaledTensor:
    # Infinities and NaNs stay: -inf in a mask means something.
    overflow: Overflow = "ieee" if fmt.storage_dtype in APPEARANCES else "saturate_finite"
    clamps = clamps and overflow == "saturate_finite"

    def divided(t: Tensor, *_: object) -> Tensor:
        # In float32 at least, so that dividing by the scale rounds nothing.
        wide = t if t.dtype == torch.float64 else t.float()
        quotient = scaled_by(wide, 1 / scale) if isinstance(scale, Form) else wide / scale
        if clamps:  # a scale far below a number makes no infinity of it
            quotient = torch.where(wide.isfinite(), quotient.clamp(-_LARGEST, _LARGEST), wide)
        return encode(quotient, fmt, overflow=overflow)

    qdata = in_pieces(divided, x.detach(), fmt.storage_dtype)
    return ScaledTensor.make(qdata, scale, rms, fmt, dtype, recipe)
