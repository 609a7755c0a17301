"""The recipe of a `Float8LinearConfig`."""

from typing import Any

import torch

from scaledtensor.compat.torchao.float8.config import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import Format, from_dtype
from scaledtensor.recipes import (
    Amax,
    Cast,
    Constant,
    Current,
    Delayed,
    Fixed,
    Gemm,
    Gemms,
    PerGemm,
    Recipe,
)
from scaledtensor.recipes.by_tensor import ROLES
from scaledtensor.recipes.casts import GEMMS

__all__ = ["casts", "recipe_of"]

_BLOCKS = {ScalingGranularity.TENSORWISE: (0, 0), ScalingGranularity.AXISWISE: (1, 0)}
_GRANULARITIES = {ScalingGranularity.TENSORWISE: "tensor", ScalingGranularity.AXISWISE: "row"}


def recipe_of(config: Float8LinearConfig, weight: Format) -> Recipe:
    """Return the recipe for layers with weights in the format `weight`. It is a `Current`,
    `Delayed` or `Constant` if one of them can express the config, otherwise a `PerGemm`.

    Raises:
        UnsupportedError: the config combines delayed casts with casts that are not tensorwise
            dynamic ones, or rounds delayed scales.
    """
    sums = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    common: dict[str, Any] = {
        "activation": weight,
        "master": weight,
        "fast_accumulation": tuple(n for n, s in zip(GEMMS, sums, strict=True) if s.use_fast_accum),
        "emulate": config.emulate,
    }
    given = casts(config)
    kinds = {c.scaling_type for c in given}
    inputs, weights, gradients = given[:3]
    delayed = ScalingType.DELAYED in kinds
    shared = {c.scaling_granularity for c in given}
    mixed = given[:3] != given[3:] or not kinds <= {ScalingType.DELAYED, ScalingType.DYNAMIC}
    if delayed and (mixed or shared != {ScalingGranularity.TENSORWISE}):
        raise UnsupportedError(
            "a delayed cast of an operand is for both products that it is in, and the others are "
            "DELAYED or DYNAMIC, and TENSORWISE; got "
            + ", ".join(f"{c.scaling_type.name} {c.scaling_granularity.name}" for c in given)
        )
    if delayed and config.round_scales_to_power_of_2:
        raise UnsupportedError(
            "round_scales_to_power_of_2 is for DYNAMIC scales; delayed ones are not rounded"
        )
    if delayed or (given[:3] == given[3:] and len(kinds) == 1):
        formats: dict[str, Any] = {
            "forward": _format(inputs),
            "weight": _format(weights),
            "gradient": _format(gradients),
        }
        if formats["weight"] == formats["forward"]:
            del formats["weight"]
        if delayed:
            return Delayed(
                history=config.delayed_scaling_config.history_len,
                current=tuple(
                    role
                    for role, c in zip(ROLES, given, strict=False)
                    if c.scaling_type is ScalingType.DYNAMIC
                ),
                **formats,
                **common,
            )
        if kinds == {ScalingType.STATIC}:
            return Constant(
                input_exponent=inputs.exponent,
                weight_exponent=weights.exponent,
                gradient_exponent=gradients.exponent,
                **formats,
                **common,
            )
        if kinds == {ScalingType.DYNAMIC} and len(shared) == 1:
            return Current(
                granularity=_GRANULARITIES[shared.pop()],
                power_of_two=config.round_scales_to_power_of_2,
                **formats,
                **common,
            )
    return PerGemm(casts=_gemms(given, config.round_scales_to_power_of_2), **common)


def casts(config: Float8LinearConfig) -> tuple[CastConfig, ...]:
    """Return six casts: of input, weight and gradient in (forward, forward, dgrad), then in (wgrad,
    dgrad, wgrad)."""
    found = (
        config.cast_config_input,
        config.cast_config_weight,
        config.cast_config_grad_output,
        config.cast_config_input_for_grad_weight,
        config.cast_config_weight_for_grad_input,
        config.cast_config_grad_output_for_grad_weight,
    )
    return tuple(c for c in found if c is not None)  # a config's constructor leaves no None


def _gemms(given: tuple[CastConfig, ...], power_of_two: bool) -> Gemms:
    x, w, dy, x_wgrad, w_dgrad, dy_wgrad = (_cast(c, power_of_two) for c in given)
    return Gemms(Gemm(x, w), Gemm(dy, w_dgrad), Gemm(x_wgrad, dy_wgrad))


def _cast(config: CastConfig, power_of_two: bool) -> Cast | None:
    if config.scaling_type is ScalingType.DISABLED:
        return None
    static = config.scaling_type is ScalingType.STATIC
    scale = Fixed(config.exponent) if static else Amax(power_of_two)
    return Cast(_format(config), scale, _BLOCKS[config.scaling_granularity])


def _format(config: CastConfig) -> Format:
    return from_dtype(config.target_dtype or torch.float8_e4m3fn)
