"""The inputs of products with a QuantizedTensor, as `Dynamic` and `Static` cast them.

The cast is exact on every device. An eager tensor of a CPU is cast by one loop in C++; otherwise
its codes are made and decoded.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from scaledtensor import native
from scaledtensor.backends import backend_of
from scaledtensor.errors import QuantizationError
from scaledtensor.formats import Format, PerTensor, TwoLevelScale, dequantize_blocks, encode_blocks
from scaledtensor.formats.blocks import LEAST_EXPONENT, carry_of
from scaledtensor.native import blocks
from scaledtensor.ops import invariant
from scaledtensor.ops.products.linear import is_alone
from scaledtensor.ops.products.quantize import Coded, factor_dtype, factors, granularity, quantized
from scaledtensor.quantization.configs import Config
from scaledtensor.recipes.casts import Amax, Cast, Microscale, TwoLevel, parsed_cast
from scaledtensor.tensors import verbs

__all__ = ["cast_values", "coded_input", "factored"]


def factored(x: Tensor, config: Config, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the rows of `x` as `config` casts them, and the factor of their product: see
    `factors`."""
    how, given = _input_cast(config, scale), scale if config.static else None
    if _is_compiled(x):
        values, outer = cast_rows(x, given, how.spec)
        return values, outer if _shape_of_outer(x, how) is not None else None
    return _factored(x, how, given)


def _factored(x: Tensor, how: Cast, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return _by_loop(x, how, given) or factors(_coded(x, how, given), how, -1)


def coded_input(x: Tensor, config: Config, scale: Tensor | None, dim: int = -1) -> Coded:
    """The input of a product as codes and scales, as the config casts it."""
    how = _input_cast(config, scale)
    return _coded(x, how, scale if config.static else None, dim)


def _coded(x: Tensor, how: Cast, given: Tensor | None, dim: int = -1) -> Coded:
    if given is None:
        return quantized(x, torch.ones((), device=x.device, dtype=torch.float32), how, dim)
    codes = encode_blocks(x, how.format, PerTensor(), given, overflow="saturate_finite")
    return Coded(codes, given)


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


def _is_compiled(x: Tensor) -> bool:
    """Whether torch.compile traces a call that a CPU will run. The loop is then one node. Traced,
    the reference is some forty nodes, which take longer to compile than the rest of a layer."""
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and backend_of(x).host
        and x.dtype in (torch.float32, torch.bfloat16)
        and native.built()
    )


verbs.LIBRARY.define("cast_rows(Tensor x, Tensor? given, str cast) -> (Tensor, Tensor)")
#: `factored` as one node: values, and the factor of their product, or 1 if there is none.
cast_rows = torch.ops.scaledtensor.cast_rows.default


def _cast_rows(x: Tensor, given: Tensor | None, cast: str) -> tuple[Tensor, Tensor]:
    values, outer = _factored(x.contiguous(), parsed_cast(cast), given)
    return values, torch.ones((), dtype=torch.float32) if outer is None else outer


def _imagined_rows(x: Tensor, given: Tensor | None, cast: str) -> tuple[Tensor, Tensor]:
    how = parsed_cast(cast)
    values = x.new_empty(x.shape, dtype=factor_dtype(x.device, how, -1))
    return values, x.new_empty(_shape_of_outer(x, how) or (), dtype=torch.float32)


def _shape_of_outer(x: Tensor, how: Cast) -> tuple[Any, ...] | None:
    if how.block == (0, 0) or isinstance(how.scale, TwoLevel):
        return ()
    return (x.shape[0], 1) if how.block == (1, 0) else None


verbs.LIBRARY.impl("cast_rows", _cast_rows, "CompositeExplicitAutograd")
torch.library.register_fake("scaledtensor::cast_rows", _imagined_rows, lib=verbs.LIBRARY)


def _by_loop(x: Tensor, how: Cast, given: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """The `factors` of `x` by the loop in C++; None if it has no such cast, or cannot read `x`."""
    across, along = how.block
    if how.rounding != "nearest_even" or how.format.bits > 8 or across > 1 or not is_alone():
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
    dtype = factor_dtype(x.device, how, -1)
    number = 1.0 if given is None else float(given)
    return blocks.cast_values(x, kind, block, _grid(how.format), dtype, power, number)


@cache
def _grid(fmt: Format) -> blocks.Grid:
    return blocks.Grid(fmt.max, fmt.min, fmt.min_normal, fmt.mantissa_bits, fmt.has_signed_zero)


@cache
def _power(fmt: Format, scale_format: str, mode: str) -> blocks.Power:
    return blocks.Power(*carry_of(fmt, mode), LEAST_EXPONENT[scale_format])
