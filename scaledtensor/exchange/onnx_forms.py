"""Operators on quantised weights in operators that ONNX has. `exchange/onnx.py` traces a model in
these forms.

The forms consist of operators of torch that torch's exporter translates, and of two operators that
`exchange/onnx_graph.py` writes out afterwards, since their types have no torch dtype:

    Decode(qdata, scale)      the values of a matrix of codes, without the second level of scales
    RoundTrip(x, scale)       x cast to a format under scales and decoded
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp
from typing import Any

import torch
from torch import Tensor

from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import Format
from scaledtensor.quantization import inputs, products
from scaledtensor.quantization.configs import Config
from scaledtensor.quantization.parts import scale_dtype
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.recipes.casts import Amax, Cast, Microscale, TwoLevel

__all__ = ["DOMAIN", "TYPES", "Forms", "check_config"]

#: The domain of the two operators.
DOMAIN = "scaledtensor"

#: Format -> the ONNX type with the same codes.
TYPES = {
    "e4m3fn": "FLOAT8E4M3FN",
    "e4m3fnuz": "FLOAT8E4M3FNUZ",
    "e5m2": "FLOAT8E5M2",
    "e5m2fnuz": "FLOAT8E5M2FNUZ",
    "int8": "INT8",
    "mxint8": "INT8",  # whose scales are times the step of MXINT8
    "int4": "INT4",
}
#: Formats whose numbers are E4M3FN numbers.
WITHIN_E4M3FN = ("e2m1fn", "e2m3fn", "e3m2fn")
_MIN_NORMAL, _MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_config(config: Config) -> None:
    """Raise an UnsupportedError if ONNX has no operators for a config."""
    for what, how in (("weights", config.weight), ("inputs", config.input)):
        if how is None:
            continue
        if how.format.name not in (*TYPES, *WITHIN_E4M3FN):
            raise UnsupportedError(
                f"ONNX has no type for the codes of {how.format.name} ({what} of {config}): choose "
                f"one of {', '.join((*TYPES, *WITHIN_E4M3FN))}"
            )
    how = config.input
    if how is None or config.static:
        return
    if not isinstance(how.scale, (Amax, Microscale, TwoLevel)):
        raise UnsupportedError(
            f"ONNX files measure inputs by amax, and {config} measures them by {how.scale}: choose "
            "input_scale out of 'amax', 'power_of_two', 'e8m0', 'two_level', or Static"
        )
    if how.block not in ((0, 0),) and how.block[0] != 1:
        raise UnsupportedError(
            f"ONNX files have scales of inputs for the tensor, for a token or for a group of its "
            f"features; {config} has blocks of {how.block}"
        )


@dataclass(frozen=True)
class Forms:
    """The forms of one file."""

    native: frozenset[str]
    """The formats that QuantizeLinear makes."""

    def table(self) -> dict[Any, Callable[..., Any]]:
        """Operator -> its form, for `written_as`."""
        aten = torch.ops.aten
        return {
            products.linear: self.linear,
            products.dequantize: self.value,
            products.cast_input: self.cast_input,
            products.rows: lambda w, ids: torch.nn.functional.embedding(ids, self.value(w)),
            # Codes of a part are no initializer: the value is read, and the part taken from it.
            aten.select.int: lambda *args: NotImplemented,
            aten._to_copy.default: lambda w, **how: aten._to_copy.default(self.value(w), **how),
        }

    # --- weights -----------------------------------------------------------------------------

    def matrix(self, w: QuantizedTensor) -> Tensor:
        """The float32 values of the matrix of codes, without the second level of scales."""
        how = w.config.weight
        return self._symbolic(
            "Decode",
            (w.qdata, w.scale),
            {
                "format": how.format.name,
                "block": list(how.block),
                "shape": list(w.matrix_shape),
                "scale": str(scale_dtype(how)).removeprefix("torch."),
            },
            w.matrix_shape,
        )

    def value(self, w: QuantizedTensor) -> Tensor:
        held = _times_whole(self.matrix(w), w)
        if w.config.rotate:
            held = products.turned_back(held)
        if w.columns is not None:
            held = held / w.columns
        held = held.mT if w.order == "columns" else held.reshape(w.shape)
        return held.to(w.dtype)

    def linear(self, x: Tensor, w: QuantizedTensor) -> Tensor:
        if x.shape[-1] != w.matrix_shape[-1]:
            products.raise_shapes(x, w)
        held = products.entering(x, w).float()
        held = self.cast(held, w.config, w.input_scale)
        return _times_whole(torch.matmul(held, self.matrix(w).mT), w).to(x.dtype)

    # --- inputs ------------------------------------------------------------------------------

    def cast_input(self, x: Tensor, w: QuantizedTensor, dim: int) -> Tensor:
        held = products.entering(x, w, dim).float()
        held = self.cast(held if dim == -1 else held.mT, w.config, w.input_scale)
        return products.leaving(held if dim == -1 else held.mT, w, dim).to(x.dtype)

    def cast(self, x: Tensor, config: Config, scale: Tensor | None) -> Tensor:
        """float32 `x` with the values that a config casts it to, summed over its last dimension."""
        how = config.input
        if how is None:
            return x
        if config.static:
            if scale is None:
                inputs.coded_input(x, config, scale)  # raises the error that names the way out
            return self.round_trip(x, scale, how.format, 0)  # type: ignore[arg-type]
        along = how.block[1] if how.block != (0, 0) else 0
        columns = x.shape[-1]
        size = x.abs()
        size = torch.where(size < torch.inf, size, torch.zeros_like(size))
        if how.block == (0, 0):
            return self.round_trip(x, _scale(_whole(size), _whole(size), how), how.format, 0)
        if not along:
            scale = _scale(size.amax(-1, keepdim=True), _whole(size), how)
            if isinstance(columns, int):
                return self.round_trip(x, scale, how.format, columns)
            # `block_size` is a constant, and this size is none.
            return (
                self.round_trip(
                    x / scale, torch.ones((), device=x.device, dtype=torch.float32), how.format, 0
                )
                * scale
            )
        padded = torch.nn.functional.pad(size, (0, -columns % along))
        amax = padded.view(*x.shape[:-1], -1, along).amax(-1)
        return self.round_trip(x, _scale(amax, _whole(size), how), how.format, along)

    def round_trip(self, x: Tensor, scale: Tensor, fmt: Format, group: int) -> Tensor:
        """`x` cast to a format under scales, one for each `group` elements or one for all."""
        if fmt.name == "mxint8":
            scale = scale * fmt.min_subnormal
        if fmt.name in self.native:
            attributes = {"format": fmt.name, "group": group}
            return self._symbolic("RoundTrip", (x, scale), attributes, x.shape)
        if group:
            scale = scale.unsqueeze(-1).expand(*scale.shape, group).flatten(-2)
            scale = scale.narrow(-1, 0, x.shape[-1])
        return _rounded(x / scale, fmt) * scale

    def _symbolic(
        self,
        name: str,
        inputs: Sequence[Tensor],
        attributes: dict[str, Any],
        shape: Sequence[Any],
    ) -> Tensor:
        from torch.onnx import ops

        made: Tensor = ops.symbolic(
            f"{DOMAIN}::{name}", inputs, attributes, dtype=torch.float32, shape=shape, version=1
        )
        return made


def _times_whole(x: Tensor, w: QuantizedTensor) -> Tensor:
    return x * w.tensor_scale if isinstance(w.config.weight.scale, TwoLevel) else x


def _whole(size: Tensor) -> Tensor:
    """The largest number of a tensor; torch's exporter wants the dimensions."""
    return size.amax(list(range(size.dim())))


def _scale(amax: Tensor, whole: Tensor, how: Cast) -> Tensor:
    """The float32 scales of blocks with these amax, as `formats/blocks.py` says. `whole` is the
    amax of the tensor."""
    top = how.format.max
    amax = amax.double()
    match how.scale:
        case Amax(power_of_two=False):
            return _least_above(amax, top)
        case TwoLevel():
            tensor = _least_above(whole.double(), 448.0 * top).double()
            ratio = torch.where(amax == 0, torch.ones_like(amax), amax / (tensor * top))
            return (_e4m3fn(ratio.clamp(min=2.0**-9).float()).double() * tensor).float()
        case Microscale(mode):
            return _power_of_two(amax, how.format, mode, -127)
        case _:
            return _power_of_two(amax, how.format, "rceil", -126)


def _least_above(amax: Tensor, limit: float) -> Tensor:
    """The least normal float32 not below amax / limit; 1 for amax 0."""
    near = (amax / limit).float().double()
    # 1.5 halves of the last place and a rounding give the next float32.
    above = torch.where(near * limit < amax, near * (1 + 1.5 * 2.0**-24), near)
    least = above.clamp(_MIN_NORMAL, _MAX).float()
    return torch.where(amax == 0, torch.ones_like(least), least)


def _power_of_two(amax: Tensor, fmt: Format, mode: str, least: int) -> Tensor:
    """The power of two that `mode` chooses, with exponents from `least` to 127; 1 for amax 0."""
    significand, above = frexp(fmt.max)
    # The carry: amax counts as the next power of two from this multiple of a power of two on.
    bits = fmt.mantissa_bits
    if not fmt.max_code >> bits:
        bits = fmt.max_code.bit_length() - 1
    inclusive = mode == "even"
    limit = {"floor": 2.0, "rceil": 2 * significand, "ceil": 1.0, "even": 2 - 2.0 ** -(bits + 1)}
    floor = _floor_power(torch.where(amax == 0, torch.ones_like(amax), amax))
    reached = amax >= floor * limit[mode] if inclusive else amax > floor * limit[mode]
    power = torch.where(reached, 2 * floor, floor) * 2.0 ** (1 - above)
    power = power.clamp(2.0**least, 2.0**127).float()
    return torch.where(amax == 0, torch.ones_like(power), power)


def _floor_power(x: Tensor) -> Tensor:
    """The power of two at or below a positive float64 that was a float32. A logarithm is near an
    integer by rounding, so its power is corrected by comparison."""
    power = torch.pow(2.0, torch.log2(x).floor())
    power = torch.where(power > x, power / 2, power)
    return torch.where(power * 2 <= x, power * 2, power)


def _e4m3fn(x: Tensor) -> Tensor:
    """`x` rounded to E4M3FN."""
    return x.clamp(max=448.0).to(torch.float8_e4m3fn).float()


def _rounded(x: Tensor, fmt: Format) -> Tensor:
    """`x` rounded to the nearest number of a format with few binades; larger ones saturate."""
    size = x.abs()
    step = torch.full_like(size, fmt.min_subnormal)
    power = 2 * fmt.min_normal
    while power <= fmt.max:
        step = torch.where(size >= power, power * 2.0**-fmt.mantissa_bits, step)
        power *= 2
    return ((x / step).round() * step).clamp(-fmt.max, fmt.max)
