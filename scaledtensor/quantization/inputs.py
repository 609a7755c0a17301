"""The inputs of products with a QuantizedTensor, as `Dynamic` and `Static` cast them.

The cast is exact on every device. An eager tensor of a CPU is cast by one loop in C++; otherwise
its codes are made and decoded.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import QuantizationError
from scaledtensor.formats import Format, PerTensor, TwoLevelScale, dequantize_blocks, encode_blocks
from scaledtensor.formats.blocks import LEAST_EXPONENT, carry_of
from scaledtensor.native import blocks
from scaledtensor.ops import invariant
from scaledtensor.ops.products.dtype import product_dtype
from scaledtensor.ops.products.linear import is_alone
from scaledtensor.ops.products.quantize import Coded, factors, granularity, is_exact, quantized
from scaledtensor.quantization.configs import Config
from scaledtensor.recipes.casts import Amax, Cast, Microscale, TwoLevel

__all__ = ["cast_values", "coded_input", "factored"]


def factored(x: Tensor, config: Config, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the rows of `x` as `config` casts them, and the factor of their product: see
    `factors`."""
    how = _input_cast(config, scale)
    made = _by_loop(x, how, scale if config.static else None)
    return made or factors(coded_input(x, config, scale), how, -1)


def coded_input(x: Tensor, config: Config, scale: Tensor | None, dim: int = -1) -> Coded:
    """The input of a product as codes and scales, as the config casts it."""
    how = _input_cast(config, scale)
    if not config.static:
        return quantized(x, torch.ones((), device=x.device), how, dim)
    assert scale is not None  # else there was an error
    codes = encode_blocks(x, how.format, PerTensor(), scale, overflow="saturate_finite")
    return Coded(codes, scale)


def cast_values(x: Tensor, config: Config, scale: Tensor | None, dim: int) -> Tensor:
    """`x` with the values that `config` casts it to, in its dtype. `dim` is the summed dimension,
    -1 or -2."""
    how = config.input
    if how is None:
        return x
    coded = coded_input(x, config, scale, dim)
    cut = granularity(how, dim)
    held: Any = coded.scale
    if coded.whole is not None:
        held = TwoLevelScale(coded.scale, coded.whole)
    return dequantize_blocks(coded.codes, held, how.format, cut, torch.float32).to(x.dtype)


def _input_cast(config: Config, scale: Tensor | None) -> Cast:
    how = config.input
    if how is None:
        raise QuantizationError(f"{config} casts no inputs")
    if config.static and scale is None:
        raise QuantizationError(
            f"{config} has no scale for this input yet: give quantize_ calibration data "
            "(calibration=batches) that reach this layer"
        )
    if not config.static and invariant.is_on():
        invariant.check_cast(
            how, "this Dynamic", "input_granularity='token', WeightOnly, or Static"
        )
    return how


# --- the loop in C++ -------------------------------------------------------------------------


def _by_loop(x: Tensor, how: Cast, given: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """The `factors` of `x` by the loop in C++; None if it has no such cast, or cannot read `x`."""
    across, along = how.block
    if type(x) is not Tensor or how.rounding != "nearest_even" or how.format.bits > 8:
        return None
    if across > 1 or torch.compiler.is_exporting() or not is_alone():
        return None
    power: blocks.Power | None = None
    kind: blocks.Kind
    match how.scale:
        case _ if given is not None:
            kind = "given"
        case TwoLevel(least_error=False):
            kind = "two_level"
        case Amax(power_of_two=binary, margin=0, least_error=False):
            kind = "power" if binary else "ratio"
            power = _power(how.format, "pow2", "rceil")
        case Microscale(mode=mode, least_error=False):
            kind, power = "power", _power(how.format, "e8m0", mode)
        case _:
            return None
    block: Any = along or ("row" if across else "tensor")
    dtype = product_dtype(x.device) if is_exact(how, -1) else torch.float32
    number = 1.0 if given is None else float(given)
    return blocks.cast_values(x, kind, block, _grid(how.format), dtype, power, number)


@cache
def _grid(fmt: Format) -> blocks.Grid:
    return blocks.Grid(fmt.max, fmt.min, fmt.min_normal, fmt.mantissa_bits, fmt.has_signed_zero)


@cache
def _power(fmt: Format, scale_format: str, mode: str) -> blocks.Power:
    return blocks.Power(*carry_of(fmt, mode), LEAST_EXPONENT[scale_format])
