"""CodedTensor: a tensor that stores values in any format, under scales of any granularity.

A CodedTensor stores weights and optimizer states. It holds packed codes and their scales, and
operators do not compute on it: torch has no dtype for FP6, FP4 or E3M4, and a product of block
scales is no block scale. A copy, a move to a device and a file keep the codes. Every other operator
reads the tensor as an ordinary ScaledTensor of the same value, with float32 elements under one
power of two, and its result is one. That reading is exact if the value is a float32, and otherwise
it is rounded once. In-place operators raise an error, because codes and scales are made together.

A `Coding` says how codes and scales make the value: blocks with their scales, or the expanded
groups of an optimizer's states. The optimizer that owns such a state writes into its inner tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeGuard, cast

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import CheckpointError, DTypeError, FormatError, UnsupportedError
from scaledtensor.formats import (
    FP32,
    Format,
    FormatLike,
    Granularity,
    PerAxis,
    PerTensor,
    TwoLevelScale,
    pack,
    quantize_expanded,
    unpack,
)
from scaledtensor.formats import get as get_format
from scaledtensor.formats.format import Specials
from scaledtensor.formats.layouts import as_granularity, packed_shape
from scaledtensor.formats.rounding import Rounding
from scaledtensor.formats.stochastic import Randomness
from scaledtensor.recipes import Recipe
from scaledtensor.recipes import get as get_recipe
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import checked_scale
from scaledtensor.tensors import verbs
from scaledtensor.tensors.coding import BLOCKS, Coding, checked_levels
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.storable import appearance, check_part, check_strided
from scaledtensor.tensors.tensor import ScaledTensor, from_plain
from scaledtensor.tensors.wrapper import is_wrapper, rebuild, written_by

__all__ = ["CodedTensor", "is_expanded", "refuse_part"]


class _Names:
    """The names of the inner tensors of a CodedTensor; of the class, the names for blocks."""

    def __get__(self, x: Any, owner: type) -> tuple[str, ...]:
        return BLOCKS.inner if x is None else x.coding.inner


class _Measured:
    """The RMS of expanded groups. No rule expects one, so it is measured on each read. A tensor of
    blocks has its RMS among its own attributes, which come first."""

    def __get__(self, x: Any, owner: type) -> Any:
        return self if x is None else measured_rms(x.value_in(torch.float32))


class CodedTensor(Ruled):
    """Codes in `format` and the scales of their blocks: the value is exactly
    `codes * scale * tensor_scale`.

    `CodedTensor.expanded(x)` makes the other coding, expanded groups.

    Args:
        codes: in `format.storage_dtype`, of any shape.
        scale: as `formats.quantize_blocks` returns it: one positive number for each block, of the
            shape that `granularity` gives, in float32 or float8_e8m0fnu; or a
            `formats.TwoLevelScale`, for a format of 8 bits or fewer.
        format: the number format of the codes: a `Format`, its name or its torch dtype. Any with a
            sign.
        granularity: the elements that share a scale.
        dtype: the dtype that autograd sees as `.dtype`; by default float32.
        recipe: how matrix products cast the values that they read from this tensor.

    Attributes:
        coding: a `Coding`, which says how the inner tensors make the value.
        qdata: the codes, contiguous; codes of fewer than 8 bits are packed (`formats.pack`).
        codes: the codes, one an element.
        scale: one for each block: float32, or float8_e4m3fn if there is a second level. For each
            expanded group, its largest magnitude in float32; in 16 bits a power of two. Negative if
            a magnitude that stands out is held apart (`formats.expansion`).
        tensor_scale: the second level, 0-dim float32, and 1 if there is none. For expanded groups,
            the unit of all values.
        power: the power of each expanded group in sixteenths, uint8.
        granularity: the elements that share a scale; for expanded groups, their size.

    Raises:
        DTypeError, FormatError, ScaleError, ShapeError, RecipeError: an argument is not one of the
            allowed.
    """

    INNER: tuple[str, ...] = cast(Any, _Names())
    _FACTS: tuple[str, ...] = (*Ruled._FACTS, "coding")

    coding: Coding
    scale: Tensor
    rms: Tensor = cast(Any, _Measured())
    power: Tensor
    tensor_scale: Tensor

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor | TwoLevelScale,
        format: FormatLike,
        granularity: Granularity = PerTensor(),  # noqa: B008 - frozen
        *,
        dtype: torch.dtype = torch.float32,
        recipe: Recipe | str | None = None,
    ) -> Self:
        fmt, cut = get_format(format), as_granularity(granularity)
        if is_wrapper(codes) or not isinstance(codes, Tensor):
            raise DTypeError(f"codes are a plain torch.Tensor; got {type(codes).__name__}")
        if codes.dtype != fmt.storage_dtype:
            raise DTypeError(
                f"codes of {fmt.name} are {fmt.storage_dtype}; got {codes.dtype}. To convert "
                f"values, use scaledtensor.scaled(tensor, {fmt.name!r}, granularity=...)"
            )
        if not fmt.has_zero:
            raise FormatError(f"{fmt.name} is a format of scales; elements need a sign and a zero")
        check_strided(codes)
        held, whole = checked_levels(scale, fmt, cut, codes)
        codes = codes.detach()
        chosen = None if recipe is None else get_recipe(recipe)
        coding = Coding(cut, 2 if isinstance(scale, TwoLevelScale) else 1)
        context = (fmt, appearance(dtype), chosen, False, coding)
        packed = pack(codes, fmt).contiguous()
        rms = measured_rms(coding.values(codes, fmt, (held, held, whole), torch.float32))
        return cls.put_together((packed, held, rms, whole), codes.shape, context)

    @classmethod
    def expanded(
        cls,
        x: Tensor,
        format: FormatLike = "e4m3fn",
        group: int = 128,
        *,
        dtype: torch.dtype | None = None,
        tensor_scale: float | Tensor = 1.0,
        rounding: Rounding = "nearest_even",
        generator: Randomness = None,
    ) -> Self:
        """Groups of consecutive elements of a plain tensor, each widened to the range of `format`.

        Args:
            x: float32, bfloat16, float16 or float64, of any shape. No gradient flows through.
            format: a signed format of 8 bits or fewer with a zero, bf16 or fp16, or its name.
            group: the number of elements in a group.
            dtype: the dtype that autograd and optimizers see; by default `x.dtype`.
            tensor_scale: a power of two, the unit of `x`.
            rounding, generator: as `formats.quantize_expanded` takes them.

        Raises:
            DTypeError, FormatError, ShapeError, ScaleError: an argument is not one of the allowed.
        """
        fmt = get_format(format)
        unit = checked_scale(tensor_scale, x.device, power_of_two=True)
        made = quantize_expanded(
            x.detach() / unit, fmt, group, rounding=rounding, generator=generator
        )
        context = (fmt, appearance(dtype or x.dtype), None, False, Coding(group, expanded=True))
        packed = pack(made.codes, fmt).contiguous()
        return cls.put_together((packed, made.amax, made.power, unit), x.shape, context)

    @classmethod
    def put_together(cls, inner: Sequence[Tensor], shape: Sequence[int], context: Any) -> Self:
        """The one constructor path, unchecked. `qdata` is packed; `shape` is the tensor's."""
        fmt, dtype, recipe, nonnegative, coding = context
        self = cast(Self, _torch.make_wrapper(cls, inner[0], dtype, shape))
        self.format, self.recipe, self.nonnegative = fmt, recipe, nonnegative
        self.coding = coding
        for name, tensor in zip(coding.inner, inner, strict=True):
            setattr(self, name, tensor)
        return self

    @property
    def context(self) -> Any:
        """The facts by which the inner tensors are read."""
        return self.format, self.dtype, self.recipe, self.nonnegative, self.coding

    @property
    def granularity(self) -> Any:
        """The elements that share a scale; for expanded groups, their size."""
        return self.coding.granularity

    @property
    def kind(self) -> str:
        return self.coding.kind

    @property
    def codes(self) -> Tensor:
        return unpack(self.qdata, self.format, self.shape)

    def widened(self) -> ScaledTensor:
        """The ordinary ScaledTensor of the same value: float32 elements under one power of two.

        A value that is no float32 is rounded to the nearest, once.
        """
        with _mode_of(self):
            return from_plain(self.value_in(torch.float32), FP32, self.dtype, self.recipe)

    def value_in(self, dtype: torch.dtype) -> Tensor:
        """The plain tensor of the value."""
        scales = [getattr(self, name) for name in self.INNER[1:]]
        return self.coding.values(self.codes, self.format, scales, dtype)

    # --- torch -------------------------------------------------------------------------------

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        *_, coding = context
        return cls.put_together([inner[name] for name in coding.inner], outer_size, context)

    def __coerce_tangent_metadata__(self) -> ScaledTensor:
        # The gradient of a CodedTensor is an ordinary ScaledTensor.
        return self.widened()

    @classmethod
    @_torch.uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = _OWN.get(func)
        if own is not None:
            return own(*args, **kwargs)
        _refuse_writing(func, args, kwargs)
        read = torch.utils._pytree.tree_map(_read, (args, kwargs))
        return cls._engine.dispatch(func, *read)

    # --- Python ------------------------------------------------------------------------------

    def _spelled_scale(self) -> str:
        if self.coding.expanded:
            return f"groups of {self.granularity}"
        if isinstance(self.granularity, PerTensor):
            spelled = super()._spelled_scale()
        else:
            spelled = f"{tuple(self.scale.shape)} {self.granularity}"
        return f"{spelled} * {self.tensor_scale:.6g}" if self.coding.levels == 2 else spelled

    def _spelled_facts(self) -> tuple[Any, ...]:
        # The granularity is None, a dimension, or the sizes of a block or a group.
        cut, (_, *facts, coding) = self.granularity, self.context
        sizes = cut if coding.expanded else next(iter(vars(cut).values()), None)
        return *facts, sizes, coding.levels, coding.expanded

    @classmethod
    def _unpickled(
        cls, inner: Sequence[Tensor], shape: Sequence[int], fmt: Format, *facts: Any
    ) -> Self:
        *facts_of_value, sizes, levels, expanded = facts
        qdata, scale, *others = inner
        if levels == 2:
            scale = scale.view(torch.float8_e4m3fn)
        cut: Any = sizes if expanded else PerTensor()
        if not expanded and sizes is not None:
            cut = PerAxis(sizes) if isinstance(sizes, int) else as_granularity(sizes)
        coding = Coding(cut, levels, expanded)
        made = super()._unpickled((qdata, scale, *others), shape, fmt, *facts_of_value, coding)
        coding.check(fmt, shape, [getattr(made, name) for name in coding.inner])
        return made

    # --- files -------------------------------------------------------------------------------

    @classmethod
    def kinds(cls) -> dict[str, tuple[str, ...]]:
        return {coding.kind: coding.inner for coding in (BLOCKS, Coding(1, expanded=True))}

    def facts(self) -> dict[str, Any]:
        return self.coding.facts

    @classmethod
    def from_facts(
        cls,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        context: tuple[Any, ...],
        facts: Mapping[str, Any],
    ) -> Self:
        fmt = context[0]
        coding = Coding.from_facts(facts, parts["scale"])
        inner = [parts[name] for name in coding.inner]
        for name in coding.inner[2:]:
            if name != "power":
                check_part(name, parts[name], torch.float32, ())
        packed = fmt.storage_dtype if fmt.bits >= 8 else torch.uint8
        check_part("qdata", inner[0], packed, packed_shape(fmt, shape))
        if coding.levels == 1 and inner[1].dtype != torch.float32:
            raise CheckpointError(f"its scale is {inner[1].dtype}")
        coding.check(fmt, shape, inner)
        made = cls.put_together(inner, shape, (*context, coding))
        if coding.expanded:
            made.dequantize()  # raises unless the parts can be decoded together
        return made


def _mode_of(x: Tensor) -> torch.inference_mode:
    """The mode in which torch makes a view of `x`: outside inference mode if `x` was made there."""
    return torch.inference_mode(torch.is_inference_mode_enabled() and x.is_inference())


def is_expanded(x: Any) -> TypeGuard[CodedTensor]:
    """Whether `x` is a CodedTensor of expanded groups, as states of an optimizer are."""
    return isinstance(x, CodedTensor) and x.coding.expanded


def _rebuild(inner: Any, shape: Any, context: tuple[Any, ...], *flags: Any) -> CodedTensor:
    """Unpickle a file of version 0.1. New files name `wrapper.rebuild`."""
    fmt, dtype, recipe, sizes = context
    levels = 1 if inner[1].dtype == torch.float32 else 2
    return rebuild(
        CodedTensor, inner, shape, (fmt, dtype, recipe, False, sizes, levels, False), *flags
    )


torch.serialization.add_safe_globals([_rebuild, CodedTensor, Format, Specials])


# --- operators -------------------------------------------------------------------------------


def _copy(x: CodedTensor, **options: Any) -> CodedTensor:
    return x.like(*(getattr(x, name).clone() for name in x.INNER))


def _share(x: CodedTensor) -> CodedTensor:
    with _mode_of(x):
        return x.like(*(getattr(x, name) for name in x.INNER))


def _view(x: CodedTensor, shape: Sequence[int]) -> Tensor:
    """In its own shape, as DTensor.from_local asks, the codes are kept."""
    return _share(x) if tuple(shape) == tuple(x.shape) else x.widened().view(*shape)


def _to(
    x: CodedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **options: Any,
) -> Any:
    """A float dtype is the appearance alone: the codes stay. Any other dtype is a reading."""
    kept = x.dtype if dtype is None else dtype
    if not kept.is_floating_point:
        return x.widened().to(dtype=kept, device=device)
    move = {"device": device, "non_blocking": non_blocking, "copy": True}
    moved = [getattr(x, name).to(**move) for name in x.INNER]
    fmt, _, *rest = x.context
    return x.put_together(moved, x.shape, (fmt, appearance(kept), *rest))


def _copy_into(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies codes and scales of one kind, as `load_state_dict` does. Nothing else is written."""
    if not isinstance(x, CodedTensor):
        return x.copy_(_read(source), non_blocking)
    alike = isinstance(source, CodedTensor) and (source.shape, _kept(source)) == (x.shape, _kept(x))
    if not alike:
        raise UnsupportedError(_refusal_of_writing(x, _aten.copy_.default))
    for name in x.INNER:
        getattr(x, name).copy_(getattr(source, name))
    return x


def _kept(x: CodedTensor) -> Any:
    return x.format, x.coding


def _dequantize(x: CodedTensor) -> Tensor:
    return x.value_in(x.dtype)


def _refuse(x: CodedTensor, *args: Any) -> Any:
    raise UnsupportedError(
        "rescale, expect and drop move one scale, and a CodedTensor may have many: read it first, "
        "as x.widened(), an ordinary ScaledTensor"
    )


_aten = torch.ops.aten

#: Operators that keep codes as they are. Every other reads the value.
_OWN: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _share,
    _aten.clone.default: _copy,
    _aten.copy_.default: _copy_into,
    _aten.detach.default: _share,
    _aten.lift_fresh.default: _share,
    _aten._to_copy.default: _to,
    _aten.view.default: _view,
    verbs.dequantize: _dequantize,
    verbs.drop: _refuse,
    verbs.expect: _refuse,
    verbs.rescale: _refuse,
}


def _read(x: Any) -> Any:
    return x.widened() if isinstance(x, CodedTensor) else x


def _refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for t in written_by(func, args, kwargs):
        if isinstance(t, CodedTensor):
            raise UnsupportedError(_refusal_of_writing(t, func))


def refuse_part(x: Tensor) -> None:
    """Raise UnsupportedError if `x` is a view of a CodedTensor, such as `coded[0]`. It is a part of
    a decoded copy, and a write into it would be lost."""
    base = x._base
    if isinstance(base, CodedTensor):
        raise UnsupportedError(
            "this operator would write into a part of a decoded copy of a CodedTensor, and the "
            "codes would not change: compute on x.widened() and keep the result by "
            "scaledtensor.scaled(result, format, granularity=...)"
        )


def _refusal_of_writing(x: CodedTensor, func: Any) -> str:
    if x.coding.expanded:
        return (
            f"{func} would write into a state in few bits, which an optimizer of torch.optim does "
            "not read: load plain_state_dict() of the optimizer that kept it (an optimizer of "
            "scaledtensor.optim with state_format='fp32' loads either), or step with that one"
        )
    return (
        f"{func} would write into a CodedTensor, whose codes and scales are made together: "
        "compute on x.widened() and keep the result by "
        "scaledtensor.scaled(result, format, granularity=...)"
    )
