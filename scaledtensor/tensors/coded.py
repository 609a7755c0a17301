"""CodedTensor: a ScaledTensor that is kept, in any format and under scales of any granularity.

What torch has no dtype for (FP6, FP4, E3M4) and what has a scale for each row or block, no operator
can compute on: a product of block scales is no block scale. So a CodedTensor is for keeping weights
and states: a copy, a device, a file. Any other operator reads it as an ordinary ScaledTensor of the
same value, float32 elements under one power of two, and its result is one; that reading is exact
wherever the value is a float32, and else its nearest one. Nothing is written into codes: in-place
operators are refused.

NVFP4's scales have two levels, an E4M3FN number for each block times one float32 for the tensor,
and both are kept: their product has up to 28 bits, and a value of E2M1FN codes up to 30. Where that
is more than the 24 of a float32, `x.to(torch.float64).dequantize()` is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import DTypeError, FormatError, ScaleError, ShapeError, UnsupportedError
from scaledtensor.formats import (
    FORMATS,
    FP32,
    Format,
    FormatLike,
    Granularity,
    PerAxis,
    PerTensor,
    TwoLevelScale,
    decode,
    dequantize_blocks,
    from_dtype,
    pack,
    unpack,
)
from scaledtensor.formats import get as get_format
from scaledtensor.formats.format import Specials
from scaledtensor.formats.layouts import as_granularity, check_scale_shape, packed_shape
from scaledtensor.recipes import Recipe
from scaledtensor.recipes import get as get_recipe
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import MIN_SCALE
from scaledtensor.tensors import verbs
from scaledtensor.tensors.storable import appearance, check_strided
from scaledtensor.tensors.tensor import ScaledTensor, from_plain, is_parameter, with_autograd

__all__ = ["CodedTensor"]

CodedContext = tuple[Format, torch.dtype, Recipe | None, bool, Granularity]


class CodedTensor(ScaledTensor):
    """Codes in `format` and the scales of their blocks: the value is exactly
    `codes * scale * tensor_scale`.

    Args:
        codes: in `format.storage_dtype`, of any shape.
        scale: as `formats.quantize_blocks` returns it: one positive number for each block, of the
            shape that `granularity` gives, in float32 or float8_e8m0fnu; or a
            `formats.TwoLevelScale`, for a format of 8 bits or fewer.
        format: the number format of the codes: a `Format`, its name or its torch dtype. Any with a
            sign.
        granularity: which elements share a scale.
        dtype: what autograd sees as `.dtype`; by default float32.
        recipe: how matrix products cast what is read from this tensor.

    Attributes:
        qdata: the codes, contiguous, those under 8 bits packed (`formats.pack`).
        codes: the codes, one an element.
        scale: one for each block: float32, or float8_e4m3fn where there is a second level.
        tensor_scale: the second level, 0-dim float32; 1 where there is none.

    Raises:
        DTypeError, FormatError, ScaleError, ShapeError, RecipeError: an argument is outside what is
            allowed.
    """

    granularity: Granularity
    tensor_scale: Tensor

    INNER: ClassVar[tuple[str, ...]] = (*ScaledTensor.INNER, "tensor_scale")

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
        if isinstance(codes, ScaledTensor) or not isinstance(codes, Tensor):
            raise DTypeError(f"codes are a plain torch.Tensor; got {type(codes).__name__}")
        if codes.dtype != fmt.storage_dtype:
            raise DTypeError(
                f"codes of {fmt.name} are {fmt.storage_dtype}; got {codes.dtype}. To convert "
                f"values, use scaledtensor.scaled(tensor, {fmt.name!r}, granularity=...)"
            )
        if not fmt.has_zero:
            raise FormatError(f"{fmt.name} is a format of scales; elements need a sign and a zero")
        check_strided(codes)
        held, whole = _checked_levels(scale, fmt, cut, codes)
        chosen = None if recipe is None else get_recipe(recipe)
        context = (fmt, appearance(dtype), chosen, False, cut)
        packed = pack(codes.detach(), fmt).contiguous()
        values = dequantize_blocks(codes.detach(), _levels(held, whole), fmt, cut)
        return cls.keep(packed, held, measured_rms(values), whole, codes.shape, *context)

    @classmethod
    def keep(
        cls,
        qdata: Tensor,
        scale: Tensor,
        rms: Tensor,
        tensor_scale: Tensor,
        shape: Sequence[int],
        format: Format,
        dtype: torch.dtype,
        recipe: Recipe | None,
        nonnegative: bool,
        granularity: Granularity,
    ) -> Self:
        """The one constructor path, unchecked: `qdata` is packed, `shape` that of the tensor."""
        self = cast(Self, _torch.make_wrapper(cls, qdata, dtype, shape))
        self.qdata, self.scale, self.rms, self.tensor_scale = qdata, scale, rms, tensor_scale
        self.format, self.recipe, self.nonnegative = format, recipe, nonnegative
        self.granularity = granularity
        return self

    def like(self, *inner: Tensor) -> Self:
        qdata, scale, rms, tensor_scale = inner
        context = self.__tensor_flatten__()[1]
        return self.keep(qdata, scale, rms, tensor_scale, self.shape, *context)

    @property
    def codes(self) -> Tensor:
        return unpack(self.qdata, self.format, self.shape)

    def widened(self) -> ScaledTensor:
        """The ordinary ScaledTensor of the same value: float32 elements under one power of two.

        A value that is no float32 is rounded to the nearest, once.
        """
        # As views are: made outside inference mode, where this tensor was.
        with torch.inference_mode(torch.is_inference_mode_enabled() and self.is_inference()):
            return from_plain(self.value_in(torch.float32), FP32, self.dtype, self.recipe)

    def value_in(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for, plain."""
        levels = _levels(self.scale, self.tensor_scale)
        return dequantize_blocks(self.codes, levels, self.format, self.granularity, dtype)

    def _refusal_of_writing(self, func: Any) -> str:
        return (
            f"{func} would write into a CodedTensor, whose codes and scales are made together: "
            "compute on x.widened() and keep the result by "
            "scaledtensor.scaled(result, format, granularity=...)"
        )

    # --- what torch asks of a wrapper subclass -----------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], CodedContext]:  # type: ignore[override]
        names, context = super().__tensor_flatten__()
        return names, (*context, self.granularity)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        qdata, scale, rms, whole = (inner[name] for name in cls.INNER)
        return cls.keep(qdata, scale, rms, whole, outer_size, *context)

    def __coerce_tangent_metadata__(self) -> ScaledTensor:  # type: ignore[override]
        # The gradient of what is kept in codes is none of that kind.
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

    # --- Python protocols --------------------------------------------------------------------

    def _adopt(self, held: Any) -> None:
        super()._adopt(held)
        self.granularity = held.granularity

    def _spelled_scale(self) -> str:
        if isinstance(self.granularity, PerTensor):
            spelled = super()._spelled_scale()
        else:
            spelled = f"{tuple(self.scale.shape)} {self.granularity}"
        return f"{spelled} * {self.tensor_scale:.6g}" if _is_two_level(self.scale) else spelled

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        inner = tuple(as_bytes(getattr(self, name)) for name in self.INNER)
        named = FORMATS.get(self.format.name) is self.format
        fmt = self.format.name if named else self.format
        context = (fmt, self.dtype, self.recipe, _spelled(self.granularity))
        flags = (self.requires_grad, is_parameter(self))
        return _rebuild, (inner, tuple(self.shape), context, *flags)


# --- scales ----------------------------------------------------------------------------------


def _is_two_level(scale: Tensor) -> bool:
    """Told by the dtype, which does not change: the number of the second level may be 1 as well."""
    return scale.dtype == torch.float8_e4m3fn


def _levels(scale: Tensor, tensor_scale: Tensor) -> Tensor | TwoLevelScale:
    """Inner tensors as `dequantize_blocks` takes them."""
    return TwoLevelScale(scale, tensor_scale) if _is_two_level(scale) else scale


def _checked_levels(
    given: Any, fmt: Format, granularity: Granularity, codes: Tensor
) -> tuple[Tensor, Tensor]:
    """The inner tensors `scale` and `tensor_scale` of what the constructor was given."""
    if not isinstance(given, TwoLevelScale):
        if isinstance(given, Tensor) and given.dtype == torch.float8_e8m0fnu:
            given = decode(given, from_dtype(given.dtype))
        scale = _checked_scales(given, torch.float32, granularity, codes)
        return scale, torch.ones((), device=scale.device)
    if fmt.bits > 8:
        raise FormatError(f"two-level scales are for elements of 8 bits or fewer, not {fmt!r}")
    block = _checked_scales(given.block, torch.float8_e4m3fn, granularity, codes)
    whole = _checked_scales(given.tensor, torch.float32, PerTensor(), codes)
    if not whole.is_meta and whole.isnan():
        raise ScaleError("the scale of the tensor is positive and finite; got nan")
    return block, whole


def _checked_scales(
    scale: Any, dtype: torch.dtype, granularity: Granularity, codes: Tensor
) -> Tensor:
    """A copy of `scale`. Looks at the numbers, where they are real."""
    if not isinstance(scale, Tensor) or isinstance(scale, ScaledTensor):
        raise ScaleError(
            "scales are a plain torch.Tensor or a TwoLevelScale of them; got "
            f"{type(scale).__name__}"
        )
    if scale.dtype != dtype:
        raise ScaleError(
            "scales are float32 or float8_e8m0fnu, or a TwoLevelScale of float8_e4m3fn for the "
            f"blocks and float32 for the tensor; got {scale.dtype} in place of {dtype}"
        )
    check_scale_shape(scale, granularity, codes.shape)
    if scale.device != codes.device:
        raise ScaleError(f"codes are on {codes.device}, their scales on {scale.device}")
    if not scale.is_meta:
        numbers = scale.detach().float()
        # NaN marks a block that held one, as in OCP MX; 2**-127 is the least scale of E8M0.
        usable = (numbers >= MIN_SCALE / 2) & (numbers < float("inf")) | numbers.isnan()
        if not usable.all():
            raise ScaleError(f"scales are positive and finite; got {numbers[~usable][0].item()}")
    held: Tensor = scale.detach().clone()
    return held


# --- files -----------------------------------------------------------------------------------


def as_bytes(x: Tensor) -> Tensor:
    """torch cannot read back the 8-bit floats that plain pickle writes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _rebuild(
    inner: tuple[Tensor, Tensor, Tensor, Tensor],
    shape: tuple[int, ...],
    context: tuple[str | Format, torch.dtype, Recipe | None, Any],
    requires_grad: bool,
    is_param: bool,
) -> CodedTensor:
    """Unpickle. A module-level function, so that `weights_only` loading can allow it by name."""
    (qdata, scale, rms, whole), (name, dtype, recipe, spelled) = inner, context
    fmt, granularity = get_format(name), _granularity(spelled)
    if fmt.bits >= 8:
        qdata = qdata.view(fmt.storage_dtype)
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    if tuple(qdata.shape) != packed_shape(fmt, shape):
        raise ShapeError(f"codes of {fmt.name} for {shape} do not have shape {tuple(qdata.shape)}")
    check_scale_shape(scale, granularity, shape)
    check_scale_shape(whole, PerTensor(), shape)
    made = CodedTensor.keep(qdata, scale, rms, whole, shape, fmt, dtype, recipe, False, granularity)
    return with_autograd(made, requires_grad, is_param)


def _spelled(granularity: Granularity) -> Any:
    """None, a dimension or the sizes of a block: what safe loading reads."""
    return next(iter(vars(granularity).values()), None)


def _granularity(spelled: Any) -> Granularity:
    if spelled is None:
        return PerTensor()
    return PerAxis(spelled) if isinstance(spelled, int) else as_granularity(spelled)


torch.serialization.add_safe_globals([_rebuild, CodedTensor, Format, Specials])


# --- operators -------------------------------------------------------------------------------


def _copy(x: CodedTensor, **layout: Any) -> CodedTensor:
    return x.like(*(getattr(x, name).clone() for name in x.INNER))


def _share(x: CodedTensor) -> CodedTensor:
    return x.viewed(x.qdata)


def _view(x: CodedTensor, shape: Sequence[int]) -> Tensor:
    """In its own shape, as DTensor.from_local asks, the codes are kept."""
    return _share(x) if tuple(shape) == tuple(x.shape) else x.widened().view(*shape)


def _to(
    x: CodedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **layout: Any,
) -> Any:
    """A float dtype is the appearance alone: the codes stay. Any other dtype is a reading."""
    kept = x.dtype if dtype is None else dtype
    if not kept.is_floating_point:
        return x.widened().to(dtype=kept, device=device)
    move = {"device": device, "non_blocking": non_blocking, "copy": True}
    qdata, scale, rms, whole = (getattr(x, name).to(**move) for name in x.INNER)
    fmt, _, *rest = x.__tensor_flatten__()[1]
    context: Any = (fmt, appearance(kept), *rest)
    return x.keep(qdata, scale, rms, whole, x.shape, *context)


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
    if not func._schema.is_mutable:
        return
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for a in func._schema.arguments:
        if a.alias_info is None or not a.alias_info.is_write or a.name not in given:
            continue
        targets = given[a.name] if isinstance(given[a.name], (list, tuple)) else [given[a.name]]
        for t in targets:
            if isinstance(t, CodedTensor):
                raise UnsupportedError(t._refusal_of_writing(func))
