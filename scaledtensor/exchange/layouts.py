"""How a file of another library keeps a weight: layouts as data, and two functions that follow.

A `Layout` names the plain tensors that stand for one weight, and says how each of them is written.
`parts_of_weight` writes a `QuantizedTensor` as these tensors, and `weight_of_parts` reads them.
Both are pure functions.

Codes are written in one of three ways (`Layout.packing`):

    typed    one code an element, in torch's dtype of the format: float8_e4m3fn, int8
    bytes    a little-endian stream of bits along each row, as `formats.pack` writes it: two FP4
             codes in a byte, the first in the low nibble; four FP6 codes in three bytes
    words    integers plus 2^(bits - 1), as such a stream in int32 words

Scales are written in the dtype and in the shape of the layout (`SHAPES`). A scale of two levels has
one float32 for the tensor, which some libraries write as its reciprocal.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scaledtensor.errors import CheckpointError, ScaledTensorError, UnsupportedError
from scaledtensor.formats import E8M0FNU, INT8, Format, TwoLevelScale, pack, unpack
from scaledtensor.formats.layouts import packed_shape, scale_shape
from scaledtensor.quantization.configs import Config
from scaledtensor.quantization.parts import block_of, scale_dtype
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.recipes.casts import Cast

__all__ = ["SHAPES", "Layout", "parts_of_weight", "weight_of_parts"]

Shape = tuple[int, ...]

#: Name of a shape -> the shape in which a file keeps scales that are a matrix of `shape` here.
SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "blocks": lambda shape: shape,
    "number": lambda shape: (),
    "one": lambda shape: (1,),
    "one by one": lambda shape: (1, 1),
    "vector": lambda shape: shape[:1],
    "spread": lambda shape: (shape[0], 1, shape[1], 1),
}


@dataclass(frozen=True)
class Layout:
    """How a file keeps weights of one kind.

    Attributes:
        name: the name by which users of the other library know the scheme, as "FP8_DYNAMIC".
        config: the config of such weights here. Another choice of the values of scales does not
            matter, only their dtype.
        written: the name of the layout in the other library's own config.
        codes, scale: the names of the tensors of codes and scales, relative to the module.
        packing: "typed", "bytes" or "words" (see the module).
        dtype: the dtype of scales in the file.
        shape: the shape of scales in the file, a name of `SHAPES`.
        tensor_scale: the name of the second level; empty if there is none.
        input_scale: the name of the scale of inputs; empty if inputs have none.
        size: the name of the shape of the weight, int64; empty if the file has none.
        reciprocal: whether the file has 1 / tensor_scale and 1 / input_scale.
        groups: whether groups of any size along the summed dimension, and whole rows, are kept in
            the same way.
        whole: whether each block is whole.
        difference: the largest relative difference of a value that was saved and loaded, in words.
        decoded: the same for the value that the other library decodes in its own precision.
        readers: the programs that read such a file.
    """

    name: str
    config: Config
    written: str = ""
    codes: str = "weight"
    scale: str = "weight_scale"
    packing: str = "typed"
    dtype: torch.dtype = torch.float32
    shape: str = "blocks"
    tensor_scale: str = ""
    input_scale: str = ""
    size: str = ""
    reciprocal: bool = False
    groups: bool = False
    whole: bool = True
    difference: str = "0"
    decoded: str = "0"
    readers: tuple[str, ...] = ()

    def fits(self, config: Config) -> bool:
        """Whether weights and inputs of `config` are kept in this way."""
        held, given = self.config.weight, config.weight
        if self.groups and given.block[0] == 1 and given.format == held.format:
            held = replace(held, block=given.block)
        same_input = _same(self.config.input, config.input) and self.config.static == config.static
        return _same(held, given) and same_input

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that a weight must have."""
        return tuple(filter(None, (self.codes, self.scale, self.tensor_scale, self.size)))


def _same(one: Cast | None, other: Cast | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.format == other.format
        and one.block == other.block
        and scale_dtype(one) == scale_dtype(other)
    )


# --- writing ---------------------------------------------------------------------------------


def parts_of_weight(layout: Layout, x: QuantizedTensor, where: str) -> dict[str, Tensor]:
    """The plain tensors of a weight, by their names relative to its module.

    Args:
        layout: a layout that fits `x.config`.
        x: a weight whose rows are summed over, of two dimensions.
        where: the name of the weight in messages.

    Raises:
        UnsupportedError: the file has no place for something that the weight has.
    """
    fmt, (rows, columns) = x.format, _checked_shape(x, where)
    across, along = x.config.weight.block
    if layout.whole and ((across and rows % across) or (along and columns % along)):
        raise UnsupportedError(
            f"{where} of shape ({rows}, {columns}) has blocks of {across} x {along} that are not "
            f"whole, which {layout.name} does not hold: leave its module out of quantize_"
        )
    parts = {
        layout.codes: _written_codes(layout.packing, x.codes, fmt),
        layout.scale: _written_scale(layout, x.scale, where),
    }
    if layout.tensor_scale:
        parts[layout.tensor_scale] = _single(layout, x.tensor_scale)
    if layout.size:
        parts[layout.size] = torch.tensor((rows, columns))
    if x.input_scale is not None and layout.input_scale:
        parts[layout.input_scale] = _single(layout, x.input_scale)
    elif layout.input_scale:
        raise UnsupportedError(
            f"{where} has no scale of its input, and {layout.name} keeps one: give save some data "
            "(calibration=batches), or quantise the weights alone by WeightOnly"
        )
    return parts


def _checked_shape(x: QuantizedTensor, where: str) -> tuple[int, int]:
    if x.dim() != 2 or x.order != "rows":
        raise UnsupportedError(
            f"{where} of shape {tuple(x.shape)} is not the weight of an nn.Linear or an "
            "nn.Embedding, and the file has no place for another one: leave its module out of "
            "quantize_, so that it is written as a plain tensor"
        )
    if x.columns is not None or x.config.rotate:
        what = "is rotated" if x.config.rotate else "has folded powers of two"
        raise UnsupportedError(
            f"{where} {what}, and its products change their inputs to match. The file cannot say "
            "so: quantise without rotate and fold to export"
        )
    return x.shape[0], x.shape[1]


def _written_codes(packing: str, codes: Tensor, fmt: Format) -> Tensor:
    if packing == "bytes":
        return pack(codes, fmt).contiguous()
    if packing == "words":
        held = pack(codes ^ (1 << fmt.bits - 1), fmt)
        return F.pad(held, (0, -held.shape[-1] % 4)).contiguous().view(torch.int32)
    if fmt.storage_dtype.is_floating_point:
        return codes.contiguous()
    sign = 1 << fmt.bits - 1
    signed = ((codes & (2 * sign - 1)).to(torch.int16) ^ sign) - sign
    return signed.to(torch.int8)


def _written_scale(layout: Layout, scale: Tensor, where: str) -> Tensor:
    if scale.float().isnan().any():
        raise UnsupportedError(
            f"{where} has a NaN among its scales, which marks a block with a NaN or an infinity: "
            "such a weight is not exported"
        )
    held = scale.view(torch.uint8) if layout.dtype == torch.uint8 else scale
    return held.to(layout.dtype).reshape(SHAPES[layout.shape](tuple(scale.shape))).clone()


def _single(layout: Layout, scale: Tensor) -> Tensor:
    """A scale of a whole tensor as the file has it."""
    held = scale.double().reciprocal() if layout.reciprocal else scale.double()
    shape = (1,) if layout.reciprocal or layout.shape == "one" else ()
    return held.float().reshape(shape)


# --- reading ---------------------------------------------------------------------------------


def weight_of_parts(
    layout: Layout,
    config: Config,
    parts: Mapping[str, Tensor],
    where: str,
    dtype: torch.dtype = torch.float32,
) -> QuantizedTensor:
    """The weight that plain tensors stand for.

    Args:
        layout: how they are written.
        config: the config of the weight.
        parts: the tensors by their names in the layout.
        where: the names of the file and the module in messages.
        dtype: the dtype of the weight's value.

    Raises:
        CheckpointError: a tensor is missing, has another dtype or shape than the layout says, or
            holds a scale that is NaN, negative or infinite.
    """
    for name in layout.names:
        if name not in parts:
            raise CheckpointError(f"{where} has no {name}, which weights of {layout.name} have")
    cast, fmt = config.weight, config.weight.format
    shape = _read_size(parts[layout.size], f"{where}.{layout.size}") if layout.size else None
    full, codes = _read_codes(layout, parts[layout.codes], fmt, f"{where}.{layout.codes}", shape)
    wanted = scale_shape(block_of(cast), full)
    scale = _read_scale(layout, parts[layout.scale], cast, wanted, f"{where}.{layout.scale}")
    held: Tensor | TwoLevelScale = scale
    if layout.tensor_scale:
        name = f"{where}.{layout.tensor_scale}"
        held = TwoLevelScale(scale, _read_single(layout, parts[layout.tensor_scale], name))
    of_input = None
    if layout.input_scale in parts:
        of_input = _read_single(layout, parts[layout.input_scale], f"{where}.{layout.input_scale}")
    elif config.static:
        raise CheckpointError(
            f"{where} has no {layout.input_scale}, and {layout.name} casts inputs under this scale"
        )
    try:
        return QuantizedTensor(codes, held, config, full, dtype=dtype, input_scale=of_input)
    except ScaledTensorError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _read_size(given: Tensor, where: str) -> Shape:
    """The shape that a file tells."""
    if given.dtype not in (torch.int64, torch.int32) or given.shape != (2,) or (given <= 0).any():
        raise CheckpointError(
            f"{where} is {given.dtype} of shape {tuple(given.shape)}; it has two sizes in int64"
        )
    return tuple(given.tolist())


def _read_codes(
    layout: Layout, given: Tensor, fmt: Format, where: str, shape: Shape | None
) -> tuple[Shape, Tensor]:
    """The shape of the weight, and its codes."""
    dtype = _dtype_of_codes(layout.packing, fmt)
    if given.dtype != dtype or given.dim() != 2:
        raise CheckpointError(
            f"{where} is {given.dtype} of shape {tuple(given.shape)}; {layout.name} has a matrix "
            f"of {dtype}"
        )
    rows, size = given.shape
    if layout.packing == "typed":
        codes = given.view(fmt.storage_dtype) if fmt.bits == 8 else _narrow(given, fmt, where)
        return tuple(given.shape), codes
    bits = 8 if layout.packing == "bytes" else 32
    full = (rows, size * bits // fmt.bits) if shape is None else shape
    stream = given.contiguous().view(torch.uint8)
    wanted = packed_shape(fmt, full)
    if len(full) != 2 or full[0] != rows or size != -(-wanted[1] * 8 // bits):
        raise CheckpointError(
            f"{where} of shape {tuple(given.shape)} does not hold the codes of a weight of {full}"
        )
    codes = unpack(stream[:, : wanted[1]].contiguous(), fmt, full)
    return full, codes ^ (1 << fmt.bits - 1) if layout.packing == "words" else codes


def _dtype_of_codes(packing: str, fmt: Format) -> torch.dtype:
    if packing == "typed":
        return fmt.storage_dtype if fmt.storage_dtype.is_floating_point else torch.int8
    return torch.uint8 if packing == "bytes" else torch.int32


def _narrow(given: Tensor, fmt: Format, where: str) -> Tensor:
    """The codes of integers that are written in a byte each."""
    limit = 1 << fmt.bits - 1
    if not ((given >= -limit) & (given < limit)).all():
        raise CheckpointError(
            f"{where} holds {int(given.amin())} to {int(given.amax())}; {fmt.name} holds {-limit} "
            f"to {limit - 1}"
        )
    return given.view(INT8.storage_dtype) & (2 * limit - 1)


def _read_scale(layout: Layout, given: Tensor, cast: Cast, wanted: Shape, where: str) -> Tensor:
    dtype = scale_dtype(cast)
    bytes_or_typed = {torch.uint8, dtype} if dtype == E8M0FNU.storage_dtype else {dtype}
    allowed = bytes_or_typed if dtype != torch.float32 else _FLOATS
    if given.dtype not in allowed:
        raise CheckpointError(
            f"{where} is {given.dtype}; {layout.name} has scales of {layout.dtype}"
        )
    if _long(tuple(given.shape)) != _long(wanted):
        raise CheckpointError(
            f"{where} has shape {tuple(given.shape)}; {layout.name} has one scale for each block, "
            f"in shape {SHAPES[layout.shape](wanted) if len(wanted) == 2 else wanted}"
        )
    held = given.view(dtype) if given.dtype == torch.uint8 else given.to(dtype)
    _check_positive(held.float(), where, zero=True)  # as the scale of a block of zeros
    return held.reshape(wanted).clone()


#: Dtypes of scales that files have for float32 scales. Each converts to float32 exactly.
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


def _read_single(layout: Layout, given: Tensor, where: str) -> Tensor:
    if given.dtype not in _FLOATS or given.numel() != 1:
        raise CheckpointError(
            f"{where} is {given.dtype} of shape {tuple(given.shape)}; {layout.name} has one number "
            "in float32"
        )
    held = given.detach().double().reshape(())
    _check_positive(held, where)
    held = (held.reciprocal() if layout.reciprocal else held).float()
    _check_positive(held, where)
    return held


def _check_positive(numbers: Tensor, where: str, zero: bool = False) -> None:
    low = numbers >= 0 if zero else numbers > 0
    usable = low & (numbers < math.inf)
    if not usable.all():
        raise CheckpointError(
            f"{where} holds the scale {numbers[~usable].flatten()[0].item()}; scales are positive "
            "and finite"
        )


def _long(shape: Shape) -> Shape:
    """A shape without its dimensions of size 1."""
    return tuple(n for n in shape if n != 1)
