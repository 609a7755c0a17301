"""Configs of the casts and products of linear layers: torchao's `float8.config`."""

import enum
import math
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scaledtensor.errors import RecipeError, UnsupportedError
from scaledtensor.formats import from_dtype

__all__ = [
    "CastConfig",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "e4m3_dtype",
    "e5m2_dtype",
]

#: The default dtypes of operands, OCP's on every device (torchao's are FNUZ on an MI300).
e4m3_dtype, e5m2_dtype = torch.float8_e4m3fn, torch.float8_e5m2


def _check_type(record: object, name: str, kind: type) -> None:
    value = getattr(record, name)
    if not isinstance(value, kind):
        raise RecipeError(f"{type(record).__name__}.{name} is a {kind.__name__}; got {value!r}")


class ScalingType(enum.Enum):
    """How the scale of a cast is chosen."""

    DYNAMIC = "dynamic"
    """The amax of the operand: `recipes.Amax`."""
    DELAYED = "delayed"
    """The amaxes of earlier steps: `recipes.History`. Earlier versions of torchao had it."""
    STATIC = "static"
    """`CastConfig.static_scale`: `recipes.Fixed`. Earlier versions of torchao had it."""
    DISABLED = "disabled"
    """No cast: the product runs in the dtype of the weight."""

    def short_str(self) -> str:
        """Return the name in a layer's representation: "dyn", "del", "sta" or "dis"."""
        return self.value[:3]


class ScalingGranularity(enum.Enum):
    """The elements that share a scale."""

    TENSORWISE = "tensorwise"
    """All elements of an operand."""
    AXISWISE = "axiswise"
    """A row of a product's left operand, or a column of its right operand."""

    def short_str(self) -> str:
        """Return the name in a layer's representation: "ten" or "axs"."""
        return {"tensorwise": "ten", "axiswise": "axs"}[self.value]


class Float8LinearRecipeName(enum.Enum):
    """Configs by name; `Float8LinearConfig.from_recipe_name` makes them."""

    TENSORWISE = "tensorwise"
    """E4M3 forward, E5M2 gradients, one scale for each tensor."""
    ROWWISE = "rowwise"
    """E4M3 for all operands, one scale for each row, powers of two."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """Same as ROWWISE, but wgrad is not cast, and the weight in dgrad has one scale."""


@dataclass(frozen=True)
class CastConfig:
    """The cast of one operand.

    Raises:
        RecipeError: the fields contradict each other.
        UnsupportedError: the static scale is not a power of two.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    """An FP8 dtype of torch. None is E4M3FN for inputs and weights, and E5M2 for gradients."""
    static_scale: Tensor | float | None = None
    """The factor of the operand before its cast, code = round(x * static_scale). It is the
    reciprocal of a scale of this library. It must be a power of two, which changes no mantissa. Any
    other number would move the ends of the format's range by less than a binade."""

    def __post_init__(self) -> None:
        _check_type(self, "scaling_type", ScalingType)
        _check_type(self, "scaling_granularity", ScalingGranularity)
        axiswise = self.scaling_granularity is ScalingGranularity.AXISWISE
        if axiswise and self.scaling_type is not ScalingType.DYNAMIC:
            raise RecipeError(f"AXISWISE scales are DYNAMIC; got {self.scaling_type}")
        if (self.scaling_type is ScalingType.STATIC) != (self.static_scale is not None):
            raise RecipeError(
                "ScalingType.STATIC takes a static_scale, and no other type does; got "
                f"{self.scaling_type}, static_scale={self.static_scale!r}"
            )
        if self.static_scale is not None:
            object.__setattr__(self, "static_scale", _power_of_two(self.static_scale))
        dtype = self.target_dtype
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
        ):
            raise RecipeError(f"CastConfig.target_dtype is an FP8 dtype of torch; got {dtype!r}")

    def short_str(self) -> str:
        """Return the name in a layer's representation, such as "dyn_ten_e4m3"."""
        dtype = from_dtype(self.target_dtype).name[:4] if self.target_dtype is not None else "none"
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{dtype}"

    @property
    def exponent(self) -> int:
        """The exponent of the static scale in this library: value = code * 2^exponent."""
        return 1 - math.frexp(float(self.static_scale or 1.0))[1]


@dataclass(frozen=True)
class DelayedScalingConfig:
    """The histories of all delayed casts.

    Raises:
        UnsupportedError: `scale_fn_name` is not "max".
    """

    history_len: int = 16
    scale_fn_name: str = "max"

    def __post_init__(self) -> None:
        if self.scale_fn_name != "max":
            raise UnsupportedError(
                f'DelayedScalingConfig.scale_fn_name is "max"; got {self.scale_fn_name!r}. The '
                'latest amax is scale_model(model, recipes.Delayed(choose="recent"))'
            )


@dataclass(frozen=True)
class Float8GemmConfig:
    """How the terms of a product are added."""

    use_fast_accum: bool = False
    """Whether FP8 units may add in fewer bits than float32 (`Recipe.fast_accumulation`)."""

    def __post_init__(self) -> None:
        _check_type(self, "use_fast_accum", bool)


def _power_of_two(given: object) -> float:
    single = isinstance(given, Tensor) and given.numel() == 1
    factor = float(given) if single or isinstance(given, (int, float)) else math.nan  # type: ignore[arg-type]
    if not 0 < factor < math.inf:
        raise RecipeError(f"a static_scale is one positive finite number; got {given!r}")
    mantissa, exponent = math.frexp(factor)
    if mantissa != 0.5:
        raise UnsupportedError(
            f"static_scale={factor:g} is no power of two; take 2**{exponent - 1}, which saturates "
            f"no sooner, or 2**{exponent}"
        )
    return factor


#: (the two casts of an operand, their default dtype). Micikevicius et al., arXiv 2209.05433.
_OPERANDS = (
    ("cast_config_input", "cast_config_input_for_grad_weight", e4m3_dtype),
    ("cast_config_weight", "cast_config_weight_for_grad_input", e4m3_dtype),
    ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight", e5m2_dtype),
)

_PRODUCTS = (
    ("output", "cast_config_input", "cast_config_weight"),
    ("grad_input", "cast_config_grad_output", "cast_config_weight_for_grad_input"),
    (
        "grad_weight",
        "cast_config_input_for_grad_weight",
        "cast_config_grad_output_for_grad_weight",
    ),
)

#: Options that torchao itself declared to have no effect -> their defaults.
_RETIRED = {
    "force_recompute_fp8_weight_in_bwd": False,
    "enable_amax_init": True,
    "enable_pre_and_post_forward": True,
}


@dataclass(frozen=True)
class Float8LinearConfig:
    """How linear layers are trained in FP8.

    Raises:
        RecipeError: the fields contradict each other.
        UnsupportedError: an option has no meaning here. The error names a replacement.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    """The input's cast in wgrad. None is the cast of the input in the forward product. The casts of
    the weight in dgrad and of the gradient in wgrad have the same default."""
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    """This option has no effect. `fully_shard` always gathers the 8-bit codes of a weight that has
    one scale, DYNAMIC or STATIC, and the elements of other weights. True is refused for AXISWISE
    weights, as in torchao."""
    pad_inner_dim: bool = False
    """This option has no effect. Sizes that are no multiples of 16 need no padding: FP8 units do
    not take them, so they run as a bfloat16 product of the same values."""
    emulate: bool = False
    """Without an FP8 unit, products are always emulated. True allows operand formats that no FP8
    unit multiplies (`Recipe.emulate`)."""
    force_recompute_fp8_weight_in_bwd: bool = False
    """This option has no effect, as in torchao 0.18. True gives a warning."""
    round_scales_to_power_of_2: bool = False
    """Whether dynamic scales are the least powers of two without saturation (`recipes.Amax`)."""
    delayed_scaling_config: DelayedScalingConfig = DelayedScalingConfig()
    enable_amax_init: bool = True
    """This option has no effect, as in the last version that had it: a history begins with the
    first amax. False gives a warning."""
    enable_pre_and_post_forward: bool = True
    """This option has no effect, as in the last version that had it. False gives a warning."""

    def __post_init__(self) -> None:
        for first, second, dtype in _OPERANDS:
            self._fill(first, second, dtype)
        for name in ("output", "grad_input", "grad_weight"):
            _check_type(self, f"gemm_config_{name}", Float8GemmConfig)
        _check_type(self, "delayed_scaling_config", DelayedScalingConfig)
        flags = (
            *("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate"),
            *("round_scales_to_power_of_2", *_RETIRED),
        )
        for name in flags:
            _check_type(self, name, bool)
        for name, usual in _RETIRED.items():
            if getattr(self, name) is not usual:
                warnings.warn(
                    f"Float8LinearConfig.{name} has no effect; leave it out",
                    DeprecationWarning,
                    stacklevel=3,
                )
        self._check_products()

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """Return the config named "tensorwise", "rowwise" or "rowwise_with_gw_hp".

        Raises:
            RecipeError: no config has this name.
        """
        try:
            name = Float8LinearRecipeName(recipe_name)
        except ValueError as error:
            names = ", ".join(repr(n.value) for n in Float8LinearRecipeName)
            raise RecipeError(
                f"a Float8LinearConfig is called {names}; got {recipe_name!r}"
            ) from error
        if name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        by_row = CastConfig(
            scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3_dtype
        )
        rowwise = Float8LinearConfig(
            cast_config_input=by_row,
            cast_config_weight=by_row,
            cast_config_grad_output=by_row,
            round_scales_to_power_of_2=True,
        )
        if name is Float8LinearRecipeName.ROWWISE:
            return rowwise
        high = CastConfig(ScalingType.DISABLED, target_dtype=e4m3_dtype)
        return replace(
            rowwise,
            cast_config_weight_for_grad_input=CastConfig(target_dtype=e4m3_dtype),
            cast_config_input_for_grad_weight=high,
            cast_config_grad_output_for_grad_weight=high,
        )

    def _fill(self, first: str, second: str, dtype: torch.dtype) -> None:
        """Fill in the defaults of an operand's two casts, and check them."""
        _check_type(self, first, CastConfig)
        if getattr(self, second) is None:
            object.__setattr__(self, second, getattr(self, first))
        _check_type(self, second, CastConfig)
        for name in (first, second):
            given: CastConfig = getattr(self, name)
            meant = replace(given, target_dtype=given.target_dtype or dtype)
            object.__setattr__(self, name, meant)
        one, other = getattr(self, first).target_dtype, getattr(self, second).target_dtype
        if one != other:
            raise RecipeError(
                f"{first} and {second} are casts of one operand to one dtype; got {one} and "
                f"{other}. recipes.PerGemm has six casts of their own"
            )

    def _check_products(self) -> None:
        shared = self.cast_config_weight.scaling_granularity
        if self.enable_fsdp_float8_all_gather and shared is not ScalingGranularity.TENSORWISE:
            raise RecipeError(
                "enable_fsdp_float8_all_gather is for TENSORWISE weights; got "
                f"{shared} for cast_config_weight"
            )
        for product, left, right in _PRODUCTS:
            kinds = (getattr(self, left).scaling_type, getattr(self, right).scaling_type)
            if (kinds[0] is ScalingType.DISABLED) != (kinds[1] is ScalingType.DISABLED):
                raise RecipeError(
                    f"incompatible operand precision for {product}: both operands are cast or "
                    f"neither; {left} is {kinds[0]}, {right} {kinds[1]}"
                )

    def short_str(self) -> str:
        """Return the casts of input, weight and gradient for a layer's representation. It shows an
        operand's second cast if it differs from the first."""
        parts = []
        for name, (first, second, _), other in zip(
            ("i", "w", "go"), _OPERANDS, ("i_gw", "w_gi", "go_gw"), strict=True
        ):
            one, two = getattr(self, first), getattr(self, second)
            parts.append(f"{name}:{one.short_str()}")
            if two != one:
                parts.append(f"{other}:{two.short_str()}")
        return ",".join(parts)
